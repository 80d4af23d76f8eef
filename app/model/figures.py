"""The figures panels show of a stretch of steps: KPIs and the roofline, with why one is None."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from app.model.requests import Key
from app.model.series import percentiles
from app.model.stages import stage_times
from app.model.steps import StepWindow
from ipc.messages import ApplyMode, DeviceInfo, KnobValue, Preempted, RequestRow

NO_DRAFTS = "nothing was drafted in this window"
# Above these shares of the measured peaks a step counts as bound by memory or compute; below, by neither.
MEMORY_BOUND_SHARE, COMPUTE_BOUND_SHARE, OVERHEAD_SHARE = 0.60, 0.45, 0.30


@dataclass(frozen=True, slots=True)
class Figure:
    """One number for a person: its value or why there is none, its sample size and its window."""

    value: float | None
    n: int | None = None
    window_s: float | None = None
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class Kpis:
    """The strip at the top, over the trailing window. Times in seconds, rates per second, shares 0..1."""

    ttft_p50_s: Figure
    ttft_p95_s: Figure
    ttft_p99_s: Figure
    tpot_p50_s: Figure
    tpot_p95_s: Figure
    tpot_p99_s: Figure
    ttft_pause_s: float | None  # the longest that a change of the configuration kept one of them waiting
    tpot_pause_s: float | None
    queue_p50_s: Figure
    e2e_p50_s: Figure
    output_tok_s: Figure  # tokens that came out; a step may bring a request several
    prefill_tok_s: Figure
    draft_acceptance: Figure  # accepted of drafted tokens
    draft_length: Figure  # tokens that a step with a draft brought a request
    finished_req_s: Figure
    error_share: Figure  # of the requests that ended, cancelled ones left out
    running: Figure
    waiting: Figure
    kv_used_share: Figure
    kv_cached_share: Figure
    kv_waste_share: Figure
    hit_rate: Figure
    bandwidth_share: Figure  # modelled bytes per second of step time / measured copy bandwidth
    preemptions: Figure
    recompute_share: Figure  # of forward time, by tokens computed once already
    result_cached: Figure  # answers from the result cache, in no latency


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where the steps of the trailing window stand against the machine's measured peaks."""

    verdict: str  # memory-bound, compute-bound, overhead-bound, mixed, idle, unknown
    explanation: str  # one sentence with the numbers it rests on
    intensity_flop_per_byte: float | None = None
    ridge_flop_per_byte: float | None = None
    bandwidth_bytes_s: float | None = None  # modelled, per second of step time
    peak_bytes_s: float | None = None
    flops_s: float | None = None
    peak_flops_s: float | None = None
    weight_byte_share: float | None = None  # the rest is KV


@dataclass(frozen=True, slots=True)
class Marker:
    """An applied or rolled-back change, for a line on every chart."""

    t_s: float
    apply_id: int
    rev: int
    ok: bool
    mode: ApplyMode
    patch: dict[str, KnobValue]
    label: str  # "prefix_cache = off"
    took_s: float
    preempted: int
    why: str


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running request lost its place, at ``t_s`` of the console's clock."""

    t_s: float
    key: Key
    event: Preempted


@dataclass(frozen=True, slots=True)
class SeatUse:
    """How full the batch was: means over the steps of a stretch, weighted by their time."""

    busy: float
    seats: float | None  # as many as `max_num_seqs` allows; None where that is not known
    share: float | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of time for which telemetry was lost; charts leave it empty."""

    t0_s: float
    t1_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """The trailing window of the live session, raw, for a baseline."""

    t0_s: float
    t1_s: float
    requests: tuple[RequestRow, ...]  # that ended inside the window
    step_stats: dict[str, float | int | None]
    markers: tuple[Marker, ...]  # a change inside the window makes the baseline mixed
    sessions: int  # engine processes seen inside it; more than one marks it
    lost: int  # telemetry messages lost in the session


def patch_label(patch: dict[str, KnobValue]) -> str:
    """A change in words, for a chart's marker: ``prefix_cache = off``."""

    def text(value: KnobValue) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return "default" if value is None else str(value)

    return ", ".join(f"{knob} = {text(value)}" for knob, value in patch.items())


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None where it is undefined."""
    return part / whole if whole > 0 and math.isfinite(whole) else None


def mean_length(window: StepWindow) -> float | None:
    """Tokens that a draft's step brought on average, the model's own included; None without drafts."""
    accepted = ratio(window.total("accepted_tok"), window.total("draft_reqs"))
    return None if accepted is None else 1.0 + accepted


def roofline(window: StepWindow, device: DeviceInfo | None) -> Roofline:
    """The verdict over the window's steps, by the shares named at the top of this file."""
    busy_s = window.total("step_s") if window.n else 0.0
    if busy_s <= 0:
        return Roofline("idle", "No steps ran in this window.")
    weights, kv, flops = (window.total(c) for c in ("weight_bytes", "kv_bytes", "flops"))
    moved = weights + kv
    peak_bytes = device.copy_bytes_per_s if device is not None else None
    peak_flops = device.flops_per_s if device is not None else None
    intensity = ratio(flops, moved)
    ridge = peak_flops / peak_bytes if peak_flops and peak_bytes else None
    verdict, explanation = (
        "unknown",
        "The machine's peaks were not measured, or the engine models no traffic.",
    )
    if peak_bytes and peak_flops and intensity is not None and ridge is not None:
        mbu, mfu = moved / busy_s / peak_bytes, flops / busy_s / peak_flops
        if mbu >= MEMORY_BOUND_SHARE and intensity < ridge:
            verdict = "memory-bound"
        elif mfu >= COMPUTE_BOUND_SHARE and intensity >= ridge:
            verdict = "compute-bound"
        elif mbu < OVERHEAD_SHARE and mfu < OVERHEAD_SHARE:
            verdict = "overhead-bound"
        else:
            verdict = "mixed"
        explanation = (
            f"Steps move {mbu:.0%} of the measured copy bandwidth and compute {mfu:.0%} of the peak; "
            f"intensity {intensity:.1f} against a ridge of {ridge:.1f} FLOP per byte."
        )
    return Roofline(
        verdict=verdict,
        explanation=explanation,
        intensity_flop_per_byte=intensity,
        ridge_flop_per_byte=ridge,
        bandwidth_bytes_s=moved / busy_s,
        peak_bytes_s=peak_bytes,
        flops_s=flops / busy_s,
        peak_flops_s=peak_flops,
        weight_byte_share=ratio(weights, moved),
    )


def seat_use(window: StepWindow, configs: Mapping[int, Mapping[str, KnobValue]]) -> SeatUse | None:
    """The use of seats while steps ran, None where none did; ``configs`` are knob values by revision."""
    took = window.column("step_s")
    total_s = float(took.sum())
    if total_s <= 0:
        return None
    busy = float(window.column("running") @ took) / total_s
    revs, seats = window.column("cfg_rev"), 0.0
    for rev in np.unique(revs):
        value = configs.get(int(rev), {}).get("max_num_seqs")
        if not isinstance(value, int) or isinstance(value, bool):
            return SeatUse(busy, None, None)
        seats += value * float(took[revs == rev].sum()) / total_s
    return SeatUse(busy, seats, ratio(busy, seats))


def step_stats(window: StepWindow, span_s: float, device: DeviceInfo | None, block_size: int) -> dict[
    str, float | int | None
]:  # fmt: skip
    """What a baseline keeps of the steps; keys carry units, undefined is None."""
    n = window.n
    stats: dict[str, float | int | None] = {"steps": n, "span_s": span_s}
    if n == 0:
        return stats
    spread = percentiles(window.column("step_s"), (50.0, 99.0))
    stats |= {"step_mean_s": spread.mean, "step_p50_s": spread[50.0], "step_p99_s": spread[99.0]}
    times = stage_times(window)
    for stage, mean in times.mean_s.items():
        stats[f"{stage}_mean_s"], stats[f"{stage}_std_s"] = mean, times.std_s[stage]
        stats[f"{stage}_share"] = times.share[stage]
    stats |= {"whole_mean_s": times.total_mean_s, "hidden_mean_s": times.hidden_mean_s}
    used = window.column("used_blk")
    blocks = used + window.column("cached_blk") + window.column("free_blk")
    held = float(used.sum()) * block_size
    roof = roofline(window, device)
    return stats | {
        "outside_forward_share": times.outside_forward_share,
        "busy_share": ratio(window.total("step_s"), span_s),
        "prefill_tok": int(window.total("prefill_tok")),
        "decode_tok": int(window.total("decode_tok")),
        "output_tok": int(window.total("output_tok")),
        "drafted_tok": int(window.total("drafted_tok")),
        "draft_acceptance": ratio(window.total("accepted_tok"), window.total("drafted_tok")),
        "draft_length": mean_length(window),
        "recompute_tok": int(window.total("recompute_tok")),
        "recompute_share": ratio(window.total("recompute_s"), window.total("forward_s")),
        "preemptions": int(window.total("preempted")),
        "running_mean": float(window.column("running").mean()),
        "waiting_mean": float(window.column("waiting").mean()),
        "kv_used_peak_share": ratio(float(used.max()), float(blocks[-1])),
        "kv_waste_share": ratio(held - window.total("used_tok"), held),
        "hit_rate": ratio(window.total("hit_tok"), window.total("query_tok")),
        "host_hit_tok": int(window.total("host_hit_tok")),
        "copied_blk": int(window.total("copied_blk")),
        "model_bytes_per_step_s": roof.bandwidth_bytes_s,
        "bandwidth_share": ratio(roof.bandwidth_bytes_s or 0.0, roof.peak_bytes_s or 0.0),
        "flops_per_step_s": roof.flops_s,
    }
