"""The live chart: gaps, logarithms, marks, and nothing that grows."""

from __future__ import annotations

import gc
import math
import warnings

import numpy as np
import psutil
import pyqtgraph as pg
import pytest
from numpy.typing import NDArray
from PySide6.QtCore import QPointF
from PySide6.QtWidgets import QApplication

from app import units
from app.widgets.chart_header import SeriesSpec
from app.widgets.live_plot import LivePlot, decimate
from app.widgets.mark_flags import ChartMark
from app.widgets.time_plot import CrosshairLink

F64 = NDArray[np.float64]


def chart(link: CrosshairLink | None = None, **options: object) -> LivePlot:
    series = [SeriesSpec("a", "p50", "series_a"), SeriesSpec("b", "p95", "series_b")]
    made = LivePlot(
        "Test", series, format_tick=units.tick, format_value=lambda v: str(units.seconds(v)), unit="ms",
        link=link, show_labels=True, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    made.resize(640, 240)
    made.show()
    QApplication.processEvents()
    return made


def coloured(plot: LivePlot) -> int:
    """Pixels of the blue series: bluer than all else in the dark theme, also where a line is blended."""
    QApplication.processEvents()
    image = plot.plot.grab().toImage().convertToFormat(pg.QtGui.QImage.Format.Format_RGB32)
    pixels = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.width(), 4).astype(int)
    return int((pixels[:, :, 0] - pixels[:, :, 2] > 45).sum())


def times(n: int) -> F64:
    return np.linspace(-300.0, 0.0, n)


@pytest.mark.parametrize("where", [[0], [500], [999], [0, 500, 999]])
def test_e02_nan_is_a_gap_and_the_rest_is_drawn(qapp: QApplication, where: list[int]) -> None:
    """E02: one NaN made the whole plot empty."""
    plot = chart()
    values = np.sin(times(1000) / 20) + 2
    values[where] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.set_data(times(1000), {"a": values})
        assert coloured(plot) > 400


def test_e02_all_nan_draws_nothing_and_says_nothing(qapp: QApplication) -> None:
    """E02: all NaN is an empty chart without a flood of warnings."""
    plot = chart()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.set_data(times(1000), {"a": np.full(1000, math.nan)})
        plot.refresh_legend()
        assert coloured(plot) == 0
    assert plot.header.legend.values["a"] == units.NONE


def test_e01_zeros_on_a_log_axis_are_gaps(qapp: QApplication) -> None:
    """E01: log axis and zeros: the whole curve vanished."""
    plot = chart()
    values = np.repeat(np.array([0.0, 0, 1, 2, 145, 0, 5]), 40)
    for _ in range(10):
        plot.set_log(True)
        plot.set_data(times(280), {"a": values})
        plot.refresh_legend()
        assert coloured(plot) > 50
        low, high = plot.y_range
        assert 0 < low <= 1
        assert 145 <= high < 10_000
        assert "≤ 0" in plot.header.note.full_text
        plot.set_log(False)
        plot.set_data(times(280), {"a": values})
        plot.refresh_legend()
        assert coloured(plot) > 50
        assert plot.y_range[0] == 0
        assert plot.y_range[1] >= 145
        assert "≤ 0" not in plot.header.note.full_text


def test_e04_a_live_chart_does_not_grow(qapp: QApplication) -> None:
    """E04: items are made once; memory stays (36,000 updates in full, a sample of paints)."""
    plot = chart()
    t = times(600)
    rng = np.random.default_rng(1)
    values = rng.random(600)

    def run(updates: int) -> None:
        for i in range(updates):
            data = np.roll(values, i)
            plot.set_data(t, {"a": data, "b": data + 1})
            if i % 40 == 0:
                plot.set_marks([ChartMark(-float(i % 300), f"change {i % 7}")])
                plot.set_gaps([(-float(i % 300), -float(i % 300) + 5)])
                QApplication.processEvents()

    run(2000)
    gc.collect()
    items = len(plot.plot.scene().items())
    before = psutil.Process().memory_info().rss
    run(8000)
    gc.collect()
    assert len(plot.plot.scene().items()) == items
    assert psutil.Process().memory_info().rss - before < 20 * 1024 * 1024


def test_the_range_grows_at_once_and_shrinks_late(
    qapp: QApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("app.widgets.axes.time.monotonic", lambda: clock[0])
    plot = chart()
    plot.set_data(times(10), {"a": np.full(10, 900.0)})
    assert plot.y_range[1] >= 900
    top = plot.y_range[1]
    plot.set_data(times(10), {"a": np.full(10, 9.0)})
    assert plot.y_range[1] == top
    clock[0] += 4
    plot.set_data(times(10), {"a": np.full(10, 9.0)})
    assert plot.y_range[1] == top
    clock[0] += 2
    plot.set_data(times(10), {"a": np.full(10, 9.0)})
    assert 9 <= plot.y_range[1] < 20


def test_marks_are_labelled_where_they_fit(qapp: QApplication) -> None:
    plot = chart()
    plot.set_data(times(10), {"a": np.ones(10)})
    plot.set_marks(
        [ChartMark(-200, "one change"), ChartMark(-199, "another"), ChartMark(-50, "a third", ok=False)]
    )
    shown = [text.toPlainText() for text in plot._texts if text.isVisible()]
    assert sorted(shown) == ["a third", "another"]
    assert sum(line.isVisible() for line in plot._lines) == 3
    plot.set_marks([])
    assert not any(line.isVisible() for line in plot._lines)
    assert not any(text.isVisible() for text in plot._texts)


def test_the_crosshair_reads_values_in_every_linked_chart(qapp: QApplication) -> None:
    link = CrosshairLink()
    first, second = chart(link), chart(link)
    t = times(301)
    first.set_data(t, {"a": -t / 1000, "b": np.ones(301)})
    second.set_data(t, {"a": -t / 1000})
    middle = first.plot.getPlotItem().vb.mapViewToScene(QPointF(-100.0, 0.5))
    first._on_mouse(middle)
    for plot in (first, second):
        assert plot.header.legend.values["a"].startswith("100")
        assert "1:40" in plot.header.note.full_text
    link.moved.emit(None)
    assert first.header.legend.values["b"] == str(units.seconds(1.0))


def test_decimation_keeps_means_and_gaps() -> None:
    t = np.arange(9000.0)
    values = np.ones(9000)
    values[3000:3600] = math.nan
    t2, v2 = decimate(t, values, 1500)
    assert len(t2) <= 1500
    assert np.isnan(v2).sum() == pytest.approx(100, abs=2)
    assert np.nanmin(v2) == np.nanmax(v2) == 1.0


def test_csv_has_a_line_for_each_time_and_nothing_for_gaps(qapp: QApplication) -> None:
    plot = chart()
    plot.set_data(np.array([-1.0, 0.0]), {"a": np.array([0.5, math.nan]), "b": np.array([1.0, 2.0])})
    assert plot.csv() == "t_s,a,b\n-1.000,0.5,1.0\n0.000,,2.0\n"
