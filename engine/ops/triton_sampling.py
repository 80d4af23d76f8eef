"""Choosing tokens with Triton kernels, nothing sorted: filters and the draw, penalties, and rejection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.draw import U64s, max_of_rows
from engine.penalties import Occurrences
from engine.sampling import GREEDY_BELOW, is_greedy
from engine.speculation.base import ACCEPT, RESIDUAL
from ipc.messages import Sampling

PER_ROW = 4  # words of 64 bits: seed, position, temperature and top_k, top_p and min_p


class TritonSampling:
    """See `engine.sampling.FusedSampling`."""

    name = "triton"

    def __init__(self) -> None:
        from engine.kernels import penalties, rejection_sample, sample, vocabulary

        self._not_finite = sample.NOT_FINITE
        self._sample, self._probabilities = sample.sample, sample.probabilities
        self._found = vocabulary.Found
        self._penalize = penalties.penalize
        self._reject = rejection_sample.rejection_sample

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        if all(map(is_greedy, settings)):  # nothing is searched, which takes many launches
            best, ids = max_of_rows(scores)
            return torch.where(best.isfinite(), ids, self._not_finite)
        packed = _send(self.pack(settings, seeds, positions, len(settings)), scores.device)
        ids = torch.empty(len(settings), dtype=torch.int64, device=scores.device)
        self.choose_packed(scores, packed, ids)
        return ids

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        words = np.zeros((PER_ROW, rows), dtype=np.int64)
        words[0, : len(settings)], words[1, : len(settings)] = seeds.view(np.int64), positions.view(np.int64)
        words[2:] = _cuts(settings, rows)
        return words

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        found = self._found.allocate(len(scores), scores.shape[1], scores.device)
        for launch in self._sample(
            scores, *_columns(packed[2:]), packed[0], packed[1], ids, found, greedy_below=GREEDY_BELOW
        ):
            launch.run()

    def penalize(self, scores: Tensor, found: Occurrences) -> None:
        rows, count = len(scores), len(found.tokens)
        sizes = np.zeros(rows, dtype=np.int64)
        sizes[found.rows] = found.sizes
        factors = np.zeros((3, rows), dtype=np.float32)
        factors[0] = 1.0
        factors[:, found.rows] = found.repetition, found.presence, found.frequency
        words = np.zeros(rows + 1 + 2 * count + factors.size, dtype=np.int32)
        cu, tokens, counts, penalties = np.split(words, np.cumsum([rows + 1, count, count]))
        cu[1:], tokens[:], counts[:] = sizes.cumsum(), found.tokens, found.counts
        penalties[:] = factors.view(np.int32).reshape(-1)
        held = torch.split(_send(words, scores.device), [rows + 1, count, count, factors.size])
        each = held[3].view(torch.float32).view(3, rows)
        self.penalize_packed(scores, held[0], held[1], held[2], each, max_tokens=int(sizes.max()))

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        self._penalize(scores, cu, tokens, counts, *each.unbind(), max_tokens=max_tokens).run()

    def probabilities(self, scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
        held = _send(_cuts(settings, len(settings)), scores.device)
        out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
        self._distribute(scores, held, out)
        return out

    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None:
        self._distribute(scores, packed[2:], out)

    def _distribute(self, scores: Tensor, cuts: Tensor, out: Tensor) -> None:
        found = self._found.allocate(len(scores), scores.shape[1], scores.device)
        for launch in self._probabilities(scores, *_columns(cuts), out, found):
            launch.run()

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
        cu = np.concatenate(([0], np.cumsum(lengths)))
        words = np.concatenate((seeds.view(np.int64), positions.view(np.int64), tokens, cu))
        held = torch.split(_send(words, device), [count, count, len(tokens), count + 1])
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        own = torch.empty(count, dtype=torch.int64, device=device)
        self.reject_packed(
            target, proposal, held[2], held[3].to(torch.int32), finite, held[0], held[1], accepted, own
        )
        both = torch.stack((accepted.long(), own)).tolist()
        return both[0], both[1]

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
        self._reject(
            target, proposal, tokens, cu, finite.to(torch.int8), seeds, positions, accepted, own,
            accept=ACCEPT, residual=RESIDUAL,
        ).run()  # fmt: skip


def _send(words: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> Tensor:
    """A copy on the device, in one transfer that the host does not wait for."""
    host = torch.from_numpy(words)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


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
