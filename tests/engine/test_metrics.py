"""Sums, meters and step rows: each figure against its definition."""

from __future__ import annotations

import pytest

from engine.metrics import MeterReader, Meters, StageTotals, StepClock, hidden_ns, step_row
from engine.plan import StepPlan
from engine.runner import StepOutput
from engine.scheduler import Scheduler
from ipc.messages import StepRow
from tests.engine.drive import knobs


def row(clock: StepClock, *, before_ns: int = 0, out: StepOutput | None = None) -> StepRow:
    scheduler = Scheduler(knobs(), num_blocks=4, block_size=4, identity="m", release_slot=lambda slot: None)
    return step_row(
        1,
        clock,
        StepPlan(),
        out or StepOutput.of(0),
        scheduler,
        text_us=(1, 2, 3),
        recompute_ns=4_000,
        publish_ns=5_999,
        before_ns=before_ns,
        output_tokens=6,
        attention="sdpa",
        cfg_rev=7,
    )


def test_a_step_lasts_from_its_begin_or_from_the_end_of_the_one_before() -> None:
    clock = StepClock(begin=1_000_000, planned=1_100_000, end=3_000_000, prepare=70_000, hidden=60_500)
    alone, after = row(clock), row(clock, before_ns=1_500_000)
    assert (alone.dur_us, after.dur_us) == (2000, 1500)
    clock.beyond = 400_000  # the next step's, which gets what this one leaves
    assert row(clock, before_ns=1_500_000).dur_us == 1100
    assert (alone.t_ns, alone.plan_us, alone.prepare_us, alone.overlap_us) == (1_000_000, 100, 70, 60)
    assert (alone.tokenize_us, alone.detokenize_us, alone.send_us) == (1, 2, 3)
    assert (alone.recompute_us, alone.publish_us, alone.cfg_rev) == (4, 5, 7)


def test_parts_of_the_forward_pass_are_none_unless_they_were_taken() -> None:
    out = StepOutput([], [], [], [], forward_s=0.003, copy_s=0.001, copied_blocks=9)
    plain = row(StepClock(), out=out)
    assert (plain.attention_us, plain.linear_us, plain.head_us) == (None, None, None)
    assert (plain.forward_us, plain.copy_us, plain.copied_blk) == (3000, 1000, 9)
    out.attention_s, out.linear_s, out.head_s = 0.001, 0.0015, 0.0
    timed = row(StepClock(), out=out)
    assert (timed.attention_us, timed.linear_us, timed.head_us) == (1000, 1500, 0)


@pytest.mark.parametrize(("begin", "end", "computed", "hidden"), [
    (10, 20, 30, 10), (10, 20, 15, 5), (10, 20, 10, 0), (10, 20, 5, 0), (0, 0, 0, 0),
])  # fmt: skip
def test_work_is_hidden_only_while_a_forward_pass_runs(
    begin: int, end: int, computed: int, hidden: int
) -> None:
    assert hidden_ns(begin, end, computed) == hidden


def test_differences_of_meters_lose_nothing_to_rounding() -> None:
    meters = Meters()
    reader = MeterReader(meters)
    sums = [0, 0, 0]
    for _ in range(1000):
        meters.tokenize_ns += 700
        meters.detokenize_ns += 1_300
        meters.send_ns += 1
        sums = [a + b for a, b in zip(sums, reader.take(), strict=True)]
    assert sums == [700, 1300, 1]
    assert reader.take() == (0, 0, 0)


def test_a_reader_begins_where_the_meters_stand() -> None:
    meters = Meters()
    meters.send_ns = 5_000_000
    assert MeterReader(meters).take() == (0, 0, 0)


def test_the_difference_of_two_readings_is_what_came_between() -> None:
    totals = StageTotals()
    totals.add(plan_ns=1, prepare_ns=2, copy_ns=3, forward_ns=4, sample_ns=5)
    before = totals.now()
    totals.add(plan_ns=10, prepare_ns=20, copy_ns=30, forward_ns=40, sample_ns=50)
    assert tuple(b - a for a, b in zip(before, totals.now(), strict=True)) == (10, 20, 30, 40, 50)
