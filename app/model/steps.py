"""One step as a row of numbers, and a stretch of such rows.

``whole_s`` is what a step cost the engine: its duration and, unless work overlaps, what publishing the step
before took, which then lies between the two. ``hidden_s`` is what of planning, preparing and publishing was
done while a forward pass ran and so cost nothing. Where the forward pass was not split, its parts are 0 and
so is ``split_s``, which otherwise repeats ``forward_s``. ``plan_s`` includes looking for drafts.
"""

from __future__ import annotations

import numpy as np

from app.model.series import F64, Ring
from ipc.messages import StepRow

STEP_COLUMNS = (
    "t_s", "step_s", "whole_s", "hidden_s",
    "tokenize_s", "plan_s", "prepare_s", "copy_s", "forward_s", "split_s", "attention_s", "linear_s",
    "head_s", "sample_s", "detokenize_s", "send_s", "publish_s", "recompute_s",
    "prefill_tok", "decode_tok", "output_tok", "running", "waiting", "preempted",
    "recompute_tok", "draft_reqs", "drafted_tok", "accepted_tok",
    "used_blk", "cached_blk", "free_blk", "used_tok", "copied_blk", "query_tok", "hit_tok", "host_hit_tok",
    "weight_bytes", "kv_bytes", "flops", "cfg_rev",
)  # fmt: skip
_US = 1e-6


def step_values(row: StepRow, t_s: float) -> tuple[float, ...]:
    """One row of a `Ring` with `STEP_COLUMNS`."""
    whole_us = row.dur_us if row.overlap_us else row.dur_us + row.publish_us
    plan_us = row.plan_us + row.draft_us
    hidden_us = min(row.overlap_us, plan_us + row.prepare_us + row.publish_us)
    split = row.attention_us is not None
    return (
        t_s, row.dur_us * _US, whole_us * _US, hidden_us * _US,
        row.tokenize_us * _US, plan_us * _US, row.prepare_us * _US, row.copy_us * _US,
        row.forward_us * _US, row.forward_us * _US if split else 0.0,
        (row.attention_us or 0) * _US, (row.linear_us or 0) * _US, (row.head_us or 0) * _US,
        row.sample_us * _US, row.detokenize_us * _US, row.send_us * _US, row.publish_us * _US,
        row.recompute_us * _US,
        row.prefill_tok, row.decode_tok, row.output_tok, row.running, row.waiting, row.preempted,
        row.recompute_tok, row.draft_reqs, row.drafted_tok, row.accepted_tok,
        row.used_blk, row.cached_blk, row.free_blk, row.used_tok, row.copied_blk, row.query_tok, row.hit_tok,
        row.host_hit_tok, row.weight_bytes, row.kv_bytes, row.flops, row.cfg_rev,
    )  # fmt: skip


class StepWindow:
    """The rows of a step ring that began from ``t0_s`` to ``t1_s`` (None: now), and the sums over them."""

    def __init__(self, ring: Ring, t0_s: float, t1_s: float | None = None) -> None:
        self._ring = ring
        self._newest = ring.newest_since("t_s", t0_s)
        times = ring.column("t_s", self._newest)
        self.n = self._newest if t1_s is None else int(np.searchsorted(times, t1_s, side="right"))

    def column(self, name: str) -> F64:
        return self._ring.column(name, self._newest)[: self.n]

    def total(self, name: str) -> float:
        return float(self.column(name).sum())

    def last(self, name: str) -> float:
        return float(self.column(name)[-1])
