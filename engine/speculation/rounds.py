"""Drafts made by a decoder, one token of each draft in a round over all requests of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, ToDevice
from engine.batch import BatchBuilder, RowRequest, TextRow
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.native import forward_pass
from engine.ops.choice import FUSED, SAMPLING, make_ops, make_sampling, probe
from engine.speculation.base import Draft
from engine.speculation.proposals import ProposalSampler
from engine.speculation.rows import DraftRow
from ipc.messages import Sampling


@dataclass(slots=True)
class Work:
    """A request that gets a draft of ``count`` tokens in this call, and what the decoder computes for it."""

    at: int  # its place in the call
    request: RowRequest
    row: TextRow
    count: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        return Draft(self.token_ids, torch.stack(self.probs) if self.probs else None)


class RoundDrafter(ABC):
    """What drafters with a decoder share. The step thread owns it; no step may be computed meanwhile.

    ``spec``: of what drafts, with the attention windows that it runs with, none larger than the target's.
    ``kv``: the pool that it writes to. ``attention`` gives the backend to run with.
    ``drawn``: drafts of requests that are not greedy are drawn freely and come with their probabilities.
    """

    name: str
    sequential = True

    def __init__(
        self,
        decoder: Decoder,
        spec: ModelSpec,
        kv: KVCache,
        attention: Callable[[], AttentionBackend],
        sampler: ProposalSampler,
        to_device: ToDevice,
    ) -> None:
        self.drawn = False
        self.caught_up = 0
        """Tokens that the last call computed beside those of drafts."""
        self._decoder = decoder
        self._spec = spec
        self._kv = kv
        self._attention = attention
        self._sampler = sampler
        self._to_device = to_device
        windows = [window for window in spec.layer_windows if window is not None]
        self._window = max(windows) if len(windows) == spec.num_layers else None
        self._builder = BatchBuilder(kv.block_size, kv.num_blocks, self._window)

    @abstractmethod
    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `engine.speculation.base.Drafter`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of a pool of its own, if it has one."""
        return 0

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._builder.release(slot)
        self._sampler.release(slot)

    def set_fused(self, wanted: Mapping[str, bool]) -> None:
        """Fuse sampling, and those parts of the decoder (`engine.ops.choice.FUSED`) that can serve it: what
        is asked for is meant for the target, whose sizes may be others.
        """
        decoder = self._decoder
        where = decoder.spec, decoder.device, decoder.activation_dtype
        can = {knob: wanted[knob] and probe(knob, *where) is None for knob in FUSED}
        decoder.ops = make_ops(can, *where)
        self._sampler.fused = make_sampling(wanted[SAMPLING], decoder.device)

    @property
    def runs_with(self) -> tuple[Decoder, AttentionBackend, KVCache, ModelSpec]:
        """What its forward passes are computed by, over which pool, and the model with its windows."""
        return self._decoder, self._attention(), self._kv, self._spec

    def close(self) -> None:  # noqa: B027 - one without a pool of its own has nothing to give back
        """Give back what it holds, whoever may still know of it. It must not be asked any more."""

    def _draft(self, work: Sequence[Work], behind: Sequence[TextRow] = ()) -> None:
        """Compute rounds until every request has its draft; those ``behind`` take part in the first.

        Raises `DraftFailed` for logits that are not finite, and what a forward pass raises.
        """
        going = list(work)
        with torch.inference_mode():
            while going or behind:
                rows = [each.row for each in going]
                logits, order = self._forward([*rows, *behind])
                for row in (*rows, *behind):
                    row.num_computed += row.num_new
                behind = ()
                if going:
                    self._choose(logits, [going[i] for i in order])
                going = [each for each in going if len(each.token_ids) < each.count]

    def _forward(self, rows: Sequence[TextRow]) -> tuple[Tensor, list[int]]:
        """Logits of the rows whose last token is computed, and which these are."""
        batch = self._builder.build(rows)
        batch.fill()
        attention = self._attention().plan(batch.rows, self._kv, self._spec, self._to_device)
        ids, positions, slots, wanted = map(
            self._to_device, (batch.ids, batch.positions, batch.slots, batch.logit_tokens)
        )
        with forward_pass():
            logits = self._decoder.forward(ids, positions, slots, attention, self._kv, wanted)
        return logits, batch.sampled

    def _choose(self, logits: Tensor, work: Sequence[Work]) -> None:
        """Add the next token to each draft, and to what is to be computed next."""
        rows = [
            DraftRow(
                each.request.rid,
                each.request.slot,
                each.row.sampling,
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
            each.row.token_ids.append(token)
            each.row.num_new = 1
            if distribution is not None:
                each.probs.append(distribution)


def settings(sampling: Sampling) -> Sampling:
    """A request's settings without the log-probabilities, which nobody reads of a draft."""
    return msgspec.structs.replace(sampling, logprobs=None)
