"""The queue into the I/O thread: no wake-up is lost, and overload drops only what can be missed."""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

import pytest

from engine import inbox as inbox_module
from engine.inbox import Inbox
from ipc import messages as m
from tests.ipc.samples import request_row


def _is_readable(inbox: Inbox) -> bool:
    return bool(select.select([inbox.fd], [], [], 0)[0])


class _BusyReader:
    """The reading end, with a writer that always comes while it is being read."""

    def __init__(self, reader: socket.socket, inbox: Inbox) -> None:
        self._reader = reader
        self._inbox = inbox

    def fileno(self) -> int:
        return self._reader.fileno()

    def recv(self, size: int) -> bytes:
        writer = threading.Thread(target=self._inbox.call, args=(print,))
        writer.start()
        writer.join()
        return self._reader.recv(size)


def test_a_writer_that_comes_while_the_reader_wakes_up_takes_no_later_wake_up_away() -> None:
    inbox = Inbox()
    reader = inbox._reader
    inbox._reader = _BusyReader(reader, inbox)  # type: ignore[assignment]
    inbox.call(print)
    assert _is_readable(inbox)
    inbox.acknowledge()
    inbox._reader = reader
    while inbox.take() is not None:
        pass
    inbox.call(print)
    assert _is_readable(inbox)


def test_overload_drops_telemetry_but_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """B07: a dropped last row would leave its request in the picture of the live ones for ever."""
    monkeypatch.setattr(inbox_module, "MAX_BATCHES", 1)
    inbox = Inbox()
    inbox.call(print)
    apply = m.ApplyEvent(
        apply_id=1, from_rev=0, to_rev=1, result="ok", t_ns=1, at_step=1, took_us=1, mode="step", patch={}
    )
    ended = request_row(1, state="finished", finish="length")
    done = m.Done(rid=1, finish="length", row=ended)
    events: list[Any] = [request_row(2, state="decode"), apply, ended, done]
    inbox.events(events)
    inbox.take()
    assert inbox.take() == [apply, ended, done]
    assert inbox.dropped["telemetry"] == 1
