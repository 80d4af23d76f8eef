"""A chart of the last minutes: curves over "seconds ago", with all that `TimePlot` frames them in.

The y range grows at once and shrinks after a while; NaN is a gap. On a log axis a value of 0 or less cannot
be drawn and becomes a gap, which the chart says. Curves are one pixel wide on purpose: wider ones with
antialiasing cost thirty times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRectF, Qt

from app import theme
from app.i18n import tr
from app.widgets.axes import HeldTop, ValueAxis, relative_time
from app.widgets.chart_header import SeriesSpec
from app.widgets.time_plot import F64, CrosshairLink, TimePlot

MAX_POINTS = 1500


def decimate(t: F64, values: F64, most: int = MAX_POINTS) -> tuple[F64, F64]:
    """Means of equal runs, at most ``most`` points; a run without a finite value stays NaN."""
    if len(t) <= most:
        return t, values
    width = math.ceil(len(t) / most)
    count = len(t) // width
    cut = len(t) - count * width
    t, values = t[cut:].reshape(count, width), values[cut:].reshape(count, width)
    finite = np.isfinite(values)
    total = np.where(finite, values, 0.0).sum(axis=1)
    number = finite.sum(axis=1)
    means = np.divide(total, number, out=np.full(count, math.nan), where=number > 0)
    return t.mean(axis=1), means


class Curve(pg.PlotCurveItem):  # type: ignore[misc]
    """A curve that may be anywhere in its view, which spares working out where it is for each new data."""

    def __init__(self) -> None:
        super().__init__(antialias=True)

    def boundingRect(self) -> QRectF:
        return QRectF(self.viewRect())

    def viewTransformChanged(self) -> None:
        self.prepareGeometryChange()
        super().viewTransformChanged()


class LivePlot(TimePlot):
    """See the module. ``format_tick`` and ``format_value`` write a value in the chart's base unit."""

    def __init__(
        self,
        title: str,
        series: Sequence[SeriesSpec],
        *,
        format_tick: Callable[[float], str],
        format_value: Callable[[float | None], str],
        unit: str = "",
        fixed_max: float | None = None,
        minimum_top: float = 0.0,
        show_labels: bool = False,
        link: CrosshairLink | None = None,
        card: bool = True,
    ) -> None:
        super().__init__(
            title, series, ValueAxis(format_tick), unit=unit, show_labels=show_labels, link=link, card=card
        )
        self._format_value = format_value
        self._fixed_max, self._minimum_top = fixed_max, minimum_top
        self._held = HeldTop()
        self._log = False
        self._data: dict[str, F64] = {}

    def _contents(self) -> Sequence[pg.GraphicsObject]:
        self.curves = {spec.key: Curve() for spec in self.series}
        return list(self.curves.values())

    # --- data ---------------------------------------------------------------------------------------

    def set_log(self, log: bool) -> None:
        """A logarithmic value axis, or a linear one from 0."""
        if log != self._log:
            self._log = self.value_axis.log = log
            self._held = HeldTop()
            self._top, self._low = (-math.inf, math.inf) if log else (0.0, 0.0)
            self.set_data(self._t, self._data)

    @property
    def log(self) -> bool:
        return self._log

    @property
    def y_range(self) -> tuple[float, float]:
        """The shown range in the base unit."""
        return (10.0**self._low, 10.0**self._top) if self._log else (self._low, self._top)

    def set_data(self, t_s: F64, data: Mapping[str, F64]) -> None:
        """New curves: times [n] in seconds, 0 is now, past negative; values [n] by key, NaN for gaps."""
        self._t = t_s
        self._data = {key: np.asarray(values, dtype=np.float64) for key, values in data.items()}
        extremes: list[float] = []
        for key, curve in self.curves.items():
            values = self._data.get(key)
            if values is None or len(values) == 0:
                curve.setData([], [])
                continue
            x, y = decimate(t_s, values)
            if self._log:
                y = np.log10(np.where(y > 0, y, math.nan))
            finite = np.isfinite(y)
            if not finite.any():
                curve.setData([], [])
                continue
            extremes += [float(y[finite].min()), float(y[finite].max())]
            if finite.all():
                curve.setData(x, y, connect="all", skipFiniteCheck=True)
            else:
                curve.setData(x, y, connect="finite")
        self._fit(extremes)
        self._draw_soon()

    def _fit(self, extremes: list[float]) -> None:
        if self._log:
            if extremes:
                low, high = math.floor(min(extremes)), math.ceil(max(extremes) + 1e-9)
                self._set_y(float(max(high, low + 1)), float(low))
            elif not math.isfinite(self._top):
                self._set_y(0.0, -3.0)
            return
        if self._fixed_max is not None:
            self._set_y(max([self._fixed_max, *(value * 1.05 for value in extremes)]), 0.0)
            return
        want = max([self._minimum_top, *(value * 1.12 for value in extremes)])
        self._set_y(self._held.fit(want), 0.0)

    # --- figures ------------------------------------------------------------------------------------

    def refresh_legend(self) -> None:
        if self._cursor_s is None or not self._t.size:
            values = {key: self._format_value(self._newest(key)) for key in self.curves}
            note = self._note
        else:
            index = int(np.argmin(np.abs(self._t - self._cursor_s)))
            values = {key: self._format_value(self._at(key, index)) for key in self.curves}
            near = [m.label for m in self._marks if abs(m.t_s - self._cursor_s) < self._span_s / 60]
            note = " · ".join([relative_time(self._cursor_s), *near[-1:]])
        if self._log and any(np.any(v <= 0) for v in self._data.values()):
            note = " · ".join(part for part in (note, tr("values ≤ 0 are not drawn")) if part)
        self.header.legend.set_values(values)
        self.header.note.set_full_text(note)

    def _newest(self, key: str) -> float | None:
        values = self._data.get(key)
        if values is None or len(values) == 0:
            return None
        tail = values[-3:]
        finite = tail[np.isfinite(tail)]
        return float(finite[-1]) if finite.size else None

    def _at(self, key: str, index: int) -> float | None:
        values = self._data.get(key)
        if values is None or index >= len(values) or not math.isfinite(values[index]):
            return None
        return float(values[index])

    def _colour(self) -> None:
        for spec in self.series:
            style = Qt.PenStyle.DashLine if spec.dashed else Qt.PenStyle.SolidLine
            self.curves[spec.key].setPen(pg.mkPen(theme.colour(spec.colour), width=1, style=style))

    def csv(self) -> str:
        """The shown data as CSV: seconds relative to now, then one column a series; gaps are empty."""
        head = ["t_s", *(spec.key for spec in self.series)]
        lines = [",".join(head)]
        for i, t in enumerate(self._t.tolist()):
            cells = [self._at(spec.key, i) for spec in self.series]
            lines.append(",".join([f"{t:.3f}", *("" if cell is None else repr(cell) for cell in cells)]))
        return "\n".join(lines) + "\n"
