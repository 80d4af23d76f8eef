"""Loads the weights of a change while steps go on, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.knob_store import Proposal
from engine.mailbox import Fetched, Mailbox
from engine.models.reading import Progress


class Stopped(RuntimeError):
    """The engine stops: what was being loaded is not wanted any more."""


class Fetcher:
    """One change at a time: its end, good or bad, comes to the mailbox. The step thread owns it.

    ``progress`` hears how far it is, on the fetching thread.
    """

    def __init__(self, mailbox: Mailbox, progress: Progress) -> None:
        self._mailbox = mailbox
        self._progress = progress
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, proposal: Proposal, job: Callable[[Progress], None]) -> None:
        """Run ``job`` for a change; the one before has ended."""
        self._thread = threading.Thread(target=self._run, args=(proposal, job), name="fetch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let a job that is under way end where it next tells how far it is."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    def _run(self, proposal: Proposal, job: Callable[[Progress], None]) -> None:
        error: Exception | None = None
        try:
            job(self._told)
        except Exception as caught:  # whoever carries the change out decides what it means
            error = caught
        self._mailbox.put(Fetched(proposal, error))

    def _told(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stopping:
            raise Stopped("the engine stopped while weights were loaded")
        self._progress(stage, done_bytes, total_bytes)
