"""Blocks for drafted tokens: lent from what nobody needs, and taken back by the next plan."""

from __future__ import annotations

from collections.abc import Sequence

from engine.block_pool import BlockPool
from engine.request import Request


class Lending:
    """What was lent of one pool. ``running`` are those who hold blocks of it, as they come and go."""

    def __init__(self, pool: BlockPool, running: Sequence[Request]) -> None:
        self._pool = pool
        self._running = running
        self._lent: dict[int, Request] = {}  # rid -> who was lent blocks since the last plan

    def lend(self, wanted: Sequence[tuple[Request, int]]) -> list[int]:
        """Give running requests blocks for so many tokens, drafts included, as far as nobody misses them.

        Returns how many tokens each one's blocks cover then.
        """
        size, spare, covered = self._pool.block_size, -1, list[int]()
        for request, num_tokens in wanted:
            lacking = -(-num_tokens // size) - len(request.block_table)
            if lacking > 0:
                spare = self._spare() if spare < 0 else spare
                count = min(lacking, spare)
                spare -= count
                request.block_table += self._pool.allocate(count, request.rid)
                self._lent[request.rid] = request
            covered.append(len(request.block_table) * size)
        return covered

    def make_way(self) -> bool:
        """Lend who may get drafted tokens with the pending one the blocks that his next step takes then.

        False if that would take blocks that others miss. The last token that a request may ever have is never
        computed.
        """
        wanted = [
            (request, min(request.num_known + request.num_maybe, request.max_total - 1))
            for request in self._running
            if request.num_maybe
        ]
        covered = self.lend(wanted)
        is_covered = all(tokens >= end for (_, end), tokens in zip(wanted, covered, strict=True))
        return is_covered and self._pool.num_available >= self._needed()

    def take_back(self) -> None:
        """Free the blocks that were lent and hold no token that is known, or may be by the next step."""
        if not self._lent:
            return
        size = self._pool.block_size
        for request in self._lent.values():
            used = -(-(request.num_known + request.num_maybe) // size)
            if len(request.block_table) > used:
                self._pool.release(request.block_table[used:])
                del request.block_table[used:]
        self._lent = {rid: request for rid, request in self._lent.items() if request.num_maybe}

    def forget(self, rid: int) -> None:
        """A request gave all its blocks back."""
        self._lent.pop(rid, None)

    def _spare(self) -> int:
        """Blocks that are left when every running request has room for its tokens and one more."""
        return max(0, self._pool.num_available - self._needed() - self._pool.num_blocks // 100)

    def _needed(self) -> int:
        """Blocks that running requests lack for their tokens and one more each."""
        size = self._pool.block_size
        return sum(
            max(0, request.num_known // size + 1 - len(request.block_table)) for request in self._running
        )
