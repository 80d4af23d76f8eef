"""A chart of places over time: one lane a seat of the batch, above them the queue, a bar for each state.

One item paints all bars that are in view; bars too thin to see are merged into the pixel they lie in. The
widget knows nothing of requests: a bar carries a key, which comes back when a person points at it or clicks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from numpy.typing import NDArray
from PySide6.QtCore import QEvent, QLineF, QObject, QPoint, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QHelpEvent, QMouseEvent, QPainter, QPen
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QToolTip, QWidget

from app import theme
from app.widgets.axes import LaneAxis, relative_time
from app.widgets.chart_header import SeriesSpec
from app.widgets.time_plot import F64, CrosshairLink, TimePlot

I64 = NDArray[np.int64]
QUEUE_LINES = 12  # what waits further back is drawn upon the last one
STRIP_SHARE = 0.24  # of the height, for the queue
MERGE_ABOVE = 1500
END_COLOURS = ("text", "dim", "alarm")  # ended well, cancelled, failed
END_HEIGHTS = (1.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Bars [n]: seconds relative to now, lane, kind (index of the colours), whether in the queue, and a key.

    Ends [m]: when, in which lane, and how (index of `END_COLOURS`). ``seats`` is how many there are.
    """

    t0_s: F64
    t1_s: F64
    lane: I64
    kind: I64
    queued: NDArray[np.bool_]
    key: I64
    end_t_s: F64
    end_lane: I64
    end: I64
    seats: int


class SeatItem(pg.GraphicsObject):  # type: ignore[misc]
    """Paints seats, bars, ends and the outline of the chosen key."""

    def __init__(self, colours: Sequence[str]) -> None:
        super().__init__()
        self._colours = list(colours)
        self._box = QRectF()
        self._seats: list[QRectF] = []
        self._bars: list[list[QRectF]] = [[] for _ in colours]
        self._ends: list[list[QLineF]] = [[] for _ in END_COLOURS]
        self._outlines: list[QRectF] = []

    @property
    def bars(self) -> list[list[QRectF]]:
        return self._bars

    def set_shapes(
        self, box: QRectF, seats: list[QRectF], bars: list[list[QRectF]], ends: list[list[QLineF]],
        outlines: list[QRectF],
    ) -> None:  # fmt: skip
        """What to paint, in view coordinates; ``bars`` and ``ends`` by colour."""
        if box != self._box:
            self.prepareGeometryChange()
            self._box = box
        self._seats, self._bars, self._ends, self._outlines = seats, bars, ends, outlines
        self.update()

    def boundingRect(self) -> QRectF:
        return self._box

    def paint(
        self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None
    ) -> None:
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(theme.colour("seat"))
        painter.drawRects(self._seats)
        for colour, rects in zip(self._colours, self._bars, strict=True):
            if rects:
                painter.setBrush(theme.colour(colour))
                painter.drawRects(rects)
        for colour, width, lines in zip(END_COLOURS, (1, 1, 2), self._ends, strict=True):
            if lines:
                painter.setPen(_cosmetic(colour, width))
                painter.drawLines(lines)
        if self._outlines:
            painter.setPen(_cosmetic("text", 1))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRects(self._outlines)


def _cosmetic(colour: str, width: int) -> QPen:
    pen = QPen(theme.colour(colour), width)
    pen.setCosmetic(True)
    return pen


class SeatPlot(TimePlot):
    """``series`` names the kinds of bars in order. ``describe`` gives the text for a key on hover."""

    picked = Signal(object)  # key that was clicked, or None
    opened = Signal(object)  # key that was clicked twice

    def __init__(
        self,
        title: str,
        series: Sequence[SeriesSpec],
        queue: str,
        *,
        link: CrosshairLink | None = None,
        card: bool = True,
    ) -> None:
        axis = LaneAxis()
        axis.strip = queue
        super().__init__(title, series, axis, link=link, card=card)
        self._raise_marks()
        self.describe: Callable[[int], str] = lambda _key: ""
        self._lanes: Lanes | None = None
        self._chosen: int | None = None
        self._shapes: tuple[F64, F64] = (np.empty((0, 4)), np.empty(0))

    def _contents(self) -> Sequence[pg.GraphicsObject]:
        self._item = SeatItem([spec.colour for spec in self.series])
        return [self._item]

    def _colour(self) -> None:
        self._item.update()

    def sizeHint(self) -> QSize:
        return QSize(420, 120)

    # --- data ---------------------------------------------------------------------------------------

    def set_lanes(self, lanes: Lanes) -> None:
        """Show these bars."""
        self._lanes = lanes
        self._t = lanes.t0_s
        seated = ~lanes.queued
        used = int(lanes.lane[seated].max()) + 1 if seated.any() else 0
        shown = max(used, min(lanes.seats, 8), 1)
        strip = shown * STRIP_SHARE / (1 - STRIP_SHARE)
        self._set_y(strip, -float(shown))
        self._draw(lanes, shown, strip)

    def choose(self, key: int | None) -> None:
        """Outline the bars of a key, or none."""
        if key != self._chosen:
            self._chosen = key
            if self._lanes is not None:
                self.set_lanes(self._lanes)

    @property
    def chosen(self) -> int | None:
        return self._chosen

    def _draw(self, lanes: Lanes, shown: int, strip: float) -> None:
        box = self.plot.getPlotItem().vb
        px_s = self._span_s / max(1.0, float(box.width()))
        px_y = (shown + strip) / max(1.0, float(box.height()))
        rects = self._rects(lanes, strip, px_s, px_y)
        self._shapes = rects, lanes.key.astype(np.float64)
        pad = px_y if px_y < 0.25 else 0.0
        seats = [
            QRectF(-self._span_s, -i - 1 + pad / 2, self._span_s, 1 - pad)
            for i in range(min(shown, lanes.seats))
        ]
        kinds = range(len(self.series))
        thin = _merged(rects, lanes.kind, px_s) if len(rects) > MERGE_ABOVE else np.arange(len(rects))
        bars = [[QRectF(*r) for r in rects[thin[lanes.kind[thin] == kind]].tolist()] for kind in kinds]
        outlines = [QRectF(*r) for r in rects[lanes.key == self._chosen].tolist()] if self._chosen else []
        ends: list[list[QLineF]] = [[], [], []]
        if px_y < 0.25:  # below four pixels a lane, marks would hide the bars
            for t_s, lane, end in zip(
                lanes.end_t_s.tolist(), lanes.end_lane.tolist(), lanes.end.tolist(), strict=True
            ):
                height = (1 - pad) * END_HEIGHTS[end]
                ends[end].append(QLineF(t_s, -lane - pad / 2, t_s, -lane - pad / 2 - height))
        whole = QRectF(-self._span_s, -float(shown), self._span_s, shown + strip)
        self._item.set_shapes(whole, seats, bars, ends, outlines)
        self._draw_soon()

    def _rects(self, lanes: Lanes, strip: float, px_s: float, px_y: float) -> F64:
        """x, y, width, height [n, 4] of the bars, none narrower than a pixel."""
        waiting = lanes.lane[lanes.queued]
        lines = int(np.clip(waiting.max() + 1, 4, QUEUE_LINES)) if waiting.size else 4
        line = strip * 0.9 / lines
        x0 = np.maximum(lanes.t0_s, -self._span_s)
        width = np.maximum(np.minimum(lanes.t1_s, 0.0) - x0, px_s)
        pad = px_y if px_y < 0.25 else 0.0
        y = np.where(
            lanes.queued,
            strip - (np.minimum(lanes.lane, lines - 1) + 1.0) * line,
            -lanes.lane - 1.0 + pad / 2,
        )
        gap = px_y if line > 3 * px_y else 0.0
        height = np.where(lanes.queued, line - gap, 1.0 - pad)
        return np.column_stack((x0, y, width, height)) if len(x0) else np.empty((0, 4))

    # --- pointing -----------------------------------------------------------------------------------

    def key_at(self, point: QPoint) -> int | None:
        """The key of the bar under a point of the viewport."""
        box = self.plot.getPlotItem().vb
        at = box.mapSceneToView(self.plot.mapToScene(point))
        rects, keys = self._shapes
        x, y = float(at.x()), float(at.y())
        inside = (rects[:, 0] <= x) & (x <= rects[:, 0] + rects[:, 2])
        inside &= (rects[:, 1] <= y) & (y <= rects[:, 1] + rects[:, 3])
        found = np.flatnonzero(inside)
        return int(keys[found[-1]]) if found.size else None

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            key = self.key_at(event.pos())
            text = self.describe(key) if key is not None else ""
            if text:
                QToolTip.showText(event.globalPos(), text, self)
            else:
                QToolTip.hideText()
            return True
        if isinstance(event, QMouseEvent) and event.button() == Qt.MouseButton.LeftButton:
            if event.type() == QEvent.Type.MouseButtonPress:
                self.picked.emit(self.key_at(event.position().toPoint()))
            elif event.type() == QEvent.Type.MouseButtonDblClick:
                self.opened.emit(self.key_at(event.position().toPoint()))
        return super().eventFilter(watched, event)

    def refresh_legend(self) -> None:
        note = self._note
        if self._cursor_s is not None:
            near = [m.label for m in self._marks if abs(m.t_s - self._cursor_s) < self._span_s / 60]
            note = " · ".join([relative_time(self._cursor_s), *near[-1:]])
        self.header.note.set_full_text(note)


def _merged(rects: F64, kind: I64, px_s: float) -> I64:
    """Indices of the bars, of those of one pixel only one for each pixel, height and kind."""
    thin = rects[:, 2] <= 1.5 * px_s
    wide = np.flatnonzero(~thin)
    at = np.flatnonzero(thin)
    if not at.size:
        return wide
    cells = np.column_stack((np.floor(rects[at, 0] / px_s), rects[at, 1], kind[at]))
    _, first = np.unique(cells, axis=0, return_index=True)
    return np.sort(np.concatenate((wide, at[first])))
