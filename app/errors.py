"""Unexpected errors: kept and shown, never a modal box in the middle of a stream, never a silent exit.

Exceptions may arise in any thread, and Qt's own messages come from any thread too. The hooks only put a
record into a deque; the window's clock takes the records out and shows them. No foreign thread touches Qt.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

MAX_RECORDS = 500
# Said by Qt where a platform lacks something, of no use to the person at the window.
QUIET_PARTS = (
    "propagateSizeHints",
    "This plugin does not support",
    "Could not parse application stylesheet url",
)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One unexpected error: a line for the toast and the whole story for the log."""

    unix_s: float
    summary: str
    detail: str
    thread: str


class ErrorHub:
    """Collects errors of all threads. `take` belongs to the GUI thread, `put` to any."""

    def __init__(self, crash_file: Path | None = None) -> None:
        self._new: deque[ErrorRecord] = deque(maxlen=MAX_RECORDS)
        self._crash_file = crash_file
        self.total = 0

    def put(self, summary: str, detail: str = "") -> None:
        """Record one error from any thread."""
        self.total += 1
        record = ErrorRecord(time.time(), summary, detail, threading.current_thread().name)
        self._new.append(record)
        if self._crash_file is not None and detail:
            try:
                with self._crash_file.open("a", encoding="utf-8") as file:
                    file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {record.thread}\n{detail}\n")
            except OSError:
                return  # the record is still shown in the window; there is no better place to complain

    def take(self) -> list[ErrorRecord]:
        """What was recorded since the last call, oldest first."""
        records = []
        while True:
            try:
                records.append(self._new.popleft())
            except IndexError:
                return records

    def put_exception(
        self, kind: type[BaseException], value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record an exception; it is printed to stderr as well, as Python would."""
        detail = "".join(traceback.format_exception(kind, value, trace))
        print(detail, file=sys.stderr, end="")
        self.put(f"{kind.__name__}: {value}", detail)

    def put_error(self, error: Exception) -> None:
        """Record an exception that was caught where the work can go on."""
        self.put_exception(type(error), error, error.__traceback__)

    def install(self) -> None:
        """Become the handler of uncaught exceptions and of Qt's messages."""

        def on_exception(
            kind: type[BaseException], value: BaseException, trace: TracebackType | None
        ) -> None:
            if issubclass(kind, KeyboardInterrupt):
                sys.__excepthook__(kind, value, trace)
                return
            self.put_exception(kind, value, trace)

        def on_thread_exception(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is not SystemExit:
                self.put_exception(args.exc_type, args.exc_value, args.exc_traceback)

        def on_qt_message(kind: QtMsgType, _context: QMessageLogContext, message: str) -> None:
            if kind in (QtMsgType.QtDebugMsg, QtMsgType.QtInfoMsg) or any(p in message for p in QUIET_PARTS):
                return
            print(f"Qt: {message}", file=sys.stderr)
            if kind in (QtMsgType.QtCriticalMsg, QtMsgType.QtFatalMsg):
                self.put(f"Qt: {message}")

        sys.excepthook = on_exception
        threading.excepthook = on_thread_exception
        qInstallMessageHandler(on_qt_message)
