"""Kernels run in Triton's interpreter here, unless a GPU is at hand (see tests/conftest.py).

What a decorated function becomes is settled when triton and its module are imported. Without triton these
tests are not collected, and test_availability.py says so.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

SWITCH = "TRITON_INTERPRET"
HAS_TRITON = find_spec("triton") is not None
ON_GPU = torch.cuda.is_available()

collect_ignore_glob: list[str] = []
if not HAS_TRITON:
    collect_ignore_glob.append("test_[!a]*.py")
else:
    from engine.kernels.launch import INTERPRETED

    if INTERPRETED == ON_GPU:
        raise RuntimeError(
            f"kernels are {'' if ON_GPU else 'not '}interpreted here: set {SWITCH}={1 - ON_GPU}"
        )


@pytest.fixture(autouse=True)
def _interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch imports more of triton, which must find the switch as the rest found it."""
    if HAS_TRITON and not ON_GPU:
        monkeypatch.setenv(SWITCH, "1")
