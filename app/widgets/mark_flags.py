"""Flags at the upper edge of a chart that name its marks; close marks share one, with the newest's name.

A flag hangs from its mark into the past and slides along the left edge when its mark leaves, so it never
changes sides. What is drawn shines through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QGraphicsItem, QGraphicsView, QStyleOptionGraphicsItem, QWidget

from app import theme
from app.i18n import tr
from app.widgets.axes import relative_time

SCALE = 0.82  # of the font
HEIGHT, PAD, MOST_WIDTH, GAP = 15, 4, 170, 3  # pixels
ALPHA = 150  # of the ground, of 255


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line at ``t_s`` (seconds, 0 is now, the past is negative)."""

    t_s: float
    label: str
    ok: bool = True

    def sentence(self) -> str:
        """When, what, and how it ended."""
        when = f"{relative_time(self.t_s)}  {self.label}"
        return when if self.ok else tr("{change} (rolled back)").format(change=when)


class MarkFlag(QGraphicsItem):
    """One flag, painted in pixels at a point of the view."""

    def __init__(self) -> None:
        super().__init__()
        self.setFlag(QGraphicsItem.GraphicsItemFlag.ItemIgnoresTransformations)
        self.setZValue(2)
        self._text, self._shown, self._ok = "", "", True
        self.named: list[ChartMark] = []  # the marks that it stands for, the newest first

    def toPlainText(self) -> str:
        """The name of its newest mark, whole."""
        return self._text

    def show_group(self, group: Sequence[ChartMark]) -> None:
        """Stand for these marks, the newest first."""
        self.named = list(group)
        newest = group[0]
        more = f"  +{len(group) - 1}" if len(group) > 1 else ""
        metrics = theme.metrics(SCALE)
        room = MOST_WIDTH - 2 * PAD - metrics.horizontalAdvance(more)
        shown = metrics.elidedText(newest.label, Qt.TextElideMode.ElideRight, room) + more
        if (newest.label, shown, newest.ok) != (self._text, self._shown, self._ok):
            self.prepareGeometryChange()
            self._text, self._shown, self._ok = newest.label, shown, newest.ok

    @property
    def width(self) -> float:
        """In pixels."""
        return float(theme.metrics(SCALE).horizontalAdvance(self._shown) + 2 * PAD)

    def covers(self, point: QPointF, view: QGraphicsView) -> bool:
        """Whether it is shown at a point of the viewport."""
        at = self.deviceTransform(view.viewportTransform()).inverted()[0].map(point)
        return self.isVisible() and self.boundingRect().contains(at)

    def boundingRect(self) -> QRectF:
        return QRectF(0, 0, self.width, HEIGHT)

    def paint(
        self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None
    ) -> None:
        t = theme.tokens()
        ground = QColor(t.raised)
        ground.setAlpha(ALPHA)
        painter.fillRect(self.boundingRect(), ground)
        painter.setPen(QColor(t.text if self._ok else t.warning_text))
        painter.setFont(theme.ui_font(SCALE))
        box = self.boundingRect().adjusted(PAD, 0, 0, 0)
        painter.drawText(box, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, self._shown)


def place(
    flags: Sequence[MarkFlag], marks: Sequence[ChartMark], top: float, span_s: float, width_px: float
) -> None:
    """Give each group of close marks a flag at height ``top``, and hide the flags that are left.

    ``marks`` are the oldest first; the view shows ``span_s`` seconds up to now in ``width_px`` pixels.
    """
    per_px = span_s / max(1.0, width_px)
    left = list(reversed(marks))
    free = 0.0  # what lies before it is free
    before: MarkFlag | None = None
    for flag in flags:
        if not left or width_px <= 0:
            flag.hide()
            continue
        group: list[ChartMark] = []
        start = free
        while left and (not group or left[0].t_s > start - GAP * per_px):
            group.append(left.pop(0))
            flag.show_group(group)
            start = max(-span_s, group[0].t_s - flag.width * per_px)
        if before is not None and start + flag.width * per_px > free:  # no room is left at the edge
            before.show_group([*before.named, *group])
            before.setPos(max(-span_s, before.named[0].t_s - before.width * per_px), top)
            flag.hide()
            continue
        free, before = start - GAP * per_px, flag
        flag.setPos(start, top)
        flag.show()
