"""Block ids of host memory, and the order in which blocks are copied to it and back.

Only ids are handled here; the bytes are the runner's. Copies are made in the order in which they were asked
for, before the next step computes. So what lies in a block is always what the queue, once made, will have
put there, and a plan that is never launched loses nothing: its copies stay queued.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_pool import LedgerError
from engine.plan import Arena, Copy, Direction


class CopyQueue:
    """Copies asked for and not yet handed to the runner."""

    def __init__(self) -> None:
        self._copies: list[Copy] = []
        self._last: set[int] = set()  # pool blocks of the last copy
        self._touched: dict[Arena, set[int]] = {"swap": set(), "prefix": set()}

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, arena: Arena, direction: Direction, block: int, host_block: int) -> None:
        """Ask for one block. Neighbours in the queue become one `Copy`, in which no pool block is twice."""
        last = self._copies[-1] if self._copies else None
        if last is None or (last.arena, last.direction) != (arena, direction) or block in self._last:
            last = Copy(arena, direction, [], [])
            self._copies.append(last)
            self._last = set()
        last.blocks.append(block)
        last.host_blocks.append(host_block)
        self._last.add(block)
        self._touched[arena].add(host_block)

    def touches(self, arena: Arena, host_block: int) -> bool:
        """Whether a queued copy reads or writes this block of host memory."""
        return host_block in self._touched[arena]

    def restores_from(self, arena: Arena) -> bool:
        """Whether something is still to come back from this arena."""
        return any(copy.arena == arena and copy.direction == "in" for copy in self._copies)

    def drop(self, arena: Arena) -> None:
        """Forget the copies of one arena, whose content nobody needs any more."""
        self._copies = [copy for copy in self._copies if copy.arena != arena]
        self._last = set(self._copies[-1].blocks) if self._copies else set()
        self._touched[arena].clear()

    def take(self) -> list[Copy]:
        """All queued copies, in order; the queue is empty then."""
        taken, self._copies, self._last = self._copies, [], set()
        for touched in self._touched.values():
            touched.clear()
        return taken


class HostArena:
    """The ids [0, num_blocks) of one part of host memory: free, held, or resting.

    A block that is given back while a queued copy still touches it rests until the queue was taken, so that
    no two copies of one launch ever write to it.
    """

    def __init__(self, name: Arena, num_blocks: int, copies: CopyQueue) -> None:
        self.name: Arena = name
        self.num_blocks = num_blocks
        self._copies = copies
        self._free = list(range(num_blocks - 1, -1, -1))
        self._resting: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._resting)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None, and nothing taken, if there are not as many free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, host_blocks: Iterable[int]) -> None:
        """Give blocks back."""
        for block in host_blocks:
            (self._resting if self._copies.touches(self.name, block) else self._free).append(block)

    def settle(self) -> None:
        """The queue was taken: what rested is free."""
        self._free += self._resting
        self._resting.clear()

    def check(self, held: Iterable[int]) -> None:
        """Verify that these are the held blocks and nothing is lost or held twice. Raises LedgerError."""
        everything = [*held, *self._free, *self._resting]
        if sorted(everything) != list(range(self.num_blocks)):
            raise LedgerError(
                f"{self.name}: {len(everything)} block ids held, free or resting are not each of "
                f"{self.num_blocks} once"
            )
