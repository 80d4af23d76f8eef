"""The console's one clock: frames at 10 Hz for charts, figures at 2 Hz, and nothing for what is not seen.

A panel registers a callback with the widget that it draws on; the callback is skipped while that widget is
hidden or the window minimised. The clock measures what its frames cost, for the status bar.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject, QTimer, Slot
from PySide6.QtWidgets import QWidget

FRAME_MS = 100
FIGURES_EVERY = 5  # frames: 2 Hz
ROWS_EVERY = 2  # of tables


@dataclass(slots=True)
class _Entry:
    widget: weakref.ref[QWidget]
    method: weakref.WeakMethod[Callable[[], None]]
    every: int


class FrameClock(QObject):
    """Calls what is registered, in order of registration, each ``every`` frames while its widget is seen."""

    def __init__(self, parent: QObject | None = None, frame_ms: int = FRAME_MS) -> None:
        super().__init__(parent)
        self._entries: list[_Entry] = []
        self._always: list[Callable[[], None]] = []
        self.on_error: Callable[[Exception], None] | None = None
        self._frame = 0
        self._costs_s: deque[float] = deque(maxlen=100)
        self._starts_s: deque[float] = deque(maxlen=30)
        self._timer = QTimer(self)
        self._timer.setInterval(frame_ms)
        self._timer.timeout.connect(self.tick)

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()

    def always(self, call: Callable[[], None]) -> None:
        """Call ``call`` in every frame, seen or not: taking in data."""
        self._always.append(call)

    def register(self, widget: QWidget, method: Callable[[], None], every: int = 1) -> None:
        """Call the bound ``method`` every ``every`` frames while ``widget`` shows. Keeps neither alive."""
        self._entries.append(_Entry(weakref.ref(widget), weakref.WeakMethod(method), every))

    @property
    def cost_s(self) -> float | None:
        """Mean time that a frame took of the GUI thread, painting not included."""
        return sum(self._costs_s) / len(self._costs_s) if self._costs_s else None

    @property
    def frames_per_s(self) -> float | None:
        """The rate of frames over the last three seconds."""
        if len(self._starts_s) < 2:
            return None
        span = self._starts_s[-1] - self._starts_s[0]
        return (len(self._starts_s) - 1) / span if span > 0 else None

    def _call(self, method: Callable[[], None]) -> None:
        """One panel's turn. A panel that fails is told of and must not stop the others."""
        try:
            method()
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    @Slot()
    def tick(self) -> None:
        """One frame."""
        begun = time.perf_counter()
        self._starts_s.append(begun)
        for call in list(self._always):
            call()
        alive: list[_Entry] = []
        for entry in list(self._entries):
            widget, method = entry.widget(), entry.method()
            if widget is None or method is None:
                continue
            alive.append(entry)
            if self._frame % entry.every == 0 and widget.isVisible() and not widget.window().isMinimized():
                self._call(method)
        if len(alive) != len(self._entries):
            self._entries = alive
        self._frame += 1
        self._costs_s.append(time.perf_counter() - begun)
