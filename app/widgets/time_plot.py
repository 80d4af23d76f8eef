"""The frame of a chart over time: header, axes, change markers, gaps, and a linked crosshair.

Made for ten frames a second: every item is made once and only given new data, and the x range stands still
while the data move. What is drawn between the gaps and the markers is the subclass's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyqtgraph as pg
from numpy.typing import NDArray
from PySide6.QtCore import QEvent, QObject, QPoint, QPointF, QSize, Qt, Signal, Slot
from PySide6.QtGui import QHelpEvent, QPen
from PySide6.QtWidgets import QFrame, QGraphicsView, QSizePolicy, QToolTip

from app import theme
from app.widgets.axes import TimeAxis, ValueAxis, style_axis
from app.widgets.basic import column, plain_tip
from app.widgets.chart_header import ChartHeader, SeriesSpec
from app.widgets.mark_flags import ChartMark, MarkFlag, place

F64 = NDArray[np.float64]
MARKERS = 12
GAPS = 6
NEAR_PX = 5  # of the pointer to a mark


class CrosshairLink(QObject):
    """Shared by charts of one time axis: where the pointer is, or None."""

    moved = Signal(object)


class TimePlot(QFrame):
    """See the module. A subclass makes its items in `_contents` and colours them in `_colour`.

    It must not override a slot: PySide does not end the connection of an overridden one with its object.
    """

    def __init__(
        self,
        title: str,
        series: Sequence[SeriesSpec],
        value_axis: ValueAxis,
        *,
        unit: str = "",
        show_labels: bool = False,
        link: CrosshairLink | None = None,
        card: bool = True,
    ) -> None:
        super().__init__()
        if card:
            self.setProperty("role", "card")
        self.series = list(series)
        self.header = ChartHeader(title, unit, self.series)
        self._show_labels = show_labels
        self._span_s = 300.0
        self._top = 1.0
        self._low = 0.0
        self._t: F64 = np.empty(0)
        self._marks: list[ChartMark] = []
        self._mark_pens: dict[bool, QPen] = {}  # by whether the change was applied
        self._num_gaps = 0
        self._note = ""
        self._cursor_s: float | None = None
        self._link = link or CrosshairLink(self)
        self.time_axis, self.value_axis = TimeAxis(), value_axis
        self._build()
        self._link.moved.connect(self._on_cursor)
        theme.manager().changed.connect(self._restyle)
        self._restyle()

    def _build(self) -> None:
        self.plot = pg.PlotWidget(
            axisItems={"bottom": self.time_axis, "left": self.value_axis}, background=None
        )
        self.plot.setFrameShape(QFrame.Shape.NoFrame)
        self.plot.setAccessibleName(self.header.title.text())
        self.plot.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.plot.setMinimumHeight(40)
        # A scene whose items tell of their changes has the whole window painted at once, scene by scene.
        self.plot.setViewportUpdateMode(QGraphicsView.ViewportUpdateMode.NoViewportUpdate)
        item = self.plot.getPlotItem()
        item.hideButtons()
        item.setMenuEnabled(False)
        item.setMouseEnabled(False, False)
        item.setContentsMargins(2, 4, 16, 2)
        item.vb.setDefaultPadding(0)
        item.vb.disableAutoRange()
        self._regions = [pg.LinearRegionItem(movable=False, pen=pg.mkPen(None)) for _ in range(GAPS)]
        self._lines = [pg.InfiniteLine(angle=90) for _ in range(MARKERS)]
        self._texts = [MarkFlag() for _ in range(MARKERS if self._show_labels else 0)]
        self._cursor = pg.InfiniteLine(angle=90)
        contents = self._contents()
        for part in (*self._regions, *self._lines, *contents, *self._texts, self._cursor):
            item.addItem(part, ignoreBounds=True)
        for part in (*self._regions, *self._lines, *self._texts, self._cursor):
            part.hide()
        item.vb.sigResized.connect(self._on_resized)
        self.plot.scene().sigMouseMoved.connect(self._on_mouse)
        self.plot.viewport().installEventFilter(self)
        self.setLayout(column(self.header, self.plot, spacing=0, margins=(1, 1, 1, 3)))
        self.set_span(self._span_s)
        self._set_y(1.0, 0.0)

    def _raise_marks(self) -> None:
        """Have the markers of changes painted upon the contents, where those are areas."""
        for line in self._lines:
            line.setZValue(1)

    def _draw_soon(self) -> None:
        """Have the picture painted, together with all else that changes in this turn of the event loop."""
        self.plot.viewport().update()

    def _contents(self) -> Sequence[pg.GraphicsObject]:
        """The items that show the data, made once, in the order in which they are painted."""
        raise NotImplementedError

    def _colour(self) -> None:
        """Give the items the colours of the theme."""
        raise NotImplementedError

    def sizeHint(self) -> QSize:
        return QSize(420, 150)

    def minimumSizeHint(self) -> QSize:
        return QSize(220, 84)

    @property
    def span_s(self) -> float:
        """The length of time shown, in seconds."""
        return self._span_s

    def set_span(self, span_s: float) -> None:
        """Show so many seconds."""
        self._span_s = self.time_axis.span_s = float(span_s)
        self.plot.getPlotItem().vb.setXRange(-self._span_s, 0.0, padding=0)
        self._draw_soon()

    def _set_y(self, top: float, low: float) -> None:
        if (top, low) != (self._top, self._low) or not self._t.size:
            self._top, self._low = top, low
            self.plot.getPlotItem().vb.setYRange(low, top, padding=0)
            self._place_texts()
            self._draw_soon()

    # --- marks and gaps -----------------------------------------------------------------------------

    def set_marks(self, marks: Sequence[ChartMark]) -> None:
        """Vertical lines for changes; the newest are kept where there are too many."""
        before = len(self._marks)
        self._marks = [mark for mark in marks if mark.t_s >= -self._span_s][-MARKERS:]
        for line, mark in zip(self._lines, self._marks, strict=False):
            line.setPos(mark.t_s)
            line.setPen(self._mark_pens[mark.ok])
            line.show()
        for line in self._lines[len(self._marks) : before]:
            line.hide()
        self._place_texts()
        self._draw_soon()

    def _place_texts(self) -> None:
        """Name the marks, where this chart does that."""
        if self._texts:
            place(self._texts, self._marks, self._top, self._span_s, self._view_width())

    def _view_width(self) -> float:
        """Of the area with the curves, in pixels."""
        return float(self.plot.getPlotItem().vb.width())

    def marks_at(self, point: QPoint) -> list[ChartMark]:
        """The marks under a point of the viewport or behind the flag there, the newest first."""
        at = self.plot.mapToScene(point)
        for flag in self._texts:
            if flag.covers(QPointF(point), self.plot):
                return flag.named
        box = self.plot.getPlotItem().vb
        if not box.sceneBoundingRect().contains(at):
            return []
        t_s = float(box.mapSceneToView(at).x())
        reach_s = NEAR_PX * self._span_s / max(1.0, self._view_width())
        return [mark for mark in reversed(self._marks) if abs(mark.t_s - t_s) <= reach_s]

    def set_gaps(self, gaps: Sequence[tuple[float, float]]) -> None:
        """Stretches of time (from, to; relative to now) without data, drawn as a grey band."""
        before = self._num_gaps
        shown = [gap for gap in gaps if gap[1] >= -self._span_s][-GAPS:]
        self._num_gaps = len(shown)
        for region, gap in zip(self._regions, shown, strict=False):
            region.setRegion((max(-self._span_s, gap[0]), min(0.0, gap[1])))
            region.show()
        for region in self._regions[len(shown) : before]:
            region.hide()
        self._draw_soon()

    # --- figures ------------------------------------------------------------------------------------

    def set_note(self, note: str) -> None:
        """What the figures rest on, at the right of the header."""
        self._note = note
        self.refresh_legend()

    def refresh_legend(self) -> None:
        """Write the newest values, or those under the crosshair, into the header."""
        raise NotImplementedError

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
        self._draw_soon()
        self.refresh_legend()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Leave:
            self._link.moved.emit(None)
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            text = "\n".join(mark.sentence() for mark in self.marks_at(event.pos()))
            if text:
                QToolTip.showText(event.globalPos(), plain_tip(text), self)
            else:
                QToolTip.hideText()
            return True
        return False

    @Slot(object)
    def _on_resized(self, _box: object) -> None:
        for axis in (self.time_axis, self.value_axis):
            axis.draw_anew()
        self._place_texts()

    @Slot()
    def _restyle(self) -> None:
        t = theme.tokens()
        self._colour()
        for axis in (self.time_axis, self.value_axis):
            style_axis(axis)
        self.value_axis.setGrid(40)
        self.plot.setBackground(t.panel)
        for region in self._regions:
            region.setBrush(pg.mkBrush(t.raised))
        self._mark_pens = {True: pg.mkPen(t.dim, width=1), False: pg.mkPen(t.warning, width=1)}
        self._cursor.setPen(pg.mkPen(t.dim, width=1, style=Qt.PenStyle.DotLine))
        self.set_marks(self._marks)
