"""The charts in the middle: TTFT, TPOT and throughput over time, on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QPoint, Qt, Slot
from PySide6.QtWidgets import QApplication, QMenu

from app.i18n import tr, tr_engine
from app.panels.view import ChartView, Follower
from app.units import count, pause, percent, rate, seconds, span, tick
from app.widgets.chart_header import SeriesSpec
from app.widgets.live_plot import LivePlot


class TimelineChart(LivePlot):
    """A `LivePlot` over columns of the session's timeline; ``columns`` maps a series key to a column."""

    def __init__(
        self, view: ChartView, title: str, series: Sequence[SeriesSpec], columns: Mapping[str, str],
        scale: float = 1.0, **options: object,
    ) -> None:  # fmt: skip
        super().__init__(title, series, link=view.link, **options)  # type: ignore[arg-type]
        self.view = view
        self._columns = dict(columns)
        self._scale = scale
        self._follower = Follower(view, self, self.redraw)
        view.changed.connect(self.redraw)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._menu)
        self.redraw()

    def refresh(self) -> None:
        """Draw, if the data would move by a pixel since the last time."""
        self._follower.refresh()

    @Slot()
    def redraw(self) -> None:
        """Draw now."""
        self._follower.begin()
        times, found = self._follower.columns(self._columns.values())
        self.set_data(times, {key: found[name] * self._scale for key, name in self._columns.items()})

    def refresh_figures(self) -> None:
        """Write the figures of the header."""
        self.set_note(self.basis())

    def basis(self) -> str:
        """What the figures rest on."""
        return ""

    @Slot(QPoint)
    def _menu(self, at: QPoint) -> None:
        menu = QMenu(self)
        log = menu.addAction(tr("Logarithmic scale"))
        log.setCheckable(True)
        log.setChecked(self.log)
        log.toggled.connect(self.set_log)
        copy_data = menu.addAction(tr("Copy data as CSV"))
        copy_data.triggered.connect(lambda: QApplication.clipboard().setText(self.csv()))
        copy_picture = menu.addAction(tr("Copy picture"))
        copy_picture.triggered.connect(lambda: QApplication.clipboard().setPixmap(self.grab()))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.mapToGlobal(at))


def _ms_tick(value: float) -> str:
    return tick(value * 1e3)


def _percentile_series(name: str) -> list[SeriesSpec]:
    tip = tr("{percent} of {name} over the trailing 10 s")
    return [
        SeriesSpec("p50", "p50", "series_a", tip.format(percent="p50", name=name)),
        SeriesSpec("p95", "p95", "series_b", tip.format(percent="p95", name=name)),
        SeriesSpec("p99", "p99", "series_c", tip.format(percent="p99", name=name)),
    ]


class LatencyChart(TimelineChart):
    """Percentiles of TTFT or TPOT. ``kind`` is ``ttft`` or ``tpot``."""

    def __init__(self, view: ChartView, kind: str) -> None:
        self._kind = kind
        names = {"ttft": "TTFT", "tpot": "TPOT"}
        tips = {
            "ttft": tr(
                "Time to first token: from a request's arrival at the engine to its first token. Percentiles "
                "over the requests of the trailing 10 s at each point; n is their number."
            ),
            "tpot": tr(
                "Time per output token: (last − first token) / (tokens − 1) of each request that ended. "
                "Percentiles over the trailing 10 s at each point; n is the number of requests."
            ),
        }
        columns = {p: f"{kind}_{p}_s" for p in ("p50", "p95", "p99")}
        super().__init__(
            view, names[kind], _percentile_series(names[kind]), columns,
            format_tick=_ms_tick, format_value=lambda v: str(seconds(v)), unit="ms",
            show_labels=kind == "ttft",
        )  # fmt: skip
        self.header.title.setToolTip(tips[kind])
        self.setAccessibleDescription(tips[kind])

    def basis(self) -> str:
        session = self.view.console.session
        n = session.timeline.column(f"{self._kind}_n", 1.0)
        number = float(n[-1]) if len(n) and n[-1] == n[-1] else 0.0
        if number <= 0:
            return tr("no traffic")
        text = f"n={count(number)} · {span(session.latency_window_s)}"
        waited_s = session.pause_s(self._kind, session.latency_window_s)
        if waited_s:
            text = f"{tr('includes a pause of {time} for a change').format(time=pause(waited_s))} · {text}"
        return text


class ThroughputChart(TimelineChart):
    """Output and prompt tokens per second."""

    def __init__(self, view: ChartView) -> None:
        series = [
            SeriesSpec("decode", tr("output"), "series_a", tr("Tokens generated per second")),
            SeriesSpec("prefill", tr("prompt"), "series_b", tr("Prompt tokens computed per second")),
        ]
        super().__init__(
            view, tr("Throughput"), series, {"decode": "output_tok_s", "prefill": "prefill_tok_s"},
            format_tick=tick, format_value=lambda v: rate(v, "").value, unit="tok/s",
            minimum_top=10.0,
        )  # fmt: skip
        tip = tr(
            "Tokens per second of wall time in half-second bins: generated ones, and prompt tokens computed "
            "(those found in the prefix cache are not computed)."
        )
        self.header.title.setToolTip(tip)
        self.setAccessibleDescription(tip)

    def basis(self) -> str:
        kpis = self.view.console.session.kpis()
        running, waiting = kpis.running.value, kpis.waiting.value
        if running is None:
            return tr("engine not running")
        text = tr("running {running} · waiting {waiting}").format(
            running=f"{running:.0f}", waiting=f"{waiting or 0:.0f}"
        )
        drafts = self._drafts()
        return f"{drafts} · {text}" if drafts else text

    def _drafts(self) -> str:
        """How drafts do, or why there are none though speculation is on; "" where there is nothing to say."""
        session = self.view.console.session
        if session.state is not None and session.state.speculation:
            return tr("no drafts: {why}").format(why=tr_engine(session.state.speculation))
        kpis = session.kpis()
        length = kpis.draft_length.value
        if length is None:
            return ""
        return tr("drafts: {share} accepted, {length} tokens a step").format(
            share=percent(kpis.draft_acceptance.value), length=f"{length:.1f}"
        )
