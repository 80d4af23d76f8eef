"""A chart of the last minutes: curves over "seconds ago", change markers, gaps, and a linked crosshair.

Made for ten frames a second: every item is made once and only given new data; the x range stands still and
the data move; the y range grows at once and shrinks after a while; NaN is a gap. On a log axis a value of 0
or less cannot be drawn and becomes a gap, which the chart says. Curves are one pixel wide on purpose: wider
ones with antialiasing cost thirty times as much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from numpy.typing import NDArray
from PySide6.QtCore import QEvent, QObject, QPointF, QSize, Qt, Signal, Slot
from PySide6.QtWidgets import QFrame, QSizePolicy

from app import theme
from app.i18n import tr
from app.units import axis_step
from app.widgets.axes import TimeAxis, ValueAxis, relative_time, style_axis
from app.widgets.basic import column
from app.widgets.chart_header import ChartHeader, SeriesSpec

F64 = NDArray[np.float64]
MAX_POINTS = 1500
MARKERS = 12
GAPS = 6
SHRINK_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line at ``t_s`` (seconds, 0 is now, the past is negative)."""

    t_s: float
    label: str
    ok: bool = True


class CrosshairLink(QObject):
    """Shared by charts of one time axis: where the pointer is, or None."""

    moved = Signal(object)


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


class LivePlot(QFrame):
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
        super().__init__()
        if card:
            self.setProperty("role", "card")
        self.series = list(series)
        self.header = ChartHeader(title, unit, self.series)
        self._format_value = format_value
        self._fixed_max, self._minimum_top = fixed_max, minimum_top
        self._show_labels = show_labels
        self._span_s = 300.0
        self._top = 1.0
        self._low = 0.0
        self._smaller_since: float | None = None
        self._log = False
        self._t: F64 = np.empty(0)
        self._data: dict[str, F64] = {}
        self._marks: list[ChartMark] = []
        self._note = ""
        self._cursor_s: float | None = None
        self._link = link or CrosshairLink(self)
        self._build(format_tick)
        self._link.moved.connect(self._on_cursor)
        theme.manager().changed.connect(self._restyle)
        self._restyle()

    def _build(self, format_tick: Callable[[float], str]) -> None:
        self.time_axis, self.value_axis = TimeAxis(), ValueAxis(format_tick)
        self.plot = pg.PlotWidget(
            axisItems={"bottom": self.time_axis, "left": self.value_axis}, background=None
        )
        self.plot.setFrameShape(QFrame.Shape.NoFrame)
        self.plot.setAccessibleName(self.header.title.text())
        self.plot.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.plot.setMinimumHeight(40)
        item = self.plot.getPlotItem()
        item.hideButtons()
        item.setMenuEnabled(False)
        item.setMouseEnabled(False, False)
        item.setContentsMargins(2, 4, 16, 2)
        item.vb.setDefaultPadding(0)
        item.vb.disableAutoRange()
        self.curves = {spec.key: pg.PlotCurveItem(antialias=True) for spec in self.series}
        self._regions = [pg.LinearRegionItem(movable=False, pen=pg.mkPen(None)) for _ in range(GAPS)]
        self._lines = [pg.InfiniteLine(angle=90) for _ in range(MARKERS)]
        self._texts = [pg.TextItem(anchor=(0, 0)) for _ in range(MARKERS if self._show_labels else 0)]
        self._cursor = pg.InfiniteLine(angle=90)
        for part in (*self._regions, *self._lines, *self.curves.values(), *self._texts, self._cursor):
            item.addItem(part, ignoreBounds=True)
        for part in (*self._regions, *self._lines, *self._texts, self._cursor):
            part.hide()
        self.plot.scene().sigMouseMoved.connect(self._on_mouse)
        self.plot.viewport().installEventFilter(self)
        self.setLayout(column(self.header, self.plot, spacing=0, margins=(1, 1, 1, 3)))
        self.set_span(self._span_s)
        self._set_y(1.0, 0.0)

    def sizeHint(self) -> QSize:
        return QSize(420, 150)

    def minimumSizeHint(self) -> QSize:
        return QSize(220, 84)

    # --- data ---------------------------------------------------------------------------------------

    def set_span(self, span_s: float) -> None:
        """The length of time shown, in seconds."""
        self._span_s = self.time_axis.span_s = float(span_s)
        self.plot.getPlotItem().vb.setXRange(-self._span_s, 0.0, padding=0)

    def set_log(self, log: bool) -> None:
        """A logarithmic value axis, or a linear one from 0."""
        if log != self._log:
            self._log = self.value_axis.log = log
            self._smaller_since = None
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
        if want <= 0:
            want = self._top if self._top > 0 else 1.0
        step = axis_step(want, 4)
        want = math.ceil(want / step - 1e-9) * step
        now = time.monotonic()
        if want > self._top or self._top <= 0:
            self._smaller_since = None
            self._set_y(want, 0.0)
        elif want < self._top * 0.7:
            self._smaller_since = self._smaller_since or now
            if now - self._smaller_since > SHRINK_AFTER_S:
                self._smaller_since = None
                self._set_y(want, 0.0)
        else:
            self._smaller_since = None

    def _set_y(self, top: float, low: float) -> None:
        if (top, low) != (self._top, self._low) or not self._t.size:
            self._top, self._low = top, low
            self.plot.getPlotItem().vb.setYRange(low, top, padding=0)
            self._place_texts()

    # --- marks and gaps -----------------------------------------------------------------------------

    def set_marks(self, marks: Sequence[ChartMark]) -> None:
        """Vertical lines for changes; the newest are kept where there are too many."""
        self._marks = [mark for mark in marks if mark.t_s >= -self._span_s][-MARKERS:]
        t = theme.tokens()
        for i, line in enumerate(self._lines):
            if i < len(self._marks):
                mark = self._marks[i]
                line.setPos(mark.t_s)
                line.setPen(pg.mkPen(t.dim if mark.ok else t.warning, width=1))
                line.show()
            else:
                line.hide()
        self._place_texts()

    def _place_texts(self) -> None:
        """Label as many marks as fit without touching, the newest first."""
        if not self._texts:
            return
        per_px = self._span_s / max(1.0, float(self.plot.getPlotItem().vb.width()))
        metrics = self.fontMetrics()
        taken = 0.0
        for i, text in reversed(list(enumerate(self._texts))):
            if i >= len(self._marks):
                text.hide()
                continue
            mark = self._marks[i]
            width_s = (metrics.horizontalAdvance(mark.label) * 0.9 + 12) * per_px
            anchor = 0 if mark.t_s + width_s <= 0 else 1
            left = mark.t_s if anchor == 0 else mark.t_s - width_s
            if left + width_s > taken and taken < 0:
                text.hide()
                continue
            taken = left
            if text.toPlainText() != mark.label:
                text.setText(mark.label)
            text.setAnchor((anchor, 0))
            text.setPos(mark.t_s, self._top)
            text.show()

    def set_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        """Stretches of time (from, to; relative to now) without data, drawn as a grey band."""
        shown = [gap for gap in gaps if gap[1] >= -self._span_s][-GAPS:]
        for i, region in enumerate(self._regions):
            if i < len(shown):
                region.setRegion((max(-self._span_s, shown[i][0]), min(0.0, shown[i][1])))
                region.show()
            else:
                region.hide()

    # --- figures ------------------------------------------------------------------------------------

    def set_note(self, note: str) -> None:
        """What the figures rest on, at the right of the header."""
        self._note = note
        self.refresh_legend()

    def refresh_legend(self) -> None:
        """Write the newest values, or those under the crosshair, into the header."""
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

    # --- crosshair ----------------------------------------------------------------------------------

    @Slot(object)
    def _on_mouse(self, position: QPointF) -> None:
        box = self.plot.getPlotItem().vb
        if box.sceneBoundingRect().contains(position):
            self._link.moved.emit(min(0.0, float(box.mapSceneToView(position).x())))
        else:
            self._link.moved.emit(None)

    @Slot(object)
    def _on_cursor(self, at_s: float | None) -> None:
        self._cursor_s = at_s
        if at_s is None:
            self._cursor.hide()
        else:
            self._cursor.setPos(at_s)
            self._cursor.show()
        self.refresh_legend()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Leave:
            self._link.moved.emit(None)
        return False

    @Slot()
    def _restyle(self) -> None:
        t = theme.tokens()
        for spec in self.series:
            style = Qt.PenStyle.DashLine if spec.dashed else Qt.PenStyle.SolidLine
            self.curves[spec.key].setPen(pg.mkPen(theme.colour(spec.colour), width=1, style=style))
        for axis in (self.time_axis, self.value_axis):
            style_axis(axis)
        self.value_axis.setGrid(40)
        self.plot.setBackground(t.panel)
        for region in self._regions:
            region.setBrush(pg.mkBrush(t.raised))
        for text in self._texts:
            text.setColor(theme.colour("text"))
            text.setFont(theme.ui_font(0.82))
        self._cursor.setPen(pg.mkPen(t.dim, width=1, style=Qt.PenStyle.DotLine))
        self.set_marks(self._marks)

    def csv(self) -> str:
        """The shown data as CSV: seconds relative to now, then one column a series; gaps are empty."""
        head = ["t_s", *(spec.key for spec in self.series)]
        lines = [",".join(head)]
        for i, t in enumerate(self._t.tolist()):
            cells = [self._at(spec.key, i) for spec in self.series]
            lines.append(",".join([f"{t:.3f}", *("" if cell is None else repr(cell) for cell in cells)]))
        return "\n".join(lines) + "\n"
