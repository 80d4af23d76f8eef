"""From `logging` to the clients' log panels: plain lines; tracebacks stay in the process's own log."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Literal

from ipc import codec
from ipc import messages as m

_Level = Literal["debug", "info", "warning", "error"]


class RingHandler(logging.Handler):
    """Numbers records and hands them on as `LogLine`. ``take`` is called on the thread that logs."""

    def __init__(self, take: Callable[[m.LogLine], None]) -> None:
        super().__init__()
        self._take = take
        self._numbers = itertools.count(1)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(
                m.LogLine(
                    n=next(self._numbers),
                    level=_level(record.levelno),
                    unix_ms=int(record.created * 1000),
                    source=record.name[:128] or "root",
                    message=codec.clip(record.getMessage()),
                )
            )
        except Exception:
            self.handleError(record)


def _level(number: int) -> _Level:
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"
