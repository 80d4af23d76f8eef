"""Choosing tokens inside a graph: what it needs of each row travels with the step's other inputs.

What a step needs decides what is captured for it. What has no room in static memory is left to the host: then
the graph ends with the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch
from engine.graphs.counting import TextCounts
from engine.graphs.driver import Driver
from engine.graphs.memory import Result
from engine.graphs.moving import Judged, Moves
from engine.graphs.newest import Newest
from engine.graphs.rejecting import GraphRejection
from engine.graphs.shapes import GraphShape, Kind
from engine.penalties import SampledRequest, has_penalty
from engine.sampling import FusedSampling, is_short
from engine.speculation.rows import draft_rows
from engine.speculation.verify import DraftSampler, is_drawn
from ipc.messages import Sampling

CHOICE_WORDS = 4  # of 64 bits a token, see `FusedSampling.pack`
POSITION_WORD = 1  # of them, that says which random numbers are drawn
ENDS = 16  # tokens hidden for each row of a shape that there is room for
MOST_ENDS = 128  # of one row: those of a request and of the model
GREEDY = Sampling()  # takes no draw


@dataclass(frozen=True, slots=True)
class Needs:
    """What choosing the tokens of a step takes, whatever shape that is computed in.

    ``outside``: why that is not done on the device, "" if it is. ``num_ends``: tokens to hide, of all places.
    """

    outside: str
    adjusted: bool
    num_ends: int
    drawn: bool
    logprobs: bool
    moved: bool

    def in_shape(self, shape: GraphShape) -> tuple[GraphShape, str]:
        """The shape that a step of that size is captured in; why, where it ends with the logits."""
        why = self.outside
        if not why and self.num_ends > shape.tokens * ENDS:
            why = "min_tokens"
        if why:
            return replace(shape, kind="logits"), why
        kind: Kind = "adjusted" if self.adjusted else "tokens"
        return replace(shape, kind=kind, drawn=self.drawn, logprobs=self.logprobs, moved=self.moved), ""


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
        self.newest = Newest(device)
        self.moves = Moves(self.newest, device)
        self.counts = TextCounts(self.newest, sampler.vocab_size, device)

    def needs_of(self, batch: Batch) -> Needs:
        """What choosing a step's tokens takes."""
        rows, drafts = batch.sampled_rows, batch.drafts
        counted = any(has_penalty(row.sampling) for row in rows)
        ends = [
            (len(self._sampler.eos_token_ids) + len(row.sampling.stop_token_ids)) * (len(draft) + 1)
            for row, draft in zip(rows, drafts, strict=True)
            if is_short(row)
        ]
        outside = "penalties" if counted and not self.counts.has_room(batch) else ""
        if any(row.num_maybe and (has_penalty(row.sampling) or is_short(row)) for row in rows):
            outside = "drafts"  # nobody knows yet which tokens count, or whether ends are still hidden
        return Needs(
            outside=outside,
            adjusted=counted or bool(ends),
            num_ends=sum(ends),
            drawn=any(map(is_drawn, rows, drafts)),
            logprobs=any(row.sampling.logprobs is not None for row in rows),
            moved=batch.may_move,
        )

    def num_words(self, shape: GraphShape) -> int:
        """Words of 64 bits that a step's choice takes in static memory."""
        return sum(self._sizes(shape))

    def clear(self, words: Tensor, shape: GraphShape) -> None:
        """Let what is chosen from ``words``, zeros otherwise, reach no slot."""
        _, leaves, _, counts, _, moves = torch.split(words, self._sizes(shape))
        self.moves.clear(leaves, moves, shape)
        self.counts.clear(counts, shape)

    def fill(self, words: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what a step's choice needs to ``words``. `send` and then `launched` have to follow."""
        rows: Sequence[SampledRequest] = batch.sampled_rows
        if any(batch.drafts):
            pairs = zip(batch.sampled_rows, batch.drafts, strict=True)
            rows = [place for row, draft in pairs for place in draft_rows(row, draft)]
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        settings = _greedy_where_drawn(batch) if shape.drawn else [row.sampling for row in rows]
        packed, leaves, ends, counts, drafts, moves = np.split(words, np.cumsum(self._sizes(shape))[:-1])
        packed[:] = self.fused.pack(settings, seeds, positions, shape.tokens).reshape(-1)
        self.moves.fill(leaves, moves, shape, batch)
        if shape.kind == "adjusted":
            self._fill_ends(ends, shape.tokens, rows)
        self.counts.fill(counts, shape, batch)
        if shape.drawn:
            self._rejection.fill(drafts, shape, batch)

    def send(self, driver: Driver) -> None:
        """Send what the choice of the step written last needs besides, ahead of it."""
        self.counts.send(driver)

    def launched(self) -> None:
        """The step written last was launched."""
        self.counts.launched()

    def feed(self, ids: Tensor, shape: GraphShape) -> Tensor:
        """Ids of a step's tokens, those that are `awaited` replaced by what the device has of their slot: -1
        for no token."""
        return ids if shape.kind == "logits" else self.newest.found(ids)

    def move(self, positions: Tensor, slots: Tensor, words: Tensor, shape: GraphShape) -> Tensor:
        """Move a step behind the drafts that the one before it accepted. Returns by how much, [rows].

        Changes positions and slots [tokens], and in words, what `fill` wrote, which random numbers are drawn.
        """
        packed, _, _, _, _, moves = torch.split(words, self._sizes(shape))
        by, each = self.moves.move(moves, slots, shape.rows)
        positions += each
        packed.view(CHOICE_WORDS, shape.tokens)[POSITION_WORD] += each
        return by

    def choose(
        self,
        logits: Tensor,
        words: Tensor,
        shape: GraphShape,
        result: Result,
        given: Tensor,
        proposals: Tensor | None = None,
    ) -> None:
        """Choose tokens from logits [tokens, vocab_size], which are changed; an id of -1: not finite.

        words: what `fill` wrote, on the device. result: what comes of it, but for ``finite``. given: ids of
        the step's tokens, where any were drafted, -1 for no token. proposals: see `GraphRejection.judge`,
        where drafts were drawn. Launches only what depends on the shape.
        """
        ids = result.ids
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        packed, leaves, ends, counts, drafts, _ = torch.split(words, self._sizes(shape))
        # Log-probabilities are those of the model's own logits.
        own = logits.clone() if result.top is not None and shape.kind == "adjusted" else logits
        finite = None
        if shape.drawn or shape.kind == "adjusted":
            finite = logits.amax(dim=1).isfinite()
        if finite is not None and shape.drawn:  # what is drawn from has to be a distribution
            logits.masked_fill_(~finite.unsqueeze(1), 0.0)
        if shape.kind == "adjusted":
            self._hide_ends(logits, ends, shape.tokens)
            self.counts.penalize(self.fused, logits, counts, shape)
        self.fused.choose_packed(logits, packed.view(CHOICE_WORDS, shape.tokens), ids)
        if finite is not None:
            if proposals is not None:
                self._rejection.judge(logits, proposals, finite, drafts, shape, result.judged)
                if result.top is not None:
                    self._rejection.settle(ids, result.judged, drafts, shape)
            ids.masked_fill_(~finite, -1)
        if result.top is not None:
            result.top.write(own, ids)
        judged = None
        if shape.drawn:
            judged = Judged(self._rejection.drawn(drafts, shape), *result.judged)
        self.moves.leave(ids, given, leaves, shape, judged)

    @property
    def vocab_size(self) -> int:
        """The target's tokens."""
        return self._sampler.vocab_size

    def propose(self, logits: Tensor, packed: Tensor, cells: Tensor) -> None:
        """Choose what a model drafts, as the target chooses, and keep it in ``cells`` [rows] of `newest`.

        logits: float32 [rows, the model's vocabulary], which are changed. packed: by `FusedSampling.pack`,
        on the device. Launches only what depends on shapes.
        """
        more = self.vocab_size - logits.shape[1]
        if more:
            logits = F.pad(logits, (0, more), value=float("-inf"))  # or cut
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        ids = torch.empty_like(cells)
        self.fused.choose_packed(logits, packed.view(CHOICE_WORDS, len(cells)), ids)
        self.newest.put(cells, ids)

    def _hide_ends(self, logits: Tensor, words: Tensor, tokens: int) -> None:
        """Hide ends in place, by what `_fill_ends` wrote."""
        begins, ends = torch.split(words.view(torch.int32)[: _num_ends(tokens)], [tokens + 1, tokens * ENDS])
        each = torch.zeros(3, tokens, dtype=torch.float32, device=logits.device)
        each[0].fill_(1.0)
        each[1].fill_(float("inf"))  # a penalty on tokens that occurred once
        self.fused.penalize_packed(logits, begins, ends, torch.ones_like(ends), each, max_tokens=MOST_ENDS)

    def _sizes(self, shape: GraphShape) -> list[int]:
        """Words of: settings and random numbers, what the next step is fed, hidden ends, penalties, drafts to
        judge, and how the step is moved."""
        if shape.kind == "logits":
            return [0, 0, 0, 0, 0, 0]
        leaves, moves = Moves.num_words(shape)
        return [
            CHOICE_WORDS * shape.tokens,
            leaves,
            (_num_ends(shape.tokens) + 1) // 2 if shape.kind == "adjusted" else 0,
            self.counts.num_words(shape),
            self._rejection.num_words(shape),
            moves,
        ]

    def _fill_ends(self, words: Ints, tokens: int, rows: Sequence[SampledRequest]) -> None:
        begins, ends = np.split(words.view(np.int32)[: _num_ends(tokens)], [tokens + 1])
        at, found = self._sampler.hidden_ends(rows)
        begins[0] = 0  # the words are another step's
        begins[1:] = np.bincount(np.array(at, dtype=np.int64), minlength=tokens).cumsum()
        ends[: len(found)] = found


def _num_ends(tokens: int) -> int:
    """Numbers of 32 bits: where the ends hidden in each row begin, and the last one's end; and the ends."""
    return tokens + 1 + tokens * ENDS


def _greedy_where_drawn(batch: Batch) -> list[Sampling]:
    """The settings of each place of each draft, of those that another rule decides the least work."""
    return [
        GREEDY if is_drawn(row, draft) else row.sampling
        for row, draft in zip(batch.sampled_rows, batch.drafts, strict=True)
        for _ in range(len(draft) + 1)
    ]
