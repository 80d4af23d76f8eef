"""The thread that computes a step while the step thread plans the next one."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from engine.runner import StepOutput

Job = Callable[[], StepOutput]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step's computation came to, and when: its output, or the error that it ended with."""

    out: StepOutput | None
    error: BaseException | None
    ended_ns: int


def compute(job: Job, clock_ns: Callable[[], int]) -> Outcome:
    """Compute a step on the calling thread. An error is part of the outcome."""
    try:
        out = job()
    except BaseException as error:  # whoever takes the outcome raises it or acts on it
        return Outcome(None, error, clock_ns())
    return Outcome(out, None, clock_ns())


class ForwardWorker:
    """Computes one step at a time on a thread of its own, which starts with the first one.

    The thread ends with `stop`, or when nobody holds the worker any more. It keeps nothing of a step that was
    computed.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False
        weakref.finalize(self, self._jobs.put, None)  # once, however often the thread is started

    def start(self, job: Job) -> None:
        """Begin to compute a step. RuntimeError if the outcome of the one before was not taken."""
        if self._busy:
            raise RuntimeError("a step is being computed; take its outcome first")
        if self._thread is None:
            arguments = (self._jobs, self._outcomes, self._clock_ns)
            self._thread = threading.Thread(target=_work, args=arguments, name="forward", daemon=True)
            self._thread.start()
        self._busy = True
        self._jobs.put(job)

    def outcome(self) -> Outcome:
        """Wait for the step that was begun."""
        outcome = self._outcomes.get()
        self._busy = False
        return outcome

    def stop(self) -> None:
        """End the thread, once it has computed what was begun. It starts again when it is needed."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _work(
    jobs: queue.SimpleQueue[Job | None],
    outcomes: queue.SimpleQueue[Outcome],
    clock_ns: Callable[[], int],
) -> None:
    while (job := jobs.get()) is not None:
        outcomes.put(compute(job, clock_ns))
        del job
