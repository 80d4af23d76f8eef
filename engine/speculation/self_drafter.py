"""Drafts from the target itself, its linear layers in fewer bits, over the target's own keys and values.

What the target has computed of a request is what the draft attends to, with the target's windows, whatever
came from the prefix cache or from swap space: nothing is computed twice, and a draft needs no pool. Keys and
values of the newest token and of the draft are written where the target will write its own when it verifies
them, in the step that the draft is made for. Until then they lie behind everything that counts as computed,
as those of rejected drafts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.batch import RowRequest, TextRow
from engine.graphs.newest import awaited
from engine.speculation.base import NO_DRAFT, Draft
from engine.speculation.rounds import RoundDrafter, Work, known_of, settings


class SelfDrafter(RoundDrafter):
    """Drafts over the pool of the target, whose queued copies must have been made."""

    name = "self"
    most_behind = 1

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `Drafter`. All tokens but the newest must be computed, and blocks cover those of the draft.

        Raises `DraftFailed` for logits that are not finite, unless the drafts come with a source which is yet
        to be asked, and what a forward pass raises. What is not finite in the blocks that it wrote to is
        replaced by zeros then, as these may go to others; what the target computed before, and others may
        share, is the target's to judge.
        """
        drafts = [NO_DRAFT] * len(requests)
        work = [
            Work(i, request, _row_of(request), count, known_of(request))
            for i, (request, count) in enumerate(zip(requests, k, strict=True))
            if count
        ]
        clean = self._cleaner(work)
        try:
            self._make(work)
        except Exception:
            clean()
            raise
        for each in work:
            drafts[each.at] = each.draft
        return drafts

    def _cleaner(self, work: Sequence[Work]) -> Callable[[], None]:
        size = self._kv.block_size
        written = [each.row.block_table[(each.request.num_known - 1) // size :] for each in work]

        def clean() -> None:
            for blocks in written:
                self._kv.scrub(blocks)

        return clean

    def clear(self) -> None:
        """Nothing is remembered but by the slots that `release` forgets."""


def _row_of(request: RowRequest) -> TextRow:
    return TextRow(
        [*request.token_ids, *([awaited(request.slot)] if known_of(request) else [])],
        request.block_table,
        num_new=1,
        num_computed=request.num_known - 1,
        rid=request.rid,
        slot=request.slot,
        sampling=settings(request.sampling),
        num_maybe=request.num_maybe,
    )
