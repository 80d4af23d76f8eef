"""What the driver tells of one card. Each reading is unknown (None) on its own, and then has a reason."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

from engine.cards import Card
from engine.gpm import GpmReading, GpmSampler
from ipc import codec
from ipc import messages as m

log = logging.getLogger("engine.monitor")

THROTTLES = {  # NVML API reference, nvmlClocksEventReasons
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
XIDS = {  # NVIDIA, "XID Errors": those that say that something is broken, or whose fault it was
    13: "a program on the card failed (graphics engine exception)",
    31: "a program on the card failed (memory page fault)",
    48: "memory errors that could not be corrected (ECC)",
    63: "rows of memory were remapped",
    64: "rows of memory could not be remapped",
    74: "an NVLink failed",
    79: "the card has fallen off the bus",
    94: "memory errors that could not be corrected, contained to one program (ECC)",
    95: "memory errors that could not be corrected (ECC)",
    119: "the card's system processor does not answer",
}
LOST = "the card has fallen off the bus; nothing runs on it until the machine is restarted"
NVML_ERROR_GPU_IS_LOST = 15
CORRECTED, UNCORRECTED, VOLATILE = 0, 1, 0  # of nvmlDeviceGetTotalEccErrors: since the driver was loaded
RX, TX = 1, 0  # of nvmlDeviceGetPcieThroughput
LINK_RX, LINK_TX = (139, 0xFFFFFFFF), (138, 0xFFFFFFFF)  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_..., all links
KIB = 1024
MAX_UNKNOWN = 256  # characters of why a reading is not there
MAX_EVENTS = 16  # that are taken at one reading


class _Lost(Exception):
    """The driver has lost the card."""


class CardReader:
    """Reads one card, on the monitor's thread alone. ``fault``: the newest that was reported of it before."""

    def __init__(self, nvml: Any, card: Card, fault: str = "") -> None:
        self._nvml = nvml
        self.card = card
        self.lost = False
        self.process_bytes = 0  # of the card's memory that this process holds
        self._gpm = GpmSampler(nvml, card)
        self._links: tuple[float, int, int] | None = None  # when, and bytes received and sent until then
        self.fault = fault
        self._events: Any = None
        with contextlib.suppress(Exception):  # not every card tells of its errors
            events = nvml.nvmlEventSetCreate()
            whole = card.handle if card.whole is None else card.whole
            nvml.nvmlDeviceRegisterEvents(whole, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def close(self) -> None:
        """Give back what the driver holds for it."""
        self._gpm.close()
        if self._events is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlEventSetFree(self._events)

    def read(self) -> m.GpuRow:
        """All readings now. One whose ``error`` says so once the card is lost."""
        try:
            return self._read()
        except _Lost:
            self.lost = True
            return self._row(error=LOST, fault=self.fault)

    def _read(self) -> m.GpuRow:
        nvml, handle = self._nvml, self.card.handle
        unknown: dict[str, str] = {}

        def ask(field: str, call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:
                if getattr(error, "value", None) == NVML_ERROR_GPU_IS_LOST:
                    raise _Lost from error
                unknown[field] = self._why(error)
                return None

        self._take_faults()
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = count(ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle)))
        celsius = ask("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        sm_mhz = ask("sm_clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        memory_mhz = ask("memory_clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        reasons = ask("throttle", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        corrected = ask("ecc", lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, CORRECTED, VOLATILE))
        uncorrected = ask("ecc", lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE))
        processes = ask("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        unknown.pop("processes", None)  # which no card shows
        mine = [count(p.usedGpuMemory) for p in processes if p.pid == os.getpid()]
        self.process_bytes = sum(each for each in mine if each is not None)
        gpm = self._gpm.read()
        if self._gpm.reason:
            unknown["gpm"] = codec.clip(self._gpm.reason, MAX_UNKNOWN)
        pcie = self._pcie(gpm, ask)
        links = self._nvlink(gpm, ask)
        return self._row(
            utilization_percent=percent(getattr(use, "gpu", None)),
            memory_used_bytes=count(getattr(memory, "used", None)),
            memory_total_bytes=count(getattr(memory, "total", None)),
            power_w=None if power is None else power / 1000,
            temperature_c=number(celsius),
            sm_clock_mhz=number(sm_mhz),
            memory_clock_mhz=number(memory_mhz),
            dram_read_write_percent=percent(gpm.dram_percent),
            sm_active_percent=percent(gpm.sm_percent),
            tensor_active_percent=percent(gpm.tensor_percent),
            pcie_rx_bytes_per_s=pcie[0],
            pcie_tx_bytes_per_s=pcie[1],
            nvlink_rx_bytes_per_s=links[0],
            nvlink_tx_bytes_per_s=links[1],
            ecc_corrected=count(corrected),
            ecc_uncorrected=count(uncorrected),
            throttle=", ".join(text for bit, text in THROTTLES.items() if (count(reasons) or 0) & bit),
            fault=self.fault,
            error=unknown["memory"] if {"memory", "utilization", "power"} <= set(unknown) else "",
            unknown=unknown,
        )

    def _row(self, **readings: Any) -> m.GpuRow:
        card = self.card
        return m.GpuRow(t_ns=time.monotonic_ns(), uuid=card.uuid[:96], name=codec.clip(card.name), **readings)

    def _why(self, error: Exception) -> str:
        said = str(error) or type(error).__name__
        part = "a part of a card (MIG) does not tell it: " if self.card.is_part else ""
        return codec.clip(part + said, MAX_UNKNOWN)

    def _pcie(self, gpm: GpmReading, ask: Callable[..., Any]) -> tuple[float | None, float | None]:
        """Bytes a second to and from the card, by GPM where it is, else over the last 20 ms."""
        if gpm.pcie_rx is not None and gpm.pcie_tx is not None:
            return number(gpm.pcie_rx), number(gpm.pcie_tx)
        nvml, handle = self._nvml, self.card.handle
        rx = number(ask("pcie", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, RX)))
        tx = number(ask("pcie", lambda: nvml.nvmlDeviceGetPcieThroughput(handle, TX)))
        return None if rx is None else rx * 1000, None if tx is None else tx * 1000  # told in kB/s

    def _nvlink(self, gpm: GpmReading, ask: Callable[..., Any]) -> tuple[float | None, float | None]:
        """Bytes a second over all links, by GPM where it is, else by counters since the last reading."""
        if gpm.nvlink_rx is not None and gpm.nvlink_tx is not None:
            return number(gpm.nvlink_rx), number(gpm.nvlink_tx)

        def counted() -> tuple[int, int]:
            rx, tx = self._nvml.nvmlDeviceGetFieldValues(self.card.handle, [LINK_RX, LINK_TX])
            if rx.nvmlReturn or tx.nvmlReturn:
                raise LookupError("the card has no NVLink that counts")
            return rx.value.ullVal, tx.value.ullVal

        now_s, found = time.monotonic(), ask("nvlink", counted)
        before, self._links = self._links, None if found is None else (now_s, *found)
        if before is None or found is None or now_s <= before[0]:
            return None, None
        took_s = now_s - before[0]
        rx, tx = ((after - was) * KIB / took_s for after, was in zip(found, before[1:], strict=True))
        return number(rx), number(tx)

    def _take_faults(self) -> None:
        """Note the newest error that the driver reports of the card (Xid)."""
        for _ in range(MAX_EVENTS if self._events is not None else 0):
            try:
                xid = int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except Exception as error:  # most of the time: a timeout, there is none
                if getattr(error, "value", None) == NVML_ERROR_GPU_IS_LOST:
                    raise _Lost from error
                return
            self.fault = f"Xid {xid}: {XIDS[xid]}" if xid in XIDS else f"Xid {xid}"
            log.error("%s (%s): %s", self.card.name, self.card.uuid, self.fault)


def count(value: object) -> int | None:
    """A number of bytes or events, None for NVML's ways of saying that it does not know."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        return None
    return value


def number(value: object) -> float | None:
    """A finite reading of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value < 1e15 else None


def percent(value: object) -> float | None:
    """A share in percent, clipped to 100."""
    known = number(value)
    return None if known is None or known > 1e6 else min(known, 100.0)
