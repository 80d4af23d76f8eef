"""A state in one glance: a shape, a word and, where it is abnormal, a colour."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme

LEVELS = ("ok", "busy", "warning", "alarm", "off")


class StatusPill(QWidget):
    """``level`` ok: disc, busy: ring, warning: triangle, alarm: octagon, off: empty ring."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._level, self._text = "off", ""
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Preferred)

    @property
    def level(self) -> str:
        return self._level

    @property
    def text(self) -> str:
        return self._text

    def set_state(self, level: str, text: str) -> None:
        """Show ``text`` with the shape of ``level``. Raises ValueError for an unknown level."""
        if level not in LEVELS:
            raise ValueError(f"unknown level {level!r}")
        if (level, text) != (self._level, self._text):
            self._level, self._text = level, text
            self.setAccessibleName(text)
            self.updateGeometry()
            self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(metrics.horizontalAdvance(self._text) + 26, metrics.height() + 4)

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def paintEvent(self, event: QPaintEvent) -> None:
        t = theme.tokens()
        mark = {"ok": t.ok_text, "busy": t.accent, "warning": t.warning, "alarm": t.alarm, "off": t.dim}
        text = {"ok": t.text, "busy": t.text, "warning": t.warning_text, "alarm": t.alarm_text, "off": t.dim}
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        paint_mark(painter, QRectF(6, self.height() / 2 - 5, 10, 10), self._level, QColor(mark[self._level]))
        painter.setPen(QColor(text[self._level]))
        painter.drawText(self.rect().adjusted(22, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, self._text)


def paint_mark(painter: QPainter, box: QRectF, level: str, colour: QColor) -> None:
    """Draw the shape of a level into ``box``."""
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(colour)
    if level == "warning":
        top = QPointF(box.center().x(), box.top())
        painter.drawPolygon(QPolygonF([top, box.bottomRight(), box.bottomLeft()]))
    elif level == "alarm":
        cut = box.width() * 0.3
        left, top_y, right, low = box.left(), box.top(), box.right(), box.bottom()
        painter.drawPolygon(
            QPolygonF(
                [
                    QPointF(left + cut, top_y), QPointF(right - cut, top_y), QPointF(right, top_y + cut),
                    QPointF(right, low - cut), QPointF(right - cut, low), QPointF(left + cut, low),
                    QPointF(left, low - cut), QPointF(left, top_y + cut),
                ]
            )
        )  # fmt: skip
    elif level == "ok":
        painter.drawEllipse(box.adjusted(1, 1, -1, -1))
    else:
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(colour, 1.6))
        painter.drawEllipse(box.adjusted(1.5, 1.5, -1.5, -1.5))
