"""Memory traffic against what the machine can do, and what that says about where the time goes."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QWidget

from app.i18n import N_, tr, tr_engine, tr_later
from app.panels.charts import TimelineChart
from app.panels.view import ChartView
from app.units import NONE, Quantity, bandwidth, data, flops, percent, significant, tick
from app.widgets.basic import FigureLabel, FlowingLabel, column, label, plain_tip, set_role, set_tip
from app.widgets.chart_header import SeriesSpec
from ipc.messages import GpuRow

VERDICTS = {
    "memory-bound": N_("Memory-bound"), "mixed": N_("Mixed"), "compute-bound": N_("Compute-bound"),
    "overhead-bound": N_("Overhead-bound"), "idle": N_("Idle"), "unknown": N_("Not known yet"),
}  # fmt: skip
ABOVE_PEAK = N_(
    "More than the measured peak. The peak is one measurement at start, which other work on the machine may "
    "have slowed down; what is modelled may partly come from caches. Read it as “at the limit”."
)
SPACES = 16  # between the parts and below them, in pixels


class BandwidthPanel(QWidget):
    """A chart of modelled traffic, a table of the roofline's figures, and its verdict in words."""

    summary_changed = Signal(str)

    def __init__(self, view: ChartView) -> None:
        super().__init__()
        self._view = view
        self._session = view.console.session
        series = [
            SeriesSpec(
                "bytes", tr("modelled"), "series_a", tr("Weights and KV moved per second of step time")
            )
        ]
        self.chart = TimelineChart(
            view, "", series, {"bytes": "step_bytes_s"}, scale=1e-9,
            format_tick=tick,
            format_value=lambda v: NONE if v is None else str(bandwidth(v * 1e9)),
            unit="GB/s", minimum_top=1.0, card=False,
        )  # fmt: skip
        self.chart.header.title.hide()
        self._grid = QGridLayout()
        self._grid.setContentsMargins(12, 0, 12, 0)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(1)
        self._values: dict[str, FigureLabel] = {}
        self._add_rows()
        self.verdict = label("", "title")
        self.explanation = FlowingLabel("dim")
        self.source = label("", "small", wrap=True)
        words = column(self.verdict, self.explanation, self.source, spacing=1, margins=(12, 0, 12, 5))
        self.setLayout(column(self.chart, self._grid, words, spacing=4))
        layout = self.layout()
        if layout is not None:
            self.layout().setStretch(0, 1)  # type: ignore[union-attr]

    def _add_rows(self) -> None:
        rows = (
            ("bandwidth", tr("Traffic"), tr("Modelled bytes of weights and KV per second of step time.")),
            (
                "peak",
                tr("Measured peak"),
                tr("Copy bandwidth (read and write) measured when the engine started."),
            ),
            (
                "intensity",
                tr("Intensity"),
                tr("Operations per byte moved; below the ridge, memory is the limit."),
            ),
            (
                "flops",
                tr("Compute"),
                tr("Modelled operations per second of step time, of the measured peak."),
            ),
        )
        self._tips = {key: tip for key, _, tip in rows}
        for i, (key, name, tip) in enumerate(rows):
            head, value = label(name, "dim"), FigureLabel()
            value.setAlignment(Qt.AlignmentFlag.AlignRight)
            for part in (head, value):
                set_tip(part, tip)
            self._values[key] = value
            self._grid.addWidget(head, i, 0)
            self._grid.addWidget(value, i, 1)
            self._grid.setColumnStretch(1, 1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_words()

    def _fit_words(self) -> None:
        """Where the panel is low, the verdict's tooltip says what else is written below it."""
        width = self.verdict.width()
        others = (self.chart.minimumSizeHint().height(), self._grid.sizeHint().height(),
                  self.verdict.sizeHint().height(), self.source.heightForWidth(width), SPACES)  # fmt: skip
        self.explanation.setVisible(
            self.height() >= sum(others) + max(0, self.explanation.heightForWidth(width))
        )

    def refresh(self) -> None:
        """Draw the chart."""
        self.chart.refresh()

    def refresh_figures(self) -> None:
        """Write the table and the verdict."""
        self.chart.refresh_figures()
        roof = self._session.roofline()
        share = None
        if roof.bandwidth_bytes_s is not None and roof.peak_bytes_s:
            share = roof.bandwidth_bytes_s / roof.peak_bytes_s
        self._show("bandwidth", _pair(bandwidth(roof.bandwidth_bytes_s), share), share)
        self._values["peak"].setText(_pair(bandwidth(roof.peak_bytes_s), None))
        intensity, ridge = roof.intensity_flop_per_byte, roof.ridge_flop_per_byte
        ends = NONE
        if intensity is not None:
            ends = f"{significant(intensity)} FLOP/B"
            if ridge is not None:
                ends += " · " + tr("ridge {value}").format(value=significant(ridge))
        self._values["intensity"].setText(ends)
        used = roof.flops_s / roof.peak_flops_s if roof.flops_s is not None and roof.peak_flops_s else None
        self._show("flops", _pair(flops(roof.flops_s), used), used)
        self.verdict.setText(tr_later(VERDICTS.get(roof.verdict, roof.verdict)))
        self.explanation.setText(tr_engine(roof.explanation))
        self.verdict.setToolTip(plain_tip(self.explanation.text()))
        self._show_source()
        self._fit_words()

    def _show(self, key: str, text: str, share: float | None) -> None:
        """Write a figure, with a word of caution where it says more than all."""
        value, above = self._values[key], share is not None and share > 1
        value.setText(f"▲ {text}" if above else text)
        set_role(value, "warning" if above else "")
        set_tip(value, "\n".join([self._tips[key], *([tr_later(ABOVE_PEAK)] if above else [])]))

    def _show_source(self) -> None:
        device, cards = self._session.device, self._session.cards
        on_card = device is not None and device.kind == "cuda"
        row = cards.own(device if on_card else None)  # on a CPU: what else there is
        if row is not None and (on_card or not row.error):
            self.source.setText(describe_gpu(row))
            self.summary_changed.emit(row.name)
            self.source.setToolTip("")
        elif device is None:
            self.source.setText("")
            self.summary_changed.emit("")
        elif device.kind == "cpu":
            self.source.setText(tr("No NVIDIA driver found: traffic is modelled."))
            self.source.setToolTip(plain_tip(tr_engine(row.error if row is not None else cards.trouble)))
            self.summary_changed.emit(device.name)
        elif cards.trouble:
            self.source.setText(tr_engine(cards.trouble))
            self.summary_changed.emit(device.name)
        else:
            self.source.setText(tr("Waiting for the first reading of the driver (NVML)."))
            self.summary_changed.emit(device.name)


def _pair(quantity: Quantity, share: float | None) -> str:
    """A figure and its share of the peak; a single dash where there is none."""
    if quantity.value == NONE:
        return NONE
    return f"{quantity} · {percent(share)}" if share is not None else str(quantity)


def describe_gpu(row: GpuRow) -> str:
    """One card in one or two lines; what NVML does not tell is left out."""
    if row.error:
        why = tr_engine(row.error)
        return tr("{name}: {why}").format(name=row.name, why=why) if row.name else why
    parts = []
    if row.dram_read_write_percent is not None:
        parts.append(tr("memory busy {share}").format(share=percent(row.dram_read_write_percent / 100)))
    if row.utilization_percent is not None:
        parts.append(tr("GPU busy {share}").format(share=percent(row.utilization_percent / 100)))
    if row.memory_used_bytes is not None and row.memory_total_bytes:
        parts.append(f"{data(row.memory_used_bytes)} / {data(row.memory_total_bytes)}")
    if row.power_w is not None:
        parts.append(f"{row.power_w:.0f} W")
    if row.temperature_c is not None:
        parts.append(f"{row.temperature_c:.0f} °C")
    if row.throttle:
        parts.append(tr("throttled: {why}").format(why=", ".join(map(tr_engine, row.throttle.split(", ")))))
    return " · ".join(parts)
