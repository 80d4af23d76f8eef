"""What every test shares. Set before torch or Qt is imported anywhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Threads that spin while they wait starve the other process on a small machine: decoding falls tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may fetch a model by name
# Whether Triton's kernels are interpreted is settled when it is imported, which torch at times does itself.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

COMPILED = pytest.StashKey[list[dict[str, Any]]]()
"""What kernels became, as `tests.engine.kernels.aot.Compiled`, once they were compiled."""

# Sockets of their own: engines that run on the machine besides must neither be swept away nor be found.
_RUNTIME = tempfile.TemporaryDirectory(prefix="decodeck-test-")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes that tests start shall not interpret; what the tests themselves need was imported by now."""
    os.environ.pop("TRITON_INTERPRET", None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes that share the tests gives what it has to show to the first one."""
    given = getattr(session.config, "workeroutput", None)
    if given is not None:
        given["compiled"] = session.config.stash.get(COMPILED, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what such a process had to show, when it has ended."""
    if rows := getattr(node, "workeroutput", {}).get("compiled"):
        node.config.stash[COMPILED] = rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print registers, shared memory and instructions of all kernels that were compiled."""
    rows = config.stash.get(COMPILED, [])
    if rows:
        from tests.engine.kernels.aot import Compiled, table

        terminalreporter.section("kernels, compiled")
        terminalreporter.write_line(table([Compiled(**row) for row in rows]))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, fetched once if it is not there (see tests/demo_model.py)."""
    from tests import demo_model as files

    return files.path()
