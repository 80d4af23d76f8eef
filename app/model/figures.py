"""The figures panels show of a stretch of steps: KPIs, stage times and the roofline, with why one is None."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.model.series import F64, Ring, percentiles
from ipc.messages import ApplyMode, DeviceInfo, KnobValue, RequestRow, StepRow

STAGES = ("plan", "prepare", "forward", "sample", "detokenize", "publish")
STEP_COLUMNS = (
    "t_s", "step_s", "plan_s", "prepare_s", "forward_s", "sample_s", "detokenize_s", "publish_s",
    "prefill_tok", "decode_tok", "running", "waiting", "preempted", "recompute_tok",
    "used_blk", "cached_blk", "free_blk", "used_tok", "query_tok", "hit_tok",
    "weight_bytes", "kv_bytes", "flops", "cfg_rev",
)  # fmt: skip
_US = 1e-6

# Above these shares of the measured peaks a step counts as bound by memory or compute; below, by neither.
MEMORY_BOUND_SHARE, COMPUTE_BOUND_SHARE, OVERHEAD_SHARE = 0.60, 0.45, 0.30


def step_values(row: StepRow, t_s: float) -> tuple[float, ...]:
    """One row of a `Ring` with `STEP_COLUMNS`."""
    return (
        t_s, row.dur_us * _US, row.plan_us * _US, row.prepare_us * _US, row.forward_us * _US,
        row.sample_us * _US, row.detokenize_us * _US, row.publish_us * _US,
        row.prefill_tok, row.decode_tok, row.running, row.waiting, row.preempted, row.recompute_tok,
        row.used_blk, row.cached_blk, row.free_blk, row.used_tok, row.query_tok, row.hit_tok,
        row.weight_bytes, row.kv_bytes, row.flops, row.cfg_rev,
    )  # fmt: skip


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
    queue_p50_s: Figure
    e2e_p50_s: Figure
    decode_tok_s: Figure
    prefill_tok_s: Figure
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


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Mean and standard deviation of each stage of a step, in seconds, over the trailing window."""

    n: int
    mean_s: dict[str, float]  # plan, prepare, forward, sample, detokenize, publish, other
    std_s: dict[str, float]
    total_mean_s: float | None
    outside_forward_share: float | None


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


def stage_times(window: StepWindow) -> StageTimes:
    """Means and deviations of the stages; ``other`` is what none of them covers (publish of the step before
    lies outside its own step's duration)."""
    if window.n == 0:
        return StageTimes(0, {}, {}, None, None)
    columns = {stage: window.column(f"{stage}_s") for stage in STAGES}
    step = window.column("step_s")
    inside = sum((columns[stage] for stage in STAGES if stage != "publish"), np.zeros(window.n))
    columns["other"] = np.maximum(step - inside, 0.0)
    whole = step.sum() + columns["publish"].sum()
    return StageTimes(
        n=window.n,
        mean_s={stage: float(column.mean()) for stage, column in columns.items()},
        std_s={stage: float(column.std()) for stage, column in columns.items()},
        total_mean_s=float(step.mean()),
        outside_forward_share=ratio(float(whole - columns["forward"].sum()), float(whole)),
    )


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
    used = window.column("used_blk")
    blocks = used + window.column("cached_blk") + window.column("free_blk")
    held = float(used.sum()) * block_size
    roof = roofline(window, device)
    return stats | {
        "outside_forward_share": times.outside_forward_share,
        "busy_share": ratio(window.total("step_s"), span_s),
        "prefill_tok": int(window.total("prefill_tok")),
        "decode_tok": int(window.total("decode_tok")),
        "recompute_tok": int(window.total("recompute_tok")),
        "preemptions": int(window.total("preempted")),
        "running_mean": float(window.column("running").mean()),
        "waiting_mean": float(window.column("waiting").mean()),
        "kv_used_peak_share": ratio(float(used.max()), float(blocks[-1])),
        "kv_waste_share": ratio(held - window.total("used_tok"), held),
        "hit_rate": ratio(window.total("hit_tok"), window.total("query_tok")),
        "model_bytes_per_step_s": roof.bandwidth_bytes_s,
        "bandwidth_share": ratio(roof.bandwidth_bytes_s or 0.0, roof.peak_bytes_s or 0.0),
        "flops_per_step_s": roof.flops_s,
    }
