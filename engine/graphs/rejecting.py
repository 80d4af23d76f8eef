"""Rejection sampling inside a graph: what it needs of a step's drafts travels with the other inputs.

The probabilities that tokens were drawn from are on the device already, and are copied there to where the
graph reads them, one row for each drafted token of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch
from engine.graphs.shapes import GraphShape
from engine.sampling import FusedSampling
from engine.speculation.verify import is_drawn
from ipc.messages import Sampling

PACKED = 4  # words of 64 bits a token, see `FusedSampling.pack`
ALL = Sampling(temperature=1.0)  # takes no search, where nobody looks at the distribution


class GraphRejection:
    """Packs what judging drawn drafts needs, and judges them inside a graph."""

    def __init__(self, fused: FusedSampling) -> None:
        self._fused = fused

    @staticmethod
    def num_words(shape: GraphShape) -> int:
        """Words of 64 bits that it takes in static memory."""
        return sum(_sizes(shape)) if shape.drawn else 0

    def fill(self, words: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what a filled step needs to ``words``, zeros otherwise: nobody has a draft there."""
        settings = [ALL] * shape.tokens
        packed, tokens, seeds, positions, cu = np.split(words, np.cumsum(_sizes(shape))[:-1])
        cu = cu.view(np.int32)
        cu[:], tokens[:], seeds[:], positions[:] = 0, -1, 0, 0
        drafted = first = 0
        for i, (row, draft) in enumerate(zip(batch.sampled_rows, batch.drafts, strict=True)):
            if is_drawn(row, draft):
                settings[first : first + len(draft) + 1] = [row.sampling] * (len(draft) + 1)
                tokens[drafted : drafted + len(draft)] = draft.token_ids
                seeds[i : i + 1].view(np.uint64)[0], positions[i] = row.seed, row.num_tokens
            drafted += len(draft)
            first += len(draft) + 1
            cu[i + 1 : shape.rows + 1] = drafted
        nothing = np.zeros(shape.tokens, dtype=np.uint64)
        packed[:] = self._fused.pack(settings, nothing, nothing, shape.tokens).reshape(-1)

    def judge(
        self,
        scores: Tensor,
        proposals: Tensor,
        finite: Tensor,
        words: Tensor,
        shape: GraphShape,
        judged: Tensor,
    ) -> None:
        """Write how many tokens of each draft stay, and what follows them, to judged int64 [2, rows].

        scores: float32 [tokens, vocab_size], as tokens are chosen from them. proposals: at least as many rows
        as `place_proposals` says. finite: bool [tokens]. words: what `fill` wrote, on the device. Launches
        only what depends on the shape.
        """
        packed, tokens, seeds, positions, cu = torch.split(words, _sizes(shape))
        target = torch.empty_like(scores)
        self._fused.probabilities_packed(scores, packed.view(PACKED, shape.tokens), target)
        accepted = torch.empty(shape.rows, dtype=torch.int32, device=scores.device)
        self._fused.reject_packed(
            target, proposals, tokens, cu.view(torch.int32)[: shape.rows + 1], finite, seeds, positions,
            accepted, judged[1],
        )  # fmt: skip
        judged[0].copy_(accepted)

    def settle(self, ids: Tensor, judged: Tensor, words: Tensor, shape: GraphShape) -> None:
        """Write what stands at each place of a drawn draft to ids int64 [tokens], as `judge` has found it.

        At places behind its end anything may stand. Launches only what depends on the shape.
        """
        _, tokens, _, _, cu = torch.split(words, _sizes(shape))
        begins = cu.view(torch.int32)[: shape.rows + 1].long()
        numbers = torch.arange(shape.tokens, device=ids.device)
        firsts = begins[:-1] + numbers[: shape.rows]  # places of each request
        row = torch.searchsorted(firsts, numbers, right=True) - 1
        at, last = numbers - firsts[row], shape.tokens - 1
        drafted = tokens[(begins[row] + at).clamp(max=last)]
        accepted, own = judged[0][row], judged[1][row]
        ids.copy_(ids.where(~self.drawn(words, shape)[row], drafted.where(at < accepted, own)))

    @staticmethod
    def drawn(words: Tensor, shape: GraphShape) -> Tensor:
        """Whose drafts were drawn, bool [rows]. Launches only what depends on the shape."""
        _, tokens, _, _, cu = torch.split(words, _sizes(shape))
        begins = cu.view(torch.int32)[: shape.rows + 1].long()
        first = tokens[begins[:-1].clamp(max=shape.tokens - 1)]
        return (first >= 0) & (begins[:-1] < begins[1:])


def place_proposals(batch: Batch) -> Iterator[tuple[int, Tensor]]:
    """The rows from which on drafts' probabilities belong, one after the other: (row, float32 [some, n])."""
    drafted = 0
    found: list[tuple[int, Tensor | None]] = []
    for row, draft in zip(batch.sampled_rows, batch.drafts, strict=True):
        if draft:
            found.append((drafted, draft.probs if is_drawn(row, draft) else None))
        drafted += len(draft)
    for there, run in groupby(found, key=lambda each: each[1] is not None):
        if there:
            places: Sequence[tuple[int, Tensor | None]] = list(run)
            yield places[0][0], torch.cat([probs for _, probs in places if probs is not None])


def _sizes(shape: GraphShape) -> list[int]:
    """Words of: settings, the tokens of all drafts, seeds and positions of requests, where drafts begin."""
    return [PACKED * shape.tokens, shape.tokens, shape.rows, shape.rows, shape.rows // 2 + 1]
