"""The load bar: what to send, start and stop, and how it goes."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QSignalBlocker, Qt, Signal, Slot
from PySide6.QtWidgets import QComboBox, QFrame

from app.i18n import N_, tr, tr_engine, tr_later
from app.lab.load_run import LoadProgress, error_kind
from app.lab.workload import WorkloadSpec
from app.load_names import ARRIVALS, MIXES
from app.units import clock, rate, span
from app.widgets.basic import ElidedLabel, button, label, row, set_role, set_tip
from app.widgets.focus import set_enabled
from app.widgets.number_field import FloatField, IntField

DURATIONS_S = (30, 60, 120, 300, 600, 3600)


class LoadBar(QFrame):
    """Emits `started` with a `WorkloadSpec`, `stopped`, `cancelled`; `show_progress` tells it how it goes.

    ``refused`` tells of a number that cannot be had, in words.
    """

    started = Signal(object)
    stopped = Signal()
    cancelled = Signal()
    refused = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._running = self._draining = False
        self._chosen = False
        self.mix = _combo({key: tr_later(name) for key, (name, _) in MIXES.items()}, tr("Prompt mix"))
        set_tip(self.mix, tr("Which prompts are sent: seeded texts that come with Decodeck."))
        self.arrival = _combo({key: tr_later(name) for key, name in ARRIVALS.items()}, tr("Arrival"))
        set_tip(
            self.arrival,
            tr(
                "Poisson and constant send on a schedule whatever the engine does (open loop). "
                "Concurrency keeps a number of requests in flight (closed loop)."
            ),
        )
        self.rate = FloatField()
        self.rate.setRange(0.05, 1000.0)
        self.rate.setDecimals(2)
        self.rate.setSuffix(" req/s")
        self.rate.setValue(2.0)
        self.rate.setFixedWidth(112)
        self.rate.setAccessibleName(tr("Rate"))
        set_tip(self.rate, tr("Requests per second that are meant to be sent."))
        self.concurrency = IntField()
        self.concurrency.setRange(1, 1024)
        self.concurrency.setValue(8)
        self.concurrency.setFixedWidth(112)
        self.concurrency.setSuffix(tr(" in flight"))
        self.concurrency.setAccessibleName(tr("Concurrency"))
        set_tip(self.concurrency, tr("Requests kept in flight, or the most this client holds in open loop."))
        self.duration = _combo({str(s): span(s) for s in DURATIONS_S}, tr("Duration"))
        self.duration.setCurrentIndex(1)
        self.button = button(tr("Start load"), self.toggle, "filled")
        self.progress = ElidedLabel("", "dim")
        for field in (self.rate, self.concurrency):
            field.refused.connect(self._on_refused)
        line = row(
            label(tr("Demo load"), "title"), 2, self.mix, self.arrival, self.rate, self.concurrency,
            self.duration, 2, self.button, 6, self.progress, margins=(12, 5, 12, 5), spacing=6,
        )  # fmt: skip
        line.setStretchFactor(self.progress, 1)
        self.setLayout(line)
        self.arrival.currentIndexChanged.connect(self._show_fields)
        self._show_fields()

    @Slot(str, str)
    def _on_refused(self, name: str, why: str) -> None:
        self.refused.emit(tr("{name}: {why}").format(name=name, why=why))

    @Slot()
    def _show_fields(self) -> None:
        closed = self.arrival.currentData() == "concurrency"
        self.rate.setVisible(not closed)
        self.concurrency.setVisible(closed)

    def spec(self) -> WorkloadSpec:
        """The load as it is set now, with what was typed and not left yet."""
        for field in (self.rate, self.concurrency):
            field.interpretText()
        mix = str(self.mix.currentData())
        return WorkloadSpec(
            name=mix,
            arrival=self.arrival.currentData(),
            rate_rps=self.rate.value(),
            concurrency=self.concurrency.value(),
            duration_s=float(self.duration.currentData()),
            mix=dict(MIXES[mix][1]),
            input_tok=(32, 256) if mix != "long" else (512, 1536),
            output_tok=(16, 96),
        )

    def values(self) -> dict[str, object]:
        """What to remember for the next start."""
        return {
            "mix": self.mix.currentData(),
            "arrival": self.arrival.currentData(),
            "rate": self.rate.value(),
            "concurrency": self.concurrency.value(),
            "duration": self.duration.currentData(),
        }

    def set_values(self, values: Mapping[str, object]) -> None:
        """Take remembered values; what does not fit is left as it is."""
        self._chosen = self._chosen or bool(values)
        for combo, key in ((self.mix, "mix"), (self.arrival, "arrival"), (self.duration, "duration")):
            index = combo.findData(values.get(key))
            if index >= 0:
                combo.setCurrentIndex(index)
        rate_value, concurrency = values.get("rate"), values.get("concurrency")
        with QSignalBlocker(self.rate), QSignalBlocker(self.concurrency):
            if isinstance(rate_value, int | float):
                self.rate.setValue(float(rate_value))
            if isinstance(concurrency, int):
                self.concurrency.setValue(concurrency)

    def suit(self, device_kind: str) -> None:
        """Begin on a CPU with a few requests in flight, where nothing was chosen before.

        How many requests a second a CPU keeps up with varies so much that a fixed rate soon fills its queue.
        """
        if not self._chosen:
            self._chosen = True
            if device_kind == "cpu":
                self.set_values({"arrival": "concurrency", "concurrency": 4})

    @Slot()
    def toggle(self) -> None:
        """Start a load, stop the one that runs, or cancel what one that was stopped still waits for."""
        if self._draining:
            self.cancelled.emit()
        elif self._running:
            self.stopped.emit()
        else:
            self.started.emit(self.spec())

    def show_progress(self, progress: LoadProgress, running: bool, ready: bool) -> None:
        """Show where the load stands. ``ready``: the engine can take requests."""
        draining = running and progress.phase == "draining"
        if (running, draining) != (self._running, self._draining):
            self._running, self._draining = running, draining
            going = tr("Cancel rest") if draining else tr("Stop load")
            self.button.setText(going if running else tr("Start load"))
            set_role(self.button, "primary" if running else "filled")
            for field in (self.mix, self.arrival, self.rate, self.concurrency, self.duration):
                set_enabled(field, not running)
        set_enabled(self.button, running or ready)
        tip = "" if ready or running else tr("The engine is not ready yet.")
        if draining:
            tip = tr("Nothing more is sent. This ends the requests that still run.")
        if tip != self.button.toolTip():
            self.button.setToolTip(tip)
        self.progress.set_full_text(describe(progress, ready))
        fine = progress.valid and progress.phase != "failed" and not progress.failed
        set_role(self.progress, "dim" if fine else "warning")


def describe(progress: LoadProgress, ready: bool) -> str:
    """One line about a load."""
    if progress.phase == "idle":
        if ready:
            return tr("Sends seeded prompts to the engine from a process of its own.")
        return tr("Waiting for the engine.")
    if progress.phase == "failed":
        return tr("Failed: {why}").format(why=tr_engine(progress.message))
    parts = [f"{_phase(progress.phase)} {clock(progress.elapsed_s)}"]
    parts.append(tr("{n} sent").format(n=progress.sent))
    parts.append(tr("{n} done").format(n=progress.done))
    if progress.in_flight:
        parts.append(tr("{n} in flight").format(n=progress.in_flight))
    if progress.failed:
        parts.append(tr("{n} failed").format(n=progress.failed))
    if progress.achieved_rps is not None:
        parts.append(str(rate(progress.achieved_rps, "req/s")))
    common = progress.common_error
    if common and error_kind(common) != error_kind(progress.last_error):
        parts.append(tr("most frequent failure: {why}").format(why=tr_engine(common)))
    elif progress.last_error:
        parts.append(tr("last failure: {why}").format(why=tr_engine(progress.last_error)))
    if not progress.valid:
        parts.append(tr("doubtful: {why}").format(why="; ".join(map(tr_engine, progress.invalid_reasons))))
    return " · ".join(parts)


def _phase(phase: str) -> str:
    names = {
        "starting": N_("starting"), "running": N_("running"), "draining": N_("draining"), "done": N_("done"),
    }  # fmt: skip
    return tr_later(names.get(phase, phase))


def _combo(choices: Mapping[str, str], name: str) -> QComboBox:
    made = QComboBox()
    made.setAccessibleName(name)
    made.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
    for key, text in choices.items():
        made.addItem(text, key)
    made.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    return made
