"""The card's panel: readings in their units, what is not known with its reason, trouble in plain words."""

from __future__ import annotations

import msgspec

from app import i18n
from app.main_window import MainWindow
from app.panels.card import READINGS
from app.settings import MIN_SIZE
from ipc.messages import GpuRow
from tests.app import builders as b
from tests.app.gui.conftest import beat
from tests.app.gui.feed import FeedLink

CARD = GpuRow(
    t_ns=1, uuid="GPU-aaaa1111-2222-3333-4444-555566667777", name="NVIDIA H200", utilization_percent=87.0,
    sm_active_percent=71.4, tensor_active_percent=33.0, dram_read_write_percent=64.2,
    memory_used_bytes=100 << 30, memory_total_bytes=141 << 30, pcie_rx_bytes_per_s=1.5e9,
    pcie_tx_bytes_per_s=2e8, power_w=612.4, temperature_c=61.0, sm_clock_mhz=1830.0, memory_clock_mhz=3201.0,
    throttle="power cap, hardware thermal", ecc_corrected=3, ecc_uncorrected=0,
    unknown={"nvlink": "the card has no NVLink that counts"},
)  # fmt: skip
DEVICE = msgspec.structs.replace(b.DEVICE, kind="cuda")


def show(window: MainWindow, link: FeedLink, row: GpuRow) -> dict[str, str]:
    window.show_panel("card")
    link.push(state=b.state(model=b.MODEL, device=DEVICE), device=DEVICE, gpu=[row])
    beat(window)
    return {key: window.card.facts.value(key).replace("\u00a0", " ") for key in READINGS}


def test_readings_in_their_units(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    shown = show(window, link, CARD)
    assert shown == {
        "busy": "87 %", "sm": "71 %", "tensor": "33 %", "dram": "64 %", "memory": "100 GiB / 141 GiB",
        "pcie": "1.50 GB/s · 200 MB/s", "nvlink": "–", "power": "612 W", "temperature": "61 °C",
        "clocks": "1830 MHz · 3201 MHz", "throttle": "power cap, hardware thermal", "ecc": "3 · 0",
    }  # fmt: skip
    assert window.card.name.text() == "NVIDIA H200"
    assert not window.card.trouble.isVisible()
    assert window.docks["traffic"].header.summary.full_text.replace("\u00a0", " ") == "87 %"


def test_what_is_not_known_says_why(window: MainWindow, link: FeedLink) -> None:
    """D02: a dash, never a zero; the reason is one hover away."""
    link.ready()
    part = GpuRow(
        t_ns=1, uuid="MIG-1", name="H200 (MIG)", memory_used_bytes=1 << 30, memory_total_bytes=2 << 30,
        unknown={
            "power": "a part of a card (MIG) does not tell it: Not Supported", "throttle": "Not Supported",
        },
    )  # fmt: skip
    shown = show(window, link, part)
    assert [key for key, text in shown.items() if text != "–"] == ["memory"]
    values = window.card.facts.values
    assert "Not known: a part of a card (MIG) does not tell it" in values["power"].toolTip()
    assert "Not known yet." in values["busy"].toolTip()
    assert "Not known" not in values["memory"].toolTip()
    assert values["power"].accessibleDescription()


def test_a_lost_card_is_told_in_plain_words(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    lost = GpuRow(
        t_ns=1, uuid="GPU-1", name="H200", fault="Xid 79: the card has fallen off the bus",
        error="the card has fallen off the bus; nothing runs on it until the machine is restarted",
    )  # fmt: skip
    show(window, link, lost)
    assert window.card.trouble.isVisible()
    assert window.card.trouble.text().startswith("the card has fallen off the bus; nothing runs on it")
    assert "Xid 79" in window.card.trouble.text()
    assert window.card.trouble.property("role") == "alarm"
    i18n.use("zh_CN")
    beat(window)
    assert "显卡已从总线上掉落" in window.card.trouble.text()
    assert "Xid" in window.card.trouble.text()


def test_without_a_card_the_reason_stands_there(window: MainWindow, link: FeedLink) -> None:
    """D04: no driver is a normal state."""
    link.ready()
    window.show_panel("card")
    link.push(gpu=[GpuRow(t_ns=1, uuid="", name="", error="no NVIDIA driver or card found (no library)")])
    beat(window)
    assert window.card.empty.title.text() == "No graphics card is in use"
    assert "no library" in window.card.empty.text.text()


def test_the_card_that_computes_is_shown_among_several(window: MainWindow, link: FeedLink) -> None:
    """D05: as the engine comes up, all cards are told of; then only its own, which is not the first."""
    link.ready()
    window.show_panel("card")
    display = GpuRow(t_ns=1, uuid="GPU-aaaa", name="T4 (display)", utilization_percent=3.0)
    idle = msgspec.structs.replace(CARD, uuid="GPU-bbbb", utilization_percent=3.0)
    busy = msgspec.structs.replace(idle, utilization_percent=97.0, memory_used_bytes=5 << 30)
    link.push(gpu=[display, idle])
    link.push(state=b.state(model=b.MODEL, device=DEVICE), device=DEVICE, gpu=[display, idle])
    device = msgspec.structs.replace(DEVICE, uuid="GPU-bbbb")
    link.push(state=b.state(model=b.MODEL, device=device), device=device, gpu=[busy])
    beat(window)
    assert (window.card.name.text(), window.card.facts.value("busy")) == ("NVIDIA H200", "97\u00a0%")
    window.show_panel("bandwidth")
    beat(window)
    assert "97" in window.bandwidth.source.text()
    assert "T4" not in window.bandwidth.source.text()


def test_a_driver_that_is_gone_takes_its_figures_with_it(window: MainWindow, link: FeedLink) -> None:
    """D07: what was read before is not shown as what is."""
    link.ready()
    show(window, link, CARD)
    why = "no NVIDIA driver or card found (Driver/library version mismatch)"
    link.push(gpu=[GpuRow(t_ns=9, uuid="", name="", error=why)])
    beat(window)
    assert window.card._stack.currentIndex() == 0
    assert "version mismatch" in window.card.empty.text.text()
    window.show_panel("bandwidth")
    beat(window)
    assert window.bandwidth.source.text() == why
    show(window, link, CARD)
    assert window.card._stack.currentIndex() == 1


def test_nothing_is_cut_in_the_smallest_window(window: MainWindow, link: FeedLink) -> None:
    """Every reading has its width; what does not fit in height is scrolled to."""
    link.ready()
    window.resize(MIN_SIZE)
    show(window, link, CARD)
    area = window.card.facts.parentWidget().parentWidget()
    assert window.card.facts.minimumSizeHint().width() <= area.width()
    for value in window.card.facts.values.values():
        assert value.width() >= value.minimumSizeHint().width()
