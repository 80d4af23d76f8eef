"""Memory that graphs share, where in theirs the results of a step lie, and how these come to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.graphs.driver import Arrival
from engine.graphs.shapes import GraphShape


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step came to, on the host.

    ``ids``: one for each place that logits were wanted of, -1 where they were not finite. finite: bool
    [tokens], of every token. Where drafts were drawn, how many tokens of each request's stay, and what
    follows these.
    """

    ids: list[int]
    finite: Tensor
    accepted: list[int]
    own: list[int]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens of a launched step, on their way to the host: see `Tokens`."""

    arrival: Arrival
    ids: Tensor
    finite: Tensor
    judged: Tensor  # [2, requests], of drafts that were drawn

    def read(self) -> Tokens:
        """Waits for them. They have to be read before the step after next is launched."""
        self.arrival.wait()
        accepted, own = self.judged.tolist()
        return Tokens(self.ids.tolist(), self.finite.bool(), accepted, own)


class SharedRows:
    """Rows of numbers over the vocabulary, float32, that lie in place for graphs.

    Graphs share them, but those of much larger shapes get others.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._held = torch.empty(0, vocab_size, device=device)

    def lacking(self, rows: int) -> int:
        """Bytes that `first` has to allocate for so many."""
        return 0 if rows <= len(self._held) else 4 * self._room(rows) * self._held.shape[1]

    def first(self, rows: int) -> Tensor:
        """The first ``rows`` of them."""
        if rows > len(self._held):
            self._held = self._held.new_empty(self._room(rows), self._held.shape[1])
        return self._held[:rows]

    @staticmethod
    def _room(rows: int) -> int:
        return 1 << (rows - 1).bit_length()  # so that growing shapes share a few


def result_words(shape: GraphShape) -> int:
    """Words of 64 bits that come out of a step: see `split_result`."""
    return 2 * shape.tokens + (2 * shape.rows if shape.drawn else 0)


def split_result(words: Tensor, shape: GraphShape) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [tokens], whether each token was finite [tokens], and what drafts were found to be, [2, rows].

    The latter is [2, 0] where no drafts were drawn.
    """
    ids, finite, judged = torch.split(
        words, [shape.tokens, shape.tokens, result_words(shape) - 2 * shape.tokens]
    )
    return ids, finite, judged.view(2, -1) if shape.drawn else judged.new_empty(2, 0)
