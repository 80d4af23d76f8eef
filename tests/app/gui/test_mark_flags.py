"""The flags that name changes on a chart: close ones share one, and none covers another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF
from PySide6.QtWidgets import QApplication

from app import i18n, units
from app.widgets.chart_header import SeriesSpec
from app.widgets.live_plot import LivePlot
from app.widgets.mark_flags import ALPHA, HEIGHT, ChartMark, MarkFlag


@pytest.fixture
def plot(qapp: QApplication) -> LivePlot:
    made = LivePlot(
        "TTFT", [SeriesSpec("a", "a", "series_a")], format_tick=units.tick,
        format_value=lambda v: str(units.seconds(v)), show_labels=True,
    )  # fmt: skip
    made.resize(700, 300)
    made.show()
    QApplication.processEvents()
    made.set_span(60)
    made.set_data(np.linspace(-60, 0, 121), {"a": np.ones(121)})
    return made


def shown(plot: LivePlot) -> list[MarkFlag]:
    return [flag for flag in plot._texts if flag.isVisible()]


def spans(plot: LivePlot) -> list[tuple[float, float]]:
    """From and to in seconds of the flags, from the left."""
    per_px = 60 / plot._view_width()
    return sorted((flag.pos().x(), flag.pos().x() + flag.width * per_px) for flag in shown(plot))


def test_close_marks_share_a_flag_that_counts_them(plot: LivePlot) -> None:
    plot.set_marks([ChartMark(-30, "one"), ChartMark(-29, "two", ok=False), ChartMark(-28, "three")])
    (flag,) = shown(plot)
    assert flag.toPlainText() == "three"
    assert flag._shown == "three  +2"
    assert [mark.label for mark in flag.named] == ["three", "two", "one"]


def test_flags_never_overlap_nor_leave_the_view_nor_change_sides(plot: LivePlot) -> None:
    labels = ["Prefix cache: off", "Running requests: 8", "Block size: 32", "Batching: static"]
    before: dict[str, float] = {}
    for step in range(50):
        marks = [ChartMark(-1.0 - step - 6 * i, labels[i % 4]) for i in range(6, -1, -1)]
        plot.set_marks(marks)
        found = spans(plot)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
        assert found[0][0] >= -60.0
        assert found[-1][1] <= 1e-6
        for flag in shown(plot):
            newest = flag.named[0]
            right = flag.pos().x() + flag.width * 60 / plot._view_width()
            if flag.pos().x() > -60.0:
                assert right <= newest.t_s + 1e-6, "it hangs into the past"
        newest_flag = max(shown(plot), key=lambda flag: flag.pos().x())
        x = newest_flag.pos().x()
        assert x < before.get("x", 0.0), "it moves with its mark"
        before["x"] = x


def test_a_flag_lets_what_is_drawn_shine_through(plot: LivePlot) -> None:
    assert ALPHA < 200
    assert HEIGHT < 20
    plot.set_marks([ChartMark(-20, "a long name of a change that would take half of the chart otherwise")])
    (flag,) = shown(plot)
    assert flag.width <= 170
    assert flag.toPlainText().endswith("otherwise")


def test_hovering_tells_of_each_change(plot: LivePlot) -> None:
    plot.set_marks([ChartMark(-30, "one"), ChartMark(-29, "two", ok=False)])
    box = plot.plot.getPlotItem().vb

    def at(t_s: float, y: float) -> QPoint:
        return plot.plot.mapFromScene(box.mapViewToScene(QPointF(t_s, y)))

    flag = shown(plot)[0]
    inside = plot.plot.mapFromScene(box.mapViewToScene(flag.pos())) + QPoint(5, 5)
    assert [mark.label for mark in plot.marks_at(inside)] == ["two", "one"]
    assert [mark.label for mark in plot.marks_at(at(-30, 0.2))] == ["one"]
    assert plot.marks_at(at(-10, 0.2)) == []
    assert plot.marks_at(QPoint(2, 2)) == []
    assert ChartMark(-29, "two", ok=False).sentence().endswith("two (rolled back)")
    i18n.use("zh_CN")
    assert ChartMark(-29, "two", ok=False).sentence().endswith("（已回滚）")
