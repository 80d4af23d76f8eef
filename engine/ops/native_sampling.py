"""Choosing tokens on a CPU by kernels in C++: each row is read a few times, and nothing is sorted."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.native import kernels, unavailable
from engine.native.structs import Drafts
from engine.ops.packed_sampling import PackedSampling
from engine.sampling import GREEDY_BELOW
from engine.speculation.base import ACCEPT, RESIDUAL


class NativeSampling(PackedSampling):
    """See `engine.sampling.FusedSampling`. RuntimeError with the reason where there are no kernels."""

    name = "native"

    def __init__(self) -> None:
        found = kernels()
        if found is None:
            raise RuntimeError(f"the C++ kernels cannot be used: {unavailable()}")
        self._native = found

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        scores = _rows(scores)
        rows, n = scores.shape
        self._native.sample(
            scores.data_ptr(), scores.stride(0), rows, n, packed.data_ptr(), GREEDY_BELOW, ids.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        self._native.penalize(
            scores.data_ptr(), scores.stride(0), len(scores), cu.data_ptr(), tokens.data_ptr(),
            counts.data_ptr(), each.data_ptr(),
        )  # fmt: skip

    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None:
        scores = _rows(scores)
        rows, n = scores.shape
        self._native.probabilities(
            scores.data_ptr(), scores.stride(0), rows, n, packed[2:].data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

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
        target, proposal = target.contiguous(), proposal.contiguous()
        given = (target, proposal, tokens, cu, finite, seeds, positions, accepted, own)
        drafts = Drafts(*(each.data_ptr() for each in given), len(own), target.shape[1], ACCEPT, RESIDUAL)
        self._native.reject(ctypes.byref(drafts), torch.get_num_threads())


def _rows(scores: Tensor) -> Tensor:
    """The same with the numbers of a row side by side."""
    return scores if scores.stride(1) == 1 else scores.contiguous()
