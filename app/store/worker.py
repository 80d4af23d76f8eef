"""`StoreWorker`: the store on a thread of its own, so that a slow disk never stops the window."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from app.store.store import Store

T = TypeVar("T")


class StoreWorker:
    """One thread, one `Store`, one call at a time in the order given."""

    def __init__(self, path: Path) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._store: Store | None = None
        self._path = path

    def call(self, work: Callable[[Store], T]) -> Future[T]:
        """Run ``work`` with the store; the future holds its result, or the StoreError in words.

        The store is opened by the first call; one that could not be opened is tried again by the next.
        """
        return self._pool.submit(self._run, work)

    def _run(self, work: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = Store(self._path)
        return work(self._store)

    def close(self) -> None:
        """Finish what was asked for, then close the file."""
        self._pool.submit(self._close)
        self._pool.shutdown(wait=True)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
