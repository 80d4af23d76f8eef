"""The way into the I/O thread: a bounded queue that never blocks its writers, and a wake-up.

The step, delivery and text threads, the loader and logging put items here. When the I/O thread falls behind,
telemetry is dropped and counted; what somebody waits for (tokens, ends, replies, how a change of the
configuration ended) is never dropped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipc import messages as m

if TYPE_CHECKING:
    from engine.loop import Event

MAX_BATCHES = 20_000


Call = Callable[[], None]


class Inbox:
    """One queue of events and of calls to make on the I/O thread, in the order they were put in.

    ``fd`` becomes readable when there is something to take.
    """

    def __init__(self) -> None:
        self._items: deque[list[Event] | Call] = deque()
        self._logs: deque[m.LogLine] = deque(maxlen=2000)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._signalled = False
        self.dropped: Counter[str] = Counter()
        self._counting = threading.Lock()

    @property
    def fd(self) -> int:
        """Readable when there is something to take."""
        return self._reader.fileno()

    @property
    def wakeup_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal's number arrives here."""
        return self._writer.fileno()

    def events(self, events: list[Event]) -> None:
        """Queue events of the step thread or of the delivery thread; returns at once."""
        if len(self._items) >= MAX_BATCHES:
            kept: list[Event] = [event for event in events if _must_arrive(event)]
            with self._counting:
                self.dropped["telemetry"] += len(events) - len(kept)
            events = kept
        self._items.append(events)
        self.wake()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have ``function(*args)`` called on the I/O thread, after everything queued before."""
        self._items.append(lambda: function(*args))
        self.wake()

    def log(self, line: m.LogLine) -> None:
        """Queue a log line."""
        if len(self._logs) == self._logs.maxlen:
            self.dropped["log"] += 1
        self._logs.append(line)
        self.wake()

    def wake(self) -> None:
        """Make ``fd`` readable."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(BlockingIOError):
                self._writer.send(b"\0")

    def acknowledge(self) -> bytes:
        """Make ``fd`` unreadable. To be called before taking items. Returns the signal numbers that came."""
        signals = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                signals += chunk
        # Only now: a writer that comes while we read must not write a byte that is read away here, for it
        # would be the last one. Its item is in the queue already, which is emptied after this.
        self._signalled = False
        return signals.replace(b"\0", b"")

    def take(self) -> list[Event] | Call | None:
        """The next batch of events or call, or None."""
        return self._items.popleft() if self._items else None

    def take_log(self) -> m.LogLine | None:
        """The next log line, or None."""
        return self._logs.popleft() if self._logs else None


def _must_arrive(event: Event) -> bool:
    """Whether nothing that comes later makes up for the loss of this event."""
    if isinstance(event, m.RequestRow):
        return event.state == "finished"
    return isinstance(event, m.Tokens | m.Done | m.ApplyEvent)
