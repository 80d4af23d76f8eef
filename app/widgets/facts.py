"""Named figures one below the other, and a bar that shows what a whole is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QWidget

from app import theme
from app.widgets.basic import ElidedLabel, FigureLabel, label, plain_tip, set_tip
from app.widgets.block_map import Swatch


@dataclass(frozen=True, slots=True)
class FactSpec:
    """One line: ``tip`` defines the figure, ``token`` is the colour of its part in a bar, "" for none.

    ``wide``: the value has the room of the remark too.
    """

    key: str
    name: str
    tip: str
    token: str = ""
    wide: bool = False


class Facts(QWidget):
    """Lines of a name, a dim remark and a value. A line without a value is hidden."""

    def __init__(self, specs: Sequence[FactSpec], role: str = "") -> None:
        """``role`` is that of the values; names are small beside it."""
        super().__init__()
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(7)
        grid.setVerticalSpacing(1)
        grid.setColumnStretch(2, 1)
        self.names: dict[str, QLabel] = {}
        self.values: dict[str, FigureLabel] = {}
        self.remarks: dict[str, ElidedLabel] = {}
        self._parts: dict[str, list[QWidget]] = {}
        for i, spec in enumerate(specs):
            name, remark, value = (
                label(spec.name, "small" if role else "dim"),
                ElidedLabel("", "small"),
                FigureLabel(role),
            )
            for part in (remark, value):
                part.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            parts: list[QWidget] = [name, remark, value]
            if spec.token:
                swatch = Swatch(spec.token)
                grid.addWidget(swatch, i, 0, Qt.AlignmentFlag.AlignVCenter)
                parts.append(swatch)
            grid.addWidget(name, i, 1 if spec.token else 0, 1, 1 if spec.token else 2)
            grid.addWidget(remark, i, 2)
            grid.addWidget(value, i, 2 if spec.wide else 3, 1, 2 if spec.wide else 1)
            set_tip(name, spec.tip)
            set_tip(value, spec.tip)
            self.names[spec.key], self.values[spec.key], self.remarks[spec.key] = name, value, remark
            self._parts[spec.key] = parts
            self.show_fact(spec.key, "")

    def show_fact(self, key: str, value: str, remark: str = "") -> None:
        """Write one line, or hide it."""
        self.values[key].setText(value)
        self.remarks[key].set_full_text(remark)
        for part in self._parts[key]:
            part.setVisible(bool(value))

    def value(self, key: str) -> str:
        """What a line shows, "" where it is hidden."""
        return self.values[key].text()


class ShareBar(QWidget):
    """A bar of ``[(token, amount), ...]`` from the left; what is left of ``whole`` stays empty."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._parts: list[tuple[str, float]] = []
        self._whole = 0.0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(name)

    def set_parts(self, parts: Sequence[tuple[str, float]], whole: float, tip: str) -> None:
        """``tip`` says the same in words."""
        self._parts, self._whole = list(parts), max(whole, sum(amount for _, amount in parts))
        self.setToolTip(plain_tip(tip))
        self.setAccessibleDescription(tip)
        self.update()

    def spans(self) -> list[tuple[str, float, float]]:
        """Token, begin and width of each part in pixels; a part that is there can be seen."""
        if not self._whole:
            return []
        width = float(self.width())
        sizes = [max(2.0, amount / self._whole * width) for _, amount in self._parts if amount > 0]
        fit = min(1.0, width / sum(sizes)) if sizes else 1.0
        made, x = [], 0.0
        for token, size in zip((token for token, amount in self._parts if amount > 0), sizes, strict=True):
            made.append((token, x, size * fit))
            x += size * fit
        return made

    def sizeHint(self) -> QSize:
        return QSize(120, 12)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), theme.colour("raised"))
        for token, x, width in self.spans():
            painter.fillRect(
                QRectF(x, 0, width - (1 if width > 3 else 0), self.height()), theme.colour(token)
            )
