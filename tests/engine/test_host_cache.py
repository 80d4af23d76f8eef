"""The tier of evicted prefix blocks in host memory, alone and behind a scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.host_arena import CopyQueue
from engine.host_cache import Entry, HostCache
from engine.plan import Copy
from engine.prefix_cache import MISS_EVICTED, MISS_NO_MATCH, MISS_SALT
from engine.request import Request
from ipc.messages import BLOCK_FREE, BLOCK_HOST, Sampling
from tests.engine.drive import Drive, expected_output


def entry(name: str, tokens: str = "") -> Entry:
    return Entry(name.encode(), b"root", (tokens or name).encode())


def make(num_blocks: int) -> tuple[HostCache, CopyQueue, list[bytes]]:
    copies, dropped = CopyQueue(), list[bytes]()
    return HostCache(num_blocks, copies, dropped.append), copies, dropped


def keys(cache: HostCache) -> list[str]:
    return [held.key.decode() for _block, held in cache]


# --- the tier alone ------------------------------------------------------------------------------


def test_what_was_used_longest_ago_makes_room() -> None:
    cache, _copies, dropped = make(2)
    for name in "ab":
        assert cache.put(entry(name)) is not None
    cache.touch(b"a")
    assert cache.put(entry("c")) is not None
    assert (keys(cache), dropped) == (["a", "c"], [b"b"])
    cache.check()


def test_what_is_here_already_is_not_copied_again() -> None:
    """It counts as used, too."""
    cache, _copies, dropped = make(2)
    cache.put(entry("a"))
    cache.put(entry("b"))
    assert cache.put(entry("a")) is None
    cache.put(entry("c"))
    assert (keys(cache), dropped) == (["a", "c"], [b"b"])


def test_another_content_under_the_same_key_takes_its_place() -> None:
    cache, _copies, _dropped = make(2)
    cache.put(entry("a", "one"))
    assert cache.put(entry("a", "two")) is not None
    held = cache.get(b"a")
    assert held is not None
    assert held[1].tokens == b"two"
    assert len(cache) == 1
    cache.check()


@pytest.mark.parametrize("why", ["guarded", "to be read", "to be written"])
def test_a_block_that_is_needed_makes_no_room(why: str) -> None:
    """A11: what a copy was not made for yet, or is about to be, stays; the newcomer is not kept then."""
    cache, copies, dropped = make(1)
    block = cache.put(entry("a"))
    assert block is not None
    if why == "guarded":
        cache.guard({block})
    else:
        copies.add("prefix", "in" if why == "to be read" else "out", 5, block)
    assert cache.put(entry("b")) is None
    assert (keys(cache), dropped) == (["a"], [])
    cache.guard(())
    copies.take()
    assert cache.put(entry("b")) == block


def test_no_memory_keeps_nothing() -> None:
    cache, _copies, dropped = make(0)
    assert cache.put(entry("a")) is None
    assert (len(cache), dropped) == (0, [])


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from("ptf"), st.sampled_from("abcdefg")), max_size=40),
)
def test_it_holds_what_a_plain_list_holds(size: int, actions: list[tuple[str, str]]) -> None:
    cache, _copies, _dropped = make(size)
    model: list[str] = []
    for action, name in actions:
        if action == "p":
            assert (cache.put(entry(name)) is None) == (name in model)
            model = [*(n for n in model if n != name), name][-size:]
        elif action == "t" and name in model:
            cache.touch(name.encode())
            model = [*(n for n in model if n != name), name]
        elif action == "f":
            cache.forget(name.encode())
            model = [n for n in model if n != name]
        assert keys(cache) == model
        cache.check()


# --- behind a scheduler --------------------------------------------------------------------------


def ids(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i + 7 * i) % 97 for i in range(length)]


def finished(drive: Drive, prompt: list[int], count: int = 1, **more: str) -> Request:
    request = drive.add(prompt, count, **more)
    drive.run()
    assert request.output_ids == expected_output(prompt, count)
    return request


def evict_all(drive: Drive) -> None:
    """Push every cached prefix out of the pool, by one request that needs all of it."""
    finished(drive, ids(50, drive.scheduler.pool.num_blocks * drive.scheduler.pool.block_size))


def inward(drive: Drive) -> list[Copy]:
    return [copy for copy in drive.copies if copy.direction == "in"]


def test_an_evicted_prefix_is_hit_from_host_memory() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    first = finished(drive, ids(1, 17))
    evict_all(drive)
    again = finished(drive, ids(1, 17))
    assert (first.cached_tokens, first.host_hit_tokens) == (0, 0)
    assert (again.cached_tokens, again.host_hit_tokens, again.miss_reason) == (16, 16, "")
    assert sum(plan.host_hit_tokens for plan in drive.plans) == 16
    assert sum(plan.hit_tokens for plan in drive.plans) == 16
    assert [len(copy.blocks) for copy in inward(drive)] == [4]
    assert again.computed_tokens == 1


def test_a_hit_may_begin_on_the_device_and_end_in_host_memory() -> None:
    """A chain is evicted from its tail on, so its head may be in the pool still."""
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 25))
    finished(drive, ids(2, 18))  # takes the two free blocks and three of the six cached ones
    held = drive.scheduler.find(Request(90, ids(1, 25), Sampling(max_tokens=1)))
    assert len(held.blocks) == 6
    assert 0 < len(held.host) < 6
    assert [index for index, _block in held.host] == list(range(6 - len(held.host), 6))
    again = finished(drive, ids(1, 25))
    assert (again.cached_tokens, again.host_hit_tokens) == (24, 4 * len(held.host))
    assert sum(plan.hit_tokens for plan in drive.plans) == 24
    assert sum(plan.host_hit_tokens for plan in drive.plans) == 4 * len(held.host)


def test_a_restored_block_stays_in_host_memory() -> None:
    """Evicting it once more copies nothing: its content has not changed."""
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17))
    evict_all(drive)
    finished(drive, ids(1, 17))
    drive.copies.clear()
    evict_all(drive)
    outward = sum(len(copy.blocks) for copy in drive.copies if copy.direction == "out")
    assert outward == 0
    assert finished(drive, ids(1, 17)).host_hit_tokens == 16


def test_restored_blocks_are_shared_at_once() -> None:
    """Two that start in one step copy a common prefix back once."""
    drive = Drive(num_blocks=16, prefix_blocks=40)
    finished(drive, ids(1, 17))
    evict_all(drive)
    first, second = drive.add([*ids(1, 16), 1, 2], 2), drive.add([*ids(1, 16), 2, 1], 2)
    drive.step()
    assert first.block_table[:4] == second.block_table[:4]
    assert (first.host_hit_tokens, second.host_hit_tokens) == (16, 0)
    assert second.cached_tokens == 16
    assert sum(len(copy.blocks) for copy in inward(drive)) == 4
    drive.run()


def test_evicted_means_from_both() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=8)
    finished(drive, ids(1, 9))
    evict_all(drive)
    assert finished(drive, ids(1, 9)).miss_reason == ""
    finished(drive, ids(3, 32))
    finished(drive, ids(4, 32))  # the tier holds the last eight that were evicted
    gone = finished(drive, ids(1, 9))
    assert (gone.cached_tokens, gone.miss_reason) == (0, MISS_EVICTED)


def test_a_restored_prefix_counts_as_used() -> None:
    """It stays in host memory while others that were not asked for make room."""
    drive = Drive(num_blocks=16, prefix_blocks=6)
    used, unused = finished(drive, ids(1, 17)), finished(drive, ids(2, 9))
    evict_all(drive)
    assert drive.scheduler.host_blocks_used == 6
    assert finished(drive, ids(1, 17)).host_hit_tokens == 16
    finished(drive, ids(3, 12))
    host = drive.scheduler.kv.host
    assert [host.get(key) is not None for key in used.block_keys] == [True] * 4
    assert [host.get(key) is not None for key in unused.block_keys] == [False] * 2


def test_a_tier_larger_than_the_memory_of_evictions_still_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves host memory was evicted then, however long ago it had left the pool."""
    monkeypatch.setattr("engine.prefix_cache.MAX_GHOSTS", 2)
    drive = Drive(num_blocks=8, prefix_blocks=8)
    finished(drive, ids(1, 5))
    finished(drive, ids(2, 32))
    finished(drive, ids(3, 32))
    again = finished(drive, ids(1, 5))
    assert (again.cached_tokens, again.miss_reason) == (0, MISS_EVICTED)


def test_a_salt_keeps_host_memory_apart() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17), salt="a")
    evict_all(drive)
    other = finished(drive, ids(1, 17), salt="b")
    assert (other.cached_tokens, other.miss_reason) == (0, MISS_SALT)
    evict_all(drive)
    assert finished(drive, ids(1, 17), salt="a").host_hit_tokens == 16


def test_what_went_wrong_is_not_found_in_host_memory() -> None:
    """A25: a copy that left the pool before its request was found to have failed is forgotten as well."""
    drive = Drive(num_blocks=8, prefix_blocks=20)
    wrong, right = finished(drive, ids(1, 17)), finished(drive, ids(2, 9))
    evict_all(drive)
    drive.scheduler.distrust(wrong)
    drive.scheduler.check()
    assert finished(drive, ids(1, 17)).cached_tokens == 0
    assert finished(drive, ids(2, 9)).host_hit_tokens == 8
    assert right.cached_tokens == 0


def test_blocks_that_were_given_up_unmade_serve_again_after_the_launch() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=4)
    wrong = finished(drive, ids(1, 17))
    drive.add(ids(50, 32), 1)
    drive.plan()
    assert drive.scheduler.host_blocks_used == 4
    drive.scheduler.distrust(wrong)
    assert (drive.scheduler.host_blocks_used, drive.scheduler.kv.host.arena.num_free) == (0, 0)
    drive.step()
    assert drive.scheduler.kv.host.arena.num_free == 4
    drive.run()


def test_switching_the_prefix_cache_off_forgets_host_memory() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17))
    evict_all(drive)
    assert drive.scheduler.host_blocks_used == 4
    drive.flip(prefix_cache=False)
    assert drive.scheduler.host_blocks_used == 0
    drive.flip(prefix_cache=True)
    again = finished(drive, ids(1, 17))
    assert (again.cached_tokens, again.miss_reason) == (0, MISS_NO_MATCH)


def test_another_size_starts_empty() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17))
    evict_all(drive)
    drive.set_host(21, 0)
    assert drive.scheduler.host_blocks_used == 0
    again = finished(drive, ids(1, 17))
    assert (again.cached_tokens, again.miss_reason) == (0, MISS_EVICTED)


def test_a_size_that_stays_keeps_its_content() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17))
    evict_all(drive)
    drive.set_host(20, 5)
    assert finished(drive, ids(1, 17)).host_hit_tokens == 16


def test_what_is_about_to_come_back_makes_no_room() -> None:
    """A11: starting evicts others to the same tier, which must not overwrite what is not copied back yet."""
    drive = Drive(num_blocks=8, prefix_blocks=4)
    finished(drive, ids(1, 17))
    evict_all(drive)
    assert drive.scheduler.pool.num_cached == 8
    assert finished(drive, ids(1, 17)).host_hit_tokens == 16


def test_contiguous_requests_are_restored_into_their_run() -> None:
    drive = Drive(num_blocks=12, prefix_blocks=20, kv_allocation="contiguous")
    finished(drive, ids(1, 17), 4)
    finished(drive, ids(50, 44), 4)
    again = drive.add(ids(1, 17), 4)
    drive.step()
    assert again.host_hit_tokens == 16
    assert again.block_table == list(range(again.block_table[0], again.block_table[0] + 5))
    drive.run()


def test_the_block_map_shows_host_memory() -> None:
    drive = Drive(num_blocks=8, prefix_blocks=20)
    finished(drive, ids(1, 17))
    evict_all(drive)
    view = drive.scheduler.view(5)
    assert (view.num_host, len(view.state)) == (20, 28)
    tier = view.state[8:]
    assert (tier == BLOCK_HOST).sum() == drive.scheduler.host_blocks_used == 4
    assert np.isin(tier, [BLOCK_HOST, BLOCK_FREE]).all()
    assert set(view.fill[8:][tier == BLOCK_HOST]) == {4}
    assert not view.owner[8:].any()
