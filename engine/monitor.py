"""What the process and its graphics cards are doing, for telemetry.

NVML is asked on a thread of its own, because after a fault of the card a call may never return. No library
and no card are normal states with a reason, and are looked at again. Sources: NVML API reference;
`nvidia-ml-py`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from engine.card_reader import LOST, CardReader
from engine.cards import GPU, MIG, CannotMap, Card, find, list_cards, visible_cards
from ipc import codec
from ipc import messages as m

log = logging.getLogger("engine.monitor")

STALE_S = 3.0
MAX_RETRY_S = 160.0


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
        self._lost: dict[str, Card] = {}  # those that were told to be lost, by UUID
        self._unread: set[str] = set()  # cards that the driver tells nothing of, and why
        self._faults: dict[str, str] = {}  # the newest that the driver reported of each
        self._reason = "the driver has not answered yet"
        self._answered_s = time.monotonic()
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="gpu monitor", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end when its present call returns."""
        self._stop.set()

    def follow(self, uuid: str) -> None:
        """Read only this card, or part of a card: the one the engine computes on."""
        self._uuid = uuid if uuid.startswith((GPU, MIG)) else GPU + uuid

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
        tries = 0
        while not self._stop.is_set():
            before_s = time.monotonic()
            try:
                if self._session():
                    continue
            except Exception as error:
                self._rows, self._process_bytes = [], 0
                self._tell(f"no NVIDIA driver or card found ({error})")
            # A driver that is not there is asked less and less often.
            tries = 0 if time.monotonic() - before_s > self._retry_s else tries
            self._wait(min(self._retry_s * 2**tries, max(self._retry_s, MAX_RETRY_S)))
            tries = min(tries + 1, 10)

    def _tell(self, reason: str) -> None:
        if reason != self._reason:
            log.info("GPU readings are off: %s", reason)
        self._reason = reason

    def _wait(self, seconds: float) -> None:
        """Sleep, and count as answering meanwhile."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop.is_set():
            self._answered_s = time.monotonic()
            self._stop.wait(min(left_s, 1.0))
        self._answered_s = time.monotonic()

    def _session(self) -> bool:
        """Read until the end, or until the driver is to be asked anew because it has lost a card.

        Whether at once: as long as other cards are there, they are read on, and the lost one is looked for
        now and then.
        """
        nvml, begun_s = self._load(), time.monotonic()
        nvml.nvmlInit()
        readers: dict[str, CardReader] = {}
        try:
            cards = list_cards(nvml)
            if not cards:
                raise LookupError("the driver lists no card")
            unread = {card.error for card in cards if card.error}
            for told in unread - self._unread:
                log.warning("%s", told)
            self._unread = unread
            while not self._stop.is_set():
                chosen = self._chosen(cards)
                for card in chosen:
                    if card.uuid not in readers:
                        readers[card.uuid] = CardReader(nvml, card, self._faults.get(card.uuid, ""))
                read = [readers[card.uuid] for card in chosen]
                gone = self._gone(cards)
                self._rows = [reader.read() for reader in read] + [self._lost_row(card) for card in gone]
                self._process_bytes = sum(reader.process_bytes for reader in read)
                self._faults |= {reader.card.uuid: reader.fault for reader in read}
                lost = {card.uuid: card for card in gone}
                lost |= {reader.card.uuid: reader.card for reader in read if reader.lost}
                for uuid in lost.keys() - self._lost.keys():
                    log.error("%s: %s", uuid, LOST)
                self._lost = lost
                if lost or (self._uuid is not None and not chosen):
                    if all(reader.lost for reader in read):
                        return False
                    if time.monotonic() - begun_s > MAX_RETRY_S:
                        return True
                self._wait(self._interval_s)
            return False
        finally:
            for reader in readers.values():
                reader.close()
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def _gone(self, cards: Sequence[Card]) -> list[Card]:
        """Cards that were lost before and that the driver counts without telling anything of them."""
        if not any(card.error for card in cards):
            return []
        wanted = self._lost.values() if self._uuid is None else find([*self._lost.values()], self._uuid)
        return [card for card in wanted if not find(cards, card.uuid)]

    def _lost_row(self, card: Card) -> m.GpuRow:
        fault, name = self._faults.get(card.uuid, ""), codec.clip(card.name)
        return m.GpuRow(t_ns=time.monotonic_ns(), uuid=card.uuid[:96], name=name, error=LOST, fault=fault)

    def _chosen(self, cards: Sequence[Card]) -> list[Card]:
        uuid = self._uuid
        unread = [card.error for card in cards if card.error]
        if uuid is not None:
            # Of a part of a card torch tells the UUID too, without saying what it is of.
            found = find(cards, uuid) or find(cards, MIG + uuid.removeprefix(GPU))
            if not found:
                told = f"the driver lists no card {uuid}, which the engine computes on"
                self._tell("; ".join([told, *unread]))
            return found[:1]
        try:
            shown = visible_cards(cards, self._environ)
        except CannotMap as error:
            self._tell(str(error))
            return []
        known = [card for card in shown if not card.error]
        if not known:
            self._tell("; ".join(unread) if shown else "CUDA_VISIBLE_DEVICES hides every card")
        return known


def _with_error(row: m.GpuRow, error: str) -> m.GpuRow:
    return msgspec.structs.replace(row, error=error)
