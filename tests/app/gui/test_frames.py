"""What a frame of the window costs: the console shares two cores with the engine that it watches."""

from __future__ import annotations

import time
from collections import Counter

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QColor, QImage, QPainter, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QApplication, QStyleOptionViewItem, QTableView

from app.main_window import MainWindow
from app.model.request_table import COLUMNS
from app.panels.requests import _Cells
from app.widgets.basic import ElidedLabel, FigureLabel, FlowingLabel
from tests.app import builders as b
from tests.app.gui.conftest import beat
from tests.app.gui.feed import FeedLink


class Counted(QObject):
    """Counts what Qt sends to a widget."""

    def __init__(self, watched: QObject) -> None:
        super().__init__(watched)
        self.seen: Counter[QEvent.Type] = Counter()
        watched.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        self.seen[event.type()] += 1
        return False


def test_moving_figures_neither_lay_out_the_window_nor_paint_it_in_pieces(
    window: MainWindow, link: FeedLink
) -> None:
    link.ready()
    beat(window)
    for _ in range(5):  # until all figures have had their room
        link.traffic(2.0)
        time.sleep(0.12)
        beat(window, 2)
    counted = Counted(window)
    plots = [Counted(chart.plot.viewport()) for chart in (window.ttft, window.tpot, window.throughput)]
    frames = 10
    for _ in range(frames):
        link.traffic(2.0)
        time.sleep(0.12)
        beat(window, 1)
    assert all(plot.seen[QEvent.Type.Paint] >= frames / 3 for plot in plots), "the charts did move"
    assert counted.seen[QEvent.Type.LayoutRequest] <= 3, "a figure of one more digit may need room"
    assert counted.seen[QEvent.Type.UpdateRequest] <= frames + 2


def test_only_cells_that_read_otherwise_are_painted_anew(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    now_s = window.session.now_s
    rows = [b.request_row(i, now_s, state="decode", end_ns=None, finish=None, tokens=3) for i in (1, 2)]
    link.push(requests=rows)
    beat(window, 2)
    model = window.requests.model
    read = [model.index(line, c).data() for line in range(2) for c in range(len(COLUMNS))]
    assert len(read) == 2 * len(COLUMNS)
    told: list[tuple[int, int, int]] = []
    model.dataChanged.connect(lambda a, z: told.append((a.row(), a.column(), z.column())))
    again = [b.request_row(i, now_s, state="decode", end_ns=None, finish=None, tokens=n)
             for i, n in ((1, 4), (2, 3))]  # fmt: skip
    link.push(requests=again)
    beat(window, 2)
    output = [column.title for column in COLUMNS].index("Output")
    assert (1, output, output) in told
    assert {line for line, _, _ in told} == {1}, "nothing of the other request changed"
    assert len(told) < len(COLUMNS)
    assert model.index(1, output).data() == "4"


def test_the_figures_of_a_window_are_worked_out_once_for_a_batch(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window, 1)
    first = window.session.kpis()
    assert window.session.kpis() is first
    window.session.window_s = 5.0
    assert window.session.kpis().ttft_p95_s.window_s == 5.0
    beat(window, 1)
    assert window.session.kpis() is not first


def test_axes_fit_a_chart_whose_height_changed(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    axis = window.ttft.value_axis
    window.grab()
    assert axis.picture is not None
    box = axis.boundingRect()
    window.splitter.setSizes([300, 100, 100])
    QApplication.processEvents()
    window.grab()
    assert axis.boundingRect().height() > box.height()
    shown = window.ttft.plot.grab().toImage()
    dim = [y for y in range(shown.height())
           if any(shown.pixelColor(x, y).lightness() > 90 for x in range(10, 45))]  # fmt: skip
    bottom = window.ttft.plot.getPlotItem().vb.sceneBoundingRect().bottom()
    assert abs(dim[-1] - bottom) < 12, "the lowest label stands at the lower end"


def test_painted_labels_ask_for_room_only_where_they_need_more(qapp: QApplication) -> None:
    figure = FigureLabel()
    figure.setText("1,000")
    wide = figure.sizeHint().width()
    figure.setText("7")
    assert figure.sizeHint().width() == wide
    assert figure.accessibleName() == figure.text() == "7"
    figure.setText("")
    assert figure.sizeHint().width() == 0
    flowing = FlowingLabel()
    flowing.resize(100, 100)
    flowing.setText("one two three four five six seven eight nine ten")
    assert flowing.sizeHint().height() >= 3 * flowing.fontMetrics().height()
    elided = ElidedLabel("a text that is too long for this")
    elided.resize(60, 20)
    elided.show()
    assert elided.text().endswith("…")
    assert "too long for this" in elided.toolTip()
    dark = [(x, y) for x in range(60) for y in range(20)
            if elided.grab().toImage().pixelColor(x, y).lightness() > 100]  # fmt: skip
    assert dark, "it is painted"
    elided.close()
    assert Qt.TextFormat.PlainText == figure.textFormat()


def test_a_cell_leaves_the_painter_as_it_was(qapp: QApplication) -> None:
    """What the view paints next, it paints with its own pen."""
    rows = QStandardItemModel(1, 1)
    rows.setItem(0, 0, QStandardItem("running"))
    image = QImage(80, 20, QImage.Format.Format_RGB32)
    image.fill(0)
    option = QStyleOptionViewItem()
    option.rect = image.rect()
    painter = QPainter(image)
    painter.setPen(QColor("red"))
    table = QTableView()
    _Cells(table).paint(painter, option, rows.index(0, 0))
    assert painter.pen().color() == QColor("red")
    painter.end()
    assert any(image.pixelColor(x, y).lightness() > 0 for x in range(80) for y in range(18)), "it is painted"
