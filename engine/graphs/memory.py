"""Memory that graphs share, where in theirs the results of a step lie, and how these come to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.graphs.driver import Arrival
from engine.graphs.logprobs import TopWords
from engine.graphs.shapes import GraphShape


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step came to, on the host.

    ``ids``: one for each place that logits were wanted of, -1 where they were not finite. finite: bool
    [tokens], of every token. Where drafts were drawn, how many tokens of each request's stay, and what
    follows these. top: of each place, where any row asks for log-probabilities.
    """

    ids: list[int]
    finite: Tensor
    accepted: list[int]
    own: list[int]
    top: TopWords | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens of a launched step, on their way to the host: see `Tokens`."""

    arrival: Arrival
    result: Result
    num_places: int
    num_tokens: int

    def read(self) -> Tokens:
        """Waits for them. They have to be read before the step after next is launched."""
        self.arrival.wait()
        result = self.result
        accepted, own = result.judged.tolist()
        ids, finite = result.ids[: self.num_places].tolist(), result.finite[: self.num_tokens].bool()
        return Tokens(ids, finite, accepted, own, result.top)


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


@dataclass(frozen=True, slots=True)
class Result:
    """What comes out of a step: views of int64 words that come to the host as they are.

    ids: [places], one for each place that logits are wanted of. finite: of each token of the step. judged:
    [2, rows], how many tokens of each drawn draft stay and what follows them, [2, 0] where none was drawn.
    """

    ids: Tensor
    finite: Tensor
    judged: Tensor
    top: TopWords | None

    @staticmethod
    def num_words(shape: GraphShape, num_tokens: int | None = None) -> int:
        """How many words it takes. num_tokens: of the step, if not as many as places in its shape."""
        return sum(_result_sizes(shape, num_tokens))

    @classmethod
    def of(cls, words: Tensor, shape: GraphShape, num_tokens: int | None = None) -> Result:
        """Its parts in ``words``."""
        ids, finite, judged, top = torch.split(words, _result_sizes(shape, num_tokens))
        return cls(ids, finite, judged.view(2, -1), TopWords(top, shape.tokens) if shape.logprobs else None)


def _result_sizes(shape: GraphShape, num_tokens: int | None) -> list[int]:
    return [
        shape.tokens,
        shape.tokens if num_tokens is None else num_tokens,
        2 * shape.rows if shape.drawn else 0,
        TopWords.size(shape.tokens) if shape.logprobs else 0,
    ]
