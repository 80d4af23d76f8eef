"""What the process and its graphics cards are doing, for telemetry.

NVML is asked on a thread of its own, because after a fault of the card a call may never return; each
reading is unknown (None) on its own, because drivers support them one by one. No library and no card are
normal states with a reason. Sources: NVML API reference; `nvidia-ml-py`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from engine.gpm import GpmSampler
from ipc import codec
from ipc import messages as m

log = logging.getLogger("engine.monitor")

STALE_S = 3.0
_THROTTLES = {  # NVML API reference, nvmlClocksEventReasons
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """This process: resident bytes, and CPU use since the sample before (100: one core; None: first)."""

    rss_bytes: int
    cpu_percent: float | None


class ProcessSampler:
    """Samples this process; CPU use at most once a second, since shorter spans are noise."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)
        self._cpu_percent: float | None = None
        self._at_s = time.monotonic()

    def sample(self) -> ProcessSample:
        """Memory now, and the last known CPU use."""
        now_s = time.monotonic()
        if now_s - self._at_s >= 1.0:
            self._at_s = now_s
            self._cpu_percent = self._process.cpu_percent(None)
        return ProcessSample(self._process.memory_info().rss, self._cpu_percent)


@dataclass(frozen=True, slots=True)
class Card:
    """One card as NVML numbers them, in PCI order."""

    uuid: str
    name: str
    handle: Any = None


class CannotMap(Exception):
    """``CUDA_VISIBLE_DEVICES`` does not say for certain which cards are meant."""


def visible_cards(cards: Sequence[Card], environ: Mapping[str, str]) -> list[Card]:
    """The cards that CUDA shows this process, in its order. Raises `CannotMap`.

    NVML ignores ``CUDA_VISIBLE_DEVICES``. Numbers there are in PCI order only under
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; an entry that names no card hides itself and all that follow.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(cards)
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({c.name for c in cards}) <= 1
    shown: list[Card] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.startswith("MIG-"):
            raise CannotMap(f"CUDA_VISIBLE_DEVICES names {entry}, a part of a card; NVML reads whole cards")
        if entry.isdecimal():
            if not in_pci_order:
                raise CannotMap(
                    f"CUDA_VISIBLE_DEVICES={wanted} counts in CUDA's own order and the cards differ; "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
            if int(entry) >= len(cards):
                break
            shown.append(cards[int(entry)])
            continue
        fitting = [card for card in cards if entry.startswith("GPU-") and card.uuid.startswith(entry)]
        if len(fitting) > 1:
            raise CannotMap(f"CUDA_VISIBLE_DEVICES names {entry}, with which {len(fitting)} cards begin")
        if not fitting:
            break
        shown.append(fitting[0])
    return shown


class GpuMonitor:
    """Reads the cards once a second on its own thread; `rows` never waits.

    ``load`` gives the ``pynvml`` module or raises; tests put a driver of their own there.
    """

    def __init__(
        self,
        *,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        environ: Mapping[str, str] = os.environ,
        interval_s: float = 1.0,
        retry_s: float = 10.0,
    ) -> None:
        self._load = load
        self._environ = environ
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._uuid: str | None = None
        self._rows: list[m.GpuRow] = []
        self._process_bytes = 0
        self._reason = "the driver has not answered yet"
        self._answered_s = time.monotonic()
        self._stop = threading.Event()
        self._gpm: dict[str, GpmSampler] = {}

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="gpu monitor", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end when its present call returns."""
        self._stop.set()

    def follow(self, uuid: str) -> None:
        """Read only this card, the one the engine computes on."""
        self._uuid = uuid

    def process_bytes(self) -> int:
        """Device memory of this process, 0 if unknown."""
        return self._process_bytes

    def rows(self) -> list[m.GpuRow]:
        """The newest readings. Without cards one row without ``uuid`` whose ``error`` says why.

        When the driver has not answered for 3 s, the last readings with an ``error`` that says since when.
        """
        silent_s = time.monotonic() - self._answered_s
        rows = self._rows
        if silent_s > STALE_S:
            error = f"the driver has not answered for {silent_s:.0f} s; these readings are stale"
            rows = rows or [m.GpuRow(t_ns=time.monotonic_ns(), uuid="", name="")]
            return [_with_error(row, error) for row in rows]
        if not rows:
            return [m.GpuRow(t_ns=time.monotonic_ns(), uuid="", name="", error=codec.clip(self._reason))]
        return rows

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._session()
            except Exception as error:
                self._rows, self._process_bytes = [], 0
                reason = f"no NVIDIA driver or card found ({error})"
                if reason != self._reason:
                    log.info("GPU readings are off: %s", reason)
                self._reason = reason
            self._wait(self._retry_s)

    def _wait(self, seconds: float) -> None:
        """Sleep, and count as answering meanwhile."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop.is_set():
            self._answered_s = time.monotonic()
            self._stop.wait(min(left_s, 1.0))
        self._answered_s = time.monotonic()

    def _session(self) -> None:
        nvml = self._load()
        nvml.nvmlInit()
        try:
            cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
            if not cards:
                raise LookupError("the driver lists no card")
            while not self._stop.is_set():
                self._rows = [self._read(nvml, card) for card in self._chosen(cards)]
                self._wait(self._interval_s)
        finally:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def _chosen(self, cards: Sequence[Card]) -> list[Card]:
        uuid = self._uuid
        if uuid is not None:
            return [card for card in cards if card.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-")]
        try:
            shown = visible_cards(cards, self._environ)
        except CannotMap as error:
            self._reason = str(error)
            return []
        if not shown:
            self._reason = "CUDA_VISIBLE_DEVICES hides every card"
        return shown

    def _read(self, nvml: Any, card: Card) -> m.GpuRow:
        errors: list[str] = []

        def ask(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:
                errors.append(str(error))
                return None

        handle = card.handle
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        celsius = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        sm_mhz = ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        memory_mhz = ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        mine = [count(p.usedGpuMemory) for p in processes if p.pid == os.getpid()]
        self._process_bytes = sum(each for each in mine if each is not None)
        gpm = self._gpm.setdefault(card.uuid, GpmSampler(nvml, handle)).read()
        nothing = memory is None and use is None and power_mw is None
        power = count(power_mw)
        return m.GpuRow(
            t_ns=time.monotonic_ns(),
            uuid=card.uuid[:96],
            name=codec.clip(card.name),
            utilization_percent=percent(getattr(use, "gpu", None)),
            memory_used_bytes=count(getattr(memory, "used", None)),
            memory_total_bytes=count(getattr(memory, "total", None)),
            power_w=None if power is None else power / 1000,
            temperature_c=number(celsius),
            sm_clock_mhz=number(sm_mhz),
            memory_clock_mhz=number(memory_mhz),
            dram_read_write_percent=percent(gpm.dram_percent),
            sm_active_percent=percent(gpm.sm_percent),
            throttle=", ".join(text for bit, text in _THROTTLES.items() if (count(reasons) or 0) & bit),
            error=codec.clip(errors[0]) if nothing and errors else "",
        )


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


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Card(_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), handle)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _with_error(row: m.GpuRow, error: str) -> m.GpuRow:
    return m.GpuRow(
        **{name: getattr(row, name) for name in row.__struct_fields__ if name != "error"}, error=error
    )
