"""One key figure: label, value and unit, what it rests on, and its last minute as a line."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.units import NONE, Quantity
from app.widgets.basic import plain_tip
from app.widgets.status_pill import paint_mark

PAD = 11
SPARK_MIN_WIDTH = 30


class KpiTile(QWidget):
    """Paints itself; told what to show by `show_value` and `set_spark`. A click emits `clicked`."""

    clicked = Signal()

    def __init__(self, title: str, definition: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.title = title
        self.definition = definition
        self.quantity = Quantity(NONE, "")
        self.note = ""
        self.aside = ""
        self.level = "ok"
        self._spark: NDArray[np.float64] = np.empty(0)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setToolTip(plain_tip(definition))
        self._describe()

    def show_value(self, quantity: Quantity, note: str, level: str = "ok", aside: str = "") -> None:
        """Show a figure and the line below it. ``level`` warning or alarm gives outline and mark.

        ``aside`` is said in the tooltip, after the definition.
        """
        if aside != self.aside:
            self.aside = aside
            self.setToolTip(plain_tip("\n".join(part for part in (self.definition, aside) if part)))
            self._describe()
        if (quantity, note, level) != (self.quantity, self.note, self.level):
            self.quantity, self.note, self.level = quantity, note, level
            self._describe()
            self.update()

    def set_spark(self, values: NDArray[np.float64]) -> None:
        """The last minute's values, oldest first, NaN for gaps."""
        if not np.array_equal(values, self._spark, equal_nan=True):
            self._spark = np.array(values, dtype=np.float64)
            self.update()

    def _describe(self) -> None:
        self.setAccessibleName(f"{self.title}: {self.quantity}")
        self.setAccessibleDescription(f"{self.note}. {self.definition} {self.aside}".rstrip())

    def mousePressEvent(self, event: QMouseEvent) -> None:
        self.clicked.emit()

    def sizeHint(self) -> QSize:
        small, big = theme.metrics(0.9), theme.metrics(1.72, bold=True)
        return QSize(160, math.ceil(2 * small.height() + big.height() + 2 * PAD - 2))

    def minimumSizeHint(self) -> QSize:
        return QSize(118, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        t = theme.tokens()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        edge = {"warning": t.warning, "alarm": t.alarm}.get(self.level, t.line)
        painter.setPen(QPen(QColor(edge), 1))
        painter.setBrush(QColor(t.panel))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), 5, 5)

        small, big = theme.ui_font(0.9), theme.ui_font(1.72, bold=True)
        small_height = theme.metrics(0.9).height()
        big_height = theme.metrics(1.72, bold=True).height()
        left, width = float(PAD), float(self.width() - 2 * PAD)
        y = PAD - 2.0
        text_left = left
        if self.level in ("warning", "alarm"):
            paint_mark(painter, QRectF(left, y + small_height / 2 - 4.5, 9, 9), self.level, QColor(edge))
            text_left += 15
        painter.setFont(small)
        painter.setPen(QColor(t.dim))
        _draw(painter, small_height, text_left, y, left + width - text_left, self.title)
        y += small_height + 1
        painter.setFont(big)
        painter.setPen(QColor(t.text if self.quantity.value != NONE else t.dim))
        value_width = theme.metrics(1.72, bold=True).horizontalAdvance(self.quantity.value)
        _draw(painter, big_height, left, y, width, self.quantity.value)
        painter.setFont(theme.ui_font())
        painter.setPen(QColor(t.dim))
        _draw(painter, big_height, left + value_width + 5, y + 2, width - value_width - 5, self.quantity.unit)
        y += big_height + 1
        painter.setFont(small)
        painter.setPen(QColor({"warning": t.warning_text, "alarm": t.alarm_text}.get(self.level, t.dim)))
        note_width = theme.metrics(0.9).horizontalAdvance(self.note)
        _draw(painter, small_height, left, y, width, self.note)
        spark_left = left + math.ceil((note_width + 10) / 8) * 8
        if left + width - spark_left >= SPARK_MIN_WIDTH:
            box = QRectF(spark_left, y + 1, left + width - spark_left, small_height - 2)
            paint_spark(painter, box, self._spark, QColor(t.dim))


def _draw(painter: QPainter, height: float, x: float, y: float, width: float, text: str) -> None:
    metrics = painter.fontMetrics()
    shown = metrics.elidedText(text, Qt.TextElideMode.ElideRight, max(0, int(width) + 1))
    painter.drawText(QRectF(x, y, width + 2, height), Qt.AlignmentFlag.AlignVCenter, shown)


def paint_spark(painter: QPainter, box: QRectF, values: NDArray[np.float64], colour: QColor) -> None:
    """Draw values as a line into ``box``, scaled between their least and greatest; NaN breaks the line."""
    finite = np.isfinite(values)
    if np.count_nonzero(finite) < 2:
        return
    low, high = float(values[finite].min()), float(values[finite].max())
    span = high - low
    shares = (values - low) / span if span > 0 else np.where(finite, 0.5, math.nan)
    xs = box.left() + np.arange(len(values)) * (box.width() / max(1, len(values) - 1))
    ys = box.bottom() - shares * box.height()
    painter.setPen(QPen(colour, 1))
    painter.setBrush(Qt.BrushStyle.NoBrush)
    run: list[QPointF] = []
    for x, y, good in zip(xs.tolist(), ys.tolist(), finite.tolist(), strict=True):
        if good:
            run.append(QPointF(x, y))
        elif run:
            painter.drawPolyline(QPolygonF(run))
            run = []
    if run:
        painter.drawPolyline(QPolygonF(run))
