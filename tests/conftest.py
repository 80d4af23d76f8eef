"""What every test shares. Set before torch or Qt is imported anywhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Threads that spin while they wait starve the other process on a small machine: decoding falls tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may fetch a model by name
# Whether Triton's kernels are interpreted is settled when it is imported, which torch at times does itself.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Sockets of their own: engines that run on the machine besides must neither be swept away nor be found.
_RUNTIME = tempfile.TemporaryDirectory(prefix="decodeck-test-")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes that tests start shall not interpret; what the tests themselves need was imported by now."""
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, fetched once if it is not there (see tests/demo_model.py)."""
    from tests import demo_model as files

    return files.path()
