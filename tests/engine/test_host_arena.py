"""Block ids of host memory and the queue of copies, against a memory of contents."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import LedgerError
from engine.host_arena import CopyQueue, HostArena
from engine.plan import Copy


def test_copies_keep_their_order_and_neighbours_are_one() -> None:
    """A11: out and in may alternate, and a block that is written twice is not written twice in one copy."""
    copies = CopyQueue()
    copies.add("prefix", "out", 3, 0)
    copies.add("prefix", "out", 4, 1)
    copies.add("prefix", "in", 3, 2)
    copies.add("swap", "in", 4, 0)
    copies.add("swap", "in", 5, 1)
    copies.add("swap", "in", 4, 2)
    copies.add("prefix", "out", 4, 3)
    assert copies.take() == [
        Copy("prefix", "out", [3, 4], [0, 1]),
        Copy("prefix", "in", [3], [2]),
        Copy("swap", "in", [4, 5], [0, 1]),
        Copy("swap", "in", [4], [2]),
        Copy("prefix", "out", [4], [3]),
    ]
    assert copies.take() == []


def test_a_block_that_is_still_to_be_copied_is_not_given_away() -> None:
    """A11: neither while a copy is to read it nor while one is to write it."""
    copies = CopyQueue()
    arena = HostArena("swap", 3, copies)
    held = arena.allocate(3)
    assert held is not None
    copies.add("swap", "in", 7, held[0])
    copies.add("swap", "out", 8, held[1])
    copies.add("prefix", "out", 9, held[2])  # the same number in the other arena
    arena.release(held)
    assert (arena.num_free, arena.num_held) == (1, 0)
    assert arena.allocate(1) == [held[2]]
    assert arena.allocate(1) is None
    copies.take()
    arena.settle()
    assert arena.allocate(3) is None
    assert sorted(arena.allocate(2) or []) == sorted(held[:2])


def test_copies_of_one_arena_can_be_dropped() -> None:
    copies = CopyQueue()
    copies.add("prefix", "out", 1, 0)
    copies.add("swap", "out", 2, 0)
    copies.add("prefix", "out", 3, 1)
    assert not copies.restores_from("swap")
    copies.add("swap", "in", 2, 0)
    assert copies.restores_from("swap")
    copies.drop("swap")
    assert not copies.touches("swap", 0)
    assert copies.touches("prefix", 0)
    assert [copy.blocks for copy in copies.take()] == [[1], [3]]


def test_a_lost_block_is_found() -> None:
    arena = HostArena("swap", 3, CopyQueue())
    arena.allocate(2)
    with pytest.raises(LedgerError, match="swap: "):
        arena.check([0])


class CopyMachine(RuleBasedStateMachine):
    """Contents are saved and brought back at random; the queue is taken now and then.

    ``now`` is what a block will hold once the queue is made; the copies are made on ``memory`` and ``host``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = CopyQueue()
        self.arena = HostArena("swap", 4, self.copies)
        self.now = dict.fromkeys(range(3), 0)
        self.memory = dict(self.now)
        self.host: dict[int, int] = {}
        self.saved: dict[int, int] = {}  # host block -> what must come back from it
        self.next_content = 1

    @rule(block=st.integers(0, 2))
    def save(self, block: int) -> None:
        if (host_blocks := self.arena.allocate(1)) is not None:
            self.copies.add("swap", "out", block, host_blocks[0])
            self.saved[host_blocks[0]] = self.now[block]

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), block=st.integers(0, 2), keep=st.booleans())
    def bring_back(self, data: st.DataObject, block: int, keep: bool) -> None:
        host_block = data.draw(st.sampled_from(sorted(self.saved)))
        self.copies.add("swap", "in", block, host_block)
        self.now[block] = self.saved[host_block]
        if not keep:
            self.forget(host_block)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.sampled_from(sorted(self.saved))))

    @rule(block=st.integers(0, 2))
    def launch(self, block: int) -> None:
        for copy in self.copies.take():
            assert len(set(copy.blocks)) == len(copy.blocks)
            if copy.direction == "out":
                assert len(set(copy.host_blocks)) == len(copy.host_blocks)
                content = [self.memory[b] for b in copy.blocks]
                self.host.update(zip(copy.host_blocks, content, strict=True))
            else:
                content = [self.host[b] for b in copy.host_blocks]
                self.memory.update(zip(copy.blocks, content, strict=True))
        self.arena.settle()
        assert self.memory == self.now
        self.memory[block] = self.now[block] = self.next_content
        self.next_content += 1

    def forget(self, host_block: int) -> None:
        del self.saved[host_block]
        self.arena.release([host_block])

    @invariant()
    def adds_up(self) -> None:
        self.arena.check(self.saved)
        assert self.arena.num_held == len(self.saved)


TestCopies = CopyMachine.TestCase
TestCopies.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
