"""Which tokens occurred in the text of each slot, counted on the device: penalties need no host for that.

A slot has a list of the distinct tokens of its request, and how often each is in the output. The host sends a
list as a whole where the device does not hold that of the request's text, but for its newest token: when its
first token is chosen, when it came back, and after a draft of which something stayed. From then on each step
adds the newest token, which may be one that the step before it chooses. What is drafted counts at the places
behind it, and is kept nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch, SampledRow
from engine.graphs.driver import Driver
from engine.graphs.newest import NOBODY, Newest, awaited
from engine.graphs.shapes import GraphShape
from engine.penalties import has_penalty
from engine.sampling import FusedSampling

MOST_COUNTED = 8192  # distinct tokens of a text that a list has room for
_SENT = 8  # bytes of a token on its way: itself, and how often it occurred
_PENALIZED = 11  # of a token while rows are penalized: the same again, and where to find one
NOTHING = awaited(NOBODY)  # stands for no token

_Numbers = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a slot's list is: that of the first ``num_tokens`` of a request, ``distinct`` of them at most."""

    rid: int
    num_tokens: int
    distinct: int

    def covers(self, row: SampledRow) -> bool:
        """Whether it is that of a row's text, or lacks nothing but its newest token."""
        return self.rid == row.rid and row.num_tokens - self.num_tokens in (0, 1)


def most_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of device memory that lists of ``rows`` penalized requests take for a while, at most: all are
    sent whole, and then worked with, beside those that are kept (see `TextCounts.nbytes`).
    """
    room = min(vocab_size, MOST_COUNTED)
    return rows * (8 + (_SENT + _PENALIZED) * room)  # with the slot that each list is sent to


class _Distinct:
    """The distinct tokens of the first ``upto`` of a request's text, counted on as that grows."""

    __slots__ = ("rid", "tokens", "upto")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.upto = 0
        self.tokens: set[int] = set()

    def count(self, text: Sequence[int]) -> int:
        """How many a text has that begins with the one counted before."""
        if len(text) > self.upto:
            self.tokens.update(text[self.upto :])
            self.upto = len(text)
        return len(self.tokens)


class TextCounts:
    """The lists of all slots, and penalties by them. One thread at a time, but for `has_room`."""

    def __init__(self, newest: Newest, vocab_size: int, device: torch.device) -> None:
        self._newest = newest
        self._vocab_size = vocab_size
        self._device = device
        self._room = min(vocab_size, MOST_COUNTED)
        # int32 [2, slots, room]: tokens, -1 where there is none, and counts.
        self._lists: Tensor | None = None
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, _Held] = {}  # once the step is launched that was written last
        self._whole: list[tuple[int, _Numbers, _Numbers]] = []  # lists to send: slot, tokens, counts
        self._distinct: dict[int, _Distinct] = {}  # by slot, where a bound did not do

    @property
    def lacking(self) -> int:
        """Bytes of device memory that `reserve` has to allocate."""
        return 8 * (NOBODY + 1) * self._room if self._lists is None else 0

    def working_bytes(self, shape: GraphShape) -> int:
        """Bytes that a shape's rows take while they are penalized: tokens, counts, and where to find one."""
        return _PENALIZED * shape.tokens * self._room if shape.kind == "adjusted" else 0

    def num_words(self, shape: GraphShape) -> int:
        """Words of 64 bits that it needs of a step in that shape."""
        return sum(_sizes(shape))

    def has_room(self, batch: Batch) -> bool:
        """Whether the lists of all that a step penalizes have room. Any thread, one call at a time."""
        if self._room == self._vocab_size:
            return True
        for i, (row, draft) in enumerate(zip(batch.sampled_rows, batch.drafts, strict=True)):
            if not has_penalty(row.sampling):
                continue
            held, most = self._held.get(row.slot), row.num_tokens
            if held is not None and held.covers(row):
                most = held.distinct + row.num_tokens - held.num_tokens
            if most + len(draft) > self._room:  # by a bound: count them
                text, counted = batch.text_of(i), self._distinct.get(row.slot)
                if counted is None or counted.rid != row.rid:
                    counted = self._distinct[row.slot] = _Distinct(row.rid)
                most = counted.count(text) + max(0, row.num_tokens - len(text))
            if most + len(draft) > self._room:
                return False
        return True

    def clear(self, words: Tensor, shape: GraphShape) -> None:
        """Let nobody be penalized by ``words``, and no list change."""
        if shape.kind != "adjusted":
            return
        slots, added, _ = torch.split(words, _sizes(shape))
        slots.fill_(NOBODY)
        added.fill_(NOTHING)

    def fill(self, words: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what penalties of a step need to ``words``. `send` and then `launched` have to follow."""
        self._coming.clear()
        self._whole.clear()
        if shape.kind != "adjusted":
            return
        slots, added, each = np.split(words, np.cumsum(_sizes(shape))[:-1])
        slots[:], added[:] = NOBODY, NOTHING
        added = added.reshape(shape.queries, shape.tokens)
        factors = each.view(np.float32)[: 3 * shape.tokens].reshape(3, shape.tokens)
        factors[0], factors[1:] = 1.0, 0.0
        first = 0
        for i, (row, draft) in enumerate(zip(batch.sampled_rows, batch.drafts, strict=True)):
            end = first + len(draft) + 1
            if has_penalty(row.sampling):
                s = row.sampling
                slots[first:end] = row.slot
                penalties = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
                factors[:, first:end] = np.array(penalties, dtype=np.float32)[:, None]
                added[0, first:end] = self._bring_up(row, batch.text_of(i), batch.source_of(row))
                for n, token in enumerate(draft.token_ids, 1):
                    added[n, first + n : end] = token
            first = end

    def _bring_up(self, row: SampledRow, text: Sequence[int], source: int) -> int:
        """See to it that a row's list will be that of its text. The token that the step is to add to it."""
        held, total = self._held.pop(row.slot, None), row.num_tokens
        if held is None or not held.covers(row):
            upto = max(row.num_prompt, total - 1)  # what a step adds belongs to the output
            tokens, places = np.unique(np.array(text[:upto], dtype=np.int32), return_inverse=True)
            counts = np.bincount(places[row.num_prompt :], minlength=len(tokens)).astype(np.int32)
            self._whole.append((row.slot, tokens, counts))
            held = _Held(row.rid, upto, len(tokens))
        lacks = total - held.num_tokens
        self._coming[row.slot] = _Held(row.rid, total, min(held.distinct + lacks, self._room))
        if not lacks:
            return NOTHING
        return text[total - 1] if total <= len(text) else awaited(source)

    def send(self, driver: Driver) -> None:
        """Send the lists that the step written last needs whole, ahead of it."""
        if not self._whole:
            return
        count, width = len(self._whole), max(len(tokens) for _, tokens, _ in self._whole)
        host = driver.host(count + count * width)
        slots, lists = host.numpy()[:count], host.numpy()[count:].view(np.int32).reshape(2, count, width)
        lists[0] = -1
        for i, (slot, tokens, counts) in enumerate(self._whole):
            slots[i], lists[0, i, : len(tokens)], lists[1, i, : len(tokens)] = slot, tokens, counts
        device = torch.empty_like(host, device=self._device)
        held = self.reserve()

        def body() -> None:
            at = device[:count]
            held[0].index_fill_(0, at, -1)
            held[1].index_fill_(0, at, 0)
            held[:, :, :width].index_copy_(1, at, device[count:].view(torch.int32).view(2, count, width))

        driver.send(host, device)
        driver.run(body)

    def launched(self) -> None:
        """The step written last was launched. Without this its lists count as lost, and are sent again."""
        self._held.update(self._coming)
        self._coming.clear()

    def forget(self) -> None:
        """Tokens that were fed may turn out to be others: send every list again before it is used."""
        self._held.clear()
        self._coming.clear()

    def reserve(self) -> Tensor:
        """All lists, which are allocated when they are first needed: RuntimeError if there is no memory."""
        if self._lists is None:
            lists = torch.zeros(2, NOBODY + 1, self._room, dtype=torch.int32, device=self._device)
            lists[0].fill_(-1)
            self._lists = lists
        return self._lists

    def penalize(self, fused: FusedSampling, scores: Tensor, words: Tensor, shape: GraphShape) -> None:
        """Add what the step adds, and change scores [tokens, vocab_size] in place.

        words: what `fill` wrote, on the device. Launches only what depends on the shape.
        """
        slots, added, each = torch.split(words, _sizes(shape))
        held = self.reserve()
        tokens, counts = held.index_select(1, slots)  # of each place, [tokens, room]
        given = self._newest.known(added).view(shape.queries, -1).to(torch.int32)
        is_there = (added != NOTHING).view(shape.queries, -1)
        for n in range(shape.queries):
            token, adds = given[n].unsqueeze(1), is_there[n].unsqueeze(1)
            # Where it is in the list, or else the first place that is free.
            at = ((tokens == token).to(torch.int8) * 2 + (tokens < 0)).argmax(1, keepdim=True)
            tokens.scatter_(1, at, token.where(adds, tokens.gather(1, at)))
            counts.scatter_add_(1, at, adds.to(torch.int32))
            if n == 0:  # the newest one, the same at all places of a draft; what follows was drafted
                for part, now in zip(held, (tokens, counts), strict=True):
                    part.index_put_((slots, at.squeeze(1)), now.gather(1, at).squeeze(1))
        begins = torch.arange(shape.tokens + 1, dtype=torch.int32, device=scores.device) * self._room
        factors = each.view(torch.float32)[: 3 * shape.tokens].view(3, shape.tokens)
        fused.penalize_packed(
            scores, begins, tokens.view(-1), counts.view(-1), factors, max_tokens=self._room
        )


def _sizes(shape: GraphShape) -> list[int]:
    """Words of: slots, tokens to add to their lists, and penalties, of each place."""
    if shape.kind != "adjusted":
        return [0, 0, 0]
    n = shape.tokens
    return [n, shape.queries * n, (3 * n + 1) // 2]
