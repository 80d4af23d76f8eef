"""The scheduler, step by step and under random load: order, budgets, memory, preemption, batching."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planner import MAX_DEFERRED
from engine.prefix_cache import MISS_NO_MATCH, MISS_NO_RUN, MISS_OFF, MISS_SHORT
from tests.engine.drive import Drive, expected_output


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(97) for i in range(length)]


# --- golden traces -------------------------------------------------------------------------------


def test_trace_of_mixed_steps() -> None:
    """Decoding rows come first and prompts fill what is left of the budget, in chunks."""
    drive = Drive(max_num_batched_tokens=8, prefill_chunk_tokens=6)
    drive.add(prompt(1, 5), 4)
    drive.step()
    drive.add(prompt(2, 9), 2)
    drive.add(prompt(3, 3), 2)
    drive.run()
    assert drive.trace == [
        [(1, 5)],
        [(1, 1), (3, 1), (2, 6)],
        [(1, 1), (2, 3), (3, 2)],
        [(1, 1), (2, 1), (3, 1)],
    ]


def test_trace_without_chunks() -> None:
    """Whole prompts only; one beyond the budget waits until it is the first, then runs in one piece."""
    drive = Drive(max_num_batched_tokens=8, chunked_prefill=False)
    drive.add(prompt(1, 5), 3)
    drive.add(prompt(2, 20), 2)
    drive.add(prompt(3, 4), 2)
    drive.run()
    assert drive.trace == [[(1, 5)], [(1, 1), (2, 20)], [(1, 1), (2, 1), (3, 4)], [(3, 1)]]


def test_trace_of_static_batches() -> None:
    """Static batching: a batch of two waits for its slowest member before the third request starts."""
    drive = Drive(batching="static", max_num_seqs=2)
    drive.add(prompt(1, 3), 1)
    drive.add(prompt(2, 3), 4)
    drive.add(prompt(3, 3), 1)
    drive.run()
    assert drive.trace == [[(1, 3), (2, 3)], [(2, 1)], [(2, 1)], [(2, 1)], [(3, 3)]]


def test_trace_of_continuous_batches() -> None:
    drive = Drive(max_num_seqs=2)
    drive.add(prompt(1, 3), 1)
    drive.add(prompt(2, 3), 4)
    drive.add(prompt(3, 3), 1)
    drive.run()
    assert drive.trace == [[(1, 3), (2, 3)], [(2, 1), (3, 3)], [(2, 1)], [(2, 1)]]


def test_members_of_a_static_batch_beyond_the_budget_belong_to_it() -> None:
    drive = Drive(batching="static", max_num_batched_tokens=4)
    for seed in (1, 2, 3):
        drive.add(prompt(seed, 4), 2)
    drive.step()
    assert [r.rid for r in drive.scheduler.running] == [1, 2, 3]
    drive.add(prompt(4, 4), 1)
    drive.run()
    assert min(i for i, rows in enumerate(drive.trace) if (4, 4) in rows) == len(drive.trace) - 1


# --- random load ---------------------------------------------------------------------------------


def draw_action(random: random.Random) -> tuple:
    """One thing that may happen to a scheduler. Arrivals and steps come often enough to fill it."""
    pick, choose = random.randrange, random.choice
    flips: list[dict[str, Any]] = [
        {"chunked_prefill": choose([True, False])},
        {"prefix_cache": choose([True, True, False])},
        {"prefill_chunk_tokens": choose([1, 3, 64])},
        {"max_num_batched_tokens": choose([1, 5, 64])},
        {"max_num_seqs": choose([1, 2, 8])},
        {"batching": choose(["static", "continuous"])},
        {"policy": choose(["fcfs", "priority"])},
        {"preemption": choose(["recompute", "swap"])},
    ]
    actions = [
        (30, ("add", 1 + pick(30), 1 + pick(12), pick(5) - 2, pick(4))),
        (40, ("step", 1 + pick(4))),
        (6, ("flip", choose(flips))),
        (4, ("cancel", pick(100))),
        (10, ("preempt", pick(100))),
        (1, ("distrust", pick(100))),
        (6, ("drop", 1 + pick(2))),
        (1, ("host", choose([0, 1, 5, 40]), choose([0, 3, 12, 40]))),
        (1, ("rebuild", choose([1, 2, 4, 16]), choose([True, False]))),
    ]
    return random.choices([action for _weight, action in actions], [weight for weight, _action in actions])[0]


def act(drive: Drive, action: tuple, total: int) -> None:
    match action:
        case ("add", length, max_tokens, priority, family):
            drive.add(
                prompt(family, 40)[:length], max_tokens, priority=priority, salt="b" if family == 3 else ""
            )
        case ("step", count):
            for _ in range(count):
                drive.step()
        case ("flip", values):
            drive.flip(**values)
        case ("cancel", pick):
            live = drive.scheduler.waiting + drive.scheduler.running
            if live:
                request = live[pick % len(live)]
                drive.scheduler.remove(request)
                request.state = "finished"
        case ("preempt", pick):
            if drive.scheduler.running:
                drive.preempt(drive.scheduler.running[pick % len(drive.scheduler.running)])
        case ("distrust", pick):
            live = drive.scheduler.waiting + drive.scheduler.running
            if live:
                request = live[pick % len(live)]
                drive.scheduler.distrust(request)
                drive.scheduler.remove(request)
                request.state = "finished"
        case ("drop", count):
            for _ in range(count):
                drive.plan()
        case ("host", prefix_blocks, swap_blocks):
            drive.set_host(prefix_blocks, swap_blocks)
        case ("rebuild", size, contiguous):
            drive.flip(kv_allocation="contiguous" if contiguous else "paged")
            drive.rebuild(total // size, size)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    length=st.integers(1, 120),
    total=st.sampled_from([48, 80, 400]),
    window=st.sampled_from([None, None, 1, 6, 13]),
    host=st.sampled_from([(0, 0), (4, 9), (30, 30)]),
    overlap=st.booleans(),
)
def test_any_load_ends_with_the_right_tokens(
    seed: int, length: int, total: int, window: int | None, host: tuple[int, int], overlap: bool
) -> None:
    """A08, A11: whatever arrives, is cancelled, flipped, preempted, swapped, resized, rebuilt or planned in
    vain: every request ends with its own tokens, its blocks hold their content at each launch (the copies are
    made on a memory of contents), the ledger adds up after each plan, and nothing is left behind."""
    chance = random.Random(seed)
    drive = Drive(
        num_blocks=total // 4,
        block_size=4,
        window=window,
        prefix_blocks=host[0],
        swap_blocks=host[1],
        overlap=overlap,
        preemption="swap" if host[1] else "recompute",
    )
    for _ in range(length):
        act(drive, draw_action(chance), total)
    drive.run()
    for request in drive.done.values():
        assert request.output_ids == expected_output(
            request.token_ids[: request.num_prompt], request.sampling.max_tokens
        )
        assert request.sched_ns is not None
        assert request.recompute_tokens <= request.computed_tokens
        assert request.recompute_tokens <= request.lost_tokens
        assert request.host_hit_tokens <= request.cached_tokens <= request.num_prompt
    scheduler = drive.scheduler
    scheduler.check()
    assert scheduler.pool.num_used == 0
    assert scheduler.pool.used_tokens == 0
    assert scheduler.num_swapped == scheduler.swap_blocks_used == 0
    assert not scheduler._in_flight


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    budget=st.integers(1, 30),
    chunk=st.integers(1, 30),
    seats=st.integers(1, 5),
)
def test_limits_hold_in_every_step(lengths: list[int], budget: int, chunk: int, seats: int) -> None:
    drive = Drive(max_num_batched_tokens=budget, prefill_chunk_tokens=chunk, max_num_seqs=seats)
    for seed, length in enumerate(lengths):
        drive.add(prompt(seed, length), 3)
    drive.run()
    for plan, rows in zip(drive.plans, drive.trace, strict=True):
        assert plan.num_tokens == sum(count for _rid, count in rows) <= budget
        assert len(rows) <= seats
        assert all(count <= chunk for _rid, count in rows)
        sizes = [count for _rid, count in rows]
        assert [s for s in sizes if s == 1] == sizes[: sizes.count(1)], "rows of one token come first"
    starts = [r.sched_ns for _rid, r in sorted(drive.done.items())]
    assert starts == sorted(starts), "first come, first served"


# --- preemption ----------------------------------------------------------------------------------


def test_preempted_requests_lose_and_repeat_nothing() -> None:
    """A08: with a pool far too small each answer equals an undisturbed one, and work done twice is told."""
    drive = Drive(num_blocks=12, block_size=16, prefix_cache=False)
    requests = [drive.add(prompt(seed, 40), 60) for seed in range(4)]
    drive.run()
    assert sum(r.preempt_count for r in requests) >= 2
    for request in requests:
        assert request.output_ids == expected_output(request.token_ids[:40], 60)
        assert request.recompute_tokens == 0 or request.preempt_count > 0
    recomputed = sum(plan.recompute_tokens for plan in drive.plans)
    assert recomputed == sum(r.recompute_tokens for r in requests) > 0


def test_a_preempted_request_resumes_before_later_ones() -> None:
    """B05: it goes back to the front of its class, and the victim is the last in that same order."""
    drive = Drive(max_num_seqs=2)
    first, second = drive.add(prompt(1, 8), 20), drive.add(prompt(2, 8), 20)
    third = drive.add(prompt(3, 8), 2)
    drive.step()
    drive.scheduler.preempt(second, drive.now_ns)
    assert drive.scheduler.waiting == [second, third]
    drive.step()
    assert drive.scheduler.running == [first, second]
    assert third.sched_ns is None


def test_the_victim_is_the_latest() -> None:
    drive = Drive(num_blocks=4, block_size=4, prefix_cache=False)
    first, second = drive.add(prompt(1, 7), 8), drive.add(prompt(2, 7), 8)
    drive.run()
    assert (first.preempt_count, second.preempt_count > 0) == (0, True)


def test_first_stamps_survive_a_preemption() -> None:
    """C03: the first schedule and first token keep their time; the preempted time is its own."""
    drive = Drive()
    request = drive.add(prompt(1, 8), 20)
    for _ in range(10):
        drive.step()
    stamps = (request.sched_ns, request.first_ns)
    drive.scheduler.preempt(request, drive.now_ns)
    assert request.preempted_at_ns == drive.now_ns
    drive.run()
    assert (request.sched_ns, request.first_ns) == stamps
    assert request.preempted_ns == 10_000_000
    assert request.preempt_count == 1


def test_own_blocks_found_again_are_no_prefix_hits() -> None:
    """C04: what a resumed request finds of itself is counted apart; hits never exceed look-ups."""
    drive = Drive(num_blocks=12, block_size=16)
    requests = [drive.add(prompt(seed, 40), 60) for seed in range(4)]
    drive.run()
    assert sum(plan.hit_tokens for plan in drive.plans) == 0
    assert sum(plan.query_tokens for plan in drive.plans) == 160
    assert sum(r.resume_hit_tokens for r in requests) > 0
    assert all(r.cached_tokens == 0 for r in requests)


# --- priority ------------------------------------------------------------------------------------


def test_a_higher_priority_takes_the_seat_of_a_lower_one() -> None:
    """B04: strictly higher preempts the lowest running at once."""
    drive = Drive(max_num_seqs=2, policy="priority", priority_ageing_s=100.0)
    low = [drive.add(prompt(seed, 8), 200, priority=5) for seed in (1, 2)]
    for _ in range(5):
        drive.step()
    high = drive.add(prompt(3, 8), 3, priority=0)
    drive.step()
    assert high.first_ns == drive.now_ns
    assert [r.preempt_count for r in low] == [0, 1]


def test_a_static_batch_is_not_broken_by_a_higher_priority() -> None:
    """Nothing may start beside a static batch, so taking a member's place would only throw work away."""
    drive = Drive(batching="static", policy="priority", max_num_seqs=2)
    low = [drive.add(prompt(n, 6), 8, priority=5) for n in range(2)]
    drive.step()
    high = drive.add(prompt(9, 6), 2, priority=-50)
    drive.run()
    assert [request.preempt_count for request in low] == [0, 0]
    assert drive.trace[:8] == [[(1, 6), (2, 6)], *[[(1, 1), (2, 1)]] * 7]
    assert high.output_ids == expected_output(prompt(9, 6), 2)


def test_a_preempted_member_goes_on_with_its_static_batch() -> None:
    """Also where somebody of higher priority waits before it for the next batch."""
    drive = Drive(batching="static", policy="priority", max_num_seqs=2)
    first, second = (drive.add(prompt(n, 6), 12, priority=5) for n in range(2))
    drive.step()
    drive.add(prompt(9, 6), 2, priority=-50)
    drive.scheduler.preempt(second, drive.now_ns)
    drive.step()
    assert second.is_running
    assert first.is_running
    drive.run()


def test_equal_priority_never_preempts() -> None:
    """B04: equals wait for each other, however they arrive."""
    drive = Drive(max_num_seqs=2, policy="priority")
    requests = [drive.add(prompt(seed, 8), 30, priority=5) for seed in range(6)]
    drive.run()
    assert all(r.preempt_count == 0 for r in requests)


def test_an_earlier_equal_does_not_take_a_seat_back() -> None:
    """B04: a preempted request that is first in the queue waits for its equal that runs."""
    drive = Drive(max_num_seqs=2, policy="priority")
    first, second = drive.add(prompt(1, 8), 20, priority=5), drive.add(prompt(2, 8), 20, priority=5)
    drive.step()
    drive.scheduler.preempt(first, drive.now_ns)
    drive.flip(max_num_seqs=1)
    drive.run()
    assert (first.preempt_count, second.preempt_count) == (1, 0)


def test_a_higher_priority_takes_blocks_only_if_that_lets_it_start() -> None:
    drive = Drive(num_blocks=8, block_size=4, policy="priority", priority_ageing_s=100.0)
    low = drive.add(prompt(1, 12), 4, priority=5)
    equal = drive.add(prompt(2, 12), 4, priority=1)
    drive.step()
    high = drive.add(prompt(3, 20), 2, priority=1)
    drive.step()
    assert (low.preempt_count, equal.preempt_count, high.sched_ns) == (0, 0, None)
    drive.run()


@pytest.mark.parametrize(("priorities", "victims"), [((1, 9, 1, 8), []), ((1, 9, 8, 1), [2, 3])])
def test_neighbouring_blocks_are_taken_only_if_they_make_a_run(
    priorities: tuple[int, ...], victims: list[int]
) -> None:
    """B04: under contiguous allocation nobody is displaced for blocks that do not lie side by side."""
    drive = Drive(
        num_blocks=8,
        kv_allocation="contiguous",
        policy="priority",
        priority_ageing_s=100.0,
        prefix_cache=False,
    )
    low = []
    for seed, priority in enumerate(priorities):
        low.append(drive.add(prompt(seed, 2), 7, priority=priority))
        drive.step()
    assert [request.block_table for request in low] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    head = drive.add(prompt(7, 13), 4, priority=5)
    plan = drive.step()
    assert sorted(preemption.request.rid for preemption in plan.preemptions) == victims
    assert head.is_running == bool(victims)
    drive.run()


def test_ageing_bounds_the_wait() -> None:
    """B05: under a steady load of higher priority a low request starts within levels x ageing."""
    drive = Drive(max_num_seqs=1, policy="priority", priority_ageing_s=0.2)
    drive.add(prompt(0, 4), 4, priority=0)
    low = drive.add(prompt(1, 4), 4, priority=5)
    seed = 2
    while low.sched_ns is None:
        drive.add(prompt(seed, 4), 4, priority=0)
        seed += 1
        for _ in range(4):
            drive.step()
        bound_ns = low.arrive_ns + 5 * 200_000_000 + 10 * 10_000_000
        assert drive.now_ns < bound_ns * 4, "it starves"
    overtook = [r for r in drive.done.values() if r.arrive_ns > low.arrive_ns + 5 * 200_000_000]
    assert not overtook, "nobody who came later than the bound went first"
    assert low.preempt_count == 0


# --- memory --------------------------------------------------------------------------------------


def test_contiguous_reserves_the_maximum() -> None:
    """Contiguous allocation holds a run for the most a request may reach; paging holds what is used."""
    shares = {}
    for allocation in ("contiguous", "paged"):
        drive = Drive(num_blocks=40, block_size=4, kv_allocation=allocation, prefix_cache=False)
        requests = [drive.add(prompt(seed, 8), 40) for seed in range(6)]
        drive.step()
        pool = drive.scheduler.pool
        shares[allocation] = (len(drive.scheduler.running), pool.num_used, pool.used_tokens)
        table = requests[0].block_table
        if allocation == "contiguous":
            assert table == list(range(table[0], table[0] + 12))
        drive.run()
    assert shares == {"contiguous": (3, 36, 24), "paged": (6, 12, 48)}


def test_a_hit_is_given_up_where_it_lies_in_the_way_of_the_only_run() -> None:
    """Contiguous: ten blocks, a cached prefix in the middle, and a request that needs eight in a row."""
    drive = Drive(num_blocks=10, block_size=4, kv_allocation="contiguous")
    drive.add(prompt(1, 15), 2)
    drive.add(prompt(2, 23), 2)
    drive.run()
    request = drive.add([*prompt(2, 12), 5], 20)
    drive.step()
    assert request.block_table == list(range(8))
    assert (request.cached_tokens, request.miss_reason) == (0, MISS_NO_RUN)
    drive.run()


def test_requests_of_one_prefix_compute_it_once() -> None:
    """Those that arrive together wait one step for the first to compute what they share."""
    drive = Drive(num_blocks=400, block_size=4)
    shared = prompt(9, 40)
    for seed in range(8):
        drive.add(shared + prompt(seed, 5), 2)
    drive.run()
    assert sum(plan.prefill_tokens for plan in drive.plans) == 45 + 7 * 5
    assert [r.cached_tokens for _rid, r in sorted(drive.done.items())] == [0] + [40] * 7


def test_shared_blocks_are_shown_with_an_owner_that_still_runs() -> None:
    drive = Drive(num_blocks=100, block_size=4)
    shared = prompt(9, 8)
    first = drive.add(shared + prompt(1, 5), 3)
    drive.step()
    second, third = drive.add(shared + prompt(2, 5), 20), drive.add(prompt(9, 4) + prompt(3, 5), 20)
    while first.rid not in drive.done:
        drive.step()
    view = drive.scheduler.pool.view(0)
    assert third.block_table[0] == second.block_table[0]
    assert view.owner[second.block_table[0]] in (second.rid, third.rid)
    assert view.owner[second.block_table[1]] == second.rid
    drive.finish(second)
    drive.finish(third)
    assert not drive.scheduler.pool.view(0).owner.any()


def test_blocks_of_a_request_that_went_wrong_are_not_found_by_others() -> None:
    """A25: not even those that another one shares, for its failing may come later than a third one's look."""
    drive = Drive(num_blocks=100, block_size=4)
    shared = prompt(9, 8)
    drive.add(shared + prompt(1, 5), 20)
    drive.step()
    drive.add(shared + prompt(2, 5), 20)
    drive.step()
    first, second = drive.scheduler.running
    assert second.cached_tokens == 8
    drive.scheduler.distrust(first)
    drive.finish(first)
    third = drive.add(shared + prompt(3, 5), 2)
    drive.step()
    assert second.is_running
    assert third.cached_tokens == 0
    drive.run()
    assert third.output_ids == expected_output(shared + prompt(3, 5), 2)


def test_waiting_for_a_common_prefix_costs_a_bounded_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds that wait for one prefix are not all matched again in each step that computes some of it."""
    drive = Drive(num_blocks=128, prefill_chunk_tokens=4)
    shared = prompt(1, 80)
    for n in range(300):
        drive.add([*shared, n % 97, n // 97], 1)
    looks, match = 0, drive.scheduler.cache.match

    def counted(*args: object) -> object:
        nonlocal looks
        looks += 1
        return match(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(drive.scheduler.cache, "match", counted)
    drive.step()
    looks = 0
    drive.step()
    assert drive.trace[-1] == [(1, 4)]
    assert looks == MAX_DEFERRED
    drive.run()
    assert len(drive.done) == 300


def test_keys_follow_the_block_size() -> None:
    """A request that was running when the pool was rebuilt leaves blocks that the next one finds."""
    drive = Drive(num_blocks=40, block_size=16)
    drive.add(prompt(1, 40), 4)
    drive.step()
    drive.rebuild(160, 4)
    drive.run()
    again = drive.add(prompt(1, 40), 1)
    drive.run()
    assert again.cached_tokens == 36


def test_a_leader_that_leaves_frees_its_followers() -> None:
    drive = Drive(num_blocks=400, block_size=4, prefill_chunk_tokens=8)
    shared = prompt(9, 40)
    leader, follower = drive.add([*shared, 1], 2), drive.add([*shared, 2], 2)
    drive.step()
    assert follower.sched_ns is None
    drive.finish(leader)
    drive.step()
    assert follower.cached_tokens == 8


@pytest.mark.parametrize(("values", "length", "reason"), [
    ({"prefix_cache": False}, 40, MISS_OFF), ({}, 4, MISS_SHORT), ({}, 40, MISS_NO_MATCH),
])  # fmt: skip
def test_the_reason_of_a_miss_is_told(values: dict, length: int, reason: str) -> None:
    drive = Drive(**values)
    request = drive.add(prompt(1, length), 1)
    drive.run()
    assert request.miss_reason == reason


def test_a_plan_that_cannot_go_on_says_why() -> None:
    """B02: nothing can be scheduled, and the plan names request, need and what is there."""
    drive = Drive(num_blocks=8, block_size=4)
    drive.scheduler.pool.allocate(8, 99)  # blocks that nobody gives back
    drive.add(prompt(1, 8), 2)
    plan = drive.scheduler.plan(1)
    assert not plan.scheduled
    assert (
        plan.reason
        == "request 1 needs 2 blocks; 0 of 8 are available, 0 of them promised to running requests"
    )
