"""What a peer measured, and the figures made of it. One rule for everybody.

Times are seconds of the measuring process's monotonic clock since the workload was handed over, so a request
that waits for its turn has that in its TTFT.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class RequestTimes(msgspec.Struct, frozen=True):
    """When each token of one request reached whoever asked for it."""

    prompt_tok: int
    token_s: list[float]
    cached_tok: int = 0


class Run(msgspec.Struct, frozen=True):
    """One repetition of one workload on one peer."""

    engine: str
    version: str
    dtype: str
    workload: str
    arm: str
    requests: list[RequestTimes]
    index: int = 0
    steps: list[tuple[int, int]] = []  # bytes moved and operations of each step, where the engine tells them
    others_cores: float = 0.0  # processors that were busy with something else


class Spread(msgspec.Struct, frozen=True):
    """A figure over the repetitions. ``n`` is how many."""

    median: float
    min: float
    max: float
    n: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. ``tpot_ms`` is None where requests have one token."""

    engine: str
    version: str
    dtype: str
    workload: str
    ttft_ms: Spread
    tpot_ms: Spread | None
    out_tok_s: Spread
    prefill_tok_s: Spread
    wall_s: Spread
    cached_tok: Spread
    others_cores: Spread
    moved_gb: float | None = None  # by the steps of the last repetition, as the engine models them
    gflop: float | None = None
    of_roofline: Spread | None = None  # the shortest time that the ceilings allow, by the wall time


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of one or more values."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def wall_s(run: Run) -> float:
    """From the hand-over to the last token of the last request."""
    return max(request.token_s[-1] for request in run.requests)


def ttft_ms(run: Run) -> float:
    """Median over the requests, from the hand-over of the workload."""
    return 1e3 * statistics.median(request.token_s[0] for request in run.requests)


def tpot_ms(run: Run) -> float | None:
    """Median over the requests of (last - first) / (n - 1); None when every request has one token."""
    values = [
        (request.token_s[-1] - request.token_s[0]) / (len(request.token_s) - 1)
        for request in run.requests
        if len(request.token_s) > 1
    ]
    return 1e3 * statistics.median(values) if values else None


def out_tok_s(run: Run) -> float:
    """All generated tokens by the wall time."""
    return sum(len(request.token_s) for request in run.requests) / wall_s(run)


def prefill_tok_s(run: Run) -> float:
    """All prompt tokens by the time until the last request had its first token."""
    return sum(request.prompt_tok for request in run.requests) / max(r.token_s[0] for r in run.requests)


def title(run: Run) -> str:
    """The workload, with its arm where it has several."""
    return run.workload if run.arm == "plain" else f"{run.workload} {run.arm}"


def roofline_s(run: Run, bytes_per_s: float, flops_per_s: float) -> float:
    """The least time for a run's steps: each takes as long as its bytes or its operations, the longer one."""
    return sum(max(moved / bytes_per_s, flops / flops_per_s) for moved, flops in run.steps)


def row(runs: Sequence[Run], ceilings: tuple[float, float] | None = None) -> Row:
    """The repetitions of one workload and arm on one peer, summed up.

    ``ceilings``: bytes and operations a second that the machine reaches.
    """
    first, last = runs[0], runs[-1]
    tpots = [value for run in runs if (value := tpot_ms(run)) is not None]
    roofs = [roofline_s(run, *ceilings) / wall_s(run) for run in runs if run.steps] if ceilings else []
    return Row(
        engine=first.engine,
        version=first.version,
        dtype=first.dtype,
        workload=title(first),
        ttft_ms=spread([ttft_ms(run) for run in runs]),
        tpot_ms=spread(tpots) if tpots else None,
        out_tok_s=spread([out_tok_s(run) for run in runs]),
        prefill_tok_s=spread([prefill_tok_s(run) for run in runs]),
        wall_s=spread([wall_s(run) for run in runs]),
        cached_tok=spread([float(sum(r.cached_tok for r in run.requests)) for run in runs]),
        others_cores=spread([run.others_cores for run in runs]),
        moved_gb=sum(moved for moved, _ in last.steps) / 1e9 if last.steps else None,
        gflop=sum(flops for _, flops in last.steps) / 1e9 if last.steps else None,
        of_roofline=spread(roofs) if roofs else None,
    )
