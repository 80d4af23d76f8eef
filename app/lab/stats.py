"""Statistics of a run, from its raw rows.

TTFT is the first token's arrival minus the *intended* sending, so a late generator or a stalled engine
cannot hide. TPOT is (last - first) / (n - 1) and undefined for one token. ITL is the gap between two tokens
by the engine's own stamps, pooled over requests, so that several tokens in one message are not one gap.
Only good rows enter latencies and throughput; errors are counted apart, cancelled requests too. An answer
from the result cache is good, but nothing was computed for it: it counts in the request rate, and in no
latency and no token rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from app.model.series import PERCENTILE_RULE, percentiles
from ipc.messages import RequestRow

ErrorClass = Literal["", "engine", "refused", "client", "cancelled"]

METRIC_ORDER = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s", "lag_s")
NS = 1e-9


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
    result_cached: bool = False  # answered from the engine's result cache
    drafts_n: int = 0  # steps with a draft; each brought one token more than accepted, or ended the request
    drafted_tok: int = 0
    accepted_tok: int = 0

    @property
    def good(self) -> bool:
        """It ended as it should: its figures count."""
        return self.finish in ("stop", "length") and not self.error_class

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_ns is None else (self.first_ns - self.intended_ns) * NS

    @property
    def tpot_s(self) -> float | None:
        if self.first_ns is None or self.last_ns is None or self.output_tok < 2:
            return None
        return (self.last_ns - self.first_ns) * NS / (self.output_tok - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.end_ns is None else (self.end_ns - self.intended_ns) * NS

    @property
    def queue_s(self) -> float | None:
        if self.sched_engine_ns is None or self.arrive_engine_ns is None:
            return None
        return (self.sched_engine_ns - self.arrive_engine_ns) * NS

    @property
    def lag_s(self) -> float | None:
        return None if self.sent_ns is None else (self.sent_ns - self.intended_ns) * NS


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
    """The whole of a run. Latencies are over the good rows that were computed; the rest is counted apart."""

    requests: int
    ok: int
    errors: dict[str, int]  # by class, cancelled ones among them
    error_share: float | None  # errors / (good + errors); cancelled requests are neither
    duration_s: float | None  # from the first intended sending to the last end, failed rows included
    request_rate_rps: float | None  # good requests per second
    output_tok_s: float | None
    prompt_tok_s: float | None
    cached_share: float | None = None  # of the computed rows' prompt tokens, found in the prefix cache
    result_cached: int = 0  # good rows that the result cache answered; in no latency and no token rate
    metrics: dict[str, MetricStat]  # ttft_s, tpot_s, itl_s, e2e_s, queue_s and, for a load, lag_s
    percentile_rule: str = PERCENTILE_RULE


def row_of_engine(row: RequestRow) -> LoadRow:
    """An engine's own record of a request as a `LoadRow`: intended sending = arrival at the engine.

    The generator's fields (sent, accepted) stay None, since nobody measured them.
    """
    if row.finish == "cancelled":
        failed: ErrorClass = "cancelled"
    elif row.finish == "error":
        failed = "refused" if row.code in ("invalid", "too_long", "too_large") else "engine"
    else:
        failed = ""
    return LoadRow(
        index=row.rid,
        kind="live",
        tag=row.tag,
        rid=row.rid,
        prompt_tok=row.prompt_tok,
        cached_tok=row.cached_tok,
        output_tok=row.output_tok,
        max_tokens=row.max_tokens,
        intended_ns=row.arrive_ns,
        first_ns=row.first_ns,
        last_ns=row.last_ns,
        end_ns=row.end_ns,
        arrive_engine_ns=row.arrive_ns,
        sched_engine_ns=row.sched_ns,
        first_engine_ns=row.first_ns,
        last_engine_ns=row.last_ns,
        itl_us=row.itl_us,
        finish=row.finish,
        error_class=failed,
        error=row.message,
        rev_first=row.rev_first,
        rev_last=row.rev_last,
        result_cached=row.result_cached,
        drafts_n=row.drafts_n,
        drafted_tok=row.drafted_tok,
        accepted_tok=row.accepted_tok,
    )


def metric(name: str, unit: str, values: Sequence[float | None]) -> MetricStat:
    """Percentiles of the defined values; the undefined ones are counted as ``excluded``."""
    defined = [v for v in values if v is not None]
    found = percentiles(defined)
    return MetricStat(
        name=name,
        unit=unit,
        n=found.n,
        excluded=len(values) - len(defined),
        mean=found.mean,
        p50=found[50.0],
        p90=found[90.0],
        p95=found[95.0],
        p99=found[99.0],
        minimum=found.minimum,
        maximum=found.maximum,
    )


def summarize(rows: Sequence[LoadRow]) -> RunStats:
    """The statistics of a run; requests that did not end yet are left out."""
    ended = [row for row in rows if row.finish is not None or row.error_class]
    good = [row for row in ended if row.good]
    errors = Counter(row.error_class or "engine" for row in ended if not row.good)
    failed = sum(count for kind, count in errors.items() if kind != "cancelled")
    ends = [row.end_ns for row in ended if row.end_ns is not None]
    span_s = (max(ends) - min(row.intended_ns for row in ended)) * NS if ends else None
    duration_s = span_s if span_s is not None and span_s > 0 else None
    computed = [row for row in good if not row.result_cached]
    prompt = sum(row.prompt_tok or 0 for row in computed)
    cached = sum(row.cached_tok or 0 for row in computed)
    gaps: list[float | None] = [gap * 1e-6 for row in computed for gap in row.itl_us]
    metrics = [
        metric("ttft_s", "s", [row.ttft_s for row in computed]),
        metric("tpot_s", "s", [row.tpot_s for row in computed]),
        metric("itl_s", "s", gaps),
        metric("e2e_s", "s", [row.e2e_s for row in computed]),
        metric("queue_s", "s", [row.queue_s for row in computed]),
    ]
    if any(row.sent_ns is not None for row in ended):
        metrics.append(metric("lag_s", "s", [row.lag_s for row in ended if row.sent_ns is not None]))
    return RunStats(
        requests=len(ended),
        ok=len(good),
        errors=dict(sorted(errors.items())),
        error_share=failed / (len(good) + failed) if good or failed else None,
        duration_s=duration_s,
        request_rate_rps=len(good) / duration_s if duration_s else None,
        output_tok_s=sum(row.output_tok for row in computed) / duration_s if duration_s else None,
        prompt_tok_s=prompt / duration_s if duration_s else None,
        cached_share=cached / prompt if prompt else None,
        result_cached=len(good) - len(computed),
        metrics={stat.name: stat for stat in metrics},
    )
