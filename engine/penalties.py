"""Repetition, presence and frequency penalties, touching only the tokens that occurred.

Sources: repetition, arXiv 1909.05858; presence and frequency as OpenAI's API defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ipc.messages import Sampling


class SampledRequest(Protocol):
    """What choosing a token reads of a request."""

    @property
    def rid(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...  # prompt and output
    @property
    def drafted(self) -> Sequence[int]: ...  # tokens after them that are only assumed, of a draft


def has_penalty(s: Sampling) -> bool:
    """Whether any of the three does anything."""
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


Numbers = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The distinct tokens that occurred in some rows of scores, and how each row is penalized.

    Row rows[i] has the next sizes[i] of ``tokens`` (int64), each of which ``counts`` (float32) says how often
    it is in the output. repetition, presence, frequency: float32, one number for each of ``rows``.
    """

    rows: list[int]
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]]
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
    counts: Numbers
    repetition: Numbers
    presence: Numbers
    frequency: Numbers


class Penalties:
    """The tokens of each penalized request, by slot, brought up to date as the request grows."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._seen.pop(slot, None)

    def clear(self) -> None:
        """Forget all slots."""
        self._seen.clear()

    def of(self, requests: Sequence[SampledRequest]) -> Occurrences | None:
        """What is penalized in rows of scores, row i for requests[i]; None if nothing is."""
        rows = [i for i, request in enumerate(requests) if has_penalty(request.sampling)]
        if not rows:
            return None
        seen = [self._of(requests[i]) for i in rows]

        def each(name: str) -> Numbers:
            return np.array([getattr(requests[i].sampling, name) for i in rows], dtype=np.float32)

        return Occurrences(
            rows,
            np.array([len(s.ids) for s in seen]),
            np.concatenate([np.array(s.ids, dtype=np.int64) for s in seen]),
            np.concatenate([np.array(s.in_output, dtype=np.float32) for s in seen]),
            each("repetition_penalty"),
            each("presence_penalty"),
            each("frequency_penalty"),
        )

    def _of(self, request: SampledRequest) -> _Seen:
        seen = self._seen.get(request.slot)
        if seen is None or seen.rid != request.rid or seen.num_tokens > request.num_tokens:
            seen = self._seen[request.slot] = _Seen(request.rid)
        seen.update(request.token_ids, request.num_prompt)
        # What is kept for the slot holds verified tokens only, so a rejected draft needs no undoing.
        return seen.with_drafted(request.drafted) if request.drafted else seen


def penalize(scores: Tensor, found: Occurrences) -> None:
    """Change scores [rows, vocab_size] in place.

    A repetition penalty r divides positive scores by r and multiplies others, for every token of prompt or
    output. Then presence is taken off once for each token of the output, and frequency as often as it
    occurred there.
    """
    device, count = scores.device, found.counts
    taken_off = np.repeat(found.frequency, found.sizes) * count
    taken_off += np.repeat(found.presence, found.sizes) * (count > 0)
    row_of = torch.from_numpy(np.repeat(np.array(found.rows), found.sizes)).to(device)
    token_of = torch.from_numpy(found.tokens).to(device)
    repetition = torch.from_numpy(np.repeat(found.repetition, found.sizes)).to(device)
    values = scores[row_of, token_of]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[row_of, token_of] = values - torch.from_numpy(taken_off).to(device)


class _Seen:
    """The distinct tokens of one request and how often each is in its output."""

    __slots__ = ("_index", "ids", "in_output", "num_tokens", "rid")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.num_tokens = 0
        self.ids: list[int] = []
        self.in_output: list[int] = []
        self._index: dict[int, int] = {}  # token -> its place in the two lists

    def update(self, token_ids: list[int], num_prompt: int) -> None:
        for at in range(self.num_tokens, len(token_ids)):
            self._count(token_ids[at], at >= num_prompt)
        self.num_tokens = len(token_ids)

    def with_drafted(self, tokens: Sequence[int]) -> _Seen:
        """A copy that counts further tokens of the output."""
        out = _Seen(self.rid)
        out.ids, out.in_output, out._index = self.ids.copy(), self.in_output.copy(), self._index.copy()
        out.num_tokens = self.num_tokens
        for token in tokens:
            out._count(token, True)
        out.num_tokens += len(tokens)
        return out

    def _count(self, token: int, is_output: bool) -> None:
        place = self._index.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.in_output.append(0)
        self.in_output[place] += is_output
