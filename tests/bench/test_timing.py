"""The arithmetic of the benchmarks, and that no token of the text is used twice."""

from __future__ import annotations

import itertools

import pytest

from tests.bench.peer_loop import Ceilings
from tests.bench.peer_report import rows_of, table
from tests.bench.timing import RequestTimes, Run
from tests.bench.workloads import build, each


def _run(engine: str, workload: str, arm: str, factor: float) -> Run:
    times = [
        RequestTimes(10, [1.0 * factor, 2.0 * factor, 3.0 * factor], 4),
        RequestTimes(30, [2.0 * factor]),
    ]
    return Run(engine, "1", "float32", workload, arm, times)


def test_figures_of_a_row() -> None:
    (row,) = rows_of([_run("e", "W2", "plain", factor) for factor in (1.0, 2.0, 4.0)])
    assert (row.ttft_ms.median, row.ttft_ms.min, row.ttft_ms.max, row.ttft_ms.n) == (3000, 1500, 6000, 3)
    assert row.tpot_ms is not None
    assert row.tpot_ms.median == 2000
    assert row.out_tok_s.median == pytest.approx(4 / 6)
    assert row.prefill_tok_s.median == pytest.approx(40 / 4)
    assert row.wall_s.max == 12
    assert row.cached_tok.median == 4


def test_one_token_has_no_time_per_token() -> None:
    (row,) = rows_of([Run("e", "1", "float32", "W4", "plain", [RequestTimes(8, [0.5])])])
    assert row.tpot_ms is None
    assert " - " in table([row])


def test_the_roofline_takes_the_slower_ceiling_of_each_step() -> None:
    run = Run(
        "decodeck", "1", "bfloat16", "W4", "plain", [RequestTimes(8, [4.0])], steps=[(100, 1), (10, 300)]
    )
    (row,) = rows_of([run], Ceilings(read_bytes_per_s=100.0, flops_per_s=300.0))
    assert row.of_roofline is not None
    assert row.of_roofline.median == pytest.approx((1.0 + 1.0) / 4.0)
    assert (row.moved_gb, row.gflop) == (110e-9, 301e-9)
    assert "50 [50 50]" in table([row])
    (without,) = rows_of([run])
    assert without.of_roofline is None


def test_every_stretch_of_the_text_is_used_once() -> None:
    plan = build("m", range(100_000), ["W1", "W2", "W3", "W4"], repeats=3, seed=20)
    seen: set[int] = set()
    for workload, _, _, items in each(plan):
        shared = 384 if workload == "W3" else 0
        assert all(item.ids[:shared] == items[0].ids[:shared] for item in items)
        fresh = list(itertools.chain(items[0].ids[:shared], *(item.ids[shared:] for item in items)))
        assert len(set(fresh)) == len(fresh)
        assert not seen & set(fresh)
        seen |= set(fresh)
    sizes = [[(len(item.ids), item.out) for item in items] for items in plan.runs["W2"]["plain"]]
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(sizes[0]) == 32
    assert all(16 <= prompt <= 384 and 16 <= out <= 192 for prompt, out in sizes[0])
    assert [(len(item.ids), item.out) for item in plan.runs["W3"]["cache_on"][0]] == [(416, 32)] * 16


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="used up"):
        build("m", range(2000), ["W4"], repeats=3, seed=1)
