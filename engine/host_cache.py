"""Prefix blocks that were evicted from the KV pool and are kept in host memory.

The tier is inclusive: a block that was copied back stays here too, so that evicting it from the pool again
costs no copy. When it is full, what was used longest ago is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from engine.block_pool import LedgerError
from engine.host_arena import CopyQueue, HostArena


@dataclass(frozen=True, slots=True)
class Entry:
    """A full block's key, that of the block before it, and its own token ids as bytes."""

    key: bytes
    parent: bytes
    tokens: bytes


class HostCache:
    """Keys of the blocks in the prefix arena. Not thread-safe: the step thread owns it.

    Every operation takes O(1). ``on_drop(key)`` is told of each key that had to make room for another.
    """

    def __init__(self, num_blocks: int, copies: CopyQueue, on_drop: Callable[[bytes], None]) -> None:
        self.arena = HostArena("prefix", num_blocks, copies)
        self._copies = copies
        self._on_drop = on_drop
        self._held: OrderedDict[bytes, tuple[int, Entry]] = OrderedDict()  # least recently used first
        self._guarded: Collection[int] = ()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        return iter(self._held.values())

    def get(self, key: bytes) -> tuple[int, Entry] | None:
        """Host block and entry under a key. Whoever uses it must compare parent and tokens."""
        return self._held.get(key)

    def touch(self, key: bytes) -> None:
        """The block under this key was used."""
        self._held.move_to_end(key)

    def guard(self, host_blocks: Collection[int]) -> None:
        """Until told otherwise these blocks do not make room for others: they are about to be copied back."""
        self._guarded = host_blocks

    def put(self, entry: Entry) -> int | None:
        """The host block that an evicted block is to be copied to.

        None if its content is here already, or if no room can be made: the tier has no block, or its oldest
        one is needed by a copy that was not made yet.
        """
        held = self._held.get(entry.key)
        if held is not None and held[1] == entry:
            self._held.move_to_end(entry.key)
            return None
        if held is not None:
            self.forget(entry.key)
        blocks = self.arena.allocate(1)
        if blocks is None and self._held:
            oldest, (block, _entry) = next(iter(self._held.items()))
            if block not in self._guarded and not self._copies.touches("prefix", block):
                self.forget(oldest)
                self._on_drop(oldest)
                blocks = self.arena.allocate(1)
        if blocks is None:
            return None
        self._held[entry.key] = (blocks[0], entry)
        return blocks[0]

    def forget(self, key: bytes) -> None:
        """Drop one key, if it is here."""
        if (held := self._held.pop(key, None)) is not None:
            self.arena.release(held[:1])

    def clear(self) -> None:
        """Drop every key; `on_drop` is not called."""
        self.arena.release(block for block, _entry in self._held.values())
        self._held.clear()

    def check(self) -> None:
        """Verify keys and blocks. Raises LedgerError."""
        self.arena.check(block for block, _entry in self._held.values())
        if any(entry.key != key for key, (_block, entry) in self._held.items()):
            raise LedgerError("a block of host memory is found under another block's key")
