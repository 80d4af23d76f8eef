"""Choosing tokens with Triton kernels, nothing sorted: filters and the draw, penalties, and rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.packed_sampling import PackedSampling
from engine.sampling import GREEDY_BELOW
from engine.speculation.base import ACCEPT, RESIDUAL


class TritonSampling(PackedSampling):
    """See `engine.sampling.FusedSampling`."""

    name = "triton"

    def __init__(self) -> None:
        from engine.kernels import penalties, rejection_sample, sample, vocabulary

        self._sample, self._probabilities = sample.sample, sample.probabilities
        self._found = vocabulary.Found
        self._penalize = penalties.penalize
        self._reject, self._sums_for = rejection_sample.rejection_sample, rejection_sample.sums_for

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        found = self._found.allocate(len(scores), scores.shape[1], scores.device)
        for launch in self._sample(
            scores, *_columns(packed[2:]), packed[0], packed[1], ids, found, greedy_below=GREEDY_BELOW
        ):
            launch.run()

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        self._penalize(scores, cu, tokens, counts, *each.unbind(), max_tokens=max_tokens).run()

    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None:
        self._distribute(scores, packed[2:], out)

    def _distribute(self, scores: Tensor, cuts: Tensor, out: Tensor) -> None:
        found = self._found.allocate(len(scores), scores.shape[1], scores.device)
        for launch in self._probabilities(scores, *_columns(cuts), out, found):
            launch.run()

    def reject_packed(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Tensor,
        cu: Tensor,
        finite: Tensor,
        seeds: Tensor,
        positions: Tensor,
        accepted: Tensor,
        own: Tensor,
    ) -> None:
        sums = self._sums_for(len(own), target.shape[1], target.device)
        for launch in self._reject(
            target, proposal, tokens, cu, finite.to(torch.int8), seeds, positions, accepted, own, sums,
            accept=ACCEPT, residual=RESIDUAL,
        ):  # fmt: skip
            launch.run()


def _columns(held: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, top_k (int32), top_p and min_p, each [rows], from `_cuts` on the device."""
    rows = held.shape[1]
    first, second = held[0].view(torch.float32), held[1].view(torch.float32)
    return first[:rows], held[0].view(torch.int32)[rows:], second[:rows], second[rows:]
