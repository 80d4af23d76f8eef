"""The block ledger against a plain model of it, and the figures it hands out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, LedgerError, NoBlocks
from ipc.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_RESERVED, BLOCK_SHARED, BLOCK_USED

NUM_BLOCKS, SIZE = 12, 4


class LedgerMachine(RuleBasedStateMachine):
    """Owners take, fill, share and give back blocks in any order; plain dictionaries say what holds."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, SIZE, self.on_evict)
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.cached: list[int] = []  # in the order of eviction
        self.kept: set[int] = set()
        self.next_owner = 1

    def on_evict(self, block: int) -> None:
        assert block == self.cached[0] or self.in_run, "not the least recently used"
        self.cached.remove(block)
        self.kept.discard(block)
        self.evicted.append(block)

    in_run = False

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        owner = self.next_owner
        if count > self.pool.num_available:
            before = (self.pool.num_free, self.pool.num_cached, self.pool.num_used)
            with pytest.raises(NoBlocks):
                self.pool.allocate(count, owner)
            assert before == (self.pool.num_free, self.pool.num_cached, self.pool.num_used)
            return
        self.tables[owner] = self.pool.allocate(count, owner)
        self.computed[owner] = 0
        self.next_owner += 1

    @rule(count=st.integers(1, 5))
    def allocate_run(self, count: int) -> None:
        self.in_run = True
        unused = {b for b in range(NUM_BLOCKS) if not any(b in t for t in self.tables.values())}
        possible = any(all(s + i in unused for i in range(count)) for s in range(NUM_BLOCKS - count + 1))
        run = self.pool.allocate_run(count, self.next_owner)
        self.in_run = False
        assert (run is not None) == possible
        if run is not None:
            assert run == list(range(run[0], run[0] + count))
            assert set(run) <= unused
            self.tables[self.next_owner] = run
            self.computed[self.next_owner] = 0
            self.next_owner += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        start = self.computed[owner]
        room = len(self.tables[owner]) * SIZE - start
        if room < 1:
            return
        count = data.draw(st.integers(1, room))
        self.pool.write(self.tables[owner], start, start + count)
        self.computed[owner] += count
        for index in range(start // SIZE, (start + count) // SIZE):
            block = self.tables[owner][index]
            if data.draw(st.booleans()) and block not in self.kept:
                self.pool.keep(block)
                self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.kept)), max_size=3, unique=True))
        self.pool.share(blocks, self.next_owner)
        self.cached = [b for b in self.cached if b not in blocks]
        self.tables[self.next_owner] = blocks
        self.computed[self.next_owner] = len(blocks) * SIZE
        self.next_owner += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables.pop(owner)
        del self.computed[owner]
        self.pool.release(table)
        for block in reversed(table):
            if block in self.kept and not any(block in t for t in self.tables.values()):
                self.cached.append(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(block)
        self.kept.discard(block)
        self.cached = [b for b in self.cached if b != block]

    @invariant()
    def adds_up(self) -> None:
        used = {b for table in self.tables.values() for b in table}
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == NUM_BLOCKS
        assert self.pool.num_used == len(used)
        assert self.pool.num_cached == len(self.cached)
        self.pool.check((self.tables[o], self.computed[o]) for o in self.tables)

    @invariant()
    def map_shows_it(self) -> None:
        view = self.pool.view(7)
        counts = np.bincount(view.state, minlength=6)
        assert counts[BLOCK_FREE] == self.pool.num_free
        assert counts[BLOCK_CACHED] == self.pool.num_cached
        assert counts[[BLOCK_USED, BLOCK_SHARED, BLOCK_RESERVED]].sum() == self.pool.num_used
        in_use = np.isin(view.state, [BLOCK_USED, BLOCK_SHARED, BLOCK_RESERVED])
        assert view.fill[in_use].sum() == self.pool.used_tokens
        assert not view.fill[view.state == BLOCK_FREE].any()
        assert (view.owner[~in_use] == 0).all()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_usage_counts_known_fill_levels() -> None:
    """C14: the shares of the pool are exact, cached blocks are not in use, and idle returns to none used."""
    pool = BlockPool(10, 4, lambda block: None)
    table = pool.allocate(4, 1)
    pool.write(table, 0, 13)
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.used_tokens) == (4, 0, 6, 13)
    for block in table[:3]:
        pool.keep(block)
    other = table[:2]
    pool.share(other, 2)
    assert (pool.num_used, pool.used_tokens) == (4, 13)
    pool.release(table)
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.used_tokens) == (2, 1, 7, 8)
    pool.release(other)
    assert (pool.num_used, pool.num_cached, pool.num_free, pool.used_tokens) == (0, 3, 7, 0)


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, 2, evicted.append)
    table = pool.allocate(3, 1)
    pool.write(table, 0, 6)
    for block in table:
        pool.keep(block)
    pool.release(table)
    pool.allocate(2, 2)
    assert evicted == [table[2], table[1]]


def test_a_second_release_is_an_error() -> None:
    pool = BlockPool(2, 2, lambda block: None)
    table = pool.allocate(1, 1)
    pool.release(table)
    with pytest.raises(LedgerError, match="nobody refers"):
        pool.release(table)


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(4, 2, lambda block: None)
    pool.allocate(2, 1)
    with pytest.raises(LedgerError):
        pool.check([])


def test_a_contiguous_run_needs_neighbours() -> None:
    """Free blocks alone are not enough for a run: this is what external fragmentation means."""
    pool = BlockPool(6, 2, lambda block: None)
    tables = [pool.allocate(1, owner) for owner in range(1, 7)]
    for table in tables[::2]:
        pool.release(table)
    assert pool.num_available == 3
    assert pool.allocate_run(2, 9) is None
    pool.release(tables[1])
    assert pool.allocate_run(3, 9) == [0, 1, 2]
