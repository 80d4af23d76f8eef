"""The timeline of requests: lanes, the queue, and what pointing and clicking do."""

from __future__ import annotations

import gc
import time

import numpy as np
import psutil
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main_window import MainWindow
from app.widgets.chart_header import SeriesSpec
from app.widgets.seat_plot import MERGE_ABOVE, Lanes, SeatPlot
from ipc.messages import CfgSet, Preempted
from tests.app import builders as b
from tests.app.gui.conftest import beat
from tests.app.gui.feed import FeedLink

KINDS = [SeriesSpec("wait", "waiting", "stage_other"), SeriesSpec("run", "decode", "series_a")]
LIVE = {"end_ns": None, "finish": None, "itl_us": []}


def lanes(n: int, seats: int = 64, span_s: float = 300.0) -> Lanes:
    """``n`` bars one after the other, over all seats, every tenth of them in the queue."""
    lane = np.arange(n) % seats
    each = span_s / max(1, n / seats)
    t0 = -span_s + (np.arange(n) // seats) * each
    queued = np.arange(n) % 10 == 0
    return Lanes(
        t0_s=t0, t1_s=t0 + each * 0.9, lane=lane, kind=(~queued).astype(np.int64), queued=queued,
        key=np.arange(1, n + 1), end_t_s=t0 + each * 0.9, end_lane=lane, end=np.arange(n) % 3, seats=seats,
    )  # fmt: skip


def plot() -> SeatPlot:
    made = SeatPlot("", KINDS, "queue")
    made.resize(900, 240)
    made.show()
    QApplication.processEvents()
    return made


def test_e04_lanes_do_not_grow_and_are_one_item(qapp: QApplication) -> None:
    """E04: thousands of bars are arrays of one item, however often they move."""
    made = plot()
    for i in range(60):
        made.set_lanes(lanes(4000 + i))
    gc.collect()
    items, before = len(made.plot.scene().items()), psutil.Process().memory_info().rss
    for i in range(300):
        made.set_lanes(lanes(4000 + i % 50))
        if i % 20 == 0:
            QApplication.processEvents()
    gc.collect()
    assert len(made.plot.scene().items()) == items
    assert psutil.Process().memory_info().rss - before < 20 * 1024 * 1024


def test_bars_thinner_than_a_pixel_are_merged(qapp: QApplication) -> None:
    made = plot()
    made.set_lanes(lanes(60_000))
    drawn = sum(len(rects) for rects in made._item.bars)
    assert MERGE_ABOVE < drawn <= 64 * 900 + 12 * 900
    made.set_lanes(lanes(1000))
    assert sum(len(rects) for rects in made._item.bars) == 1000


def test_a_bar_is_found_under_the_pointer_wherever_it_is_drawn(qapp: QApplication) -> None:
    made = plot()
    made.set_lanes(lanes(256))
    box = made.plot.getPlotItem().vb
    for kind, rects in enumerate(made._item.bars):
        for rect in rects[:: max(1, len(rects) // 7)]:
            at = made.plot.mapFromScene(box.mapViewToScene(rect.center()))
            key = made.key_at(at)
            assert key is not None
            assert int(key % 10 != 1) == kind
    assert made.key_at(QPoint(2, 2)) is None


def test_nothing_to_show_is_shown_as_nothing(qapp: QApplication) -> None:
    made = plot()
    none, whole = np.empty(0), np.empty(0, np.int64)
    made.set_lanes(Lanes(none, none, whole, whole, np.empty(0, np.bool_), whole, none, whole, whole, 0))
    assert made.key_at(QPoint(300, 100)) is None
    assert not any(made._item.bars)


# --- the panel ---------------------------------------------------------------------------------------


def busy(window: MainWindow, link: FeedLink) -> None:
    """A static batch of three that ended one by one, one request that runs, and one that waits."""
    link.ready(max_num_seqs=4)
    window.show_panel("timeline")
    beat(window, 1)
    now = time.monotonic()
    rows = [b.request_row(i + 1, now - 20, tokens=n) for i, n in enumerate((300, 20, 20))]
    rows.append(
        b.request_row(
            4, now - 5, tokens=50, state="decode", preempt_n=2, preempted_us=350_000, preempt_reason="blocks",
            lost_tok=64, recompute_tok=48, recompute_us=12_000, swap_n=1, swap_in_tok=32, **LIVE,
        )
    )  # fmt: skip
    rows.append(b.request_row(5, now - 2, tokens=0, state="waiting", sched_ns=None, **LIVE))
    event = Preempted(
        t_ns=round((now - 3) * 1e9), rid=4, by=9, reason="blocks", mode="recompute", lost_tok=64,
        why="the swap space has no room for its 4 blocks",
    )  # fmt: skip
    steps = [b.step_row(i, now - 20 + i * 0.1, running=2, recompute_us=450) for i in range(190)]
    link.push(steps=steps, requests=rows, preemptions=[event])
    beat(window)
    window.timeline.chart.redraw()  # a beat draws only what moved by a pixel


def point(window: MainWindow, rid: int) -> QPoint:
    """A point on the last bar of a request."""
    chart = window.timeline.chart
    rects, keys = chart._shapes
    x, y, width, height = rects[np.flatnonzero(keys % (1 << 40) == rid)[-1]]
    middle = QPointF(x + width / 2, y + height / 2)
    return chart.plot.mapFromScene(chart.plot.getPlotItem().vb.mapViewToScene(middle))


def test_the_line_says_how_many_seats_were_busy_and_what_was_computed_again(
    window: MainWindow, link: FeedLink
) -> None:
    busy(window, link)
    assert window.timeline.seats.text() == "seats busy 2 of 4 (50\u00a0%)"
    assert window.timeline.tax.text() == "preempted 1 · recompute tax 5.0\u00a0%"
    assert window.timeline.seats.toolTip()
    assert window.timeline.tax.toolTip()


def test_a_bar_tells_of_its_request(window: MainWindow, link: FeedLink) -> None:
    busy(window, link)
    chart = window.timeline.chart
    key = chart.key_at(point(window, 4))
    assert key is not None
    text = chart.describe(key).replace("\u00a0", " ")
    for part in ("Request 4 t/4", "decode", "prompt 100 tokens", "TTFT 50.0 ms", "preempted 2 times",
                 "no KV block was left", "64 tokens lost, 48 computed again in 12.0 ms",
                 "swapped out once, tokens copied back: 32", "no room for its 4 blocks"):  # fmt: skip
        assert part in text, part


def test_a_click_picks_the_request_everywhere(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    busy(window, link)
    view = window.timeline.chart.plot.viewport()
    at = point(window, 4)
    qtbot.mouseClick(view, Qt.MouseButton.LeftButton, pos=at)
    assert window.console.selected_rid == 4
    assert window.timeline.chart.chosen is not None
    chosen = window.requests.table.selectionModel().selectedRows()
    assert [int(i.data(Qt.ItemDataRole.DisplayRole).split()[0]) for i in chosen] == [4]
    assert window.timeline.chart._item._outlines
    qtbot.mouseDClick(view, Qt.MouseButton.LeftButton, pos=at)
    assert window.docks["bottom"].current == "requests"
    window.show_panel("timeline")
    qtbot.mouseClick(view, Qt.MouseButton.LeftButton, pos=QPoint(3, 3))
    assert window.console.selected_rid is None
    assert window.timeline.chart.chosen is None


def test_a_request_picked_in_the_table_is_outlined(window: MainWindow, link: FeedLink) -> None:
    busy(window, link)
    window.console.select(1)
    assert len(window.timeline.chart._item._outlines) == 3


def test_empty_seats_are_drawn_and_changes_are_marked(window: MainWindow, link: FeedLink) -> None:
    busy(window, link)
    item = window.timeline.chart._item
    assert len(item._seats) == 4
    assert sum(line.isVisible() for line in window.timeline.chart._lines) == 0
    window.console.knobs.set({"max_num_seqs": 8})
    link.apply(*link.last(CfgSet))
    beat(window, 4)
    window.timeline.chart.redraw()
    assert sum(line.isVisible() for line in window.timeline.chart._lines) == 1
    assert len(item._seats) == 8


def test_a_request_of_an_engine_before_is_described_but_not_picked(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    """Its number means another request now."""
    busy(window, link)
    at = point(window, 1)
    key = window.timeline.chart.key_at(at)
    link.ready(max_num_seqs=4)
    beat(window, 3)
    assert key is not None
    assert "Request 1" in window.timeline.describe(key)
    window.timeline.chart.picked.emit(key)
    assert window.console.selected_rid is None


def test_before_any_request_it_says_what_will_be_here(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.show_panel("timeline")
    beat(window)
    assert window.timeline.empty.isVisible()


@pytest.mark.parametrize("hidden", ["timeline", "stages"])
def test_a_page_behind_another_costs_nothing(window: MainWindow, link: FeedLink, hidden: str) -> None:
    busy(window, link)
    window.show_panel("log")
    panel = window.panels[hidden]
    calls: list[int] = []
    panel.chart._follower._redraw = lambda: calls.append(1)  # type: ignore[attr-defined]
    beat(window, 30)
    assert not calls
