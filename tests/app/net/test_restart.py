"""With which command line the managed engine starts anew. No process is started here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from app.net import io_thread
from app.net.io_thread import EngineLink
from app.net.supervisor import ExitCause
from app.net.types import LaunchSpec


class NoProcess:
    """Stands where `EngineProcess` stands; it ends as soon as it is asked to."""

    made: ClassVar[list[NoProcess]] = []

    def __init__(self, argv: list[str], notify: Callable[[], None]) -> None:
        self.argv = tuple(argv)
        self.ready = None
        self.exit: ExitCause | None = None
        self.pid = 1 << 30
        self._notify = notify
        NoProcess.made.append(self)

    def log_tail(self) -> tuple[str, ...]:
        return ()

    def ask_to_end(self) -> None:
        self.exit = ExitCause(0, None, "it ended by itself", True)
        self._notify()

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLink]:
    monkeypatch.setattr(io_thread, "EngineProcess", NoProcess)
    NoProcess.made.clear()
    made = EngineLink()
    made.start()
    yield made
    made.close()


def line(number: int) -> list[str]:
    """The command line of the engine that was started as the ``number``-th."""
    end_s = time.monotonic() + 10
    while len(NoProcess.made) < number:
        assert time.monotonic() < end_s, "no engine was started"
        time.sleep(0.01)
    return list(NoProcess.made[number - 1].argv)


def draft(argv: list[str]) -> str | None:
    return argv[argv.index("--draft-model") + 1] if "--draft-model" in argv else None


def test_a_draft_model_stays_for_the_restarts_that_follow(link: EngineLink) -> None:
    link.launch(LaunchSpec(model="/m", knobs={"max_num_seqs": 8}))
    assert draft(line(1)) is None
    link.restart_with_draft("small x", {"speculation": "draft"})
    argv = line(2)
    assert draft(argv) == os.path.abspath("small x")
    assert {"max_num_seqs=8", "speculation=draft"} <= set(argv)
    link.restart()
    assert draft(line(3)) == os.path.abspath("small x")


def test_without_its_model_the_engine_starts_with_speculation_off(link: EngineLink) -> None:
    """Else the engine would refuse its own last configuration, and no restart could succeed."""
    link.launch(LaunchSpec(model="/m", draft_model="/d", knobs={"speculation": "draft"}))
    assert "speculation=draft" in line(1)
    link.restart_with_draft(None, {"speculation": "draft"})
    argv = line(2)
    assert draft(argv) is None
    assert "speculation=off" in argv


def test_an_attached_engine_is_not_restarted(link: EngineLink) -> None:
    link.attach("tcp://127.0.0.1:9")
    link.restart_with_draft("/d")
    time.sleep(0.3)
    assert NoProcess.made == []
