"""`Timeline`: the session's course for the charts, one row of values each half second.

A step's work is spread evenly over the bins it ran in, so that one longer than a bin is no spike with holes
beside it; what happens once (look-ups, preemptions) counts in the bin of its start. Late rows still land in
their bins. A bin is drawn once it is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from app.model.figures import ratio
from app.model.requests import RequestBook
from app.model.series import F64, BinTable, Ring, percentiles
from app.model.stages import FORWARD_PARTS, OVERLAPPED, exposed_parts
from app.model.steps import STEP_COLUMNS
from app.net.types import LinkState
from ipc.messages import EngineState, Heartbeat

# Columns of `Timeline.line`, one value a bin (1/2 s), NaN where undefined.
TIMELINE_COLUMNS = (
    "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_n",  # over the trailing `latency_window_s`
    "tpot_p50_s", "tpot_p95_s", "tpot_p99_s", "tpot_n",
    "itl_p50_s", "itl_p99_s", "itl_n",
    "queue_p50_s", "queue_n",
    "prefill_tok_s", "output_tok_s", "finished_req_s",
    "running", "waiting", "preempted",
    "kv_used_share", "kv_cached_share", "kv_free_share",  # of all blocks; they add up to 1
    "kv_waste_share",  # of the tokens the used blocks could hold
    "hit_rate",  # prefix cache: tokens found / tokens looked up, NaN without look-ups
    "model_bytes_s", "flops_s",  # modelled traffic per second of wall time
    "step_bytes_s", "step_flops_s",  # the same per second spent in steps
    "busy_share",  # of wall time spent in steps
    "steps", "step_mean_s", "recompute_share",  # the last: of forward time
    # A step's stages, means of the bin's steps: all its work, ...
    "tokenize_s", "plan_s", "prepare_s", "copy_s", "forward_s", "sample_s", "detokenize_s", "send_s",
    "publish_s", "attention_s", "linear_s", "head_s", "rest_s", "other_s",
    # ... what the engine waited for (with forward, as far as it was not split: they add up to whole_s), ...
    "exposed_plan_s", "exposed_prepare_s", "exposed_publish_s", "unsplit_s", "whole_s",
    "hidden_s",  # ... and what was done under a forward pass
    "rss_bytes", "cpu_percent", "cfg_rev",
)  # fmt: skip

BIN_S = 0.5
_SETTLE_S = 0.25  # a bin is drawn this long after its end, when the engine's rows of it have arrived
_AT = {name: i for i, name in enumerate(STEP_COLUMNS)}
_AT_START = ("preempted", "query_tok", "hit_tok")  # counted once, in the bin of the start
_LATEST = ("running", "waiting", "used_blk", "cached_blk", "free_blk", "used_tok", "cfg_rev")
_SUMS = ("n", *STEP_COLUMNS[1:])  # n: steps
_ONCE = np.array([name in _AT_START for name in _SUMS])
_PUT = np.array([name in _LATEST for name in _SUMS])
_WORK = ("tokenize", "plan", "prepare", "copy", "forward", "sample", "detokenize", "send", "publish")
_SILENT = (LinkState.DEAD, LinkState.UNRESPONSIVE, LinkState.OFFLINE)


@dataclass(frozen=True, slots=True)
class Now:
    """What `Timeline.draw` needs to know of the present."""

    now_s: float
    book: RequestBook
    state: EngineState | None
    heartbeat: Heartbeat | None
    link_state: LinkState
    stepped: bool = True  # the present engine has run a step
    pool: tuple[float, float, float, float] | None = None  # before it has: blocks, as `kv_shares` takes them

    @property
    def block_size(self) -> int:
        return self.state.block_size if self.state is not None else 0


def sample(ring: Ring, t0_s: float, t1_s: float) -> F64:
    """Values of the samples with t0 < t <= t1, of a ring whose ``t_s`` never falls."""
    times = ring.column("t_s")
    first, last = np.searchsorted(times, (t0_s, t1_s), side="right")
    return ring.column("value")[first:last]


def kv_shares(
    used: float, cached: float, free: float, used_tok: float, block_size: int
) -> dict[str, float | None]:
    """The pool's parts as shares of all blocks, and the waste as a share of what used blocks could hold."""
    total, held = used + cached + free, used * block_size
    return {
        "kv_used_share": ratio(used, total),
        "kv_cached_share": ratio(cached, total),
        "kv_free_share": ratio(free, total),
        "kv_waste_share": ratio(held - used_tok, held),
    }


def _stages(sums: Mapping[str, float]) -> dict[str, float | None]:
    """A bin's stages a step. Where nothing was split the parts are 0, so that a stack of them has no gap."""
    steps = sums["n"]
    parts = exposed_parts(sums)
    values = {f"{stage}_s": sums[f"{stage}_s"] / steps for stage in (*_WORK, "whole", "hidden")}
    values |= {f"exposed_{stage}_s": parts[stage] / steps for stage in OVERLAPPED}
    values |= {f"{part}_s": parts[part] / steps for part in (*FORWARD_PARTS, "other")}
    return {**values, "unsplit_s": parts["forward"] / steps}


class Timeline:
    """``line`` holds the drawn bins, with `TIMELINE_COLUMNS`."""

    def __init__(self, history_s: float) -> None:
        self.latency_window_s = 10.0  # over which percentiles are taken
        self.line = BinTable(TIMELINE_COLUMNS, BIN_S, max(2, int(history_s / BIN_S)))
        self._sums = BinTable(_SUMS, BIN_S, self.line.capacity)
        self._dirty: set[int] = set()

    def add_step(self, t_s: float, values: tuple[float, ...]) -> None:
        """Add one step's values (`STEP_COLUMNS`) to the bins from its start to its end."""
        sums, took_s = self._sums, values[_AT["step_s"]]
        sums.advance(t_s + took_s)
        first, last = sums.bin_of(t_s), sums.bin_of(t_s + took_s)
        first_held = max(first, last - sums.capacity)
        row = np.array(values)
        row[0] = 1.0
        for number in range(first_held, last + 1):
            inside_s = min(t_s + took_s, (number + 1) * BIN_S) - max(t_s, number * BIN_S)
            part = np.where(_PUT, 1.0, inside_s / took_s if last > first else 1.0)
            part[_ONCE] = float(number == first)
            sums.add_row(number, row * part, _PUT)
            self._dirty.add(number)

    def draw(self, now: Now) -> None:
        """Write the bins that are over, and again those that rows arrived late for."""
        begun = self.line.advance(now.now_s - _SETTLE_S - BIN_S)
        self._sums.advance(now.now_s)
        for number in begun:
            self._dirty.discard(number)
            self._draw_rates(number, now)
            self._draw_latency(number, now.book)
        for number in [n for n in self._dirty if self.line.last is not None and n <= self.line.last]:
            self._dirty.discard(number)
            self._draw_rates(number, now)

    def _draw_rates(self, number: int, now: Now) -> None:
        line, sums = self.line, self._sums
        heartbeat = now.heartbeat
        if heartbeat is not None:
            line.put(number, "rss_bytes", float(heartbeat.rss_bytes))
            if heartbeat.cpu_percent is not None:
                line.put(number, "cpu_percent", heartbeat.cpu_percent)
        found = sums.row(number)
        steps = found["n"]
        if math.isnan(steps):
            self._draw_quiet(number, now)
            return
        busy_s, moved = found["step_s"], found["weight_bytes"] + found["kv_bytes"]
        values: dict[str, float | None] = {
            "steps": steps,
            "step_mean_s": busy_s / steps,
            "busy_share": min(1.0, busy_s / BIN_S),
            "prefill_tok_s": found["prefill_tok"] / BIN_S,
            "output_tok_s": found["output_tok"] / BIN_S,
            "preempted": found["preempted"],
            "running": found["running"],
            "waiting": found["waiting"],
            "cfg_rev": found["cfg_rev"],
            "hit_rate": ratio(found["hit_tok"], found["query_tok"]),
            "recompute_share": ratio(found["recompute_s"], found["forward_s"]),
            "model_bytes_s": moved / BIN_S,
            "flops_s": found["flops"] / BIN_S,
            "step_bytes_s": ratio(moved, busy_s),
            "step_flops_s": ratio(found["flops"], busy_s),
        }
        values |= _stages(found)
        values |= kv_shares(
            found["used_blk"], found["cached_blk"], found["free_blk"], found["used_tok"], now.block_size
        )
        for name, value in values.items():
            line.put(number, name, math.nan if value is None else value)

    def _draw_quiet(self, number: int, now: Now) -> None:
        """A bin without steps: counts of requests and the pool go on, rates are gaps, 0 only in a stall."""
        if now.state is None or now.link_state in _SILENT:
            return
        line = self.line
        line.put(number, "running", float(now.state.running))
        line.put(number, "waiting", float(now.state.waiting))
        line.put(number, "cfg_rev", float(now.state.cfg_rev))
        if now.state.running:
            line.put(number, "prefill_tok_s", 0.0)
            line.put(number, "output_tok_s", 0.0)
            line.put(number, "busy_share", 0.0)
        names = ("kv_used_share", "kv_cached_share", "kv_free_share")
        if now.stepped:
            for name in names:
                line.put(number, name, line.get(number - 1, name))
        elif now.pool is not None:  # the bins before are those of an engine that is gone
            shares = kv_shares(*now.pool, now.block_size)
            for name in names:
                value = shares[name]
                line.put(number, name, math.nan if value is None else value)

    def _draw_latency(self, number: int, book: RequestBook) -> None:
        end_s = (number + 1) * BIN_S
        line = self.line
        for name, ring, percents in (
            ("ttft", book.ttft, (50.0, 95.0, 99.0)),
            ("tpot", book.tpot, (50.0, 95.0, 99.0)),
            ("itl", book.itl, (50.0, 99.0)),
            ("queue", book.queue, (50.0,)),
        ):
            found = percentiles(sample(ring, end_s - self.latency_window_s, end_s), percents)
            if found.n:
                line.put(number, f"{name}_n", float(found.n))
            for percent in percents:
                value = found[percent]
                if value is not None:
                    line.put(number, f"{name}_p{percent:.0f}_s", value)
        ended = sample(book.ended_kind, end_s - BIN_S, end_s)
        if ended.size:
            line.put(number, "finished_req_s", float(ended.sum()) / BIN_S)
