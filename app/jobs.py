"""Work that may take a while (the database, files), on one thread of its own, told to the GUI by polling.

`Jobs` runs one job after another; the window's clock calls `poll`, which hands results to the callbacks on
the GUI thread. The worker holds no Qt object and waits for nobody, so closing cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Job:
    title: str
    future: Future[Any]
    on_done: Callable[[Any], None]
    on_error: Callable[[Exception], None]


class Jobs:
    """All methods belong to the GUI thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decodeck-jobs")
        self._running: list[_Job] = []

    def submit(
        self,
        title: str,
        work: Callable[[], Any],
        on_done: Callable[[Any], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Run ``work`` on the worker; one of the callbacks is called by a later `poll`."""
        self._running.append(_Job(title, self._pool.submit(work), on_done, on_error))

    @property
    def titles(self) -> list[str]:
        """What is queued or running, in order."""
        return [job.title for job in self._running]

    def poll(self) -> None:
        """Hand over what has ended. An exception that is not an `Exception` goes up."""
        ended = [job for job in self._running if job.future.done()]
        self._running = [job for job in self._running if job not in ended]
        for job in ended:
            error = job.future.exception()
            if error is None:
                job.on_done(job.future.result())
            elif isinstance(error, Exception):
                job.on_error(error)
            else:
                raise error

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Let the running job end, drop the queued ones, then run ``last``. No callback is called."""
        for job in self._running:
            job.future.cancel()
        self._running = []
        if last is not None:
            self._pool.submit(last)
        self._pool.shutdown(wait=True)
