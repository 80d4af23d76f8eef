"""The graphics card that the engine computes on, as the driver (NVML) tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFrame, QScrollArea, QStackedLayout, QWidget

from app.console import Console
from app.i18n import N_, tr, tr_engine, tr_later
from app.units import NONE, Quantity, bandwidth, count, data, percent
from app.widgets.basic import column, label, set_role, set_tip
from app.widgets.empty_state import EmptyState
from app.widgets.facts import Facts, FactSpec
from ipc.messages import GpuRow


@dataclass(frozen=True, slots=True)
class Reading:
    """One line. ``source``: under which name the row says why it is not known."""

    name: str
    tip: str
    source: str
    value: Callable[[GpuRow], str]


def _share(value: float | None) -> str:
    return NONE if value is None else str(percent(value / 100))


def _with_unit(value: float | None, unit: str) -> str:
    return NONE if value is None else str(Quantity(f"{value:.0f}", unit))


def _both(first: Quantity, second: Quantity) -> str:
    return NONE if NONE in (first.value, second.value) else f"{first} · {second}"


READINGS: dict[str, Reading] = {
    "busy": Reading(
        N_("GPU busy"), N_("Share of the last second in which at least one kernel ran."), "utilization",
        lambda r: _share(r.utilization_percent),
    ),
    "sm": Reading(
        N_("SMs active"), N_("Share of the card's multiprocessors that had work. Hopper and later (GPM)."),
        "gpm", lambda r: _share(r.sm_active_percent),
    ),
    "tensor": Reading(
        N_("Tensor cores"), N_("Share of the time in which multiprocessors used tensor cores (GPM)."), "gpm",
        lambda r: _share(r.tensor_active_percent),
    ),
    "dram": Reading(
        N_("DRAM bandwidth"), N_("Part of the memory's theoretical bandwidth that was used (GPM)."), "gpm",
        lambda r: _share(r.dram_read_write_percent),
    ),
    "memory": Reading(
        N_("Memory taken"), N_("By whatever runs on the card, and what it has."), "memory",
        lambda r: NONE if r.memory_used_bytes is None or r.memory_total_bytes is None
        else f"{data(r.memory_used_bytes)} / {data(r.memory_total_bytes)}",
    ),
    "pcie": Reading(
        N_("PCIe in · out"), N_("Bytes a second to the card and from it."), "pcie",
        lambda r: _both(bandwidth(r.pcie_rx_bytes_per_s), bandwidth(r.pcie_tx_bytes_per_s)),
    ),
    "nvlink": Reading(
        N_("NVLink in · out"), N_("Bytes a second from other cards and to them, over all links."), "nvlink",
        lambda r: _both(bandwidth(r.nvlink_rx_bytes_per_s), bandwidth(r.nvlink_tx_bytes_per_s)),
    ),
    "power": Reading(
        N_("Power"), N_("What the whole board draws."), "power", lambda r: _with_unit(r.power_w, "W"),
    ),
    "temperature": Reading(
        N_("Temperature"), N_("Of the chip."), "temperature", lambda r: _with_unit(r.temperature_c, "°C"),
    ),
    "clocks": Reading(
        N_("Clock SM · memory"), N_("Of the multiprocessors and of the memory, now."), "sm_clock",
        lambda r: NONE if r.sm_clock_mhz is None or r.memory_clock_mhz is None
        else f"{_with_unit(r.sm_clock_mhz, 'MHz')} · {_with_unit(r.memory_clock_mhz, 'MHz')}",
    ),
    "throttle": Reading(
        N_("Slowed down by"), N_("What keeps the clocks down, beside having nothing to do."), "throttle",
        lambda r: NONE if "throttle" in r.unknown
        else ", ".join(map(tr_engine, r.throttle.split(", "))) if r.throttle else tr("nothing"),
    ),
    "ecc": Reading(
        N_("Memory errors"),
        N_("Corrected ones and those that could not be, since the driver was loaded (ECC)."), "ecc",
        lambda r: NONE if r.ecc_corrected is None or r.ecc_uncorrected is None
        else f"{count(r.ecc_corrected)} · {count(r.ecc_uncorrected)}",
    ),
}  # fmt: skip


class CardPanel(QWidget):
    """Refreshed twice a second."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.name = label("", "title", wrap=True)
        self.uuid = label("", "small", wrap=True)
        self.trouble = label("", "warning", wrap=True)
        self.facts = Facts([
            FactSpec(key, tr_later(each.name), tr_later(each.tip), wide=True)
            for key, each in READINGS.items()
        ])  # fmt: skip
        self.facts.values["throttle"].setWordWrap(True)  # there may be several reasons
        page = QWidget()
        page.setProperty("role", "page")
        page.setLayout(
            column(self.name, self.uuid, self.trouble, self.facts, None, spacing=5, margins=(12, 8, 12, 6))
        )
        area = QScrollArea()
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setWidget(page)
        self.empty = EmptyState("")
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(area)

    def showEvent(self, event: QShowEvent) -> None:
        self.refresh_figures()

    def refresh_figures(self) -> None:
        """Write everything anew."""
        session = self._console.session
        row = session.cards.own(session.device)
        if row is None:
            self._show_none(session.cards.trouble)
            return
        self._stack.setCurrentIndex(1)
        self.name.setText(row.name)
        self.uuid.setText(row.uuid)
        trouble = "\n".join(tr_engine(text) for text in (row.error, row.fault) if text)
        self.trouble.setText(trouble)
        self.trouble.setVisible(bool(trouble))
        set_role(self.trouble, "alarm" if row.error else "warning")
        for key, each in READINGS.items():
            value = each.value(row)
            self.facts.show_fact(key, value)
            tip = tr_later(each.tip)
            if value == NONE:
                why = row.unknown.get(each.source, "")
                told = tr("Not known: {why}").format(why=tr_engine(why)) if why else tr("Not known yet.")
                tip = f"{tip}\n{told}"
            set_tip(self.facts.values[key], tip)
        self.summary_changed.emit(trouble if row.error else _share(row.utilization_percent))

    def _show_none(self, why: str) -> None:
        self._stack.setCurrentIndex(0)
        self.empty.set_texts(tr("No graphics card is in use"), tr_engine(why))
        self.summary_changed.emit("")
