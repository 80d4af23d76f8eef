"""What kernels that choose tokens read, packed on the host: one transfer a step, whatever rows ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.draw import U64s, max_of_rows
from engine.penalties import Occurrences
from engine.sampling import is_greedy
from ipc.messages import Sampling

PER_ROW = 4  # words of 64 bits: seed, position, temperature and top_k, top_p and min_p


class PackedSampling(ABC):
    """`engine.sampling.FusedSampling` by what is packed. The kernels themselves are a subclass's."""

    name: str

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        if all(map(is_greedy, settings)):  # nothing is searched for; torch reads few rows in parts
            best, ids = max_of_rows(scores)
            return torch.where(best.isfinite(), ids, -1)
        packed = send(self.pack(settings, seeds, positions, len(settings)), scores.device)
        ids = torch.empty(len(settings), dtype=torch.int64, device=scores.device)
        self.choose_packed(scores, packed, ids)
        return ids

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        words = np.zeros((PER_ROW, rows), dtype=np.int64)
        words[0, : len(settings)], words[1, : len(settings)] = seeds.view(np.int64), positions.view(np.int64)
        words[2:] = _cuts(settings, rows)
        return words

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
        held = torch.split(send(words, scores.device), [rows + 1, count, count, factors.size])
        each = held[3].view(torch.float32).view(3, rows)
        self.penalize_packed(scores, held[0], held[1], held[2], each, max_tokens=int(sizes.max()))

    def probabilities(self, scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
        none = np.zeros(len(settings), dtype=np.uint64)
        out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
        packed = send(self.pack(settings, none, none, len(settings)), scores.device)
        self.probabilities_packed(scores, packed, out)
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
        cu = np.concatenate(([0], np.cumsum(lengths)))
        words = np.concatenate((seeds.view(np.int64), positions.view(np.int64), tokens, cu))
        held = torch.split(send(words, device), [count, count, len(tokens), count + 1])
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        own = torch.empty(count, dtype=torch.int64, device=device)
        self.reject_packed(
            target, proposal, held[2], held[3].to(torch.int32), finite, held[0], held[1], accepted, own
        )
        both = torch.stack((accepted.long(), own)).tolist()
        return both[0], both[1]

    @abstractmethod
    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None: ...

    @abstractmethod
    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None: ...

    @abstractmethod
    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None: ...

    @abstractmethod
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
    ) -> None: ...


def send(words: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> Tensor:
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
