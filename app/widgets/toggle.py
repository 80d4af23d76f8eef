"""A switch: on, off, and on its way between them."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QSizePolicy, QWidget

from app import theme

WIDTH, HEIGHT = 28, 16


class ToggleSwitch(QAbstractButton):
    """A checkable button drawn as a switch. ``pending`` dashes its outline until the engine has answered."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._pending = False
        self.setCheckable(True)
        self.setAccessibleName(name)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.setCursor(Qt.CursorShape.PointingHandCursor)

    @property
    def pending(self) -> bool:
        return self._pending

    def set_pending(self, pending: bool) -> None:
        """Show that a change was asked for and has not happened yet."""
        if pending != self._pending:
            self._pending = pending
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(WIDTH + 4, HEIGHT + 4)

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def paintEvent(self, event: QPaintEvent) -> None:
        t = theme.tokens()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        top = (self.height() - HEIGHT) / 2
        body = QRectF(2.5, top + 0.5, WIDTH - 1, HEIGHT - 1)
        on, enabled = self.isChecked(), self.isEnabled()
        fill = QColor(t.accent if on else t.raised)
        line = QColor(t.accent if on else t.disabled)
        knob = QColor(t.on_accent if on else t.dim)
        if self._pending:
            fill, line, knob = QColor(t.panel), QColor(t.warning), QColor(t.dim)
        if not enabled and not self._pending:
            fill, line, knob = QColor(t.raised), QColor(t.line), QColor(t.disabled)
        pen = QPen(line, 1)
        if self._pending:
            pen.setStyle(Qt.PenStyle.DashLine)
            pen.setDashPattern([3, 2])
        painter.setPen(pen)
        painter.setBrush(fill)
        painter.drawRoundedRect(body, HEIGHT / 2, HEIGHT / 2)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(knob)
        inset = 3.0
        size = HEIGHT - 2 * inset
        x = body.right() - size - inset + 0.5 if on else body.left() + inset - 0.5
        painter.drawEllipse(QRectF(x, top + inset, size, size))
        if self.hasFocus():
            painter.setPen(QPen(QColor(t.accent), 1))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(0.5, top - 1.5, WIDTH + 3, HEIGHT + 3), 9, 9)
