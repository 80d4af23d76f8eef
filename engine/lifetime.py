"""How the engine process ends: exit codes, the lifetime pipe, and an end that nothing can hold up.

A torch import or a model load may keep the main thread in native code for seconds, and tearing torch down
may take as long. So whoever decides that the process ends starts a deadline; past it the process exits
without asking anyone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """What a console reads from the exit status. Signals are negative, as usual."""

    OK = 0
    BAD_CONFIG = 2
    PARENT_GONE = 3
    OUT_OF_MEMORY = 10
    DEVICE = 11
    BIND = 12
    LOCK_HELD = 13
    LOAD_FAILED = 14
    LOOP_FAILED = 15


class Lifetime:
    """Ends the process once, by whoever asks first. ``cleanup`` callables run in any case, newest first."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.code: int = ExitCode.OK
        self.failure: int = ExitCode.OK  # what an end that was asked for reports after a failure
        self.reason = ""
        self._lock = threading.Lock()
        self._cleanups: list[Callable[[], None]] = []
        self._wakers: list[Callable[[], None]] = []

    def on_end(self, cleanup: Callable[[], None]) -> None:
        """Run this before the process exits: it must be short and may run on any thread."""
        self._cleanups.append(cleanup)

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Call this when the end was decided, to wake whoever sleeps."""
        self._wakers.append(wake)

    def end(self, code: int, reason: str, *, grace_s: float) -> None:
        """Decide the end: ``stop`` is set, and after ``grace_s`` the process exits even if a thread hangs."""
        with self._lock:
            if self.stop.is_set():
                return
            self.code, self.reason = code or self.failure, reason
            self.stop.set()
        threading.Thread(target=self._deadline, args=(grace_s,), name="deadline", daemon=True).start()
        for wake in self._wakers:
            wake()

    def _deadline(self, grace_s: float) -> None:
        threading.Event().wait(grace_s)
        self.exit()

    def exit(self) -> None:
        """Clean up and leave. Does not return."""
        with self._lock:
            cleanups, self._cleanups = self._cleanups, []
        for cleanup in reversed(cleanups):
            with contextlib.suppress(Exception):
                cleanup()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.code)


def watch_stdin(ended: Callable[[], None]) -> None:
    """Call ``ended`` when stdin reaches its end: the process that held the other side is gone."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        ended()

    threading.Thread(target=read, name="lifetime pipe", daemon=True).start()


def prefer_for_oom_killer() -> None:
    """Let the kernel choose this process rather than the console when memory runs out. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
