"""Drafts from a language model of its own, smaller than the target, with the same tokens.

A draft of k tokens takes k rounds, each of one token for all requests of the batch. The draft model's keys
and values lie in a pool with as many blocks as the target's, at the places that the requests' own block
tables name, so there is no second ledger, and nothing to free when a request ends (see `Mirror`).

A request that the draft model has not followed is caught up with, a bounded number of tokens at a call, and
has no draft meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.attention.base import AttentionBackend, ToDevice
from engine.batch import RowRequest, TextRow
from engine.graphs.drafting import MOST_QUERIES
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.request import NO_BLOCK
from engine.speculation.base import MAX_DRAFT, NO_DRAFT, Draft
from engine.speculation.mirror import Mirror
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rounds import ReplaysRounds, RoundDrafter, Work, known_of, settings
from ipc.messages import Sampling

CATCH_UP = 256  # tokens that one call computes at most beside those of drafts, over all requests
DUMMY = 1  # a token, where it does not matter which
NEAR = MAX_DRAFT + 1  # so few missing tokens are no catching up: what a step brought, and what it rejected


class ModelDrafter(RoundDrafter):
    """Drafts by a decoder over a pool of its own.

    ``max_len``: the longest context it knows; longer requests get no drafts. ``catch_up``: tokens that one
    call computes at most beside those of drafts. See `RoundDrafter` for the rest.
    """

    name = "draft"
    most_behind = MOST_QUERIES

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        kv: KVCache,
        attention: Callable[[], AttentionBackend],
        sampler: ProposalSampler,
        to_device: ToDevice,
        *,
        max_len: int,
        catch_up: int = CATCH_UP,
        graphs: ReplaysRounds | None = None,
    ) -> None:
        super().__init__(decoder, spec, kv, attention, sampler, to_device, graphs)
        self._max_len = max_len
        self._catch_up = catch_up
        self._mirrors: dict[int, Mirror] = {}

    @property
    def kv_bytes(self) -> int:
        """Bytes of its own pool."""
        return sum(part.nbytes for part in (*self._kv.k, *self._kv.v))

    def close(self) -> None:
        """Give its pool back, whoever may still know of it. It must not be asked any more."""
        super().close()
        self._kv.k.clear()
        self._kv.v.clear()

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `Drafter`. A request's blocks must cover its tokens and its draft, but the last of it.

        Raises `DraftFailed` for logits that are not finite, unless the drafts come with a source which is yet
        to be asked, and what a forward pass raises.
        """
        drafts = [NO_DRAFT] * len(requests)
        work: list[Work] = []
        behind: list[Mirror] = []
        budget = self._catch_up
        for i, (request, count) in enumerate(zip(requests, k, strict=True)):
            mirror = self._mirror_of(request) if count and not self._gave_up(request) else None
            room = 0 if mirror is None else self._max_len - mirror.num_tokens - mirror.num_maybe + 1
            if mirror is None or room < 1:
                continue
            lacking = mirror.num_tokens - mirror.num_computed
            if mirror.num_maybe and lacking > MOST_QUERIES:
                continue  # some of it lies behind what nobody has judged
            if lacking > NEAR:
                mirror.num_new = min(lacking, budget)
                budget -= mirror.num_new
            else:
                mirror.num_new = lacking
            if mirror.num_new == lacking:
                work.append(Work(i, request, mirror, min(count, room), known_of(request)))
            elif mirror.num_new:
                behind.append(mirror)
        self.caught_up = self._catch_up - budget
        self._make(work, behind)
        for each in work:
            drafts[each.at] = each.draft
        return drafts

    def largest(self, rows: int, context: int, alike: int, count: int, sampling: Sampling) -> list[Draft]:
        """Drafts of ``count`` tokens for ``rows`` requests, made with the largest rounds that there can be.

        All blocks are block 0, whose content does not matter: it is for measuring the memory that it takes.
        Which rounds take the most depends on the attention. So once the first request alone is at the end of
        a context of ``context`` tokens, and once all have ``alike``, as far as the draft model goes. Beside
        them one is caught up with, at the end of the context too.
        """
        context, alike = (max(1, min(each, self._max_len + 1)) for each in (context, alike))
        near, more = min(NEAR, context), max(1, min(self._catch_up, context - 1))

        def drafted(lengths: Sequence[int]) -> list[Draft]:
            rows = [
                self._dummy(slot, length, near, length - near, count, sampling)
                for slot, length in enumerate(lengths)
            ]
            length = max(more + 1, context)  # it lacks a token even then
            behind = self._dummy(len(rows), length, more, length - 1 - more, count, sampling)
            work = [Work(row.slot, row, row, count) for row in rows]
            try:
                self._draft(work, [behind])
            finally:
                for row in (*rows, behind):
                    self.release(row.slot)
            return [each.draft for each in work]

        drafted([max(near, context - count), *[near] * (rows - 1)])  # given up before the next are held
        return drafted([max(near, alike - count)] * rows)

    def _dummy(
        self, slot: int, length: int, num_new: int, num_computed: int, count: int, sampling: Sampling
    ) -> TextRow:
        """A request of ``length`` tokens, and ``count`` to be drafted, in block 0."""
        table = [0] * -(-(length + count) // self._kv.block_size)
        return TextRow([DUMMY] * length, table, num_new, num_computed, slot, slot, sampling=sampling)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._mirrors.pop(slot, None)
        super().release(slot)

    def clear(self) -> None:
        """Forget all slots."""
        for slot in list(self._mirrors):
            self.release(slot)

    @property
    def num_followed(self) -> int:
        """Requests that something was computed of."""
        return len(self._mirrors)

    def _mirror_of(self, request: RowRequest) -> Mirror:
        mirror = self._mirrors.get(request.slot)
        if mirror is None or mirror.rid != request.rid:
            mirror = Mirror([], [], rid=request.rid, slot=request.slot, sampling=settings(request.sampling))
            self._mirrors[request.slot] = mirror
        mirror.follow(request, self._kv.block_size, self._window, held=mirror.plan == self.plan - 1)
        mirror.plan = self.plan
        if known_of(request):
            mirror.await_newest(request)
        return mirror

    def _gave_up(self, request: RowRequest) -> bool:
        """Whether a request's first round behind a step in flight would look at a block that it gave up."""
        if self._window is None or not known_of(request):
            return False
        oldest = max(0, request.num_tokens - self._window)
        return request.block_table[oldest // self._kv.block_size] == NO_BLOCK
