"""Preemption by swap: what is recorded, what is copied, and every way back."""

from __future__ import annotations

import numpy as np
import pytest

from engine.plan import Copy
from engine.request import Request
from ipc.messages import BLOCK_SWAPPED
from tests.engine.drive import Drive, expected_output


def ids(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i + 7 * i) % 97 for i in range(length)]


def swapping(**values) -> Drive:  # type: ignore[no-untyped-def]
    return Drive(**{"num_blocks": 40, "swap_blocks": 40, "preemption": "swap"} | values)


def decoding(drive: Drive, length: int = 10, count: int = 20, seed: int = 1) -> Request:
    """A request that has given a few tokens already."""
    request = drive.add(ids(seed, length), count)
    for _ in range(4):
        drive.step()
    assert request.state == "decode"
    return request


def moved(drive: Drive, direction: str) -> int:
    return sum(len(copy.blocks) for copy in drive.copies if copy.direction == direction)


def right(*requests: Request) -> bool:
    return all(r.output_ids == expected_output(r.token_ids[: r.num_prompt], r.num_output) for r in requests)


def test_swapped_blocks_come_back_and_nothing_is_computed_again() -> None:
    drive = swapping(prefix_cache=False)
    request = decoding(drive)
    computed = request.num_computed
    preemption = drive.preempt(request)
    assert (preemption.mode, preemption.swapped_blocks, preemption.lost_tokens) == ("swap", 4, 0)
    assert preemption.why == ""
    assert request.swap is not None
    assert request.swap.num_tokens == computed == 13
    assert (drive.scheduler.num_swapped, drive.scheduler.swap_blocks_used) == (1, 4)
    drive.step()
    assert (drive.scheduler.num_swapped, drive.scheduler.swap_blocks_used) == (0, 0)
    assert [(copy.arena, copy.direction, len(copy.blocks)) for copy in drive.copies] == [
        ("swap", "out", 4),
        ("swap", "in", 4),
    ]
    drive.run()
    assert (request.swap_count, request.swap_in_tokens, request.recompute_tokens) == (1, 13, 0)
    assert (request.preempt_count, request.lost_tokens, request.preempt_reason) == (1, 0, "blocks")
    assert request.computed_tokens == request.num_tokens - 1
    assert right(request)


def test_it_goes_on_in_the_phase_it_was_in() -> None:
    """One that lacks a single token after its prompt keeps decoding, so its first token is not told twice."""
    drive = swapping(prefill_chunk_tokens=4)
    late = decoding(drive, length=3)
    early = drive.add(ids(2, 17), 4)
    drive.step()
    drive.preempt(late)
    drive.preempt(early)
    plan = drive.scheduler.plan(drive.now_ns + 1)
    assert (late.state, early.state) == ("decode", "prefill")
    assert plan.decode_tokens == 1
    drive.launch(plan)
    drive.run()
    assert right(late, early)


def test_one_that_lacks_the_last_token_of_its_prompt_has_not_begun_to_decode() -> None:
    drive = swapping(prefill_chunk_tokens=3)
    request = drive.add(ids(1, 7), 4)
    drive.step()
    drive.step()
    assert request.num_computed == 6
    drive.preempt(request)
    plan = drive.plan()
    assert (request.state, request.num_computed) == ("prefill", 6)
    assert (plan.prefill_tokens, plan.decode_tokens) == (1, 0)
    drive.launch(plan)
    drive.run()
    assert request.first_ns is not None
    assert right(request)


def test_what_the_prefix_cache_still_holds_is_not_copied_back() -> None:
    drive = swapping()
    request = decoding(drive)
    drive.preempt(request)
    drive.step()
    assert (moved(drive, "out"), moved(drive, "in")) == (4, 1)
    assert (request.swap_in_tokens, request.resume_hit_tokens) == (1, 12)
    drive.run()
    assert request.cached_tokens == 0
    assert right(request)


def test_a_prefix_that_grew_meanwhile_is_taken_instead() -> None:
    """Where another has left more of the same tokens in the pool than was swapped, nothing is copied back."""
    drive = swapping(prefill_chunk_tokens=8, policy="priority", priority_ageing_s=100.0, max_num_seqs=1)
    request = drive.add(ids(1, 30), 3, priority=5)
    drive.step()
    drive.add(ids(1, 30), 1, priority=0)
    assert drive.preempt(request).swapped_blocks == 2
    drive.run()
    assert (moved(drive, "in"), request.swap_in_tokens, request.resume_hit_tokens) == (0, 0, 28)
    assert drive.scheduler.swap_blocks_used == 0
    assert right(request)


def test_without_room_it_is_recomputed_and_says_why() -> None:
    drive = swapping(swap_blocks=3, prefix_cache=False)
    request = decoding(drive)
    preemption = drive.preempt(request)
    assert (preemption.mode, preemption.lost_tokens, preemption.swapped_blocks) == ("recompute", 13, 0)
    assert preemption.why == "4 blocks do not fit: swap space has 3 of 3 free"
    drive.run()
    assert (request.swap_count, request.lost_tokens, request.recompute_tokens) == (0, 13, 13)
    assert right(request)


def test_a_request_that_has_computed_nothing_has_nothing_to_swap() -> None:
    drive = swapping()
    drive.add(ids(1, 10), 2)
    plan = drive.scheduler.plan(1)
    preemption = drive.preempt(plan.scheduled[0].request)
    assert (preemption.mode, preemption.lost_tokens) == ("recompute", 0)
    assert preemption.why == "nothing of it was computed yet"
    drive.run()


def test_a_plain_preemption_needs_no_reason() -> None:
    drive = Drive()
    preemption = drive.preempt(decoding(drive))
    assert (preemption.mode, preemption.why) == ("recompute", "")
    drive.run()


def test_a_cancel_frees_swap_space() -> None:
    drive = swapping()
    request = decoding(drive)
    drive.preempt(request)
    drive.finish(request)
    assert (drive.scheduler.num_swapped, drive.scheduler.swap_blocks_used) == (0, 0)
    drive.scheduler.check()


def test_freed_swap_space_is_not_written_twice_by_one_launch() -> None:
    """A11: a swap that was ordered and given up keeps its blocks until the copies were taken."""
    drive = swapping(swap_blocks=5)
    first, second = decoding(drive), decoding(drive, seed=2)
    drive.preempt(first)
    drive.finish(first)
    preemption = drive.preempt(second)
    assert (preemption.mode, preemption.why) == (
        "recompute",
        "4 blocks do not fit: swap space has 0 of 5 free",
    )
    drive.step()
    assert drive.preempt(second).mode == "swap"
    drive.run()
    assert right(second)


def test_contiguous_requests_are_swapped_too() -> None:
    """Only blocks that hold something are copied; the run they come back to is reserved whole."""
    drive = swapping(kv_allocation="contiguous", prefix_cache=False)
    request = decoding(drive)
    assert len(request.block_table) == 8
    assert drive.preempt(request).swapped_blocks == 4
    drive.step()
    assert request.block_table == list(range(request.block_table[0], request.block_table[0] + 8))
    assert request.swap_in_tokens == 13
    drive.run()
    assert right(request)


def test_a_run_that_shared_blocks_lie_in_comes_from_swap_space_alone() -> None:
    """Its prefix is in the pool, in the middle of the only run: that is evicted, and all is copied back."""
    drive = swapping(kv_allocation="contiguous", num_blocks=10, policy="priority", priority_ageing_s=100.0)
    request = drive.add(ids(1, 13), 20, priority=5)
    drive.step()
    drive.step()
    for prompt in (ids(2, 15), [*ids(1, 12), *ids(3, 11)]):
        drive.add(prompt, 2)
    drive.step()
    assert [other.block_table for other in drive.scheduler.running] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    while not request.is_running:
        drive.step()
    assert request.block_table == list(range(8))
    assert (request.swap_in_tokens, request.resume_hit_tokens, request.recompute_tokens) == (14, 0, 0)
    drive.run()
    assert right(request)


def test_swapped_requests_outlive_the_switch() -> None:
    drive = swapping(prefix_cache=False)
    request = decoding(drive)
    drive.preempt(request)
    drive.flip(preemption="recompute")
    assert drive.scheduler.num_swapped == 1
    drive.step()
    assert request.swap_in_tokens == 13
    assert drive.preempt(request).mode == "recompute"
    drive.run()
    assert right(request)


@pytest.mark.parametrize("blocks", [0, 2, 80])
def test_swap_space_of_another_size_starts_empty(blocks: int) -> None:
    """Its requests are recomputed; a copy that was ordered into what is gone is not made."""
    drive = swapping(prefix_cache=False)
    request = decoding(drive)
    drive.preempt(request)
    drive.set_host(0, blocks)
    assert drive.scheduler.num_swapped == drive.scheduler.swap_blocks_used == 0
    assert request.lost_tokens == 13
    drive.run()
    assert drive.copies == []
    assert (request.swap_in_tokens, request.recompute_tokens) == (0, 13)
    assert right(request)


@pytest.mark.parametrize(("prefix_blocks", "swap_blocks"), [(0, 39), (9, 40)])
def test_host_memory_that_goes_while_blocks_are_to_come_back(prefix_blocks: int, swap_blocks: int) -> None:
    """A plan was dropped that had begun to restore: if those copies can never be made, all start over."""
    drive = swapping(prefix_cache=False)
    request, other = decoding(drive), decoding(drive, seed=2)
    drive.preempt(request)
    drive.step()
    drive.preempt(request)
    drive.plan()
    assert request.is_running
    drive.set_host(prefix_blocks, swap_blocks)
    starts_over = swap_blocks != 40
    assert [p.request.rid for p in drive.preemptions if p.reason == "rebuild"] == (
        [request.rid, other.rid] if starts_over else []
    )
    drive.run()
    assert (other.preempt_count, request.recompute_tokens > 0) == (starts_over, starts_over)
    assert right(request, other)


def test_a_rebuild_drops_what_was_swapped() -> None:
    drive = swapping()
    swapped, running = decoding(drive), decoding(drive, seed=2)
    drive.preempt(swapped)
    drive.rebuild(160, 1)
    assert drive.preemptions[-1].request is running
    assert (drive.preemptions[-1].reason, drive.preemptions[-1].mode) == ("rebuild", "recompute")
    assert drive.preemptions[-1].why == "its blocks cannot be kept"
    assert drive.scheduler.num_swapped == 0
    drive.run()
    assert drive.copies == []
    assert right(swapped, running)


def test_distrust_gives_up_what_was_swapped() -> None:
    """A25: content that must not be used any more does not come back from swap space either."""
    drive = swapping()
    request = decoding(drive)
    drive.preempt(request)
    drive.scheduler.distrust(request)
    assert (drive.scheduler.num_swapped, request.lost_tokens) == (0, 13)
    drive.run()
    assert (request.swap_in_tokens, request.resume_hit_tokens) == (0, 0)
    assert right(request)


def test_lack_of_blocks_swaps_and_names_who_needed_them() -> None:
    """A08: a pool that is far too small costs copies and no computing, and each answer is undisturbed."""
    drive = Drive(num_blocks=12, block_size=16, swap_blocks=60, preemption="swap", prefix_cache=False)
    requests = [drive.add(ids(seed, 40), 60) for seed in range(4)]
    drive.run()
    assert len(drive.preemptions) >= 2
    assert {(p.mode, p.reason, p.lost_tokens) for p in drive.preemptions} == {("swap", "blocks", 0)}
    for preemption in drive.preemptions:
        assert preemption.by <= preemption.request.rid
        assert preemption.swapped_blocks > 0
    assert sum(request.recompute_tokens for request in requests) == 0
    assert sum(request.swap_in_tokens for request in requests) > 0
    assert right(*requests)


def test_a_higher_priority_swaps_its_victim() -> None:
    drive = swapping(policy="priority", max_num_seqs=1, priority_ageing_s=100.0)
    low = decoding(drive)
    low.priority = 5
    drive.flip(max_num_seqs=1)
    high = drive.add(ids(2, 5), 2, priority=-5)
    plan = drive.step()
    assert [(p.request, p.by, p.reason, p.mode) for p in plan.preemptions] == [
        (low, high.rid, "priority", "swap")
    ]
    assert low.preempt_reason == "priority"
    drive.run()
    assert low.recompute_tokens == 0
    assert right(low, high)


def test_a_token_on_its_way_belongs_to_the_swapped_request() -> None:
    """A request is preempted while the step in flight still owes it a token: it gets it."""
    drive = swapping(overlap=True, prefix_cache=False)
    request = decoding(drive)
    assert request.num_pending == 1
    drive.preempt(request)
    assert request.swap is not None
    assert request.swap.num_tokens == request.num_tokens
    drive.run()
    assert (request.swap_in_tokens > 0, request.recompute_tokens) == (True, 0)
    assert request.num_output == 20
    assert right(request)


def test_one_whose_last_token_is_on_its_way_does_not_start_again() -> None:
    drive = swapping(overlap=True)
    request = decoding(drive, count=5)
    while request.num_known < request.max_total:
        drive.step()
    assert request.num_pending == 1
    assert not drive.plan().scheduled
    drive.preempt(request)
    plan = drive.plan()
    assert (plan.scheduled, plan.admitted, request.state) == ([], [], "preempted")
    drive.land()
    assert request.is_finished
    assert drive.scheduler.swap_blocks_used == 0
    assert right(request)


def test_the_block_map_shows_swap_space_behind_the_prefix_tier() -> None:
    drive = swapping(prefix_blocks=3, swap_blocks=6)
    request = decoding(drive)
    drive.preempt(request)
    view = drive.scheduler.view(5)
    assert (view.num_host, len(view.state)) == (9, 49)
    swap = np.flatnonzero(view.state == BLOCK_SWAPPED)
    assert (swap >= 43).all()
    assert sorted(view.fill[swap].tolist()) == [1, 4, 4, 4]
    assert set(view.owner[swap].tolist()) == {request.rid}
    assert view.owner[40:].sum() == 4 * request.rid


def test_a_plan_that_is_not_launched_keeps_its_copies() -> None:
    """Out, in and out again in plans that were never launched: the next step makes all of it, in order."""
    drive = swapping(prefix_cache=False)
    request = decoding(drive)
    drive.preempt(request)
    drive.plan()
    drive.preempt(request)
    drive.plan()
    assert drive.copies == []
    drive.step()
    assert [copy.direction for copy in drive.copies] == ["out", "in", "out", "in"]
    assert isinstance(drive.copies[0], Copy)
    drive.run()
    assert right(request)


def test_what_came_back_is_found_by_others() -> None:
    """Its blocks were evicted while it waited; restored, they are shared again."""
    drive = swapping(num_blocks=12, policy="priority", priority_ageing_s=100.0, max_num_seqs=2)
    request = drive.add(ids(1, 17), 12, priority=5)
    drive.step()
    drive.preempt(request)
    drive.add(ids(2, 44), 4)
    while not request.is_running:
        drive.step()
    assert request.resume_hit_tokens == 0
    other = drive.add(ids(1, 17), 2)
    drive.run()
    assert other.cached_tokens == 16
    assert right(request, other)
