"""What a smoke run found: figures of each phase, ``smoke.json`` and the ten-line summary. No Qt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.lab.stats import LoadRow, RunStats
from ipc.messages import DeviceInfo, EngineInfo, KnobValue, ModelInfo

PHASES = ("on", "off", "on_again")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One flip of the knob. ``running`` requests went on while it was applied."""

    value: KnobValue
    rev: int
    took_ms: float
    running: int
    t_ns: int  # the engine's clock, when it was applied


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The good requests that were first scheduled in one phase. Undefined is None."""

    phase: str
    requests: int
    prompt_tok: int
    cached_tok: int
    hit_rate: float | None
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    queue_p50_ms: float | None


class Playground(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    reply: str
    ttft_ms: float | None
    tok_per_s: float | None
    tokens: int


class Report(msgspec.Struct, kw_only=True):
    """``smoke.json``. Filled piece by piece, so a run that fails still tells what it had."""

    ok: bool = False
    failed: str = ""  # the piece that failed
    why: str = ""
    timings_s: dict[str, float] = {}
    model: ModelInfo | None = None
    device: DeviceInfo | None = None
    engine: EngineInfo | None = None
    workload: dict[str, Any] = {}
    load: RunStats | None = None
    load_valid: bool | None = None
    changes: list[Change] = []
    phases: list[PhaseFigures] = []
    num_blocks: int = 0
    block_size: int = 0
    most_used_blocks: int = 0
    most_shared_blocks: int = 0
    steps: int = 0
    outside_forward_share: float | None = None
    attention: str = ""
    kernels: str = ""
    frame_ms: float | None = None  # of the GUI thread, mean
    playground: Playground | None = None
    snapshot_id: str = ""
    snapshot_rows: int = 0
    exports: dict[str, str] = {}
    imported_equal: bool | None = None
    screenshots: list[str] = []
    notes: list[str] = []


def phases(rows: Sequence[LoadRow], changes: Sequence[Change]) -> list[PhaseFigures]:
    """Sort rows by when the engine first scheduled them: that is when it looked for their prefix."""
    edges = [change.t_ns for change in changes]
    groups: list[list[LoadRow]] = [[] for _ in range(len(edges) + 1)]
    for row in rows:
        if row.good and row.sched_engine_ns is not None:
            groups[sum(row.sched_engine_ns >= edge for edge in edges)].append(row)
    return [_figures(name, group) for name, group in zip(PHASES, groups, strict=False)]


def _figures(name: str, rows: Sequence[LoadRow]) -> PhaseFigures:
    prompt = sum(row.prompt_tok or 0 for row in rows)
    cached = sum(row.cached_tok or 0 for row in rows)
    return PhaseFigures(
        phase=name,
        requests=len(rows),
        prompt_tok=prompt,
        cached_tok=cached,
        hit_rate=cached / prompt if prompt else None,
        ttft_p50_ms=_median_ms([row.ttft_s for row in rows]),
        tpot_p50_ms=_median_ms([row.tpot_s for row in rows]),
        queue_p50_ms=_median_ms([row.queue_s for row in rows]),
    )


def _median_ms(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return 1e3 * statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name:12} {self.text}"


def summary(report: Report) -> str:
    """Ten lines with the run's real figures."""
    lines = [_head(report), _model(report), _device(report), _load(report)]
    lines += [_latency(report, "TTFT", "ttft_s"), _latency(report, "TPOT", "tpot_s"), _hits(report)]
    lines += [_kv(report), _snapshot(report), _rest(report)]
    return "\n".join(str(line) for line in lines)


def _head(report: Report) -> _Line:
    verdict = "ok" if report.ok else f"FAILED at {report.failed}: {report.why}"
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.timings_s.items())
    return _Line("smoke", f"{verdict} ({took})")


def _model(report: Report) -> _Line:
    model = report.model
    if model is None:
        return _Line("model", "-")
    size = f"{model.num_params / 1e6:.0f} M parameters, {model.weight_bytes / 2**20:.0f} MiB"
    return _Line("model", f"{model.name}, {model.architecture}, {model.dtype}, {size}")


def _device(report: Report) -> _Line:
    device = report.device
    if device is None:
        return _Line("device", "-")
    copy = device.copy_bytes_per_s
    speed = f"copies {copy / 1e9:.1f} GB/s" if copy else "copy speed not measured"
    where = f", {device.threads} threads" if device.kind == "cpu" else ""
    return _Line("device", f"{device.name}{where}, {speed}; attention {report.attention or '-'}")


def _load(report: Report) -> _Line:
    load = report.load
    if load is None:
        return _Line("load", "-")
    rates = f"{_number(load.request_rate_rps, 2)} req/s, {_number(load.output_tok_s, 1)} output tok/s"
    return _Line("load", f"{load.ok} of {load.requests} requests good, {rates}, {report.steps} steps")


def _latency(report: Report, title: str, name: str) -> _Line:
    metric = report.load.metrics.get(name) if report.load is not None else None
    if metric is None or metric.p50 is None:
        return _Line(title, "-")
    values = [
        (label, value) for label, value in (("p50", metric.p50), ("p95", metric.p95), ("p99", metric.p99))
    ]
    text = "  ".join(f"{label} {_number(None if v is None else v * 1e3, 0)} ms" for label, v in values)
    return _Line(title, f"{text}  (n={metric.n})")


def _hits(report: Report) -> _Line:
    parts = []
    for figures, state in zip(report.phases, ("on", "off", "on again"), strict=False):
        rate = None if figures.hit_rate is None else 100 * figures.hit_rate
        ttft = _number(figures.ttft_p50_ms, 0)
        parts.append(f"{state} {_number(rate, 1)} % hits, TTFT p50 {ttft} ms (n={figures.requests})")
    revs = ", ".join(str(change.rev) for change in report.changes)
    return _Line("prefix cache", f"{'; '.join(parts) or '-'}; cfg rev {revs or '-'}")


def _kv(report: Report) -> _Line:
    blocks = f"{report.num_blocks} blocks of {report.block_size} tokens"
    return _Line(
        "KV map", f"{blocks}, at most {report.most_used_blocks} used, {report.most_shared_blocks} shared"
    )


def _snapshot(report: Report) -> _Line:
    same = {True: "imported again: equal", False: "imported again: NOT equal", None: "not imported"}
    kinds = ", ".join(report.exports) or "nothing"
    text = f"{report.snapshot_id[:8] or '-'} with {report.snapshot_rows} rows, exported {kinds}"
    return _Line("snapshot", f"{text}, {same[report.imported_equal]}")


def _rest(report: Report) -> _Line:
    chat = report.playground
    said = (
        "no reply"
        if chat is None
        else f"TTFT {_number(chat.ttft_ms, 0)} ms, {_number(chat.tok_per_s, 1)} tok/s"
    )
    frame = f"a frame takes {_number(report.frame_ms, 1)} ms"
    return _Line("window", f"chat {said}; {len(report.screenshots)} screenshots; {frame}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
