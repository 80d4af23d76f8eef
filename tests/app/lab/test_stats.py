"""Statistics of runs, from rows."""

from __future__ import annotations

import time

import numpy as np
import pytest

from app.lab.stats import LoadRow, row_of_engine, summarize
from ipc.messages import RequestRow

MS = 1_000_000


def row(index: int, *, tokens: int = 10, start_ms: float = 0.0, **changes: object) -> LoadRow:
    start = round(start_ms * MS)
    first = start + 50 * MS + index * MS
    last = first + max(0, tokens - 1) * 20 * MS
    values: dict[str, object] = {
        "index": index,
        "kind": "chat",
        "tag": f"t/{index}",
        "intended_ns": start,
        "sent_ns": start + MS,
        "output_tok": tokens,
        "prompt_tok": 100,
        "first_ns": first if tokens else None,
        "last_ns": last if tokens else None,
        "end_ns": last + MS,
        "itl_us": [20_000] * max(0, tokens - 1),
        "finish": "length",
    }
    return LoadRow(**(values | changes))  # type: ignore[arg-type]


def test_ttft_counts_from_the_intended_sending() -> None:
    late = row(0, sent_ns=40 * MS)
    assert late.ttft_s == pytest.approx(0.050)
    assert late.lag_s == pytest.approx(0.040)


def test_tpot_leaves_out_requests_of_fewer_than_two_tokens() -> None:
    """C09: 20 of one token, 20 of none, 20 of ten: the mean is over the last twenty, the rest is counted."""
    rows = [row(i, tokens=1) for i in range(20)]
    rows += [row(20 + i, tokens=0, finish="stop") for i in range(20)]
    rows += [row(40 + i, tokens=10) for i in range(20)]
    tpot = summarize(rows).metrics["tpot_s"]
    assert (tpot.n, tpot.excluded) == (20, 40)
    assert tpot.mean == pytest.approx(0.020)
    assert rows[0].tpot_s is None
    assert rows[20].ttft_s is None


def test_failed_requests_change_no_latency_and_are_counted_apart() -> None:
    """C11: 100 good and 20 killed at half give the latencies of the 100 and an error rate of 16.7 %."""
    good = [row(i, start_ms=i * 10) for i in range(100)]
    killed = [
        row(100 + i, start_ms=i * 10, tokens=5, finish="error", error_class="engine", end_ns=3000 * MS)
        for i in range(20)
    ]
    with_errors, without = summarize(good + killed), summarize(good)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert with_errors.metrics[name] == without.metrics[name]
    assert with_errors.errors == {"engine": 20}
    assert with_errors.error_share == pytest.approx(20 / 120)


def test_cancelled_requests_are_neither_good_nor_errors() -> None:
    rows = [row(0), row(1, finish="cancelled", error_class="cancelled")]
    stats = summarize(rows)
    assert (stats.ok, stats.error_share, stats.errors) == (1, 0.0, {"cancelled": 1})


def test_answers_from_the_result_cache_are_good_but_no_measurement() -> None:
    """Rates of requests count them; latencies, token rates and prefix hits do not."""
    computed = [row(i, start_ms=100.0 * i, cached_tok=50) for i in range(10)]
    kept = [row(10 + i, start_ms=100.0 * i, first_ns=1, last_ns=1, result_cached=True) for i in range(10)]
    alone, both = summarize(computed), summarize([*computed, *kept])
    assert (both.ok, both.result_cached) == (20, 10)
    latencies = [name for name in alone.metrics if name != "lag_s"]  # sending is the generator's own doing
    assert [both.metrics[name] for name in latencies] == [alone.metrics[name] for name in latencies]
    assert both.cached_share == alone.cached_share == 0.5
    assert both.request_rate_rps == pytest.approx(20 / both.duration_s)
    assert both.output_tok_s == pytest.approx(100 / both.duration_s)


def test_a_run_of_which_half_failed_has_its_real_duration() -> None:
    """C08: failed rows carry real times, so nothing reaches back to the epoch."""
    base_ms = time.monotonic_ns() / MS
    rows = []
    for i in range(10):
        failed = {"finish": None, "error_class": "refused", "first_ns": None, "last_ns": None}
        rows.append(row(i, start_ms=base_ms + i * 100, **(failed if i % 2 else {})))
    stats = summarize(rows)
    ends = [r.end_ns for r in rows if r.end_ns is not None]
    assert stats.duration_s == pytest.approx((max(ends) - rows[0].intended_ns) * 1e-9)
    assert stats.ok == 5


def test_ttft_has_one_sample_for_each_request_with_a_token() -> None:
    """C01: 300 requests, 30 cancelled in the queue, 20 refused: 250 samples, ordered within each row."""
    rows = [row(i, sched_engine_ns=20 * MS, arrive_engine_ns=2 * MS) for i in range(250)]
    nothing = {"tokens": 0, "finish": "cancelled", "error_class": "cancelled"}
    rows += [row(250 + i, **nothing) for i in range(30)]  # type: ignore[arg-type]
    rows += [row(280 + i, tokens=0, finish=None, error_class="refused") for i in range(20)]
    stats = summarize(rows)
    assert stats.metrics["ttft_s"].n == 250 == sum(r.first_ns is not None for r in rows)
    for each in rows[:250]:
        assert each.queue_s is not None
        assert each.ttft_s is not None
        assert each.e2e_s is not None
        assert each.queue_s <= each.ttft_s <= each.e2e_s


def test_itl_is_pooled_from_the_engines_gaps_not_from_messages() -> None:
    stats = summarize([row(0, itl_us=[10_000, 30_000]), row(1, itl_us=[20_000] * 8)])
    gaps = [0.010, 0.030, *[0.020] * 8]
    assert stats.metrics["itl_s"].n == 10
    assert stats.metrics["itl_s"].p99 == pytest.approx(np.percentile(gaps, 99, method="linear"))


def test_an_empty_run_is_undefined_not_zero() -> None:
    stats = summarize([])
    assert (stats.requests, stats.duration_s, stats.output_tok_s, stats.error_share) == (0, None, None, None)
    assert stats.metrics["ttft_s"].p50 is None


def test_the_engines_own_rows_give_the_same_statistics_without_a_generator() -> None:
    live = RequestRow(
        rid=7, tag="", state="finished", arrive_ns=5 * MS, prompt_tok=10, cached_tok=4, output_tok=3,
        sched_ns=6 * MS, first_ns=15 * MS, last_ns=35 * MS, end_ns=36 * MS, itl_us=[10_000, 10_000],
        finish="stop",
    )  # fmt: skip
    stats = summarize([row_of_engine(live)])
    assert stats.metrics["ttft_s"].p50 == pytest.approx(0.010)
    assert stats.metrics["tpot_s"].p50 == pytest.approx(0.010)
    assert stats.metrics["queue_s"].p50 == pytest.approx(0.001)
    assert stats.cached_share == pytest.approx(0.4)
    assert "lag_s" not in stats.metrics


def test_durations_do_not_feel_a_jump_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: every duration is a difference of monotonic stamps, whatever time.time says."""
    before = summarize([row(i, start_ms=time.monotonic_ns() / MS) for i in range(5)])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    after = summarize([row(i, start_ms=time.monotonic_ns() / MS) for i in range(5)])
    assert after.metrics["ttft_s"].p50 == pytest.approx(before.metrics["ttft_s"].p50, abs=1e-9)
