"""Which KV block holds what: the ledger, the order of eviction, and the live arrays of the block map.

Every block is in exactly one of three states, so free + cached + used = total after every call:
free (no content), cached (nobody refers to it, its content is kept under a key) and used (referred to by
one or more requests). Only ids are handled here; the keys and values themselves lie in `engine.kv_cache`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import NO_BLOCK
from ipc.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_RESERVED, BLOCK_SHARED, BLOCK_USED

OWNER_MODULUS = 1 << 32


class LedgerError(AssertionError):
    """The block ledger does not add up. Always a fault of the engine."""


class NoBlocks(Exception):
    """More blocks were asked for than are free or cached. Nothing was allocated."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """A copy of the block map taken between two steps: state u8, fill u16 and owner u32, one a block.

    The last ``num_host`` entries are blocks of host memory.
    """

    t_ns: int
    block_size: int
    state: NDArray[np.uint8]
    fill: NDArray[np.uint16]
    owner: NDArray[np.uint32]
    num_host: int = 0


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Not thread-safe: the step thread owns it.

    Each operation on a block takes O(1), except `allocate_run`, which looks through the pool.
    ``on_evict(block)`` is told of each cached block whose content is given up.
    """

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1 or not 1 <= block_size <= 0xFFFF:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens; need at least 1, and 1 to 65535 tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.used_tokens = 0  # tokens held in used blocks, a shared block counted once
        self._on_evict = on_evict
        self._refs = array("i", bytes(4 * num_blocks))
        self._fill = array("H", bytes(2 * num_blocks))
        self._owner = array("I", bytes(4 * num_blocks))
        self._keyed = bytearray(num_blocks)
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks - 1, -1, -1))  # last in, first out
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, owner: int) -> list[int]:
        """Take ``count`` blocks, free ones first, then the least recently used cached ones.

        Raises NoBlocks, and takes none, if there are not as many.
        """
        if count > self.num_available:
            raise NoBlocks(f"{count} blocks asked for, {self.num_available} available of {self.num_blocks}")
        blocks = []
        for _ in range(count):
            if self._free:
                block, _none = self._free.popitem()
            else:
                block, _none = self._cached.popitem(last=False)
                self._give_up(block)
            blocks.append(block)
        self._claim(blocks, owner)
        return blocks

    def allocate_run(self, count: int, owner: int) -> list[int] | None:
        """Take the first run of ``count`` neighbouring blocks, evicting what is cached there, or None."""
        if count == 0:
            return []
        starts, lengths = _runs(np.frombuffer(self._refs, dtype=np.int32) == 0)
        long_enough = np.flatnonzero(lengths >= count)
        if not long_enough.size:
            return None
        start = int(starts[long_enough[0]])
        blocks = list(range(start, start + count))
        for block in blocks:
            if block in self._free:
                del self._free[block]
            else:
                del self._cached[block]
                self._give_up(block)
        self._claim(blocks, owner)
        return blocks

    def longest_run(self, released: Iterable[Sequence[int]] = (), shared: Sequence[int] = ()) -> int:
        """The most neighbouring blocks that nobody uses, or would once these block tables were released and
        those ``shared`` blocks used once more."""
        refs = np.frombuffer(self._refs, dtype=np.int32).copy()
        refs[list(shared)] += 1
        for table in released:
            refs[list(table)] -= 1
        return int(_runs(refs == 0)[1].max(initial=0))

    def share(self, blocks: Sequence[int], owner: int) -> None:
        """Refer once more to blocks that hold content: cached ones come back into use."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
                self._owner[block] = owner % OWNER_MODULUS
                self.used_tokens += self._fill[block]
            self._refs[block] += 1

    def num_referenced(self, blocks: Sequence[int]) -> int:
        """How many of these are in use, so that sharing them takes nothing from what is available."""
        return sum(1 for block in blocks if self._refs[block])

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each, the last first: a chain's tail is evicted before its head."""
        refs = self._refs
        for block in reversed(blocks):
            if refs[block] < 1:
                raise LedgerError(f"block {block} is released but nobody refers to it")
            refs[block] -= 1
            if refs[block] == 0:
                self.used_tokens -= self._fill[block]
                if self._keyed[block]:
                    self._cached[block] = None
                else:
                    self._fill[block] = 0
                    self._free[block] = None

    def touch(self, blocks: Iterable[int]) -> None:
        """Those that are cached are evicted later, the last of them last."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def pass_on(self, blocks: Sequence[int], table: Sequence[int], owner: int) -> None:
        """Show ``owner`` as that of the first released ``blocks``, as far as ``table`` begins with them."""
        for block, theirs in zip(blocks, table, strict=False):
            if NO_BLOCK in (block, theirs):
                continue  # one of the two has it outside its window already
            if block != theirs:
                return
            self._owner[block] = owner % OWNER_MODULUS

    def num_released_by(self, blocks: Sequence[int]) -> int:
        """How many of these blocks would become available if one reference to each were given back."""
        return sum(1 for block in blocks if self._refs[block] == 1)

    def write(self, block_table: Sequence[int], start: int, end: int) -> None:
        """Note that token positions [start, end) of a request were written into its blocks."""
        size = self.block_size
        self.used_tokens += end - start
        if end - start == 1:
            self._fill[block_table[start // size]] += 1
            return
        for index in range(start // size, (end - 1) // size + 1):
            self._fill[block_table[index]] = min(end - index * size, size)

    def keep(self, block: int) -> None:
        """The block has a key from now on: when its last reference goes it becomes cached, not free."""
        self._keyed[block] = 1

    def drop(self, block: int) -> None:
        """The block has no key any more. A cached one becomes free; `on_evict` is not called."""
        self._keyed[block] = 0
        if self._refs[block] == 0 and block in self._cached:
            del self._cached[block]
            self._fill[block] = 0
            self._free[block] = None

    def view(self, t_ns: int) -> BlockView:
        """The block map, copied: arrays of [num_blocks]."""
        refs = np.frombuffer(self._refs, dtype=np.int32)
        fill = np.frombuffer(self._fill, dtype=np.uint16).copy()
        state = np.full(self.num_blocks, BLOCK_FREE, dtype=np.uint8)
        state[(refs == 0) & (np.frombuffer(self._keyed, dtype=np.uint8) == 1)] = BLOCK_CACHED
        state[refs == 1] = BLOCK_USED
        state[refs > 1] = BLOCK_SHARED
        state[(refs > 0) & (fill == 0)] = BLOCK_RESERVED
        owner = np.where(refs > 0, np.frombuffer(self._owner, dtype=np.uint32), 0).astype(np.uint32)
        return BlockView(t_ns, self.block_size, state, fill, owner)

    def check(self, block_tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Verify the ledger against every live (block table, tokens computed). Raises LedgerError.

        Leading entries of a table that are `NO_BLOCK` were released.
        """
        expected: Counter[int] = Counter()
        fill: dict[int, int] = {}
        for table, computed in block_tables:
            for index, block in enumerate(table):
                if block == NO_BLOCK:
                    continue
                expected[block] += 1
                held = max(0, min(computed - index * self.block_size, self.block_size))
                if fill.setdefault(block, held) != held:
                    raise LedgerError(
                        f"block {block} is shared but its sharers hold {fill[block]} and {held} tokens"
                    )
        used = {block for block in range(self.num_blocks) if self._refs[block]}
        if len(used) + self.num_free + self.num_cached != self.num_blocks:
            raise LedgerError(
                f"{self.num_free} free + {self.num_cached} cached + {len(used)} used is not {self.num_blocks}"
            )
        for block in used | set(expected):
            if self._refs[block] != expected[block]:
                raise LedgerError(
                    f"block {block} has {self._refs[block]} references, {expected[block]} are live"
                )
            if self._fill[block] != fill[block]:
                raise LedgerError(f"block {block} is marked {self._fill[block]} full, it holds {fill[block]}")
        if self.used_tokens != sum(fill.values()):
            raise LedgerError(f"{self.used_tokens} tokens counted in used blocks, {sum(fill.values())} held")
        if any(self._keyed[b] or self._fill[b] for b in self._free) or not all(
            map(self.is_kept, self._cached)
        ):
            raise LedgerError("a free block holds content or a cached one has no key")

    def is_kept(self, block: int) -> bool:
        """Whether the block's content is under a key."""
        return self._keyed[block] == 1

    def _claim(self, blocks: Sequence[int], owner: int) -> None:
        for block in blocks:
            self._refs[block] = 1
            self._fill[block] = 0
            self._owner[block] = owner % OWNER_MODULUS

    def _give_up(self, block: int) -> None:
        self._keyed[block] = 0
        self._fill[block] = 0
        self._on_evict(block)


def _runs(unused: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Start and length of each run of True."""
    ends = np.flatnonzero(np.diff(np.concatenate(([False], unused, [False])).astype(np.int8)))
    return ends[::2], ends[1::2] - ends[::2]
