"""The line above a chart: title, one entry for each series with its value, and what it rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.widgets.basic import ElidedLabel, label, row


@dataclass(frozen=True, slots=True)
class SeriesSpec:
    """One curve: ``colour`` is a theme token, ``tip`` defines what it shows."""

    key: str
    label: str
    colour: str
    tip: str = ""
    dashed: bool = False


class Legend(QWidget):
    """Entries in one row. Their widths only grow, so that changing figures do not push each other."""

    def __init__(self, series: list[SeriesSpec]) -> None:
        super().__init__()
        self._series = series
        self._values: dict[str, str] = {}
        self._widths: dict[str, float] = {}
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(", ".join(s.label for s in series))

    @property
    def values(self) -> dict[str, str]:
        return dict(self._values)

    def set_values(self, values: dict[str, str]) -> None:
        """Show a value beside each name."""
        if values == self._values:
            return
        before = self.sizeHint().width()
        self._values = dict(values)
        self.setAccessibleName(", ".join(f"{s.label} {values.get(s.key, '')}" for s in self._series))
        for spec in self._series:
            self._widths[spec.key] = max(self._widths.get(spec.key, 0.0), self._width(spec))
        if self.sizeHint().width() != before:
            self.updateGeometry()
        self.update()

    def _width(self, spec: SeriesSpec) -> float:
        small, bold = theme.metrics(0.9), theme.metrics(0.9, bold=True)
        value = self._values.get(spec.key, "")
        text = small.horizontalAdvance(spec.label) + (5 + bold.horizontalAdvance(value) if value else 0)
        return 14 + text

    def sizeHint(self) -> QSize:
        width = sum(max(self._widths.get(s.key, 0.0), self._width(s)) + 14 for s in self._series)
        return QSize(math.ceil(width), 20)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, 20)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        x = 0.0
        small, bold = theme.ui_font(0.9), theme.ui_font(0.9, bold=True)
        for spec in self._series:
            painter.fillRect(QRectF(x, self.height() / 2 - 1.5, 9, 3), theme.colour(spec.colour))
            painter.setFont(small)
            painter.setPen(QColor(theme.tokens().dim))
            width = theme.metrics(0.9).horizontalAdvance(spec.label)
            painter.drawText(
                QRectF(x + 14, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter, spec.label
            )
            painter.setFont(bold)
            painter.setPen(QColor(theme.tokens().text))
            value = self._values.get(spec.key, "")
            box = QRectF(x + 14 + width + 5, 0, self.width() - x, self.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignVCenter, value)
            x += max(self._widths.get(spec.key, 0.0), self._width(spec)) + 14


class ChartHeader(QWidget):
    """Title, unit, legend and note."""

    def __init__(self, title: str, unit: str, series: list[SeriesSpec]) -> None:
        super().__init__()
        self.title = label(title, "title")
        self.unit = label(unit, "small")
        self.legend = Legend(series)
        self.note = ElidedLabel("", "small")
        self.note.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.note.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        line = row(self.title, self.unit, 8, self.legend, self.note, margins=(12, 5, 12, 2), spacing=6)
        line.setStretchFactor(self.note, 1)
        self._line = line
        self.setLayout(line)

    def add(self, *parts: QWidget) -> None:
        """Put further parts at the right end."""
        self._line.addSpacing(6)
        for part in parts:
            self._line.addWidget(part)
