"""`RequestBook`: every request the engine told of, live and ended, and the latency samples they give.

A request gives at most one TTFT sample, when its first token is heard of, and one TPOT sample when it ended
well with two tokens or more. An answer from the result cache cost nothing and gives no latency: it is counted
apart. Engines number requests from 1, so a key holds the engine's number too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from app.model.pauses import LEAST_S
from app.model.series import Ring
from app.model.stages import REQUEST_COLUMNS, request_stages
from ipc.messages import RequestRow

SHOWN_ENDED = 2000
_NS = 1e-9

Key = tuple[int, int]  # (which engine process of this window, rid)


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a table shows it. Times are in seconds; those that did not happen are None."""

    key: Key
    row: RequestRow
    arrive_s: float  # the console's monotonic clock
    queue_s: float | None
    ttft_s: float | None  # first token - arrival at the engine
    tpot_s: float | None
    e2e_s: float | None

    @property
    def rid(self) -> int:
        return self.row.rid


def _span(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) * _NS


def tpot_s(row: RequestRow) -> float | None:
    """(last - first) / (n - 1); None for fewer than two tokens."""
    span = _span(row.first_ns, row.last_ns)
    return None if span is None or row.output_tok < 2 else span / (row.output_tok - 1)


class RequestBook:
    """See the module. Samples are rings with the columns ``t_s`` (when it was so) and ``value``."""

    def __init__(self, most_ended: int = 20_000, most_gaps: int = 1_000_000) -> None:
        """Keep at most so many ended requests, and so many gaps between tokens in them all together."""
        self.rev = 0
        self.forgot_rev = 0  # the revision in which rows last went away
        self.unheard = 0  # requests whose end was lost with a message
        self.ttft = Ring(("t_s", "value"), 65_536)
        self.tpot = Ring(("t_s", "value"), 65_536)
        self.itl = Ring(("t_s", "value"), 262_144)
        self.queue = Ring(("t_s", "value"), 65_536)
        self.e2e = Ring(("t_s", "value"), 65_536)
        self.paused = Ring(("t_s", "value"), 65_536)  # s without a place, of those that a change displaced
        self.ended_kind = Ring(("t_s", "value"), 65_536)  # 1 good, 0 failed; cancelled ones are neither
        self.result_cached = Ring(("t_s", "value"), 65_536)  # 1 each
        self.stages = Ring(REQUEST_COLUMNS, 32_768)
        self._engine = 0
        self._live: dict[Key, RequestView] = {}
        self._ended: OrderedDict[Key, RequestView] = OrderedDict()
        self._gaps = 0
        self._most_ended, self._most_gaps = most_ended, most_gaps
        self._revs: dict[Key, int] = {}
        self._ttft_seen: set[Key] = set()

    def new_engine(self) -> None:
        """Another engine process: its numbers begin anew."""
        self.engine_ended()
        self._ttft_seen.clear()
        self._engine += 1

    def engine_ended(self) -> None:
        """The live requests ended with their engine."""
        for key in list(self._live):
            view = self._live.pop(key)
            row = msgspec.structs.replace(
                view.row, state="finished", finish="error", message="The engine ended.", code="internal"
            )
            self.rev += 1
            self._revs[key] = self.rev
            self._end(RequestView(key, row, view.arrive_s, view.queue_s, view.ttft_s, None, None))

    def resynced(self, live: frozenset[int]) -> None:
        """Forget requests that are no longer live and whose end was lost."""
        for key in [k for k in self._live if k[1] not in live]:
            del self._live[key]
            self._revs.pop(key, None)
            self._ttft_seen.discard(key)
            self.unheard += 1
            self.rev += 1
            self.forgot_rev = self.rev

    def take(self, rows: Iterable[RequestRow], offset_ns: int) -> list[RequestRow]:
        """Rows in order of arrival; ``offset_ns`` is the engine's clock minus ours. Returns what was news."""
        news: list[RequestRow] = []
        for row in rows:
            key = (self._engine, row.rid)
            if key in self._ended:
                continue  # its end is known; an older row came late
            news.append(row)
            view = RequestView(
                key=key,
                row=row,
                arrive_s=(row.arrive_ns - offset_ns) * _NS,
                queue_s=_span(row.arrive_ns, row.sched_ns),
                ttft_s=_span(row.arrive_ns, row.first_ns),
                tpot_s=tpot_s(row),
                e2e_s=_span(row.arrive_ns, row.end_ns),
            )
            self._sample_first(view, offset_ns)
            self.rev += 1
            self._revs[key] = self.rev
            if row.state == "finished":
                self._live.pop(key, None)
                self._ttft_seen.discard(key)
                self._sample_end(view, offset_ns)
                self._end(view)
            else:
                self._live[key] = view
        return news

    def _sample_first(self, view: RequestView, offset_ns: int) -> None:
        row = view.row
        if view.ttft_s is None or row.first_ns is None or view.key in self._ttft_seen or row.result_cached:
            return
        self._ttft_seen.add(view.key)
        t_s = (row.first_ns - offset_ns) * _NS
        _add(self.ttft, t_s, view.ttft_s)
        if view.queue_s is not None:
            _add(self.queue, t_s, view.queue_s)

    def _sample_end(self, view: RequestView, offset_ns: int) -> None:
        row = view.row
        if row.end_ns is None or row.finish == "cancelled":
            return
        t_s = (row.end_ns - offset_ns) * _NS
        good = row.finish in ("stop", "length")
        _add(self.ended_kind, t_s, float(good))
        if row.result_cached:
            _add(self.result_cached, t_s, 1.0)
        if not good or row.result_cached:
            return
        stages = request_stages(row, _rising(self.stages, t_s))
        if stages is not None:
            self.stages.append(stages)
        if view.tpot_s is not None:
            _add(self.tpot, t_s, view.tpot_s)
            if row.preempt_reason == "rebuild" and row.preempted_us >= LEAST_S * 1e6:
                _add(self.paused, t_s, row.preempted_us * 1e-6)
        if view.e2e_s is not None:
            _add(self.e2e, t_s, view.e2e_s)
        if row.itl_us:
            at_s = _rising(self.itl, t_s)
            self.itl.append([(at_s, gap * 1e-6) for gap in row.itl_us])

    def _end(self, view: RequestView) -> None:
        self._ended[view.key] = view
        self._gaps += len(view.row.itl_us)
        while len(self._ended) > 1 and (len(self._ended) > self._most_ended or self._gaps > self._most_gaps):
            key, old = self._ended.popitem(last=False)
            self._gaps -= len(old.row.itl_us)
            self._revs.pop(key, None)

    # --- reading ---------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def engine(self) -> int:
        """Which engine process of this window the newest rows are of."""
        return self._engine

    def find(self, key: Key) -> RequestView | None:
        """One request, live or ended, as far as it is kept."""
        return self._live.get(key) or self._ended.get(key)

    def rows(self) -> list[RequestView]:
        """Live requests, newest first, then the newest `SHOWN_ENDED` that ended."""
        ended = list(self._ended.values())[-SHOWN_ENDED:]
        return [*reversed(self._live.values()), *reversed(ended)]

    def changed(self, since_rev: int) -> list[RequestView]:
        """Those of `rows` whose row changed after revision ``since_rev``."""
        return [view for view in self.rows() if self._revs.get(view.key, 0) > since_rev]

    def ended_rows(self, t0_ns: int, newest: int | None) -> tuple[RequestRow, ...]:
        """Rows that ended at ``t0_ns`` of the engine's clock or later, or just the ``newest`` ones."""
        rows = [view.row for view in self._ended.values()]
        if newest is not None:
            return tuple(rows[-newest:]) if newest > 0 else ()
        return tuple(row for row in rows if row.end_ns is not None and row.end_ns >= t0_ns)


def _rising(ring: Ring, t_s: float) -> float:
    """``t_s``, or the time of the newest sample where that is later, so that a window is a slice."""
    return max(t_s, float(ring.column("t_s", 1)[0])) if len(ring) else t_s


def _add(ring: Ring, t_s: float, value: float) -> None:
    ring.append((_rising(ring, t_s), value))
