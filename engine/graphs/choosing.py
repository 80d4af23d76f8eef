"""Choosing tokens inside a graph: what it needs of each row travels with the step's other inputs.

What a step needs decides what is captured for it. Where the kernels do not serve something, or what it needs
has no room in static memory, the graph ends with the logits and tokens are chosen outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch
from engine.graphs.shapes import GraphShape, Kind
from engine.knobs import MAX_SEQS
from engine.penalties import SampledRequest, has_penalty
from engine.sampling import FusedSampling, is_short
from engine.speculation.rows import draft_rows
from engine.speculation.verify import DraftSampler, is_drawn

CHOICE_WORDS = 4  # of 64 bits a token, see `FusedSampling.pack`
NOBODY = MAX_SEQS  # a slot that no request has: where what nobody asked for goes
COUNTED = 1024  # tokens that occurred, for each row of a shape, that there is room for
MOST_COUNTED = 8192  # of one row
ENDS = 16  # tokens hidden for each row of a shape that there is room for
MOST_ENDS = 128  # of one row: those of a request and of the model


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
        self._newest = torch.zeros(MAX_SEQS + 1, dtype=torch.int64, device=device)  # of each slot

    def kind_of(self, batch: Batch, tokens: int) -> tuple[Kind, str]:
        """What has to be captured for a step in a shape of ``tokens`` tokens; why, where it is the logits."""
        rows, drafts = batch.sampled_rows, batch.drafts
        if any(row.sampling.logprobs is not None for row in rows):
            return "logits", "logprobs"
        if any(map(is_drawn, rows, drafts)):
            return "logits", "proposals"
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
        if shape.kind == "logits":
            return 0
        words = CHOICE_WORDS * shape.tokens
        if shape.kind == "adjusted":
            return words + (_Lists.size(shape.tokens) + 1) // 2
        return words + shape.tokens if shape.feeds else words

    def clear(self, words: Tensor, shape: GraphShape) -> None:
        """Let what is chosen from ``words``, zeros otherwise, reach no slot."""
        if shape.feeds:
            words[CHOICE_WORDS * shape.tokens :] = NOBODY

    def fill(self, words: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what a filled step's choice needs to ``words``."""
        rows: Sequence[SampledRequest] = batch.sampled_rows
        if any(batch.drafts):
            pairs = zip(batch.sampled_rows, batch.drafts, strict=True)
            rows = [place for row, draft in pairs for place in draft_rows(row, draft)]
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        split = CHOICE_WORDS * shape.tokens
        words[:split] = self.fused.pack(
            [row.sampling for row in rows], seeds, positions, shape.tokens
        ).reshape(-1)
        if shape.kind == "adjusted":
            self._fill_lists(words[split:], shape.tokens, rows)
        elif shape.feeds:
            words[split : split + len(rows)] = [row.slot for row in rows]
            words[split + len(rows) :] = NOBODY

    def feed(self, ids: Tensor, shape: GraphShape) -> Tensor:
        """Ids of a step's tokens, those that are `awaited` replaced by the newest one of their slot."""
        if not shape.feeds:
            return ids
        newest = self._newest.index_select(0, (-1 - ids).clamp(min=0))
        return torch.where(ids < 0, newest, ids)

    def choose(self, logits: Tensor, words: Tensor, shape: GraphShape, ids: Tensor) -> None:
        """Choose ids int64 [tokens] from logits [tokens, vocab_size], which are changed; -1: not finite.

        words: what `fill` wrote, on the device. Launches only what depends on the shape.
        """
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        split = CHOICE_WORDS * shape.tokens
        packed = words[:split].view(CHOICE_WORDS, shape.tokens)
        if shape.kind == "tokens":
            self.fused.choose_packed(logits, packed, ids)
            if shape.feeds:  # -1 is no token: whoever gets that one fails, and what follows is of no use
                self._newest.index_copy_(0, words[split:], ids.clamp(min=0))
            return
        finite = logits.amax(dim=1).isfinite()
        lists = _Lists(words[split:].view(torch.int32), shape.tokens)
        self.fused.penalize_packed(
            logits, lists.cu_ends, lists.ends, torch.ones_like(lists.ends), _hiding(shape.tokens, logits),
            max_tokens=MOST_ENDS,
        )  # fmt: skip
        self.fused.penalize_packed(
            logits, lists.cu, lists.tokens, lists.counts, lists.each.view(torch.float32),
            max_tokens=MOST_COUNTED,
        )  # fmt: skip
        self.fused.choose_packed(logits, packed, ids)
        ids.masked_fill_(~finite, -1)

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


def _hiding(tokens: int, like: Tensor) -> Tensor:
    """A penalty of -inf on tokens that occurred once: float32 [3, tokens]."""
    each = torch.zeros(3, tokens, dtype=torch.float32, device=like.device)
    each[0].fill_(1.0)
    each[1].fill_(float("inf"))
    return each
