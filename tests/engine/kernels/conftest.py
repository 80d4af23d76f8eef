"""Kernels run in Triton's interpreter here, unless a GPU is at hand.

What a decorated function becomes is settled when its module is imported, so the choice is made before any
test of this folder is. Without triton the tests are skipped, with the reason.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
import torch

SWITCH = "TRITON_INTERPRET"
HAS_TRITON = find_spec("triton") is not None
ON_GPU = torch.cuda.is_available()

collect_ignore_glob: list[str] = []
if not HAS_TRITON:
    collect_ignore_glob.append("test_[!a]*.py")  # test_availability.py says so
elif not ON_GPU:
    if "triton" in sys.modules:
        raise RuntimeError(f"triton was imported before {SWITCH} could be set; look for who imported it")
    os.environ[SWITCH] = "1"
    import triton  # noqa: F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes that other tests start shall not interpret: the kernels were imported by now."""
    os.environ.pop(SWITCH, None)


@pytest.fixture(autouse=True)
def _interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch imports more of triton, which must find the switch as the rest found it."""
    if HAS_TRITON and not ON_GPU:
        monkeypatch.setenv(SWITCH, "1")
