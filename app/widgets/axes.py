"""Axes of the live charts: time as seconds ago, and values in the unit of the chart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pyqtgraph as pg
from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QPainter, QPicture, QPixmap
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

from app import theme
from app.i18n import tr
from app.units import MINUS, NBSP, axis_step, tick

TickStrings = list[str]
Format = Callable[[float], str]
TIME_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
LEFT_WIDTH_PX = 52
EDGE_PX = 30
SHRINK_AFTER_S = 5.0


class StillAxis(pg.AxisItem):  # type: ignore[misc]
    """An axis that is kept as a picture of pixels, since it stands still while the curves move."""

    picture: QPicture | None  # what it draws; None: to be made anew

    def __init__(self, side: str) -> None:
        super().__init__(side)
        self._pixels = QPixmap()

    def draw_anew(self) -> None:
        """Make the picture again, for another size."""
        self.picture = None

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None) -> None:
        box = self.boundingRect()
        ratio = painter.device().devicePixelRatioF()
        size = (box.size() * ratio).toSize()
        kept = self._pixels
        if self.picture is None or (kept.size(), kept.devicePixelRatio()) != (size, ratio):
            self._pixels = kept = QPixmap(size)
            kept.setDevicePixelRatio(ratio)
            kept.fill(Qt.GlobalColor.transparent)
            inner = QPainter(kept)
            inner.translate(-box.topLeft())
            super().paint(inner, option, widget)
            inner.end()
        painter.drawPixmap(box.topLeft(), kept)


class TimeAxis(StillAxis):
    """The lower axis: 0 is now, to the left is the past."""

    def __init__(self) -> None:
        super().__init__("bottom")
        self.span_s = 300.0
        self.setStyle(tickLength=0, tickTextOffset=4, hideOverlappingLabels=False)
        self.setHeight(20)

    def boundingRect(self) -> QRectF:
        # Labels outside it are not drawn; those at both ends reach beyond the axis.
        return QRectF(self.mapRectFromParent(self.geometry())).adjusted(-EDGE_PX, 0, EDGE_PX, 0)

    def tickValues(self, minimum: float, maximum: float, size: float) -> list[tuple[float, list[float]]]:
        step = next(
            (s for s in TIME_STEPS_S if self.span_s / s <= max(2, min(6, size / 80))), TIME_STEPS_S[-1]
        )
        count = int(self.span_s // step)
        return [(float(step), [-float(step * i) for i in range(count + 1)])]

    def tickStrings(self, values: list[float], scale: float, spacing: float) -> TickStrings:
        return [relative_time(value) for value in values]


def relative_time(seconds: float) -> str:
    """``now``, ``−30 s``, ``−2 min`` or ``−1:30``."""
    ago = round(-seconds)
    if ago <= 0:
        return tr("now")
    if ago < 60:
        return f"{MINUS}{ago}{NBSP}s"
    minutes, rest = divmod(ago, 60)
    return f"{MINUS}{minutes}{NBSP}min" if rest == 0 else f"{MINUS}{minutes}:{rest:02}"


class ValueAxis(StillAxis):
    """The left axis. ``format_value`` writes one tick; on a log axis data are decimal logarithms."""

    def __init__(self, format_value: Format) -> None:
        super().__init__("left")
        self._format = format_value
        self.log = False
        self.setStyle(
            tickLength=0,
            tickTextOffset=6,
            autoReduceTextSpace=False,
            autoExpandTextSpace=False,
            hideOverlappingLabels=False,
        )
        self.setWidth(LEFT_WIDTH_PX)

    def boundingRect(self) -> QRectF:
        # With a grid the axis also paints over its view; the labels at both ends need some more.
        return QRectF(super().boundingRect()).adjusted(0, -EDGE_PX, 0, EDGE_PX)

    def tickValues(self, minimum: float, maximum: float, size: float) -> list[tuple[float, list[float]]]:
        if self.log:
            low, high = math.ceil(minimum - 1e-9), math.floor(maximum + 1e-9)
            return [(1.0, [float(k) for k in range(low, high + 1)])]
        step = axis_step(maximum - minimum, max(1, min(4, int(size / 34))))
        first = math.ceil(minimum / step - 1e-9)
        last = math.floor(maximum / step + 1e-9)
        if last <= first:  # too low for a round step: name both ends
            return [(maximum - minimum, [minimum, maximum])]
        return [(step, [k * step for k in range(first, last + 1)])]

    def tickStrings(self, values: list[float], scale: float, spacing: float) -> TickStrings:
        return [self._format(10.0**value if self.log else value) for value in values]


class LaneAxis(ValueAxis):
    """The left axis of lanes one below the other: lane i lies from -i - 1 to -i, and a strip above 0."""

    def __init__(self) -> None:
        super().__init__(tick)
        self.strip = ""  # what is written beside the strip

    def tickValues(self, minimum: float, maximum: float, size: float) -> list[tuple[float, list[float]]]:
        lanes = math.floor(-minimum + 1e-9)
        step = max(1, round(axis_step(lanes, max(1, int(size / 30)))))
        marks = [0.5 - number for number in range(1, lanes + 1, step)]
        return [(float(step), [*marks, maximum / 2] if self.strip else marks)]

    def tickStrings(self, values: list[float], scale: float, spacing: float) -> TickStrings:
        return [self.strip if value > 0 else str(round(0.5 - value)) for value in values]


class HeldTop:
    """The upper end of a range that starts at 0: round, grows at once, shrinks after a while of less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._smaller_since_s: float | None = None

    def fit(self, want: float) -> float:
        """The end that shows ``want``; 0 or less keeps what is."""
        if want <= 0:
            want = self.value if self.value > 0 else 1.0
        step = axis_step(want, 4)
        want = math.ceil(want / step - 1e-9) * step
        now_s = time.monotonic()
        if want < self.value * 0.7:
            self._smaller_since_s = self._smaller_since_s or now_s
            if now_s - self._smaller_since_s <= SHRINK_AFTER_S:
                return self.value
        elif 0 < want <= self.value:
            want = self.value
        self._smaller_since_s = None
        self.value = want
        return want


def style_axis(axis: pg.AxisItem) -> None:
    """Give an axis the colours and the font of the theme."""
    t = theme.tokens()
    axis.setPen(pg.mkPen(t.line))
    axis.setTextPen(pg.mkPen(t.dim))
    axis.setTickFont(theme.ui_font(0.85))
