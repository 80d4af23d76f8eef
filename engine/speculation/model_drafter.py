"""Drafts from a language model: a smaller one with the same tokens, or the target itself in fewer bits.

A draft of k tokens takes k rounds, each of one token for all requests of the batch. The draft model's keys
and values lie in a pool with as many blocks as the target's, at the places that the requests' own block
tables name, so there is no second ledger, and nothing to free when a request ends (see `Mirror`).

A request that the draft model has not followed is caught up with, a bounded number of tokens at a call, and
has no draft meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, ToDevice
from engine.batch import BatchBuilder, RowRequest
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.speculation.base import MAX_DRAFT, NO_DRAFT, Draft
from engine.speculation.mirror import Mirror
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rows import DraftRow
from ipc.messages import Sampling

CATCH_UP = 256  # tokens that one call computes at most beside those of drafts, over all requests
NEAR = MAX_DRAFT + 1  # so few missing tokens are no catching up: what a step brought, and what it rejected


@dataclass(slots=True)
class _Work:
    """A request that gets a draft of ``count`` tokens in this call."""

    at: int  # its place in the call
    request: RowRequest
    mirror: Mirror
    count: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        return Draft(self.token_ids, torch.stack(self.probs) if self.probs else None)


class ModelDrafter:
    """Drafts by a decoder over a pool of its own. The step thread owns it; no step may be computed meanwhile.

    ``spec``: of the draft model, with the attention windows that it runs with, none larger than the target's.
    ``max_len``: the longest context it knows; longer requests get no drafts.
    ``drawn``: drafts of requests that are not greedy are drawn freely and come with their probabilities.
    """

    sequential = True

    def __init__(
        self,
        name: Literal["draft", "self"],
        decoder: Decoder,
        spec: ModelSpec,
        kv: KVCache,
        attention: AttentionBackend,
        sampler: ProposalSampler,
        to_device: ToDevice,
        *,
        max_len: int,
        catch_up: int = CATCH_UP,
    ) -> None:
        self.name = name
        self.drawn = False
        self.caught_up = 0
        """Tokens that the last call computed to catch up, beside those of drafts."""
        self._decoder = decoder
        self._spec = spec
        self._kv = kv
        self._attention = attention
        self._sampler = sampler
        self._to_device = to_device
        self._max_len = max_len
        self._catch_up = catch_up
        windows = [window for window in spec.layer_windows if window is not None]
        self._window = max(windows) if len(windows) == spec.num_layers else None
        self._builder = BatchBuilder(kv.block_size, kv.num_blocks, self._window)
        self._mirrors: dict[int, Mirror] = {}

    @property
    def kv_bytes(self) -> int:
        """Bytes of its own pool."""
        return sum(part.nbytes for part in (*self._kv.k, *self._kv.v))

    def close(self) -> None:
        """Give its pool back, whoever may still know of it. It must not be asked any more."""
        self._kv.k.clear()
        self._kv.v.clear()

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `Drafter`. A request's blocks must cover its tokens and its draft, but the last of it.

        Raises `DraftFailed` for logits that are not finite, and what a forward pass raises.
        """
        drafts = [NO_DRAFT] * len(requests)
        work: list[_Work] = []
        behind: list[Mirror] = []
        budget = self._catch_up
        for i, (request, count) in enumerate(zip(requests, k, strict=True)):
            mirror = self._mirror_of(request) if count else None
            room = 0 if mirror is None else self._max_len - mirror.num_tokens + 1
            if mirror is None or room < 1:
                continue
            lacking = mirror.num_tokens - mirror.num_computed
            if lacking > NEAR:
                mirror.num_new = min(lacking, budget)
                budget -= mirror.num_new
            else:
                mirror.num_new = lacking
            if mirror.num_new == lacking:
                work.append(_Work(i, request, mirror, min(count, room)))
            elif mirror.num_new:
                behind.append(mirror)
        self.caught_up = self._catch_up - budget
        with torch.inference_mode():
            self._draft(work, behind)
        for each in work:
            drafts[each.at] = each.draft
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._mirrors.pop(slot, None)
        self._builder.release(slot)
        self._sampler.release(slot)

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
            mirror = Mirror([], [], rid=request.rid, slot=request.slot, sampling=_settings(request.sampling))
            self._mirrors[request.slot] = mirror
        mirror.follow(request, self._kv.block_size, self._window)
        return mirror

    def _draft(self, work: Sequence[_Work], behind: Sequence[Mirror]) -> None:
        """Compute rounds until every request has its draft; those ``behind`` take part in the first."""
        going = list(work)
        while going or behind:
            rows = [each.mirror for each in going]
            logits, order = self._forward([*rows, *behind])
            for mirror in (*rows, *behind):
                mirror.num_computed += mirror.num_new
            behind = ()
            if going:
                self._choose(logits, [going[i] for i in order])
            going = [each for each in going if len(each.token_ids) < each.count]

    def _forward(self, mirrors: Sequence[Mirror]) -> tuple[Tensor, list[int]]:
        """Logits of the mirrors whose last token is computed, and which these are."""
        batch = self._builder.build(mirrors)
        batch.fill()
        attention = self._attention.plan(batch.rows, self._kv, self._spec, self._to_device)
        ids, positions, slots, wanted = map(
            self._to_device, (batch.ids, batch.positions, batch.slots, batch.logit_tokens)
        )
        logits = self._decoder.forward(ids, positions, slots, attention, self._kv, wanted)
        return logits, batch.sampled

    def _choose(self, logits: Tensor, work: Sequence[_Work]) -> None:
        """Add the next token to each draft, and to what is to be computed next."""
        rows = [
            DraftRow(
                each.request.rid,
                each.request.slot,
                each.mirror.sampling,
                each.request.seed,
                each.request.num_prompt,
                each.request.num_tokens + len(each.token_ids),
                each.request.token_ids,
                each.token_ids,
            )
            for each in work
        ]
        ids, probs = self._sampler.propose(logits, rows, drawn=self.drawn)
        for each, token, distribution in zip(work, ids, probs, strict=True):
            each.token_ids.append(token)
            each.mirror.token_ids.append(token)
            each.mirror.num_new = 1
            if distribution is not None:
                each.probs.append(distribution)


def _settings(sampling: Sampling) -> Sampling:
    """A request's settings without the log-probabilities, which nobody reads of a draft."""
    return msgspec.structs.replace(sampling, logprobs=None)
