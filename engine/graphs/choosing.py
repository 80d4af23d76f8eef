"""Choosing tokens inside a graph: what it needs of each row travels with the step's other inputs.

What a step needs decides what is captured for it. Where the kernels do not serve something, or what it needs
has no room in static memory, the graph ends with the logits and tokens are chosen outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch
from engine.graphs.memory import Result
from engine.graphs.rejecting import GraphRejection
from engine.graphs.shapes import GraphShape, Kind
from engine.knobs import MAX_SEQS
from engine.penalties import SampledRequest, has_penalty
from engine.sampling import FusedSampling, is_short
from engine.speculation.rows import draft_rows
from engine.speculation.verify import DraftSampler, is_drawn
from ipc.messages import Sampling

CHOICE_WORDS = 4  # of 64 bits a token, see `FusedSampling.pack`
NOBODY = MAX_SEQS  # a slot that no request has: where what nobody asked for goes
COUNTED = 1024  # tokens that occurred, for each row of a shape, that there is room for
MOST_COUNTED = 8192  # of one row
ENDS = 16  # tokens hidden for each row of a shape that there is room for
MOST_ENDS = 128  # of one row: those of a request and of the model
GREEDY = Sampling()  # takes no draw


class GraphChooser:
    """Packs what choosing tokens needs, and chooses from it inside a graph.

    Where a shape ``feeds`` the newest token of each slot stays on the device, so that the next step can take
    it from there before the host has read it.
    """

    def __init__(
        self, sampler: DraftSampler, fused: FusedSampling, padded: Tensor | None, device: torch.device
    ) -> None:
        """padded: ids on the device that no token belongs to, which are never chosen."""
        self.fused = fused
        self._sampler = sampler
        self._padded = padded
        self._rejection = GraphRejection(fused)
        self._newest = torch.zeros(MAX_SEQS + 1, dtype=torch.int64, device=device)  # of each slot

    def shape_of(self, batch: Batch, shape: GraphShape) -> tuple[GraphShape, str]:
        """The shape that a step of that size is captured in; why, where it ends with the logits."""
        kind, why = self.kind_of(batch, shape.tokens)
        if kind == "logits":
            return replace(shape, kind=kind), why
        rows = batch.sampled_rows
        drawn = any(map(is_drawn, rows, batch.drafts))
        logprobs = any(row.sampling.logprobs is not None for row in rows)
        return replace(shape, kind=kind, drawn=drawn, logprobs=logprobs), why

    def kind_of(self, batch: Batch, tokens: int) -> tuple[Kind, str]:
        """What has to be captured for a step in a shape of ``tokens`` tokens; why, where it is the logits."""
        rows, drafts = batch.sampled_rows, batch.drafts
        places = [len(draft) + 1 for draft in drafts]
        counted = [
            count
            for row, n in zip(rows, places, strict=True)
            if has_penalty(row.sampling)
            for count in [row.num_tokens + n] * n
        ]
        if sum(counted) > tokens * COUNTED or max(counted, default=0) > MOST_COUNTED:
            return "logits", "penalties"
        ends = [
            (len(self._sampler.eos_token_ids) + len(row.sampling.stop_token_ids)) * n
            for row, n in zip(rows, places, strict=True)
            if is_short(row)
        ]
        if sum(ends) > tokens * ENDS:
            return "logits", "min_tokens"
        return ("adjusted", "") if counted or ends else ("tokens", "")

    def num_words(self, shape: GraphShape) -> int:
        """Words of 64 bits that a step's choice takes in static memory."""
        return sum(self._sizes(shape))

    def clear(self, words: Tensor, shape: GraphShape) -> None:
        """Let what is chosen from ``words``, zeros otherwise, reach no slot."""
        torch.split(words, self._sizes(shape))[1].fill_(NOBODY)

    def fill(self, words: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what a filled step's choice needs to ``words``."""
        rows: Sequence[SampledRequest] = batch.sampled_rows
        if any(batch.drafts):
            pairs = zip(batch.sampled_rows, batch.drafts, strict=True)
            rows = [place for row, draft in pairs for place in draft_rows(row, draft)]
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        settings = _greedy_where_drawn(batch) if shape.drawn else [row.sampling for row in rows]
        packed, slots, lists, drafts = np.split(words, np.cumsum(self._sizes(shape))[:-1])
        packed[:] = self.fused.pack(settings, seeds, positions, shape.tokens).reshape(-1)
        if shape.feeds:
            slots[: len(rows)] = [row.slot for row in rows]
            slots[len(rows) :] = NOBODY
        if shape.kind == "adjusted":
            self._fill_lists(lists, shape.tokens, rows)
        if shape.drawn:
            self._rejection.fill(drafts, shape, batch)

    def feed(self, ids: Tensor, shape: GraphShape) -> Tensor:
        """Ids of a step's tokens, those that are `awaited` replaced by the newest one of their slot."""
        if not shape.feeds:
            return ids
        newest = self._newest.index_select(0, (-1 - ids).clamp(min=0))
        return torch.where(ids < 0, newest, ids)

    def choose(
        self,
        logits: Tensor,
        words: Tensor,
        shape: GraphShape,
        result: Result,
        proposals: Tensor | None = None,
    ) -> None:
        """Choose tokens from logits [tokens, vocab_size], which are changed; an id of -1: not finite.

        words: what `fill` wrote, on the device. result: what comes of it, but for ``finite``. proposals: see
        `GraphRejection.judge`, where drafts were drawn. Launches only what depends on the shape.
        """
        ids = result.ids
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        packed, slots, lists, drafts = torch.split(words, self._sizes(shape))
        # Log-probabilities are those of the model's own logits.
        own = logits.clone() if result.top is not None and shape.kind == "adjusted" else logits
        finite = None
        if shape.drawn or shape.kind == "adjusted":
            finite = logits.amax(dim=1).isfinite()
        if finite is not None and shape.drawn:  # what is drawn from has to be a distribution
            logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        if shape.kind == "adjusted":
            self._adjust(logits, lists, shape.tokens)
        self.fused.choose_packed(logits, packed.view(CHOICE_WORDS, shape.tokens), ids)
        if finite is not None:
            if proposals is not None:
                self._rejection.judge(logits, proposals, finite, drafts, shape, result.judged)
                if result.top is not None:
                    self._rejection.settle(ids, result.judged, drafts, shape)
            ids.masked_fill_(~finite, -1)
        if result.top is not None:
            result.top.write(own, ids)
        if shape.feeds:  # -1 is no token: whoever gets that one fails, and what follows is of no use
            self._newest.index_copy_(0, slots, ids.clamp(min=0))

    def _adjust(self, logits: Tensor, words: Tensor, tokens: int) -> None:
        """Hide ends and penalize in place, by what `_fill_lists` wrote."""
        lists = _Lists(words.view(torch.int32), tokens)
        self.fused.penalize_packed(
            logits, lists.cu_ends, lists.ends, torch.ones_like(lists.ends), _hiding(tokens, logits),
            max_tokens=MOST_ENDS,
        )  # fmt: skip
        self.fused.penalize_packed(
            logits, lists.cu, lists.tokens, lists.counts, lists.each.view(torch.float32),
            max_tokens=MOST_COUNTED,
        )  # fmt: skip

    def _sizes(self, shape: GraphShape) -> list[int]:
        """Words of: settings and random numbers, slots, lists of tokens, and drafts to judge."""
        if shape.kind == "logits":
            return [0, 0, 0, 0]
        return [
            CHOICE_WORDS * shape.tokens,
            shape.tokens if shape.feeds else 0,
            (_Lists.size(shape.tokens) + 1) // 2 if shape.kind == "adjusted" else 0,
            self._rejection.num_words(shape),
        ]

    def _fill_lists(self, words: Ints, tokens: int, rows: Sequence[SampledRequest]) -> None:
        lists = _Lists(torch.from_numpy(words).view(torch.int32), tokens)
        found = self._sampler.occurrences(rows)
        sizes = np.zeros(tokens, dtype=np.int64)
        each = np.zeros((3, tokens), dtype=np.float32)
        each[0] = 1.0
        if found is not None:
            sizes[found.rows] = found.sizes
            each[:, found.rows] = found.repetition, found.presence, found.frequency
            lists.tokens.numpy()[: len(found.tokens)] = found.tokens
            lists.counts.numpy()[: len(found.counts)] = found.counts
        for begins in (lists.cu, lists.cu_ends):
            begins[0] = 0  # the words are another step's
        lists.cu.numpy()[1:] = sizes.cumsum()
        lists.each.numpy()[:] = each.view(np.int32)
        at, ends = self._sampler.hidden_ends(rows)
        lists.cu_ends.numpy()[1:] = np.bincount(np.array(at, dtype=np.int64), minlength=tokens).cumsum()
        lists.ends.numpy()[: len(ends)] = ends


def awaited(slot: int) -> int:
    """What stands for the newest token of a slot where the host does not know it yet."""
    return -1 - slot


class _Lists:
    """Views of int32 words: the tokens that occurred in each row and the ends that are hidden there.

    cu, cu_ends: [tokens + 1], where each row's begin and the last one's end. each: [3, tokens], the bits of
    float32 penalties.
    """

    def __init__(self, held: Tensor, tokens: int) -> None:
        room = tokens * COUNTED
        sizes = [tokens + 1, room, room, 3 * tokens, tokens + 1, tokens * ENDS]
        parts = torch.split(held[: sum(sizes)], sizes)
        self.cu, self.tokens, self.counts, each, self.cu_ends, self.ends = parts
        self.each = each.view(3, tokens)

    @staticmethod
    def size(tokens: int) -> int:
        return 5 * tokens + 2 + tokens * (2 * COUNTED + ENDS)


def _greedy_where_drawn(batch: Batch) -> list[Sampling]:
    """The settings of each place of each draft, of those that another rule decides the least work."""
    return [
        GREEDY if is_drawn(row, draft) else row.sampling
        for row, draft in zip(batch.sampled_rows, batch.drafts, strict=True)
        for _ in range(len(draft) + 1)
    ]


def _hiding(tokens: int, like: Tensor) -> Tensor:
    """A penalty of -inf on tokens that occurred once: float32 [3, tokens]."""
    each = torch.zeros(3, tokens, dtype=torch.float32, device=like.device)
    each[0].fill_(1.0)
    each[1].fill_(float("inf"))
    return each
