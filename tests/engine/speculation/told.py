"""Drafters that know the answer, or know that they are wrong: what a test needs acceptance to be."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.batch import RowRequest
from engine.speculation.base import Draft


class Told:
    """Proposes the tokens of known answers, ``mistakes`` of them replaced by others.

    ``shorter`` of the drafts are shorter than they might be, ``silent`` of them empty.

    answers: whole texts, prompt and output, one of which begins with what a request has, or the drafter
    proposes random tokens. What it proposes depends on the request's tokens alone, so it is the same in any
    order and after any preemption.
    """

    name = "ngram"
    sequential = False

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        mistakes: float = 0.0,
        shorter: float = 0.0,
        silent: float = 0.0,
    ) -> None:
        self._answers = [list(answer) for answer in answers]
        self._vocab_size = vocab_size
        self._mistakes = mistakes
        self._shorter = shorter
        self._silent = silent
        self.asked = 0
        self.released: list[int] = []

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        self.asked += 1
        return [Draft(self._follow(r.token_ids, count)) for r, count in zip(requests, k, strict=True)]

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def clear(self) -> None:
        self.released.clear()

    def _follow(self, token_ids: list[int], count: int) -> list[int]:
        rng = random.Random(hash(tuple(token_ids)))
        if rng.random() < self._silent:
            return []
        if rng.random() < self._shorter:
            count = rng.randrange(count + 1)
        total = len(token_ids)
        known = next((a for a in self._answers if len(a) > total and a[:total] == token_ids), None)
        if known is None:
            return [rng.randrange(self._vocab_size) for _ in range(count)]
        return [
            (token + 1) % self._vocab_size if rng.random() < self._mistakes else token
            for token in known[total : total + count]
        ]


class Always:
    """Proposes the same tokens whatever a request has written."""

    name = "ngram"
    sequential = False

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        return [Draft(self._token_ids[:count]) for _, count in zip(requests, k, strict=True)]

    def release(self, slot: int) -> None: ...

    def clear(self) -> None: ...


class Again:
    """Proposes a request's newest token over and over, which is right now and then."""

    name = "ngram"
    sequential = False

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        return [Draft(r.token_ids[-1:] * count) for r, count in zip(requests, k, strict=True)]

    def release(self, slot: int) -> None: ...

    def clear(self) -> None: ...
