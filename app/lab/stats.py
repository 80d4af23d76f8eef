"""Statistics of a run, from its raw rows."""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorClass = Literal["", "engine", "refused", "client", "cancelled"]


class LoadRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a load. ``*_ns`` are this machine's monotonic clock; undefined is None."""

    index: int
    kind: str
    tag: str
    rid: int | None = None
    prompt_sha256: str = ""
    prompt_tok: int | None = None
    cached_tok: int | None = None
    output_tok: int = 0
    max_tokens: int = 0
    intended_ns: int
    sent_ns: int | None = None
    accepted_ns: int | None = None
    first_ns: int | None = None  # first token received
    last_ns: int | None = None
    end_ns: int | None = None
    arrive_engine_ns: int | None = None  # the engine's stamps, its own clock
    sched_engine_ns: int | None = None
    first_engine_ns: int | None = None
    last_engine_ns: int | None = None
    itl_us: list[int] = []
    finish: str | None = None
    error_class: ErrorClass = ""
    error: str = ""
    rev_first: int | None = None
    rev_last: int | None = None


class MetricStat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric over the good rows: ``n`` counted, ``excluded`` undefined there (TPOT of one token)."""

    name: str
    unit: str
    n: int
    excluded: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    minimum: float | None = None
    maximum: float | None = None


class RunStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of a run. Latencies are over good rows only; errors are counted apart."""

    requests: int
    ok: int
    errors: dict[str, int]  # by class
    error_share: float | None
    duration_s: float | None
    request_rate_rps: float | None  # good requests per second
    output_tok_s: float | None
    prompt_tok_s: float | None
    metrics: dict[str, MetricStat]  # ttft_s, tpot_s, itl_s, e2e_s, queue_s, lag_s
    percentile_rule: str = ""


def summarize(rows: list[LoadRow]) -> RunStats:
    raise NotImplementedError
