"""The distribution itself that a request's settings make of scores, where drawing from it is not enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.draw import U64s, cut_top_k, inverse_cdf, totals, uniform
from engine.sampling import SCRATCH_ROWS
from engine.speculation.base import PROPOSE
from ipc.messages import Sampling

NUCLEUS_TRY = 1024  # the most likely tokens among which a top-p cut is looked for before everything is sorted


def probabilities(scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """softmax(scores / T) cut by top_k, then top_p of what is left, then min_p: float32 [rows, n], sums 1.

    The same cuts, ties included, as drawing without a draft makes (`engine.draw`). scores: [rows, n], finite
    or -inf, not all -inf in a row; T > 0. They are not changed.
    """
    device = scores.device

    def column(name: str, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[getattr(settings[i], name)] for i in rows], dtype=dtype, device=device)

    weights = scores.clone()
    cut_top_k(weights, settings)
    weights.sub_(weights.amax(dim=-1, keepdim=True))
    weights.div_(column("temperature", range(len(settings)), torch.float32)).exp_()
    floors = column("min_p", range(len(settings)), torch.float64).float()
    nucleus = [i for i, s in enumerate(settings) if s.top_p < 1.0]
    for first in range(0, len(nucleus), SCRATCH_ROWS):
        some = nucleus[first : first + SCRATCH_ROWS]
        at = torch.tensor(some, device=device)
        found = _nucleus_floors(weights[at], column("top_p", some, torch.float64))
        floors[at] = torch.maximum(floors[at], found)
    if nucleus or any(s.min_p > 0.0 for s in settings):
        weights.masked_fill_(weights < floors, 0.0)
    return weights.div_(weights.sum(dim=-1, keepdim=True, dtype=torch.float64))


def _nucleus_floors(weights: Tensor, top_p: Tensor) -> Tensor:
    """The least weight [rows, 1] in each row's nucleus: those above it do not reach top_p of the whole."""
    n = weights.shape[1]
    limit = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for count in (min(n, NUCLEUS_TRY), n):
        values = weights.topk(count, dim=-1).values
        _, before = totals(values)
        if count == n or bool((before[:, -1:] >= limit).all()):
            break
    return values.gather(1, (before < limit).sum(dim=-1, keepdim=True) - 1)


def draw_proposal(probs: Tensor, seeds: U64s, positions: U64s) -> Tensor:
    """Draw ids [rows] from ``probs`` [rows, n], as a drafter must that gives them with its draft.

    positions: the place in the request of each token drawn. The random numbers are of a stream that nothing
    else reads, which is what makes accepting a draft, or replacing it, independent of it.
    """
    u = torch.from_numpy(uniform(seeds, positions, PROPOSE)).to(probs.device)
    return inverse_cdf(probs, u)
