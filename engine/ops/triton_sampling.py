"""Choosing tokens with Triton kernels: filters, draw and rejection in one launch each, nothing sorted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.draw import U64s
from engine.penalties import Occurrences
from engine.sampling import GREEDY_BELOW
from engine.speculation.base import ACCEPT, RESIDUAL
from ipc.messages import Sampling

PER_ROW = 4  # words of 64 bits: seed, position, temperature and top_k, top_p and min_p


class TritonSampling:
    """See `engine.sampling.FusedSampling`."""

    name = "triton"

    def __init__(self) -> None:
        from engine.kernels import penalties, rejection_sample, sample

        self._sample, self._probabilities = sample.sample, sample.probabilities
        self._penalize = penalties.penalize
        self._reject = rejection_sample.rejection_sample

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        packed = torch.from_numpy(self.pack(settings, seeds, positions, len(settings))).to(scores.device)
        ids = torch.empty(len(settings), dtype=torch.int64, device=scores.device)
        self.choose_packed(scores, packed, ids)
        return ids

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        words = np.zeros((PER_ROW, rows), dtype=np.int64)
        words[0, : len(settings)], words[1, : len(settings)] = seeds.view(np.int64), positions.view(np.int64)
        words[2:] = _cuts(settings, rows)
        return words

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        self._sample(
            scores, *_columns(packed[2:]), packed[0], packed[1], ids, greedy_below=GREEDY_BELOW
        ).run()  # fmt: skip

    def penalize(self, scores: Tensor, found: Occurrences) -> None:
        device = scores.device
        sizes = np.zeros(len(scores), dtype=np.int64)
        sizes[found.rows] = found.sizes
        cu = np.concatenate(([0], sizes.cumsum())).astype(np.int32)
        each = np.zeros((3, len(scores)), dtype=np.float32)
        each[0] = 1.0
        each[:, found.rows] = found.repetition, found.presence, found.frequency
        self.penalize_packed(
            scores,
            torch.from_numpy(cu).to(device),
            torch.from_numpy(found.tokens.astype(np.int32)).to(device),
            torch.from_numpy(found.counts.astype(np.int32)).to(device),
            torch.from_numpy(each).to(device),
            max_tokens=int(sizes.max()),
        )

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        self._penalize(scores, cu, tokens, counts, *each.unbind(), max_tokens=max_tokens).run()

    def probabilities(self, scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
        held = torch.from_numpy(_cuts(settings, len(settings))).to(scores.device)
        out = torch.empty_like(scores)
        self._probabilities(scores, *_columns(held), out).run()
        return out

    def reject(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Sequence[int],
        lengths: Sequence[int],
        finite: Tensor,
        seeds: U64s,
        positions: U64s,
    ) -> tuple[list[int], list[int]]:
        device, count = target.device, len(lengths)
        words = np.stack((seeds.view(np.int64), positions.view(np.int64)))
        held = torch.from_numpy(words).to(device)
        cu = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        own = torch.empty(count, dtype=torch.int64, device=device)
        self._reject(
            target, proposal, torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.from_numpy(cu).to(device), finite.to(torch.int8), held[0], held[1], accepted, own,
            accept=ACCEPT, residual=RESIDUAL,
        ).run()  # fmt: skip
        both = torch.stack((accepted.long(), own)).tolist()
        return both[0], both[1]


def _cuts(settings: Sequence[Sampling], rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Temperature and top_k, then top_p and min_p of each row, in halves of 64 bits: [2, rows].

    All 0 in rows beyond the settings.
    """
    count = len(settings)
    words = np.zeros((2, 2 * rows), dtype=np.float32)
    words[0, :count] = [s.temperature for s in settings]
    words[0, rows : rows + count] = np.array([s.top_k for s in settings], dtype=np.int32).view(np.float32)
    words[1, :count] = [s.top_p for s in settings]
    words[1, rows : rows + count] = [s.min_p for s in settings]
    return words.view(np.int64)


def _columns(held: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, top_k (int32), top_p and min_p, each [rows], from `_cuts` on the device."""
    rows = held.shape[1]
    first, second = held[0].view(torch.float32), held[1].view(torch.float32)
    return first[:rows], held[0].view(torch.int32)[rows:], second[:rows], second[rows:]
