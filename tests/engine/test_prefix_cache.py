"""The prefix cache against a plain model of it: a hit is always the same tokens under the same salt."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.prefix_cache import MISS_EVICTED, MISS_NO_MATCH, MISS_SALT, MISS_SHORT, PrefixCache

NUM_BLOCKS, SIZE = 10, 2


def make(num_blocks: int = NUM_BLOCKS, size: int = SIZE) -> tuple[PrefixCache, BlockPool]:
    cache = PrefixCache("model", size)
    return cache, BlockPool(num_blocks, size, cache.forget)


def fill(cache: PrefixCache, pool: BlockPool, ids: list[int], salt: str = "", owner: int = 1) -> list[int]:
    """Compute a sequence as an engine would, and leave its blocks cached. Returns its block table."""
    keys: list[bytes] = []
    match = cache.match(keys, ids, salt)
    pool.share(match.blocks, owner)
    table = match.blocks + pool.allocate(-(-len(ids) // pool.block_size) - len(match.blocks), owner)
    pool.write(table, len(match.blocks) * pool.block_size, len(ids))
    cache.extend_keys(keys, ids, salt, len(ids))
    for index in range(len(match.blocks), len(ids) // pool.block_size):
        if cache.insert(keys, index, table[index], ids, salt):
            pool.keep(table[index])
    pool.release(table)
    return table


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet and two salts share, are evicted and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache("model", SIZE)
        self.pool = BlockPool(NUM_BLOCKS, SIZE, self.cache.forget)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # what each block was last filled with
        self.live: list[tuple[list[int], int]] = []

    @rule(
        ids=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        salt=st.sampled_from(["", "b"]),
        hold=st.booleans(),
    )
    def run(self, ids: list[int], salt: str, hold: bool) -> None:
        keys: list[bytes] = []
        match = self.cache.match(keys, ids, salt)
        assert len(match.blocks) * SIZE < len(ids), "a hit must leave a token to compute"
        for index, block in enumerate(match.blocks):
            assert self.content[block] == (salt, tuple(ids[: (index + 1) * SIZE]))
        revived = len(match.blocks) - self.pool.num_referenced(match.blocks)
        fresh = -(-len(ids) // SIZE) - len(match.blocks)
        if fresh + revived > self.pool.num_available:
            return
        self.pool.share(match.blocks, 1)
        table = match.blocks + self.pool.allocate(fresh, 1)
        self.pool.write(table, len(match.blocks) * SIZE, len(ids))
        self.cache.extend_keys(keys, ids, salt, len(ids))
        for index in range(len(match.blocks), len(ids) // SIZE):
            self.content[table[index]] = (salt, tuple(ids[: (index + 1) * SIZE]))
            if self.cache.insert(keys, index, table[index], ids, salt):
                self.pool.keep(table[index])
        if hold:
            self.live.append((table, len(ids)))
        else:
            self.pool.release(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _computed = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(table)

    @rule()
    def clear(self) -> None:
        self.cache.clear(self.pool)
        assert len(self.cache) == 0
        assert self.pool.num_cached == 0

    @invariant()
    def one_to_one(self) -> None:
        self.cache.check(self.pool)
        self.pool.check(self.live)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_hit_leaves_a_token_to_compute(length: int, hit: int) -> None:
    """A03: whole blocks are hit, and never the last token: n blocks exactly hit n - 1."""
    cache, pool = make(8, 16)
    ids = list(range(length))
    fill(cache, pool, ids)
    assert len(cache.match([], ids, "").blocks) * 16 == hit


def test_equal_second_blocks_under_different_first_ones_are_not_shared() -> None:
    """A06: a key covers the whole chain before it."""
    cache, pool = make()
    first = fill(cache, pool, [1, 1, 7, 7, 0])
    second = fill(cache, pool, [2, 2, 7, 7, 0])
    assert set(first[:2]).isdisjoint(second[:2])
    assert len(cache) == 4


def test_keys_are_equal_in_every_process() -> None:
    """A06: keys do not depend on the process, its hash seed among it."""
    code = (
        "from engine.prefix_cache import PrefixCache\n"
        "keys = []\n"
        "PrefixCache('model', 4).extend_keys(keys, list(range(12)), 'salt', 12)\n"
        "print([key.hex() for key in keys])"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here: list[bytes] = []
    PrefixCache("model", 4).extend_keys(here, list(range(12)), "salt", 12)
    assert out == {f"{[key.hex() for key in here]}\n"}


def test_model_and_salt_part_equal_tokens() -> None:
    """A06: neither another model's blocks nor another tenant's are found, and the two names cannot blend."""
    roots = {
        PrefixCache(model, 2).root(salt)
        for model, salt in [("ab", "c"), ("a", "bc"), ("ab", ""), ("abc", "")]
    }
    assert len(roots) == 4


def test_a_colliding_key_is_no_hit() -> None:
    """A key only leads to a candidate; its tokens are compared one by one."""
    cache = PrefixCache("model", 2, hash_key=lambda data: b"same")
    pool = BlockPool(4, 2, cache.forget)
    fill(cache, pool, [1, 2, 3])
    assert len(cache) == 1
    assert cache.match([], [1, 9, 3], "").blocks == []


def test_partial_blocks_have_no_key() -> None:
    """A05: only full blocks are kept, so nothing stale is found where a partial one was filled further."""
    cache, pool = make(8, 4)
    table = fill(cache, pool, [1, 2, 3, 4, 5, 6])
    assert list(cache.keys()) == [table[0]]
    assert cache.match([], [1, 2, 3, 4, 5, 6, 9, 9, 9], "").blocks == [table[0]]


def test_miss_reasons() -> None:
    cache, pool = make(4, 2)
    assert cache.match([], [1, 2], "").miss_reason == MISS_SHORT
    assert cache.match([], [1, 2, 3], "").miss_reason == MISS_NO_MATCH
    fill(cache, pool, [1, 2, 3], salt="a")
    assert cache.match([], [1, 2, 3], "b").miss_reason == MISS_SALT
    assert cache.match([], [1, 2, 3], "a").miss_reason == ""
    pool.release(pool.allocate(4, 2))
    assert cache.match([], [1, 2, 3], "a").miss_reason == MISS_EVICTED
