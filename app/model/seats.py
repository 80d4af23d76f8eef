"""`SeatBook`: which request held which place and when, for a picture of the batch over time.

A running request takes the lowest seat that is free; one that waits, at first or after a preemption, takes
the lowest free line of the queue. What happened is kept as bars, each a stretch of time in one state.
Arrival, first step, first token, preemption and end are the engine's own stamps. When a preempted request
is back is told by how long it waited; when it has caught up, only by the next row of it, some tenth of a
second late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.model.requests import Key
from app.model.series import F64, Ring
from ipc.messages import Preempted, RequestRow

WAITING, PREFILL, DECODE, RECOMPUTE, SWAPPED = range(
    5
)  # states of a bar; the last two wait after a preemption
IN_QUEUE = (WAITING, RECOMPUTE, SWAPPED)
GOOD, CANCELLED, FAILED = range(3)  # how a request ended
_NS, _US = 1e-9, 1e-6
_CLOSE_S = 1e-3  # a place counts as free for who comes at most so much before it was left
_COLUMNS = ("seen_s", "t0_s", "t1_s", "lane", "kind", "engine", "rid")
_ENDS = ("seen_s", "t_s", "lane", "end")


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars as arrays [n] beside each other, and the ends [m] of those that left a seat."""

    t0_s: F64
    t1_s: F64
    lane: NDArray[np.int64]  # of the seats or, for the states of `IN_QUEUE`, of the queue
    kind: NDArray[np.int64]
    engine: NDArray[np.int64]
    rid: NDArray[np.int64]
    end_t_s: F64
    end_lane: NDArray[np.int64]
    end: NDArray[np.int64]


class _Lanes:
    """Numbered places; for each free one, since when."""

    def __init__(self) -> None:
        self._free_s: list[float | None] = []

    def take(self, t_s: float) -> int:
        for lane, free_s in enumerate(self._free_s):
            if free_s is not None and free_s <= t_s + _CLOSE_S:
                self._free_s[lane] = None
                return lane
        self._free_s.append(None)
        return len(self._free_s) - 1

    def leave(self, lane: int, t_s: float) -> None:
        self._free_s[lane] = t_s


@dataclass(slots=True)
class _Place:
    """Where a live request is now."""

    kind: int
    since_s: float
    lane: int
    preempted_us: int = 0
    swap_n: int = 0
    had_first: bool = False


@dataclass(slots=True)
class SeatBook:
    """See the module. All times are seconds of the console's clock."""

    capacity: int = 65_536
    _bars: Ring = field(init=False)
    _ends: Ring = field(init=False)
    _live: dict[Key, _Place] = field(default_factory=dict)
    _seats: _Lanes = field(default_factory=_Lanes)
    _queue: _Lanes = field(default_factory=_Lanes)
    _now_s: float = 0.0

    def __post_init__(self) -> None:
        self._bars = Ring(_COLUMNS, self.capacity)
        self._ends = Ring(_ENDS, self.capacity)

    # --- taking in -------------------------------------------------------------------------------

    def take(
        self,
        engine: int,
        rows: Iterable[RequestRow],
        events: Iterable[Preempted],
        offset_ns: int,
        now_s: float,
    ) -> None:
        """New rows and preemptions of an engine, no row of a request that has ended before.

        ``offset_ns`` is the engine's clock minus ours.
        """
        self._now_s = now_s
        by_rid: dict[int, list[Preempted]] = {}
        for event in events:
            by_rid.setdefault(event.rid, []).append(event)
        for row in rows:
            # What the result cache answered never had a place.
            if not row.result_cached:
                self._take_row((engine, row.rid), row, by_rid.pop(row.rid, []), offset_ns)
        for rid, left in by_rid.items():
            place = self._live.get((engine, rid))
            if place is not None:
                for event in left:
                    self._preempt((engine, rid), place, (event.t_ns - offset_ns) * _NS, event.mode == "swap")

    def _take_row(self, key: Key, row: RequestRow, events: Sequence[Preempted], offset_ns: int) -> None:
        place = self._live.get(key)
        if place is None:
            arrive_s = (row.arrive_ns - offset_ns) * _NS
            place = self._live[key] = _Place(WAITING, arrive_s, self._queue.take(arrive_s))
        for event in events:
            at_s = (event.t_ns - offset_ns) * _NS
            self._stamps(key, place, row, offset_ns, at_s)
            self._preempt(key, place, at_s, event.mode == "swap")
        self._resume(key, place, row)
        self._stamps(key, place, row, offset_ns, float("inf"))
        if row.state == "preempted" and place.kind in (PREFILL, DECODE):  # its event was lost
            self._preempt(key, place, self._now_s, row.swap_n > place.swap_n)
        place.swap_n = row.swap_n
        if row.state == "finished":
            end_s = self._now_s if row.end_ns is None else (row.end_ns - offset_ns) * _NS
            self._end(key, place, end_s, _kind_of_end(row))
        elif place.kind == PREFILL and place.had_first and row.state == "decode":
            last_s = 0.0 if row.last_ns is None else (row.last_ns - offset_ns) * _NS
            self._change(key, place, DECODE, last_s if last_s > place.since_s else self._now_s)

    def _stamps(self, key: Key, place: _Place, row: RequestRow, offset_ns: int, until_s: float) -> None:
        """Go through what the row's stamps tell of the time before ``until_s``."""
        if place.kind == WAITING and row.sched_ns is not None:
            at_s = (row.sched_ns - offset_ns) * _NS
            if at_s <= until_s:
                self._change(key, place, PREFILL, at_s)
        if place.kind == PREFILL and row.first_ns is not None and not place.had_first:
            at_s = (row.first_ns - offset_ns) * _NS
            if at_s <= until_s:
                place.had_first = True
                self._change(key, place, DECODE, at_s)

    def _preempt(self, key: Key, place: _Place, at_s: float, swapped: bool) -> None:
        if place.kind in (PREFILL, DECODE):
            self._change(key, place, SWAPPED if swapped else RECOMPUTE, at_s)

    def _resume(self, key: Key, place: _Place, row: RequestRow) -> None:
        """It is back if a row says so, or if it ended with tokens since."""
        back = row.state in ("prefill", "decode") or (
            row.state == "finished" and row.finish in ("stop", "length")
        )
        waited_s = (row.preempted_us - place.preempted_us) * _US
        if place.kind in (RECOMPUTE, SWAPPED) and back:
            at_s = min(self._now_s, place.since_s + waited_s) if waited_s > 0 else self._now_s
            decodes = row.state == "decode" and place.had_first
            self._change(key, place, DECODE if decodes else PREFILL, at_s)
        place.preempted_us = row.preempted_us

    def _change(self, key: Key, place: _Place, kind: int, at_s: float) -> None:
        """End the present bar and begin the next one, perhaps in another place."""
        at_s = max(at_s, place.since_s)
        self._close(key, place, at_s)
        if (place.kind in IN_QUEUE) != (kind in IN_QUEUE):
            (self._queue if place.kind in IN_QUEUE else self._seats).leave(place.lane, at_s)
            place.lane = (self._queue if kind in IN_QUEUE else self._seats).take(at_s)
        place.kind, place.since_s = kind, at_s

    def _close(self, key: Key, place: _Place, at_s: float) -> None:
        if at_s > place.since_s:
            self._bars.append((self._now_s, place.since_s, at_s, place.lane, place.kind, *key))

    def _end(self, key: Key, place: _Place, at_s: float, end: int) -> None:
        at_s = max(at_s, place.since_s)
        self._close(key, place, at_s)
        if place.kind in IN_QUEUE:
            self._queue.leave(place.lane, at_s)
        else:
            self._seats.leave(place.lane, at_s)
            self._ends.append((self._now_s, at_s, place.lane, end))
        del self._live[key]

    def engine_ended(self) -> None:
        """Whoever was live ended with the engine."""
        for key, place in list(self._live.items()):
            self._end(key, place, self._now_s, FAILED)

    def keep_only(self, engine: int, live: frozenset[int]) -> None:
        """Let requests go whose end was lost with a message."""
        for key, place in list(self._live.items()):
            if key[0] == engine and key[1] not in live:
                self._end(key, place, self._now_s, CANCELLED)

    # --- reading ---------------------------------------------------------------------------------

    def bars(self, t0_s: float, t1_s: float) -> Bars:
        """Everything from ``t0_s`` to ``t1_s``; live requests reach to now."""
        number = self._bars.newest_since("seen_s", t0_s)
        held = {name: self._bars.column(name, number) for name in _COLUMNS}
        shown = (held["t1_s"] > t0_s) & (held["t0_s"] < t1_s)
        open_now = [
            (self._now_s, place.since_s, self._now_s, place.lane, place.kind, *key)
            for key, place in self._live.items()
            if place.since_s < t1_s
        ]
        late = np.array(open_now, np.float64).reshape(-1, len(_COLUMNS))
        joined = {name: np.concatenate((held[name][shown], late[:, i])) for i, name in enumerate(_COLUMNS)}
        count = self._ends.newest_since("seen_s", t0_s)
        ends = {name: self._ends.column(name, count) for name in _ENDS}
        ended = (ends["t_s"] > t0_s) & (ends["t_s"] <= t1_s)
        return Bars(
            t0_s=joined["t0_s"],
            t1_s=joined["t1_s"],
            **_whole({name: joined[name] for name in ("lane", "kind", "engine", "rid")}),
            end_t_s=ends["t_s"][ended],
            end_lane=ends["lane"][ended].astype(np.int64),
            end=ends["end"][ended].astype(np.int64),
        )


def _whole(columns: Mapping[str, F64]) -> dict[str, NDArray[np.int64]]:
    return {name: values.astype(np.int64) for name, values in columns.items()}


def _kind_of_end(row: RequestRow) -> int:
    if row.finish == "cancelled":
        return CANCELLED
    return FAILED if row.finish == "error" else GOOD
