"""The stages panel: areas upon each other, the table that names them, and its switch."""

from __future__ import annotations

import gc
import math
import time
import warnings

import msgspec
import numpy as np
import psutil
import pyqtgraph as pg
import pytest
from numpy.typing import NDArray
from PySide6.QtCore import QPointF, Qt
from PySide6.QtGui import QFontMetricsF
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import i18n, theme, units
from app.console import Console
from app.main_window import MainWindow
from app.model.stage_table import HEADS, StageTable
from app.widgets.chart_header import SeriesSpec
from app.widgets.stack_plot import Layer, StackPlot
from ipc.messages import CfgSet, StepRow
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat, discard
from tests.app.gui.feed import FeedLink

F64 = NDArray[np.float64]
SPLIT = {"attention_us": 2000, "linear_us": 5000, "head_us": 1000}


def stack() -> StackPlot:
    above = [Layer("model", "model", "stage_forward"), Layer("host", "host", "stage_plan")]
    made = StackPlot(
        "", above, [Layer("text", "text", "stage_tokenize")],
        [(SeriesSpec("sum", "exposed", "stage_forward"), ("model", "host"))],
        format_tick=units.tick, format_value=lambda v: str(units.seconds(v)),
    )  # fmt: skip
    made.resize(640, 240)
    made.show()
    QApplication.processEvents()
    return made


def pixels(plot: StackPlot, token: str) -> int:
    """Pixels of exactly a layer's colour."""
    QApplication.processEvents()
    image = plot.plot.grab().toImage().convertToFormat(pg.QtGui.QImage.Format.Format_RGB32)
    found = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.width(), 4)
    colour = theme.colour(token)
    return int((found[:, :, :3] == (colour.blue(), colour.green(), colour.red())).all(axis=2).sum())


def data(n: int = 600, model: float = 0.010, host: float = 0.005) -> tuple[F64, dict[str, F64]]:
    t = np.linspace(-300.0, 0.0, n)
    return t, {"model": np.full(n, model), "host": np.full(n, host), "text": np.full(n, 0.002)}


def test_layers_cover_areas_in_the_ratio_of_their_values(qapp: QApplication) -> None:
    plot = stack()
    plot.set_data(*data())
    model, host = pixels(plot, "stage_forward"), pixels(plot, "stage_plan")
    assert model / host == pytest.approx(2.0, rel=0.08)
    assert pixels(plot, "stage_tokenize") / host == pytest.approx(0.4, rel=0.15)
    low, high = plot._low, plot._top
    assert low < -0.002 < 0.015 < high


@pytest.mark.parametrize("where", [[0], [300], [599], [0, 1, 300, 599]])
def test_e02_nan_is_a_gap_in_all_layers_and_the_rest_is_drawn(qapp: QApplication, where: list[int]) -> None:
    """E02: a gap is not bridged: the area is closed at both of its sides."""
    plot = stack()
    t, values = data()
    plot.set_data(t, values)
    whole = pixels(plot, "stage_forward")
    values["host"][where] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.set_data(t, values)
    runs = [polygons for _, polygons in plot._item.areas]
    assert {len(polygons) for polygons in runs} == {2 if 300 in where else 1}
    assert 0.95 * whole < pixels(plot, "stage_forward") <= whole


def test_e02_nothing_measured_draws_nothing(qapp: QApplication) -> None:
    """E02: all NaN, and no row at all."""
    plot = stack()
    t, values = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.set_data(t, {key: np.full(len(t), math.nan) for key in values})
        plot.set_data(np.empty(0), {key: np.empty(0) for key in values})
        plot.refresh_legend()
    assert pixels(plot, "stage_forward") == 0
    assert plot.header.legend.values["sum"] == units.NONE


def test_a_few_long_steps_do_not_flatten_all_others(qapp: QApplication) -> None:
    """One of a hundred steps took as long as all others together: it is cut at the edge."""
    plot = stack()
    t, values = data()
    values["model"][:300] = 10.0
    weights = np.where(np.arange(600) < 300, 1 / 300, 99 / 300)
    plot.set_data(t, values, weights)
    assert 0.015 < plot._top < 0.05
    plot._on_mouse(plot.plot.getPlotItem().vb.mapViewToScene(QPointF(-200.0, 0.001)))
    assert plot.reading[1]["model"] == 10.0


def test_a_lone_half_second_is_seen(qapp: QApplication) -> None:
    plot = stack()
    t, values = data()
    for column in values.values():
        column[:300], column[301:] = math.nan, math.nan
    plot.set_data(t, values)
    assert pixels(plot, "stage_forward") > 30


def test_e04_a_stack_does_not_grow(qapp: QApplication) -> None:
    """E04: one item, given new data (thousands of updates, a sample of paints)."""
    plot = stack()
    t, values = data()
    rng = np.random.default_rng(1)
    noise = rng.random(600) * 0.01

    def run(updates: int) -> None:
        for i in range(updates):
            plot.set_data(t, {key: column + np.roll(noise, i) for key, column in values.items()})
            if i % 40 == 0:
                QApplication.processEvents()

    run(500)
    gc.collect()
    items, before = len(plot.plot.scene().items()), psutil.Process().memory_info().rss
    run(3000)
    gc.collect()
    assert len(plot.plot.scene().items()) == items
    assert psutil.Process().memory_info().rss - before < 20 * 1024 * 1024


def test_the_crosshair_reads_every_layer(qapp: QApplication) -> None:
    plot = stack()
    t, values = data(301)
    values["model"] = -t / 10_000
    plot.set_data(t, values)
    told: list[object] = []
    plot.read.connect(lambda: told.append(plot.reading))
    plot._on_mouse(plot.plot.getPlotItem().vb.mapViewToScene(QPointF(-100.0, 0.001)))
    when, found = plot.reading
    assert when == "−1:40"
    assert found["model"] == pytest.approx(0.010)
    assert plot.header.legend.values["sum"].startswith("15.0")
    plot._link.moved.emit(None)
    assert plot.reading[1]["model"] == pytest.approx(0.0)
    assert len(told) == 2


# --- the panel ---------------------------------------------------------------------------------------


def fed(window: MainWindow, link: FeedLink, **changes: object) -> None:
    """Ten seconds of steps and requests that end now."""
    link.ready()
    window.show_panel("stages")
    beat(window, 1)
    now = time.monotonic()
    steps: list[StepRow] = [b.step_row(i, now - 10 + i * 0.05, **changes) for i in range(200)]
    requests = [b.request_row(i + 1, now - 5, forward_us=60_000, tokenize_us=1000) for i in range(20)]
    link.push(steps=steps, requests=requests)
    beat(window)


def cells(model: StageTable, key: str) -> list[str]:
    line = [spec.key for spec in model.rows].index(key)
    return [str(model.index(line, at).data()).strip() for at in range(len(HEADS))]


def test_the_table_tells_mean_deviation_and_share_of_steps_and_requests(
    window: MainWindow, link: FeedLink
) -> None:
    fed(window, link, send_us=400)
    model = window.stages.model
    assert cells(model, "forward")[2:] == ["9.00", "0", "90\u00a0%", "60.0", "0", "26\u00a0%"]
    assert cells(model, "send")[2:5] == ["0.400", "0", "hidden"]
    assert cells(model, "queue")[2:6] == ["–", "–", "–", "9.00"]
    assert cells(model, "whole")[2] == "10.1"
    assert "200 steps · 20 requests" in window.docks["bottom"].header.summary.full_text
    shown = {spec.key for spec in model.rows}
    assert not shown & {"attention", "linear", "head", "rest", "copy", "preempted"}


def test_stages_that_took_time_get_a_line(window: MainWindow, link: FeedLink) -> None:
    fed(window, link, copy_us=50, **SPLIT)
    model = window.stages.model
    assert {"attention", "linear", "head", "rest", "copy"} <= {spec.key for spec in model.rows}
    assert cells(model, "linear")[2:5] == ["5.00", "0", "50\u00a0%"]


def test_every_line_and_head_says_what_it_is(window: MainWindow, link: FeedLink) -> None:
    fed(window, link, copy_us=50, **SPLIT)
    model = window.stages.model
    for line in range(model.rowCount()):
        for at in range(model.columnCount()):
            assert model.index(line, at).data(Qt.ItemDataRole.ToolTipRole)
    for at in range(model.columnCount()):
        assert model.headerData(at, Qt.Orientation.Horizontal, Qt.ItemDataRole.ToolTipRole)


@pytest.mark.parametrize("language", ["en", "zh_CN"])
def test_no_name_and_no_figure_of_a_column_is_cut(console: Console, link: FeedLink, language: str) -> None:
    i18n.use(language)
    window = MainWindow(console)
    window.resize(1280, 800)
    window.show()
    link.ready()
    beat(window)
    window.show_panel("stages")
    now_s = window.session.now_s
    steps = [
        b.step_row(
            i, now_s - 0.1 * i, dur_us=1000 + 23_000_000 * (i % 2), forward_us=900 + 22_900_000 * (i % 2)
        )
        for i in range(20, 0, -1)
    ]
    link.push(steps=steps, requests=[b.request_row(1, now_s - 20.0, end_ns=round(now_s * 1e9))])
    beat(window)
    window.stages.refresh_figures()
    table = window.stages.table
    header = table.horizontalHeader()
    for column, _ in enumerate(HEADS):
        width = table.columnWidth(column)
        assert header.sectionSizeHint(column) <= width
        for line in range(window.stages.model.rowCount()):
            font = window.stages.model.index(line, column).data(Qt.ItemDataRole.FontRole)
            text = str(window.stages.model.index(line, column).data())
            assert QFontMetricsF(font).horizontalAdvance(text) + 8 <= width, (text, column)
    assert any(len(str(window.stages.model.index(0, column).data())) >= 6 for column in range(len(HEADS)))
    assert window.width() == 1280
    window.keep_console = True
    discard(window)


def test_a_line_below_tells_how_drafts_did_and_why_there_are_none(window: MainWindow, link: FeedLink) -> None:
    """Acceptance, length, each place, both times; nothing at all without speculation."""
    panel = window.stages
    fed(window, link)
    panel.refresh_figures()
    assert panel.drafts.isHidden()
    drafted = {"draft_reqs": 4, "drafted_tok": 12, "accepted_tok": 6, "drafted_at": [4, 4, 4]}
    row = b.step_row(
        200, window.session.now_s, accepted_at=[3, 2, 1], draft_us=250, verify_us=6000, **drafted
    )
    link.push(steps=[row])
    beat(window, 2)
    panel.refresh_figures()
    text = panel.drafts.text().replace("\u00a0", " ")
    assert text == (
        "Drafts: 50 % accepted · 2.5 tokens/step · by place 75 50 25 % · draft 250 µs · verify 6.00 ms"
    )
    assert not panel.drafts.isHidden()
    assert "By place" in panel.drafts.accessibleDescription()
    assert window.session.state is not None
    link.push(state=msgspec.structs.replace(window.session.state, speculation="nothing repeats"))
    beat(window, 2)
    panel.refresh_figures()
    assert panel.drafts.text().endswith("\nno drafts: nothing repeats")


def test_without_steps_the_table_says_nothing_not_zero(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.show_panel("stages")
    beat(window)
    model = window.stages.model
    for spec in model.rows:
        assert set(cells(model, spec.key)[1:]) == {units.NONE}, spec.key
    assert window.stages.chart.header.note.full_text == "no traffic"


def test_the_switch_flips_the_knob_as_any_other(
    window: MainWindow, link: FeedLink, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Desired is not applied: pending until the engine says so, and back if it refuses."""
    knob = b.knob("forward_timing", group="measuring", title="Split the forward pass", default=False)
    monkeypatch.setattr(feed, "KNOBS", [*feed.KNOBS, knob])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, "forward_timing": False})
    link.ready()
    window.show_panel("stages")
    beat(window)
    switch = window.stages.split
    assert switch.isEnabled()
    assert not switch.isChecked()
    qtbot.mouseClick(switch, Qt.MouseButton.LeftButton)
    number, command = link.last(CfgSet)
    assert command.patch == {"forward_timing": True}
    beat(window, 1)
    assert switch.pending
    assert not switch.isEnabled()
    link.apply(number, command)
    beat(window, 4)
    assert switch.isChecked()
    assert not switch.pending
    qtbot.mouseClick(switch, Qt.MouseButton.LeftButton)
    number, command = link.last(CfgSet)
    link.apply(number, command, ok=False, why="not now", rev=2)
    beat(window, 4)
    assert switch.isChecked()


def test_an_engine_without_the_knob_disables_the_switch(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.show_panel("stages")
    beat(window)
    assert not window.stages.split.isEnabled()
    assert window.stages.split_state.text() == "this engine cannot"
