"""Where the time of steps and of requests goes, stage by stage.

A stage is *exposed* as far as the engine waited for it, and *hidden* as far as it was done meanwhile: text
and sockets are other threads' work, and with overlap planning, preparing and publishing happen under a
forward pass. Shares are of exposed time only, so those of a step add up to 1. What overlap hid is known as
one sum; it is taken off the three stages in proportion to their work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from app.model.series import F64, Ring
from app.model.steps import StepWindow
from ipc.messages import RequestRow

FORWARD_PARTS = ("attention", "linear", "head", "rest")
STEP_STAGES = (
    "plan", "prepare", "copy", "forward", *FORWARD_PARTS, "sample", "publish", "other",
    "tokenize", "detokenize", "send",
)  # fmt: skip
REQUEST_STAGES = (
    "tokenize", "queue", "plan", "prepare", "copy", "forward", "sample", "preempted", "other",
    "detokenize", "send",
)  # fmt: skip
OVERLAPPED = ("plan", "prepare", "publish")  # what a forward pass can hide
BESIDE = ("tokenize", "detokenize", "send")  # other threads' work: no step waits for it

REQUEST_COLUMNS = ("t_s", "e2e_s", *(f"{stage}_s" for stage in REQUEST_STAGES))
_US, _NS = 1e-6, 1e-9


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Stages of the steps, or of the requests, of one stretch of time.

    ``share`` is the exposed part of a stage, of the whole; None where all of it is hidden. A part of the
    forward pass is missing where it was not measured, and rests on the steps that were split.
    """

    n: int = 0
    mean_s: Mapping[str, float] = field(default_factory=dict)
    std_s: Mapping[str, float] = field(default_factory=dict)
    share: Mapping[str, float | None] = field(default_factory=dict)
    total_mean_s: float | None = None  # a step's cost, a request's E2E
    total_std_s: float | None = None
    hidden_mean_s: float | None = None
    outside_forward_share: float | None = None


def exposed_parts(sums: Mapping[str, float]) -> dict[str, float]:
    """What the engine waited for, from sums of step columns; ``forward`` is what of it was not split.

    The parts add up to the sum of ``whole_s``, apart from rounding of the engine's microseconds.
    """
    work = sum(sums[f"{stage}_s"] for stage in OVERLAPPED)
    seen = 1.0 - min(1.0, sums["hidden_s"] / work) if work > 0 else 1.0
    parts = {stage: sums[f"{stage}_s"] * seen for stage in OVERLAPPED}
    parts |= {stage: sums[f"{stage}_s"] for stage in ("copy", "sample", "attention", "linear", "head")}
    parts["rest"] = max(0.0, sums["split_s"] - parts["attention"] - parts["linear"] - parts["head"])
    parts["forward"] = max(0.0, sums["forward_s"] - sums["split_s"])
    parts["other"] = max(0.0, sums["whole_s"] - sum(parts.values()))
    return parts


def stage_times(window: StepWindow) -> StageTimes:
    """The stages of the steps in ``window``. Standard deviations are of the steps (population)."""
    if window.n == 0:
        return StageTimes()
    whole = window.column("whole_s")
    work = {
        stage: window.column(f"{stage}_s") for stage in (*BESIDE, *OVERLAPPED, "copy", "forward", "sample")
    }
    hidden = window.column("hidden_s")
    exposed = sum((work[s] for s in (*OVERLAPPED, "copy", "forward", "sample")), np.zeros(window.n)) - hidden
    work["other"] = np.maximum(whole - exposed, 0.0)
    split = window.column("split_s") > 0
    if split.any():
        for part in ("attention", "linear", "head"):
            work[part] = window.column(f"{part}_s")[split]
        named = work["attention"] + work["linear"] + work["head"]
        work["rest"] = np.maximum(window.column("split_s")[split] - named, 0.0)
    names = ("whole_s", "hidden_s", "forward_s", "split_s", "copy_s", "sample_s", "attention_s", "linear_s")
    sums = {name: window.total(name) for name in (*names, "head_s", *(f"{s}_s" for s in OVERLAPPED))}
    parts = exposed_parts(sums)
    parts["forward"] = sums["forward_s"]
    total = float(whole.sum())
    share: dict[str, float | None] = {
        stage: None if stage in BESIDE or total <= 0 else parts[stage] / total for stage in work
    }
    return StageTimes(
        n=window.n,
        mean_s={stage: float(values.mean()) for stage, values in work.items()},
        std_s={stage: float(values.std()) for stage, values in work.items()},
        share=share,
        total_mean_s=float(whole.mean()),
        total_std_s=float(whole.std()),
        hidden_mean_s=float(hidden.mean() + sum(work[stage].mean() for stage in BESIDE)),
        outside_forward_share=1.0 - sums["forward_s"] / total if total > 0 else None,
    )


def request_stages(row: RequestRow, t_s: float) -> tuple[float, ...] | None:
    """One ended request with `REQUEST_COLUMNS`; None where it was never worked on.

    ``queue`` is the wait for a first place, without the tokenizing that lies in it. ``other`` is what remains
    of E2E: steps it was not in the way of, publishing, and the beginnings and ends of its steps.
    """
    if row.end_ns is None or row.sched_ns is None:
        return None
    tokenize = row.tokenize_us * _US
    queue = max(0.0, (row.sched_ns - row.arrive_ns) * _NS - tokenize)
    e2e = (row.end_ns - row.arrive_ns) * _NS
    plan, prepare, copy, forward, sample, preempted, detokenize, send = (
        value * _US
        for value in (
            row.plan_us, row.prepare_us, row.copy_us, row.forward_us, row.sample_us, row.preempted_us,
            row.detokenize_us, row.send_us,
        )
    )  # fmt: skip
    named = (tokenize, queue, plan, prepare, copy, forward, sample, preempted)
    return t_s, e2e, *named, max(0.0, e2e - sum(named)), detokenize, send


def request_times(ring: Ring, t0_s: float) -> StageTimes:
    """The stages of the requests that ended since ``t0_s``, from a ring with `REQUEST_COLUMNS`."""
    n = ring.newest_since("t_s", t0_s)
    if n == 0:
        return StageTimes()

    def column(name: str) -> F64:
        return ring.column(name, n)

    e2e = column("e2e_s")
    mean = {stage: float(column(f"{stage}_s").mean()) for stage in REQUEST_STAGES}
    total = float(e2e.mean())
    beside = ("detokenize", "send")
    return StageTimes(
        n=n,
        mean_s=mean,
        std_s={stage: float(column(f"{stage}_s").std()) for stage in REQUEST_STAGES},
        share={s: None if s in beside or total <= 0 else value / total for s, value in mean.items()},
        total_mean_s=total,
        total_std_s=float(e2e.std()),
        hidden_mean_s=sum(mean[stage] for stage in beside),
        outside_forward_share=1.0 - mean["forward"] / total if total > 0 else None,
    )
