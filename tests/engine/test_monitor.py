"""Readings of cards, with a driver of the test's own at the edge: what NVML would answer, or not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.card_reader import LOST, CardReader, count, number, percent
from engine.cards import CannotMap, Card, list_cards, visible_cards
from engine.gpm import GpmSampler
from engine.monitor import GpuMonitor, ProcessSampler
from ipc import codec
from ipc import messages as m
from tests.engine.harness import wait_until

GIB = 1 << 30
BIG = Card("GPU-aaaa1111-0000", "H200")
SMALL = Card("GPU-aabb2222-0000", "T4")
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class NvmlError(Exception):
    """As pynvml raises it: 3 not supported, 6 not found, 10 timeout, 15 the card is lost."""

    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 15: "GPU is lost"}.get(value, f"error {value}"))
        self.value = value


class Driver:
    """NVML with two cards of 80 and 10 GiB; ``faults`` are calls that fail, ``hang`` lets none return."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.cards = [BIG, SMALL]
        self.parts: list[Card] = []  # of the first card, handles from 100 on
        self.xids: list[int] = []
        self.link_kib = 0
        self.inits = self.sets = 0
        self.faults: dict[str, Exception] = {}
        self.unlisted: set[int] = set()  # cards that fell off the bus: not even a handle is given for them
        self.hang = threading.Event()
        self.hang.set()
        self.process_memory: Any = 3 * GIB

    def nvmlInit(self) -> None:
        self.inits += 1
        self._answer("nvmlInit", None)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.unlisted:
            raise NvmlError(15)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._card(handle).uuid

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self._card(handle).name.encode()

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not self.parts or handle:
            raise NvmlError(3)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index >= 2 * len(self.parts) or index % 2 == 0:  # numbers have gaps
            raise NvmlError(6)
        return 100 + index // 2

    def nvmlDeviceGetGpuInstanceId(self, handle: int) -> int:
        assert handle >= 100
        return 7

    def nvmlEventSetCreate(self) -> list[int]:
        self.sets += 1
        return []

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: Any) -> None:
        assert (handle, types) in {(0, 8), (1, 8)}, "of a whole card"
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "readings never wait"
        if self.xids and events == [0]:
            return SimpleNamespace(eventData=self.xids.pop(0))
        raise NvmlError(10)

    def nvmlEventSetFree(self, events: Any) -> None:
        self.sets -= 1

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total = 20 * GIB if handle >= 100 else (80, 10)[handle] * GIB
        return self._answer("memory", SimpleNamespace(used=total // 2, total=total))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._whole(handle)
        assert counter == 0, "since the driver was loaded"
        return int(self._answer("ecc", (7, 2)[kind]))

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        self._whole(handle)
        return int(self._answer("pcie", (3000, 5000)[counter]))  # kB/s sent, received

    def nvmlDeviceGetFieldValues(self, handle: int, ids: list[tuple[int, int]]) -> Any:
        self._whole(handle)
        self.link_kib += 1 << 20
        told = {139: self.link_kib, 138: 2 * self.link_kib}
        assert {scope for _, scope in ids} == {0xFFFFFFFF}, "over all links"
        value = [SimpleNamespace(ullVal=told[number]) for number, _ in ids]
        return [SimpleNamespace(nvmlReturn=self._answer("links", 0), value=each) for each in value]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._whole(handle)
        return self._answer("use", SimpleNamespace(gpu=140, memory=3))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        self._whole(handle)
        return self._answer("power", 250_500)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        return self._answer("temperature", 61)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> Any:
        return self._answer("clock", 1000 * clock)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> Any:
        return self._answer("reasons", 0x4 | 0x40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.process_memory)
        return self._answer("processes", [mine, SimpleNamespace(pid=1, usedGpuMemory=GIB)])

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return self._answer("gpm", SimpleNamespace(isSupportedDevice=0))

    def _card(self, handle: int) -> Card:
        return self.parts[handle - 100] if handle >= 100 else self.cards[handle]

    def _whole(self, handle: int) -> int:
        if handle >= 100:
            raise NvmlError(3)
        return handle

    def _answer(self, name: str, value: Any) -> Any:
        self.hang.wait()
        if name in self.faults:
            raise self.faults[name]
        return value


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.hang.set()


@pytest.fixture
def start() -> Iterator[Callable[..., GpuMonitor]]:
    monitors: list[GpuMonitor] = []

    def make(load: Callable[[], Any], **environ: str) -> GpuMonitor:
        monitor = GpuMonitor(load=load, environ=environ, interval_s=0.02, retry_s=0.05)
        monitors.append(monitor)
        monitor.start()
        return monitor

    yield make
    for monitor in monitors:
        monitor.stop()


def _read(monitor: GpuMonitor) -> list[m.GpuRow]:
    wait_until(lambda: bool(monitor.rows()[0].uuid), "the first reading")
    rows = monitor.rows()
    for row in rows:
        assert codec.unpack_telemetry(codec.pack_telemetry(1, row))[2] == row
    return rows


def test_readings_of_every_card_in_their_units(driver: Driver, start: Callable[..., GpuMonitor]) -> None:
    big, small = _read(start(lambda: driver))
    assert (big.uuid, big.name) == (BIG.uuid, "H200")
    assert (big.memory_used_bytes, big.memory_total_bytes) == (40 * GIB, 80 * GIB)
    assert small.memory_total_bytes == 10 * GIB
    assert (big.power_w, big.temperature_c, big.sm_clock_mhz) == (250.5, 61.0, 1000.0)
    assert big.throttle == "power cap, hardware thermal"
    assert (big.pcie_rx_bytes_per_s, big.pcie_tx_bytes_per_s) == (5e6, 3e6)
    assert (big.ecc_corrected, big.ecc_uncorrected) == (7, 2)
    assert big.fault == ""
    assert big.unknown == {"gpm": "this card has no GPM"}
    assert big.utilization_percent == 100.0, "clipped"
    assert big.error == ""


@pytest.mark.parametrize("memory", [None, (1 << 64) - 1, -1])
def test_what_the_driver_does_not_know_is_unknown_and_nothing_else(
    driver: Driver, start: Callable[..., GpuMonitor], memory: Any
) -> None:
    """D02: WSL2 answers None or the largest number for a process's memory."""
    driver.process_memory = memory
    monitor = start(lambda: driver)
    rows = _read(monitor)
    assert monitor.process_bytes() == 0
    assert rows[0].memory_used_bytes == 40 * GIB


def test_one_failing_call_costs_one_reading(driver: Driver, start: Callable[..., GpuMonitor]) -> None:
    """D02: each reading is unknown on its own."""
    driver.faults = {"power": NvmlError(3), "gpm": RuntimeError("no"), "use": OSError("x")}
    driver.faults |= {"ecc": NvmlError(3), "pcie": NvmlError(3), "links": NvmlError(3)}
    row = _read(start(lambda: driver))[0]
    assert row.unknown == {
        "power": "Not Supported", "gpm": "no", "utilization": "x", "ecc": "Not Supported",
        "pcie": "Not Supported", "nvlink": "Not Supported",
    }  # fmt: skip
    assert (row.ecc_corrected, row.pcie_rx_bytes_per_s, row.nvlink_rx_bytes_per_s) == (None, None, None)
    assert (row.power_w, row.utilization_percent, row.dram_read_write_percent) == (None, None, None)
    assert row.memory_used_bytes == 40 * GIB
    assert row.error == ""


def test_a_long_error_of_the_driver_is_cut_to_what_a_message_holds(
    driver: Driver, start: Callable[..., GpuMonitor]
) -> None:
    driver.faults = {"gpm": RuntimeError("x" * 5000), "power": RuntimeError("y" * 5000)}
    row = _read(start(lambda: driver))[0]
    assert row.unknown["gpm"].endswith("x…")
    assert row.unknown["power"].endswith("y…")


def test_no_library_is_a_state_with_a_reason_and_is_tried_again(
    driver: Driver, start: Callable[..., GpuMonitor]
) -> None:
    """D04: nothing is raised, the reason is told, and a driver that appears later is used."""
    there = threading.Event()

    def load() -> Driver:
        if not there.is_set():
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return driver

    monitor = start(load)
    wait_until(lambda: "libnvidia-ml" in monitor.rows()[0].error, "the reason is known")
    (row,) = monitor.rows()
    assert row.uuid == ""
    assert row.error.startswith("no NVIDIA driver or card found")
    there.set()
    assert len(_read(monitor)) == 2


def test_a_real_machine_without_or_with_a_card_answers(start: Callable[..., GpuMonitor]) -> None:
    """D04: the real library, whatever it finds here."""
    monitor = GpuMonitor(interval_s=0.02)
    monitor.start()
    wait_until(lambda: "not answered yet" not in monitor.rows()[0].error, "an answer")
    row = monitor.rows()[0]
    assert bool(row.uuid) is not bool(row.error)
    monitor.stop()


def test_a_driver_that_never_answers_makes_readings_stale(
    driver: Driver, start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D07: asking for rows never waits, and what is shown says how old it is."""
    monkeypatch.setattr("engine.monitor.STALE_S", 0.2)
    monitor = start(lambda: driver)
    fresh = _read(monitor)
    driver.hang.clear()
    wait_until(lambda: "stale" in monitor.rows()[0].error, "staleness is seen")
    stale = monitor.rows()[0]
    assert stale.memory_used_bytes == fresh[0].memory_used_bytes
    assert stale.t_ns <= time.monotonic_ns()
    driver.hang.set()
    wait_until(lambda: monitor.rows()[0].error == "", "it recovers when the call returns")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [BIG, SMALL]),
        ("0", [BIG]),
        ("1", [SMALL]),
        ("1,0", [SMALL, BIG]),
        ("1, 0x", [SMALL, BIG]),
        ("+1", [SMALL]),
        ("1gpu,0", [SMALL, BIG]),
        ("GPU-aabb,0", [SMALL]),  # the first entry says of which kind all are
        ("0,GPU-aabb", [BIG]),
        ("0,7,1", [BIG]),  # an entry that names no card hides all that follow
        ("", []),
        ("-1", []),
        ("GPU-aaaa1111-0000", [BIG]),
        ("GPU-aab,GPU-aaaa", [SMALL, BIG]),
        ("GPU-ffff", []),
        ("MIG-aaaa", []),
        ("nonsense", []),
    ],
)
def test_the_cards_shown_are_those_that_cuda_shows(wanted: str | None, expected: list[Card]) -> None:
    """D05: CUDA_VISIBLE_DEVICES=1 must never show the memory of card 0."""
    environ = PCI | ({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})
    assert visible_cards([BIG, SMALL], environ) == expected


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (PCI | {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, "2 cards begin; write the whole UUID"),
        (PCI | {"CUDA_VISIBLE_DEVICES": "1, 1"}, "names a card twice"),
        (PCI | {"CUDA_VISIBLE_DEVICES": "GPU-aab,GPU-aabb"}, "names a card twice"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "PCI_BUS_ID"),  # CUDA's own order puts the fastest first
    ],
)
def test_what_cannot_be_mapped_is_said(
    environ: dict[str, str], reason: str, driver: Driver, start: Callable[..., GpuMonitor]
) -> None:
    """D05: rather no card than the wrong one."""
    with pytest.raises(CannotMap, match=reason):
        visible_cards([BIG, SMALL], environ)
    monitor = start(lambda: driver, **environ)
    wait_until(lambda: reason in monitor.rows()[0].error, "the reason is shown")
    assert monitor.rows()[0].uuid == ""


@pytest.mark.parametrize("environ", [{}, PCI | {"CUDA_VISIBLE_DEVICES": "0"}])
def test_of_a_divided_card_cuda_shows_the_first_part(environ: dict[str, str]) -> None:
    parts = (Card("MIG-1", "H200 (MIG)"), Card("MIG-2", "H200 (MIG)"))
    assert visible_cards([Card("GPU-1", "H200", parts=parts)], environ) == [parts[0]]


def test_equal_cards_may_be_counted_in_any_order() -> None:
    cards = [Card("GPU-1", "T4"), Card("GPU-2", "T4")]
    assert visible_cards(cards, {"CUDA_VISIBLE_DEVICES": "1"}) == [cards[1]]


def test_the_engines_own_card_is_followed_by_its_uuid(
    driver: Driver, start: Callable[..., GpuMonitor]
) -> None:
    """D05: once the engine computes, its device's identity decides, not an index."""
    monitor = start(lambda: driver, **PCI, CUDA_VISIBLE_DEVICES="0")
    assert [row.uuid for row in _read(monitor)] == [BIG.uuid]
    monitor.follow(SMALL.uuid.removeprefix("GPU-"))
    wait_until(lambda: monitor.rows()[0].uuid == SMALL.uuid, "the other card is shown")
    monitor.follow("GPU-ffff")
    wait_until(lambda: "lists no card GPU-ffff" in monitor.rows()[0].error, "it is named")


PARTS = [Card("MIG-11112222-0000", "H200"), Card("MIG-33334444-0000", "H200")]


def test_a_part_of_a_card_tells_what_it_can(driver: Driver, start: Callable[..., GpuMonitor]) -> None:
    """D05: CUDA shows a process one part of a card that MIG divides; the rest of the card is not its own."""
    driver.parts = PARTS
    whole, other = list_cards(driver)
    assert [part.uuid for part in whole.parts] == [part.uuid for part in PARTS]
    assert other.parts == ()
    monitor = start(lambda: driver, CUDA_VISIBLE_DEVICES="MIG-3333")
    (row,) = _read(monitor)
    assert (row.uuid, row.name) == ("MIG-33334444-0000", "H200 (MIG)")
    assert (row.memory_used_bytes, row.memory_total_bytes) == (10 * GIB, 20 * GIB)
    assert (row.utilization_percent, row.power_w, row.ecc_corrected) == (None, None, None)
    assert row.unknown["power"] == "a part of a card (MIG) does not tell it: Not Supported"
    assert row.error == ""
    monitor.follow("MIG-1111")
    wait_until(lambda: monitor.rows()[0].uuid == PARTS[0].uuid, "the part that computes is shown")
    monitor.follow(PARTS[1].uuid.removeprefix("MIG-"))
    wait_until(lambda: monitor.rows()[0].uuid == PARTS[1].uuid, "as torch names it, without a kind")


def test_errors_that_the_driver_reports_are_told(
    driver: Driver, start: Callable[..., GpuMonitor], caplog: pytest.LogCaptureFixture
) -> None:
    driver.xids = [31, 999, 48]
    monitor = start(lambda: driver)
    big, small = _read(monitor)
    assert big.fault == "Xid 48: memory errors that could not be corrected (ECC)"
    assert small.fault == ""
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [text.partition("): ")[2].partition(":")[0] for text in told] == ["Xid 31", "Xid 999", "Xid 48"]


def test_a_card_that_fell_off_the_bus_is_reported_and_looked_for_again(
    driver: Driver,
    start: Callable[..., GpuMonitor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What follows it is nobody's figure; the driver is asked anew, for it may come back."""
    monkeypatch.setattr("engine.monitor.MAX_RETRY_S", 0.05)
    monitor = start(lambda: driver)
    monitor.follow(BIG.uuid)
    _read(monitor)
    driver.xids = [79]
    driver.faults = {"memory": NvmlError(15)}
    wait_until(lambda: monitor.rows()[0].error == LOST, "it is reported")
    (row,) = monitor.rows()
    assert (row.uuid, row.memory_used_bytes) == (BIG.uuid, None)
    assert row.fault == "Xid 79: the card has fallen off the bus"
    begun = driver.inits
    wait_until(lambda: driver.inits > begun + 1, "the driver is asked anew")
    told = [record.getMessage() for record in caplog.records if LOST in record.getMessage()]
    assert told == [f"{BIG.uuid}: {LOST}"], "once, not at each try"
    assert monitor.rows()[0].fault.startswith("Xid 79"), "what was reported before stays"
    driver.cards = [SMALL]
    wait_until(lambda: "lists no card" in monitor.rows()[0].error, "a driver that forgot it")
    driver.cards, driver.faults = [BIG, SMALL], {}
    wait_until(lambda: monitor.rows()[0].memory_used_bytes == 40 * GIB, "it came back")


def test_a_lost_card_that_has_no_handle_any_more_stays_in_the_list(
    driver: Driver, start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one the engine computes on: told as lost at each retry, not as a machine without a driver."""
    monkeypatch.setattr("engine.monitor.MAX_RETRY_S", 0.05)
    monitor = start(lambda: driver)
    monitor.follow(BIG.uuid)
    _read(monitor)
    driver.faults, driver.unlisted = {"memory": NvmlError(15)}, {0}
    wait_until(lambda: monitor.rows()[0].error == LOST, "it is reported")
    begun = driver.inits
    while driver.inits < begun + 3:
        (row,) = monitor.rows()
        assert (row.uuid, row.name, row.error) == (BIG.uuid, "H200", LOST)
        time.sleep(0.005)
    driver.faults, driver.unlisted = {}, set()
    wait_until(lambda: monitor.rows()[0].memory_used_bytes == 40 * GIB, "it came back")


def test_a_lost_card_hides_no_other(
    driver: Driver, start: Callable[..., GpuMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost before anybody looked, or under way: the others are read as often as ever."""
    monkeypatch.setattr("engine.monitor.MAX_RETRY_S", 1000.0)
    driver.unlisted = {0}
    monitor = start(lambda: driver)
    (row,) = _read(monitor)
    assert (row.uuid, row.error) == (SMALL.uuid, "")
    wait_until(lambda: monitor.rows()[0].t_ns > row.t_ns, "it is read again")
    assert driver.inits == 1
    monitor.follow(BIG.uuid)
    wait_until(lambda: "card 0 cannot be read: GPU is lost" in monitor.rows()[0].error, "that is the reason")

    other = Driver()
    lost = other.nvmlDeviceGetPowerUsage

    def power(handle: int) -> Any:
        if handle == 0:
            raise NvmlError(15)
        return lost(handle)

    monkeypatch.setattr(other, "nvmlDeviceGetPowerUsage", power)
    monitor = start(lambda: other)
    big, small = _read(monitor)
    assert (big.error, small.error, small.memory_used_bytes) == (LOST, "", 5 * GIB)
    wait_until(lambda: monitor.rows()[1].t_ns > small.t_ns, "it is read on")
    assert other.inits == 1


def test_a_card_that_cannot_be_read_keeps_its_number() -> None:
    """D05: CUDA_VISIBLE_DEVICES=1 is the second card, though nothing is known of the first."""
    gone = Card("", "", error="card 0 cannot be read: GPU is lost")
    assert visible_cards([gone, SMALL], PCI | {"CUDA_VISIBLE_DEVICES": "1"}) == [SMALL]
    with pytest.raises(CannotMap, match=r"card 0 cannot be read: GPU is lost; set CUDA_DEVICE_ORDER=PCI"):
        visible_cards([gone, SMALL], {"CUDA_VISIBLE_DEVICES": "1"})


def test_nvlinks_are_read_by_their_counters(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.card_reader.time.monotonic", lambda: now[0])
    reader = CardReader(driver, list_cards(driver)[0])
    assert reader.read().nvlink_rx_bytes_per_s is None, "one reading is no rate"
    now[0] += 2.0
    row = reader.read()
    assert (row.nvlink_rx_bytes_per_s, row.nvlink_tx_bytes_per_s) == (GIB / 2, GIB)
    reader.close()
    assert driver.sets == 0, "what the driver holds is given back"


def test_a_driver_that_is_not_there_is_asked_less_and_less_often() -> None:
    waits: list[float] = []

    def load() -> Driver:
        raise OSError("no library")

    monitor = GpuMonitor(load=load, environ={}, retry_s=10.0)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 7:
            monitor.stop()

    monitor._wait = wait  # type: ignore[method-assign]
    monitor._run()
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]


GPM = {2: 10.0, 5: 4.0, 10: 55.0, 20: 1.0, 21: 2.0, 60: 3.0, 61: 0.5}  # MiB/s from 20 on


class GpmDriver(Driver):
    """A card with performance monitoring: utilization rises by 10 percent a sample."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        super().__init__()
        self.samples = self.freed = 0
        self.dram_status = 0

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(n=self.samples)

    def nvmlGpmSampleGet(self, handle: int, sample: Any) -> Any:
        return sample

    def nvmlGpmMigSampleGet(self, handle: int, instance: int, sample: Any) -> Any:
        assert (handle, instance) == (0, 7)
        return self.nvmlGpmSampleGet(handle, sample)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(98)])

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.sample2.n == query.sample1.n + 1
        for metric in query.metrics[: query.numMetrics]:
            metric.value = GPM[metric.metricId]
        query.metrics[1].nvmlReturn = self.dram_status


def test_gpm_averages_between_two_samples_and_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = GpmDriver()
    monkeypatch.setattr("engine.gpm._MIN_GAP_S", 0.0)
    sampler = GpmSampler(driver, Card("GPU-1", "H200", 0))
    assert sampler.read().dram_percent is None, "one sample is no average"
    reading = sampler.read()
    assert (reading.sm_percent, reading.dram_percent, reading.tensor_percent) == (10.0, 55.0, 4.0)
    assert (reading.pcie_tx, reading.pcie_rx) == (1 << 20, 2 << 20)
    assert (reading.nvlink_rx, reading.nvlink_tx) == (3 << 20, 1 << 19)
    driver.dram_status = 3
    assert (sampler.read().dram_percent, sampler.read().sm_percent) == (None, 10.0)
    assert driver.freed == driver.samples - 1
    sampler.close()
    assert driver.freed == driver.samples


def test_gpm_reads_a_part_of_a_card_through_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = GpmDriver()
    driver.parts = PARTS
    monkeypatch.setattr("engine.gpm._MIN_GAP_S", 0.0)
    reader = CardReader(driver, list_cards(driver)[0].parts[0])
    reader.read()
    row = reader.read()
    assert (row.tensor_active_percent, row.sm_active_percent) == (4.0, 10.0)
    assert (row.pcie_rx_bytes_per_s, row.nvlink_tx_bytes_per_s) == (2 << 20, 1 << 19)


def test_gpm_that_fails_costs_one_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings come back after a timeout, and no average reaches over it."""
    driver = GpmDriver()
    monkeypatch.setattr("engine.gpm._MIN_GAP_S", 0.0)
    reader = CardReader(driver, list_cards(driver)[0])
    reader.read()
    assert reader.read().dram_read_write_percent == 55.0
    monkeypatch.setattr(driver, "nvmlGpmSampleGet", failing(10))
    row = reader.read()
    assert (row.dram_read_write_percent, row.unknown["gpm"]) == (None, "error 10")
    monkeypatch.undo()
    monkeypatch.setattr("engine.gpm._MIN_GAP_S", 0.0)
    row = reader.read()
    assert (row.dram_read_write_percent, row.unknown) == (None, {}), "one sample is no average"
    assert reader.read().dram_read_write_percent == 55.0
    reader.close()
    assert driver.freed == driver.samples


@pytest.mark.parametrize("code", [3, 4, 13])
def test_gpm_that_there_is_none_of_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    driver = GpmDriver()
    sampler = GpmSampler(driver, Card("GPU-1", "H200", 0))
    monkeypatch.setattr(driver, "nvmlGpmSampleGet", failing(code))
    assert sampler.read().dram_percent is None
    monkeypatch.undo()
    sampler.read()
    assert (driver.samples, driver.freed) == (1, 1)
    assert sampler.reason


def failing(code: int) -> Callable[..., None]:
    def fail(handle: int, sample: Any) -> None:
        raise NvmlError(code)

    return fail


def test_numbers_from_outside_are_checked() -> None:
    assert [count(v) for v in (5, 0, -1, None, (1 << 64) - 1, 2.5, True)] == [
        5,
        0,
        None,
        None,
        None,
        None,
        None,
    ]
    assert [number(v) for v in (5, 2.5, float("nan"), float("inf"), -1, None)] == [5.0, 2.5, *[None] * 4]
    assert [percent(v) for v in (40, 101, 4294967295, None)] == [40.0, 100.0, None, None]


def test_the_process_sampler_sees_this_process() -> None:
    sampler = ProcessSampler()
    sample = sampler.sample()
    assert sample.rss_bytes > 1 << 20
    assert sample.cpu_percent is None, "a share of time needs a span of time"
