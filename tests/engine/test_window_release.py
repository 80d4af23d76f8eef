"""Blocks that left every attention window: given back, and right with everything else that holds blocks."""

from __future__ import annotations

import pytest

from engine.request import NO_BLOCK, Request
from tests.engine.drive import Drive, expected_output


def ids(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i + 7 * i) % 97 for i in range(length)]


def right(request: Request) -> bool:
    return request.output_ids == expected_output(request.token_ids[: request.num_prompt], request.num_output)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
def test_exactly_what_no_token_looks_at_any_more_is_given_back(window: int) -> None:
    """A33: at each length the kept blocks are those from the first position on that the next token sees.

    That they still hold what they must is read back by the drive at each launch."""
    drive = Drive(window=window, prefix_cache=False)
    request = drive.add(ids(1, 3), 30)
    for _ in range(30):
        drive.step()
        if request.is_finished:
            break
        first_seen = max(0, request.num_computed - window + 1)
        kept = [index for index, block in enumerate(request.block_table) if block != NO_BLOCK]
        assert kept == list(range(first_seen // 4, len(request.block_table)))
        pool = drive.scheduler.pool
        assert pool.num_used == len(kept)
        assert pool.used_tokens == request.num_computed - first_seen // 4 * 4
    assert right(request)


def test_without_a_window_nothing_is_given_back() -> None:
    drive = Drive(prefix_cache=False)
    request = drive.add(ids(1, 3), 30)
    for _ in range(25):
        drive.step()
    assert NO_BLOCK not in request.block_table
    drive.run()


def test_a_run_of_neighbours_is_kept_whole() -> None:
    """Contiguous allocation reserves the maximum, window or not."""
    drive = Drive(window=4, kv_allocation="contiguous", prefix_cache=False)
    request = drive.add(ids(1, 8), 24)
    for _ in range(20):
        drive.step()
    assert request.block_table == list(range(8))
    drive.run()
    assert right(request)


def test_a_window_lets_more_requests_run() -> None:
    """What a request needs to start is what it will hold at once, not all of its prompt."""
    running = {}
    for window in (None, 8):
        drive = Drive(num_blocks=31, window=window, prefix_cache=False, prefill_chunk_tokens=4)
        for seed in range(8):
            drive.add(ids(seed, 60), 4)
        drive.step()
        running[window] = len(drive.scheduler.running)
        drive.run()
        assert all(map(right, drive.done.values()))
    assert running == {None: 2, 8: 7}


def test_given_back_blocks_are_still_found_by_their_prefix() -> None:
    drive = Drive(window=4)
    first = drive.add(ids(1, 33), 3)
    drive.step()
    drive.step()
    assert first.block_table.count(NO_BLOCK) > 6
    again = drive.add(ids(1, 33), 3)
    drive.step()
    assert (again.cached_tokens, again.miss_reason) == (32, "")
    assert again.block_table[:7] == [NO_BLOCK] * 7, "what is outside the window already is not taken"
    drive.run()
    assert right(first)
    assert right(again)


def test_a_prefix_in_host_memory_is_restored_from_the_window_on() -> None:
    drive = Drive(num_blocks=10, window=4, prefix_blocks=40)
    drive.add(ids(1, 33), 1)
    drive.run()
    drive.add(ids(50, 40), 1)
    drive.run()
    again = drive.add(ids(1, 33), 3)
    drive.run()
    assert (again.cached_tokens, again.host_hit_tokens) == (32, 4)
    assert right(again)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_request_resumes(preemption: str, prefix_cache: bool) -> None:
    """Recompute begins at position 0, or at a hit; swap brings back what lies in the window."""
    drive = Drive(window=6, swap_blocks=20, preemption=preemption, prefix_cache=prefix_cache)
    request = drive.add(ids(1, 21), 12)
    for _ in range(5):
        drive.step()
    computed, held = request.num_computed, len(request.held_blocks)
    assert held == 2
    preemption_record = drive.preempt(request)
    assert preemption_record.swapped_blocks == (held if preemption == "swap" else 0)
    drive.step()
    if preemption == "swap":
        assert request.num_computed == computed + 1
        in_the_window = computed - (computed + 1 - 6) // 4 * 4
        assert request.swap_in_tokens + request.resume_hit_tokens == in_the_window
    drive.run()
    assert (request.recompute_tokens == 0) == (preemption == "swap")
    assert right(request)


def test_the_head_of_a_chain_outlives_its_tail() -> None:
    """Blocks given back early are not evicted before those that can only be found through them."""
    drive = Drive(num_blocks=12, window=4)
    drive.add(ids(1, 33), 1)
    drive.run()
    drive.scheduler.pool.allocate(drive.scheduler.pool.num_available - 3, 99)
    found = drive.scheduler.find(Request(9, ids(1, 33), drive.done[1].sampling))
    assert len(found.blocks) == 3


@pytest.mark.parametrize("ends", [False, True])
def test_a_shared_block_is_shown_with_an_owner_that_has_it_in_its_window(ends: bool) -> None:
    """Whether the one ahead leaves the block behind or ends: it is the other one's then."""
    drive = Drive(window=8)
    first = drive.add([*ids(1, 16), 3], 30)
    for _ in range(3):
        drive.step()
    second = drive.add([*ids(1, 16), 5], 30)
    drive.step()
    shared = first.block_table[3]
    assert second.block_table[3] == shared != NO_BLOCK
    assert first.block_table.count(NO_BLOCK) == 3 > second.block_table.count(NO_BLOCK) == 2
    assert drive.scheduler.view(0).owner[shared] == first.rid
    if ends:
        drive.finish(first)
    while first.block_table[3:4] == [shared]:
        drive.step()
    assert second.block_table[3] == shared
    assert drive.scheduler.view(0).owner[shared] == second.rid
    drive.run()
    assert right(first)
    assert right(second)


def test_a_hit_keeps_what_lies_before_the_window_fresh() -> None:
    """Blocks that a hit only leads through count as used: another chain is evicted first."""
    drive = Drive(num_blocks=24, window=4)
    for seed in (1, 2):
        drive.add(ids(seed, 33), 1)
        drive.run()
    again = drive.add(ids(1, 33), 8)
    drive.step()
    assert again.block_table[:7] == [NO_BLOCK] * 7
    pool, sampling = drive.scheduler.pool, again.sampling
    held = pool.allocate(pool.num_available - 8, 99)
    assert len(drive.scheduler.find(Request(98, ids(1, 33), sampling)).blocks) == 8
    assert len(drive.scheduler.find(Request(99, ids(2, 33), sampling)).blocks) < 8
    pool.release(held)
    drive.run()
