"""What other threads ask of the step thread: requests, cancels, changes, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.knob_store import Proposal
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End these requests, as far as they still live."""

    rids: list[int]
    why: str


@dataclass(frozen=True, slots=True)
class StopFound:
    """A stop string was found in the text of this request."""

    rid: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a change needs was loaded, or could not be."""

    proposal: Proposal
    error: Exception | None


Item = Request | Cancel | StopFound | Proposal | Fetched


class Closed(Exception):
    """The engine takes no more requests."""


class Mailbox:
    """Filled by any thread, emptied by the step thread, which sleeps here while there is nothing to do."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_change_next(self) -> bool:
        """Whether the next item is a change of the configuration."""
        return bool(self._items) and isinstance(self._items[0], Proposal | Fetched)

    def put(self, item: Item) -> None:
        """Any thread. Raises `Closed` for a request after `close`."""
        with self._changed:
            if self._closed and isinstance(item, Request):
                raise Closed
            self._items.append(item)
            self._changed.notify()

    def take(self) -> Item:
        """The next item. There must be one."""
        return self._items.popleft()

    def close(self) -> None:
        """Refuse further requests, so that none is left without an end."""
        with self._changed:
            self._closed = True

    def wake(self) -> None:
        """Make `wait` return."""
        with self._changed:
            self._changed.notify()

    def wait(self, timeout_s: float, unless: Callable[[], bool]) -> None:
        """Sleep until something comes in, but not if ``unless`` says so already."""
        with self._changed:
            if not self._items and not unless():
                self._changed.wait(timeout_s)
