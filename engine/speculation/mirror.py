"""What a draft model has computed of a request, and which of it still holds."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import RowRequest, TextRow
from engine.graphs.newest import awaited
from engine.request import NO_BLOCK

SHORT_WINDOW = 256  # tokens that are caught up with at once, or nearly so


@dataclass(slots=True)
class Mirror(TextRow):
    """A request as a draft model sees it: verified tokens, then those it has drafted.

    The draft model's keys and values lie in blocks of the same numbers as the target's, in a pool of its own.
    A block of the target's may have been filled before the draft model was there, for another request, or by
    a copy, so nothing is taken to be in a block but what the draft model computed there itself:
    ``num_computed`` tokens of ``token_ids``, in the blocks that ``block_table`` listed then.

    Where a request has given up leading blocks, it is seen from its block ``first_block`` on, as if it began
    there. Rotary positions only count by their differences.
    """

    first_block: int = 0
    agreed: int = 0  # leading tokens that were verified at the last look
    owned: int = 0  # tokens in blocks that the request needed then anyway: others were lent, and may be back
    plan: int = -1  # that it was looked at for

    def follow(self, request: RowRequest, block_size: int, window: int | None, *, held: bool = False) -> None:
        """Take over what the request is now, and keep of what was computed only what holds.

        The newest token always remains to be computed. window: the largest of the draft model's attention
        windows, None if it sees everything. held: this look belongs to the plan after that of the last one,
        so that lent blocks which it needs by now were not taken back in between.
        """
        skipped = self.first_block * block_size
        owned = self.owned
        if held:
            owned = -(-(len(request.token_ids) - skipped) // block_size) * block_size
        kept = min(self._same_tokens(request.token_ids, skipped), owned)
        kept = min(kept, self._same_blocks(request.block_table, block_size), self.num_computed)
        oldest = 0 if window is None else max(0, kept + 1 - window)
        if request.block_table[self.first_block + oldest // block_size] == NO_BLOCK:
            self.first_block = _begin(request, block_size, window)
            skipped, kept = self.first_block * block_size, 0
        self.token_ids[kept:] = request.token_ids[skipped + kept :]
        self.block_table = request.block_table[self.first_block :]
        self.num_computed = kept
        self.num_maybe = 0
        self.agreed = len(self.token_ids)
        self.owned = -(-self.agreed // block_size) * block_size

    def await_newest(self, request: RowRequest) -> None:
        """The newest token is pending, and the one that was it until now is to be computed with it.

        That was computed before, unless a draft before it holds as a whole: the device knows which it is.
        """
        self.token_ids.append(awaited(self.slot))
        self.num_maybe = request.num_maybe

    def _same_tokens(self, token_ids: list[int], skipped: int) -> int:
        """How many leading tokens are the request's, less its newest. What was verified is not looked at."""
        limit = min(len(self.token_ids), len(token_ids) - skipped - 1)
        at = max(0, min(self.agreed, limit))
        if at and self.token_ids[at - 1] != token_ids[skipped + at - 1]:
            at = 0
        while at < limit and self.token_ids[at] == token_ids[skipped + at]:
            at += 1
        return at

    def _same_blocks(self, table: list[int], block_size: int) -> int:
        """Tokens in leading blocks that are where they were, or that are not attended to any more."""
        now = table[self.first_block : self.first_block + len(self.block_table)]
        if now != self.block_table:
            for i, (block, was) in enumerate(zip(now, self.block_table, strict=False)):
                if block not in (was, NO_BLOCK):
                    return i * block_size
        return len(now) * block_size


def _begin(request: RowRequest, block_size: int, window: int | None) -> int:
    """The block from which on a request is computed anew.

    Of a long window only its newer half, which suffices to draft from: more could take so long that the
    request has given up the next blocks by then.
    """
    given_up = request.block_table.count(NO_BLOCK)
    if window is None or window <= SHORT_WINDOW or not given_up:
        return given_up
    return max(given_up, (request.num_tokens - 1 - window // 2) // block_size)
