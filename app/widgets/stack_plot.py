"""A chart of areas upon each other over time: what was waited for above the line, what was hidden below it.

One item paints all layers from arrays, so nothing is made anew from frame to frame. A time without data (NaN
in any layer) is a gap in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from numpy.typing import NDArray
from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QPainter, QPolygonF
from PySide6.QtWidgets import QStyleOptionGraphicsItem, QWidget

from app import theme
from app.widgets.axes import HeldTop, ValueAxis, relative_time
from app.widgets.chart_header import SeriesSpec
from app.widgets.live_plot import decimate
from app.widgets.time_plot import F64, CrosshairLink, TimePlot

MOST_POINTS = 700  # an area needs no more than the pixels it may have
EMPTY_TOP = 0.01  # the range where there is nothing to show
CUT_SHARE = 0.02
_LOW_SHARE = 0.04  # of the range that stays below the line where nothing is hidden


@dataclass(frozen=True, slots=True)
class Layer:
    """One area: ``colour`` is a theme token."""

    key: str
    label: str
    colour: str


def runs(finite: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and behind-last index of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], finite, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class StackItem(pg.GraphicsObject):  # type: ignore[misc]
    """Paints polygons in the colours of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self._box = QRectF()
        self._areas: list[tuple[str, list[QPolygonF]]] = []

    def set_areas(self, box: QRectF, areas: list[tuple[str, list[QPolygonF]]]) -> None:
        """Polygons by colour token, in the order in which they are painted, all inside ``box``."""
        if box != self._box:
            self.prepareGeometryChange()
            self._box = box
        self._areas = areas
        self.update()

    @property
    def areas(self) -> list[tuple[str, list[QPolygonF]]]:
        return self._areas

    def boundingRect(self) -> QRectF:
        return self._box

    def paint(
        self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None
    ) -> None:
        painter.setPen(Qt.PenStyle.NoPen)
        for colour, polygons in self._areas:
            painter.setBrush(theme.colour(colour))
            for polygon in polygons:
                painter.drawPolygon(polygon)


class StackPlot(TimePlot):
    """``above`` and ``below`` are the layers from the line outwards, ``legend`` sums of them."""

    read = Signal()  # `reading` changed

    def __init__(
        self,
        title: str,
        above: Sequence[Layer],
        below: Sequence[Layer],
        legend: Sequence[tuple[SeriesSpec, Sequence[str]]],
        *,
        format_tick: Callable[[float], str],
        format_value: Callable[[float | None], str],
        unit: str = "",
        link: CrosshairLink | None = None,
        card: bool = True,
    ) -> None:
        super().__init__(
            title, [spec for spec, _ in legend], ValueAxis(lambda value: format_tick(abs(value))),
            unit=unit, link=link, card=card,
        )  # fmt: skip
        self._raise_marks()
        self.layers = {layer.key: layer for layer in (*above, *below)}
        self._above, self._below = [layer.key for layer in above], [layer.key for layer in below]
        self._sums = {spec.key: list(keys) for spec, keys in legend}
        self._format_value = format_value
        self._held, self._held_below = HeldTop(), HeldTop()
        self._data: dict[str, F64] = {}

    def _contents(self) -> Sequence[pg.GraphicsObject]:
        self._item = StackItem()
        self._zero = pg.InfiniteLine(pos=0, angle=0)
        return [self._item, self._zero]

    def _colour(self) -> None:
        self._zero.setPen(pg.mkPen(theme.tokens().dim, width=1))
        self._item.update()

    # --- data ---------------------------------------------------------------------------------------

    def set_data(self, t_s: F64, data: Mapping[str, F64], weights: F64 | None = None) -> None:
        """Times [n] in seconds (0 is now) and, for each layer, values [n] of 0 or more, NaN for gaps.

        The range shows all but the heaviest hundredths of what there is; ``weights`` [n] say how much each
        time counts in that. What reaches beyond is cut at the edge, and read by the crosshair.
        """
        self._t = t_s
        _, weight = decimate(t_s, np.ones(len(t_s)) if weights is None else weights, MOST_POINTS)
        self._data = {key: np.asarray(data[key], np.float64) for key in self.layers}
        x = t_s
        values = []
        for key in self.layers:
            x, thinned = decimate(t_s, self._data[key], MOST_POINTS)
            values.append(thinned)
        stack = np.array(values).reshape(len(self.layers), -1)
        finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(stack), axis=0)
        count = len(self._above)
        top = np.cumsum(stack[:count], axis=0)
        bottom = -np.cumsum(stack[count:], axis=0)
        self._fit(top, bottom, weight, finite)
        found = runs(finite)
        areas = [(self.layers[k].colour, _polygons(x, top, i, found)) for i, k in enumerate(self._above)]
        areas += [(self.layers[k].colour, _polygons(x, bottom, i, found)) for i, k in enumerate(self._below)]
        self._item.set_areas(QRectF(-self._span_s, self._low, self._span_s, self._top - self._low), areas)
        self._draw_soon()

    def _fit(self, top: F64, bottom: F64, weight: F64, finite: NDArray[np.bool_]) -> None:
        # One step of a long prompt must not flatten the picture of all others.
        if not finite.any():
            self._set_y(EMPTY_TOP, -EMPTY_TOP * _LOW_SHARE)
            return
        high = _most(top[-1][finite], weight[finite])
        deep = _most(-bottom[-1][finite], weight[finite])
        upper = self._held.fit(high * 1.12)
        lower = self._held_below.fit(deep * 1.12) if deep > upper * _LOW_SHARE else upper * _LOW_SHARE
        self._set_y(upper, -lower)

    # --- figures ------------------------------------------------------------------------------------

    @property
    def reading(self) -> tuple[str, dict[str, float]]:
        """When, in words, and each layer's value then: under the crosshair, else the newest. Empty: none."""
        at = len(self._t) - 1
        when = relative_time(0.0)
        if self._cursor_s is not None and self._t.size:
            at = int(np.argmin(np.abs(self._t - self._cursor_s)))
            when = relative_time(self._cursor_s)
        values = {key: float(column[at]) for key, column in self._data.items() if 0 <= at < len(column)}
        return when, {} if any(math.isnan(value) for value in values.values()) else values

    def refresh_legend(self) -> None:
        when, values = self.reading
        shown: dict[str, str] = {}
        for key, parts in self._sums.items():
            total = sum(values[part] for part in parts) if values else None
            shown[key] = self._format_value(total)
        self.header.legend.set_values(shown)
        note = self._note
        if self._cursor_s is not None:
            near = [m.label for m in self._marks if abs(m.t_s - self._cursor_s) < self._span_s / 60]
            note = " · ".join([when, *near[-1:]])
        self.header.note.set_full_text(note)
        self.read.emit()


def _most(values: F64, weights: F64) -> float:
    """The least value that all but `CUT_SHARE` of the weight does not exceed."""
    order = np.argsort(values)
    total = np.cumsum(np.nan_to_num(weights[order]))
    at = int(np.searchsorted(total, (1 - CUT_SHARE) * total[-1])) if len(total) else 0
    return float(values[order][min(at, len(values) - 1)])


def _polygons(x: F64, edges: F64, number: int, found: list[tuple[int, int]]) -> list[QPolygonF]:
    """The area between an edge and the one before it, a polygon for each run of finite values."""
    made = []
    for first, last in found:
        outer = edges[number, first:last]
        inner = edges[number - 1, first:last] if number else np.zeros(last - first)
        if not np.any(outer != inner):
            continue
        xs = x[first:last]
        if last - first == 1:  # a lone bin is a bar of its own width
            half_s = 0.25
            xs = np.array([xs[0] - half_s, xs[0] + half_s])
            outer, inner = np.repeat(outer, 2), np.repeat(inner, 2)
        line, edge = np.concatenate((xs, xs[::-1])), np.concatenate((outer, inner[::-1]))
        made.append(pg.functions.arrayToQPolygonF(line, edge))
    return made
