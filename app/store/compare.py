"""Two baselines side by side: what differed, and what was measured. It shows, it does not judge.

Whether a difference is more than chance takes repeated runs; so what speaks against reading two single
baselines as cause and effect (another workload, an invalid run, few requests) is said beside the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from app.lab.stats import METRIC_ORDER
from app.store.records import Baseline, BaselineSummary, Comparison, ConfigDiff, Identity, MetricDelta
from ipc.messages import KnobValue

FEW_REQUESTS = 30
# Figures of the steps that are compared, where either side has them: unit, and whether more is better.
_OF_STEPS: dict[str, tuple[str, bool]] = {
    "draft_acceptance": ("share", True), "draft_length": ("tokens", True), "draft_mean_s": ("s", False),
    "verify_mean_s": ("s", False), "weight_bytes": ("B", False), "original_bytes": ("B", False),
    "draft_weight_bytes": ("B", False), "draft_kv_bytes": ("B", False), "kv_pool_bytes": ("B", False),
}  # fmt: skip
CONSIDERABLE = 0.10  # of the machine's cores, taken by other processes
_HIGHER_IS_BETTER = ("request_rate_rps", "output_tok_s", "prompt_tok_s", "cached_share")


def other_work(stats: Mapping[str, float | int | None]) -> str:
    """What a baseline's step statistics say of other processes, where they were in the way; else ""."""
    mean, cores = stats.get("other_cores_mean"), stats.get("machine_cores")
    if mean is None or not cores or mean < CONSIDERABLE * cores:
        return ""
    return f"other processes kept {mean:.1f} of the machine's {cores:.0f} cores busy meanwhile"


def compare(a: Baseline, about_a: BaselineSummary, b: Baseline, about_b: BaselineSummary) -> Comparison:
    """Everything of ``b`` against ``a``."""
    return Comparison(
        a=about_a,
        b=about_b,
        identity=_differences(_flat(a.data.identity), _flat(b.data.identity)),
        config=_differences(a.data.config, b.data.config),
        metrics=_metrics(a, b),
        warnings=_warnings(a, b),
    )


def _flat(identity: Identity) -> dict[str, KnobValue]:
    """An identity as one level of named values; measured peaks are left out, they differ at every start."""
    skipped = ("copy_bytes_per_s", "read_bytes_per_s", "flops_per_s", "pid", "started_unix_ms", "threads")
    flat: dict[str, KnobValue] = {}
    for part in ("model", "device", "engine", "environment"):
        values = msgspec.to_builtins(getattr(identity, part)) or {}
        for key, value in values.items():
            if isinstance(value, dict):
                flat |= {f"{part}.{key}.{name}": str(inner) for name, inner in value.items()}
            elif key not in skipped and key != "tag":
                flat[f"{part}.{key}"] = value
    return flat


def _differences(a: dict[str, KnobValue], b: dict[str, KnobValue]) -> list[ConfigDiff]:
    return [
        ConfigDiff(key=key, a=a.get(key), b=b.get(key), in_a=key in a, in_b=key in b)
        for key in sorted(a.keys() | b.keys())
        if (key in a) != (key in b) or a[key] != b[key] or type(a[key]) is not type(b[key])
    ]


def _metrics(a: Baseline, b: Baseline) -> list[MetricDelta]:
    deltas: list[MetricDelta] = []
    for name in METRIC_ORDER:
        left, right = a.data.stats.metrics.get(name), b.data.stats.metrics.get(name)
        if left is None and right is None:
            continue
        n = (left.n if left else 0, right.n if right else 0)
        for stat in ("p50", "p95", "p99", "mean"):
            values = (getattr(left, stat, None), getattr(right, stat, None))
            deltas.append(_delta(f"{name.removesuffix('_s')}_{stat}_s", "s", values, n, higher=False))
    counts = (a.data.stats.ok, b.data.stats.ok)
    units = {"request_rate_rps": "1/s", "output_tok_s": "tok/s", "prompt_tok_s": "tok/s", "cached_share": ""}
    for name in _HIGHER_IS_BETTER:
        values = (getattr(a.data.stats, name), getattr(b.data.stats, name))
        deltas.append(_delta(name, units[name], values, counts, higher=True))
    shares = (a.data.stats.error_share, b.data.stats.error_share)
    ended = (a.data.stats.requests, b.data.stats.requests)
    deltas.append(_delta("error_share", "", shares, ended, higher=False))
    left_steps, right_steps = a.data.step_stats, b.data.step_stats
    n = (int(left_steps.get("steps") or 0), int(right_steps.get("steps") or 0))
    for name, (unit, higher) in _OF_STEPS.items():
        values = (left_steps.get(name), right_steps.get(name))
        if any(values):  # what neither has, or neither takes, is no difference
            deltas.append(_delta(name, unit, values, n, higher=higher))
    for name in ("other_cores_mean", "other_cores_max"):
        values = (left_steps.get(name), right_steps.get(name))
        if values != (None, None):
            delta = _delta(name, "cores", values, n, higher=False)
            deltas.append(msgspec.structs.replace(delta, better=None))
    return deltas


def _delta(
    name: str, unit: str, values: tuple[float | None, float | None], n: tuple[int, int], *, higher: bool
) -> MetricDelta:
    a, b = values
    delta = b - a if a is not None and b is not None else None
    better: Literal["a", "b"] | None = None
    if delta:
        better = "b" if (delta > 0) == higher else "a"
    return MetricDelta(
        name=name,
        unit=unit,
        a=a,
        b=b,
        n_a=n[0],
        n_b=n[1],
        delta=delta,
        ratio=b / a if a and b is not None else None,
        better=better,
    )


def _warnings(a: Baseline, b: Baseline) -> list[str]:
    found: list[str] = []
    for label, made in (("A", a), ("B", b)):
        if not made.data.validity.valid:
            found.append(f"{label} is doubtful: {'; '.join(made.data.validity.reasons)}")
        if made.data.stats.ok < FEW_REQUESTS:
            good = f"{made.data.stats.ok} good request{'' if made.data.stats.ok == 1 else 's'}"
            found.append(f"{label} has {good}; its percentiles are coarse.")
        work = other_work(made.data.step_stats)
        if work:
            found.append(f"{label} was measured while other work went on: {work}.")
    known = ["other_cores_mean" in made.data.step_stats for made in (a, b)]
    if known[0] != known[1]:
        found.append(f"{'B' if known[0] else 'A'} does not tell what else kept its machine busy.")
    if a.data.source != b.data.source:
        found.append("One is a load run and one live traffic: their times start at different events.")
    if a.data.workload_sha256 != b.data.workload_sha256 or not a.data.workload_sha256:
        found.append("The two did not get the same list of requests.")
    model_a, model_b = a.data.identity.model, b.data.identity.model
    if model_a is not None and model_b is not None and model_a.sha256 != model_b.sha256:
        found.append("The two ran different models.")
    return found
