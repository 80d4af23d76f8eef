"""What a plan records and waits for, who takes turns, planning ahead, and what memory is reserved for."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages import BLOCK_FREE
from tests.engine.drive import Drive, expected_output
from tests.engine.test_scheduler import prompt

# --- records of preemption -----------------------------------------------------------------------


def test_each_preemption_names_victim_cause_and_loss() -> None:
    """For lack of blocks the latest in the order goes, for whoever needed them: another one, or itself."""
    drive = Drive(num_blocks=4, block_size=4, prefix_cache=False)
    first, second = drive.add(prompt(1, 7), 8), drive.add(prompt(2, 7), 8)
    while not drive.preemptions:
        drive.step()
    record = drive.preemptions[0]
    assert (record.request, record.by, record.reason, record.mode) == (
        second,
        first.rid,
        "blocks",
        "recompute",
    )
    assert record.lost_tokens == 8
    drive.run()
    assert sum(p.lost_tokens for p in drive.preemptions) == second.lost_tokens == second.recompute_tokens
    assert (second.preempt_reason, second.preempt_count) == ("blocks", len(drive.preemptions))
    drive = Drive(num_blocks=4, block_size=4, prefix_cache=False)
    drive.add(prompt(1, 5), 8)
    second = drive.add(prompt(2, 7), 8)
    while not drive.preemptions:
        drive.step()
    assert (drive.preemptions[0].request, drive.preemptions[0].by) == (second, second.rid)
    drive.run()


def test_a_rebuild_is_a_preemption_of_everybody() -> None:
    drive = Drive()
    requests = [drive.add(prompt(seed, 9), 10) for seed in range(3)]
    drive.step()
    drive.rebuild(40, 4)
    assert [(p.request, p.by, p.reason, p.lost_tokens) for p in drive.preemptions] == [
        (request, 0, "rebuild", 9) for request in requests
    ]
    drive.run()


def test_rows_say_what_of_them_is_computed_again() -> None:
    """The recompute tax of a step is known row by row, and adds up with the plan's and the requests'."""
    drive = Drive(prefill_chunk_tokens=8, prefix_cache=False)
    request, other = drive.add(prompt(1, 20), 6), drive.add(prompt(2, 3), 12)
    for _ in range(5):
        drive.step()
    lost = drive.preempt(request).lost_tokens
    again = []
    while request.recompute_tokens < lost:
        plan = drive.step()
        assert sum(row.recompute for row in plan.scheduled) == plan.recompute_tokens
        again += [row.recompute for row in plan.scheduled if row.request is request]
    assert again == [8, 8, lost - 16]
    drive.run()
    assert other.recompute_tokens == 0
    assert sum(plan.recompute_tokens for plan in drive.plans) == request.recompute_tokens == lost


# --- waiting for a batch -------------------------------------------------------------------------


def starts(drive: Drive) -> list[int]:
    """Steps in which something was computed."""
    return [index for index, rows in enumerate(drive.trace) if rows]


def test_a_static_batch_waits_for_members() -> None:
    """It starts once its oldest member has waited long enough; those that came meanwhile belong to it."""
    drive = Drive(batching="static", batch_wait_ms=45.0)
    first = drive.add(prompt(1, 3), 2)
    plan = drive.step()
    assert (plan.scheduled, plan.wake_ns) == ([], first.arrive_ns + 45_000_000)
    assert plan.reason == "a batch of 1 waits for up to 64 members"
    drive.step()
    second = drive.add(prompt(2, 3), 2)
    drive.run()
    assert starts(drive) == [4, 5]
    assert (first.sched_ns, second.sched_ns) == (50_000_000, 50_000_000)
    assert drive.plans[4].wake_ns is None


def test_a_full_batch_does_not_wait() -> None:
    drive = Drive(batching="static", batch_wait_ms=10_000.0, max_num_seqs=2)
    drive.add(prompt(1, 3), 1)
    assert not drive.step().scheduled
    drive.add(prompt(2, 3), 1)
    assert len(drive.step().scheduled) == 2


def test_a_cancel_moves_the_start_to_the_next_oldest() -> None:
    drive = Drive(batching="static", batch_wait_ms=45.0)
    first = drive.add(prompt(1, 3), 1)
    drive.step()
    second = drive.add(prompt(2, 3), 1)
    drive.finish(first)
    assert drive.step().wake_ns == second.arrive_ns + 45_000_000


def test_who_waited_while_a_batch_ran_has_waited() -> None:
    drive = Drive(batching="static", batch_wait_ms=20.0, max_num_seqs=2)
    drive.add(prompt(1, 3), 6)
    drive.step()
    late = drive.add(prompt(2, 3), 1)
    drive.run()
    steps = starts(drive)
    assert steps == list(range(steps[0], steps[-1] + 1)), "no pause between the batches"
    assert late.sched_ns is not None


def test_preempted_members_do_not_wait_again() -> None:
    """Nor does anybody new slip into their batch, though nothing runs at that moment."""
    drive = Drive(batching="static", batch_wait_ms=10_000.0, max_num_seqs=3)
    members = [drive.add(prompt(seed, 3), 6) for seed in (1, 2, 4)]  # so many that it starts at once
    drive.step()
    drive.finish(members.pop())
    drive.finish(members.pop())
    newcomer = drive.add(prompt(3, 3), 1)
    drive.rebuild(64, 4)
    plan = drive.step()
    assert plan.wake_ns is None
    assert [row.request for row in plan.scheduled] == members
    assert newcomer.sched_ns is None
    while drive.scheduler.running:
        drive.step()
    assert drive.step().wake_ns == newcomer.arrive_ns + 10_000_000_000


def test_continuous_batching_waits_for_nobody() -> None:
    drive = Drive(batch_wait_ms=10_000.0, batching="continuous")
    drive.add(prompt(1, 3), 1)
    assert drive.step().scheduled


# --- fairness ------------------------------------------------------------------------------------


def test_equals_take_turns_where_a_step_has_too_few_tokens() -> None:
    """Five decode, two tokens a step: nobody is ever more than one token ahead of anybody."""
    drive = Drive(max_num_batched_tokens=64)
    requests = [drive.add(prompt(seed, 4), 40) for seed in range(5)]
    drive.step()
    drive.flip(max_num_batched_tokens=2)
    for _ in range(30):
        drive.step()
        outputs = [request.num_output for request in requests]
        assert max(outputs) - min(outputs) <= 1
    assert sum(outputs) == 5 + 60
    drive.run()


def test_a_turn_passes_to_others_where_its_request_has_to_make_room() -> None:
    """One token a step and no block left for the one whose turn it is: the step is not wasted."""
    drive = Drive(num_blocks=4, block_size=4, prefix_cache=False)
    first, second = drive.add(prompt(1, 5), 9), drive.add(prompt(2, 7), 9)
    drive.step()
    drive.flip(max_num_batched_tokens=1)
    while not drive.preemptions:
        assert drive.step().scheduled
    assert [(p.request, p.by) for p in drive.preemptions] == [(second, second.rid)]
    assert drive.trace[-1] == [(1, 1)]
    drive.run()
    assert first.preempt_count == 0


def test_turns_keep_levels_apart() -> None:
    """A higher level is served whole first; a lower one has its turn when it has waited for its ageing."""
    drive = Drive(policy="priority", priority_ageing_s=0.05, max_num_batched_tokens=64)
    high = [drive.add(prompt(seed, 4), 60, priority=0) for seed in range(2)]
    low = [drive.add(prompt(seed, 4), 60, priority=2) for seed in (3, 4)]
    drive.step()
    drive.flip(max_num_batched_tokens=2)
    for _ in range(9):
        drive.step()
    assert [request.num_output for request in high] == [10, 10]
    assert [request.num_output for request in low] == [1, 1]
    for _ in range(30):
        drive.step()
    assert min(request.num_output for request in low) >= 3, "it starves"
    assert min(request.num_output for request in high) > 3 * max(request.num_output for request in low)
    drive.run()


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=9),
    overlap=st.booleans(),
)
def test_nobody_waits_for_ever_among_equals(budget: int, lengths: list[int], overlap: bool) -> None:
    """Between two tokens of a decoding request lie at most so many steps as there are turns to take."""
    drive = Drive(num_blocks=400, overlap=overlap, prefix_cache=False)
    requests = [drive.add(prompt(seed, length), 30) for seed, length in enumerate(lengths)]
    while any(request.state != "decode" for request in requests):
        drive.step()
    drive.flip(max_num_batched_tokens=budget)
    begin_ns = drive.now_ns
    drive.run()
    bound_ns = (-(-len(requests) // budget) + 1 + overlap) * 10_000_000
    for request in requests:
        times = [begin_ns, *(t for t in request.token_ns if t > begin_ns)]
        assert all(b - a <= bound_ns for a, b in itertools.pairwise(times))


def test_steady_higher_load_delays_a_low_request_for_its_ageing_only() -> None:
    """B05, B04: it is preempted by higher ones that come soon after it, keeps its place before all later ones
    of its class, and has finished within ageing x levels plus the work that was ahead of it."""
    ageing_s, levels = 0.3, 3
    drive = Drive(max_num_seqs=2, policy="priority", priority_ageing_s=ageing_s)
    low = drive.add(prompt(1, 6), 12, priority=levels)
    drive.step()
    bound_ns = low.arrive_ns + int(ageing_s * levels * 1e9)
    goes_on_ns = 0  # when it last began to run
    for seed in range(2, 400):
        drive.add(prompt(seed, 6), 6, priority=levels if seed % 10 == 0 else 0)  # more than two seats serve
        for _ in range(2):
            was_running = low.is_running
            drive.step()
            goes_on_ns = drive.now_ns if low.is_running and not was_running else goes_on_ns
        if low.is_finished:
            break
    assert low.is_finished
    assert low.preempt_count >= 1
    everybody = [*drive.done.values(), *drive.scheduler.running, *drive.scheduler.waiting]
    overtook = [r for r in everybody if r is not low and r.sched_ns is not None and r.sched_ns < goes_on_ns]
    assert {r.priority for r in overtook} == {0}, "one of its class that came later went first"
    assert max(r.arrive_ns for r in overtook) <= bound_ns
    assert goes_on_ns <= bound_ns + 6 * 10_000_000 * len(overtook)
    drive.run()


# --- planning ahead ------------------------------------------------------------------------------


def test_a_step_is_planned_while_the_one_before_owes_its_tokens() -> None:
    """What is owed counts as known: the next plan gives each decoding request its next token, no more."""
    drive = Drive(overlap=True)
    request = drive.add(prompt(1, 5), 6)
    for _ in range(4):
        drive.step()
    assert (request.num_pending, request.num_known) == (1, request.num_tokens + 1)
    plan = drive.plan()
    assert [(row.request, row.num_new) for row in plan.scheduled] == [(request, 1)]
    assert plan.decode_tokens == 1
    assert request.num_computed == request.num_tokens
    drive.run()
    assert request.output_ids == expected_output(prompt(1, 5), 6)
    assert request.computed_tokens == 5 + 6 - 1, "nothing was computed beyond the last token"


def test_overlap_changes_no_step() -> None:
    """The same rows in the same steps, but for one step at each end in which a token is on its way."""
    traces = []
    for overlap in (False, True):
        drive = Drive(overlap=overlap, max_num_batched_tokens=8, prefill_chunk_tokens=6, prefix_cache=False)
        for seed in range(3):
            drive.add(prompt(seed, 9 + seed), 5)
        drive.run()
        traces.append([rows for rows in drive.trace if rows])
    assert traces[0] == traces[1]


def test_a_dropped_plan_changes_nothing_but_blocks_and_seats() -> None:
    drive = Drive(prefix_cache=False)
    request = drive.add(prompt(1, 9), 4)
    for _ in range(5):
        drive.plan()
    assert (request.num_computed, request.computed_tokens, request.high_water) == (0, 0, 0)
    assert drive.scheduler.pool.used_tokens == 0
    drive.run()
    assert request.computed_tokens == 12


# --- what is reserved, used and wasted -----------------------------------------------------------


def test_reserved_used_and_wasted_tokens_of_both_allocations() -> None:
    """A reserved block that nothing was written to is in use with 0 tokens; a shared one counts once."""
    figures = {}
    for allocation in ("contiguous", "paged"):
        drive = Drive(num_blocks=60, kv_allocation=allocation)
        shared = prompt(9, 8)
        for seed in range(3):
            drive.add(shared + prompt(seed, 3), 21)
            drive.step()
        pool = drive.scheduler.pool
        reserved = pool.num_used * pool.block_size
        figures[allocation] = (reserved, pool.used_tokens, reserved - pool.used_tokens)
        view = drive.scheduler.view(0)
        in_use = view.state != BLOCK_FREE
        assert view.fill[in_use].sum() == pool.used_tokens
        drive.run()
    # tokens held: 8 shared ones, and 3 prompt tokens each with 2, 1 and 0 decoded ones
    assert figures == {"contiguous": (80, 20, 60), "paged": (24, 20, 4)}
