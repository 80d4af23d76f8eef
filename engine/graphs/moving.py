"""Steps behind a verification, before anybody has read how many drafted tokens it accepted.

The host builds such a step as if nothing had been accepted. The verification leaves on the device how many
tokens of each slot's draft it accepted, and there the step's rows are moved by that: positions, where keys
and values go, what attention looks at, and which random numbers are drawn.

A row may be moved beyond its blocks. Then its request has ended by length, and nobody takes what is computed
for it: it only must not be written, nor read what is another's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.batch import Batch
from engine.graphs.newest import NOBODY, Newest
from engine.graphs.shapes import NO_SLOT, GraphShape
from engine.speculation.base import MAX_DRAFT

PLACES = MAX_DRAFT + 1  # where a row may come to lie: behind none of a draft's tokens, or one, or more


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of drafts that were drawn: which requests had such, how many tokens of each hold, and what
    follows these, all [rows]."""

    drawn: Tensor
    accepted: Tensor
    own: Tensor


class Moves:
    """How many drafted tokens of each slot held in the step launched last, int64 on the device.

    What it launches depends on shapes alone.
    """

    def __init__(self, newest: Newest, device: torch.device) -> None:
        self._newest = newest
        self.accepted = torch.zeros(NOBODY + 1, dtype=torch.int64, device=device)

    @staticmethod
    def num_words(shape: GraphShape) -> tuple[int, int]:
        """Words of 64 bits that a step takes: for what it leaves to the next one, and to be moved itself."""
        if not shape.feeds:
            return 0, 0
        leaves = shape.rows if shape.queries == 1 else 3 * shape.rows
        return leaves, words_to_move(shape.rows, shape.tokens) if shape.moved else 0

    def clear(self, leaves: Tensor, moves: Tensor, shape: GraphShape) -> None:
        """Let nothing be left to any slot and nothing be written, by words that are zeros otherwise."""
        leaves[: shape.rows].fill_(NOBODY)
        if shape.moved:
            self.clear_moves(moves, shape.rows, shape.tokens)

    @staticmethod
    def clear_moves(moves: Tensor, rows: int, tokens: int) -> None:
        """Let nothing be moved and nothing be written."""
        moves[:rows].fill_(NOBODY)
        moves[2 * rows + tokens :].fill_(NO_SLOT)

    def fill(self, leaves: Ints, moves: Ints, shape: GraphShape, batch: Batch) -> None:
        """Write what a step needs for both."""
        if not shape.feeds:
            return
        rows, count = batch.sampled_rows, len(batch.sampled_rows)
        leaves[:] = 0
        leaves[:count] = [row.slot for row in rows]
        leaves[count : shape.rows] = NOBODY
        if shape.queries > 1:
            firsts, drafted = leaves[shape.rows :].reshape(2, shape.rows)
            drafted[:count] = list(map(len, batch.drafts))
            firsts[1:count] = (drafted[: count - 1] + 1).cumsum()
        if shape.moved:
            self.fill_moves(moves, shape.rows, shape.tokens, batch)

    def leave(
        self, ids: Tensor, given: Tensor, leaves: Tensor, shape: GraphShape, judged: Judged | None
    ) -> None:
        """Keep what the next step may be fed: how many tokens of each draft hold, and the one behind these.

        ids: [tokens], chosen at each place. given: [tokens], the step's own, drafted ones among them, -1 for
        one that never holds. leaves: what `fill` wrote, on the device. judged: of drafts that were drawn.
        """
        if shape.queries == 1:
            self._newest.put(leaves, ids)
            return
        slots, firsts, drafted = leaves.view(3, shape.rows)
        place = torch.arange(shape.queries - 1, device=ids.device)
        at = firsts.unsqueeze(1) + place
        last = shape.tokens - 1
        draft = given[(at + 1).clamp(max=last)]
        holds = (ids[at.clamp(max=last)] == draft) & (draft >= 0) & (place < drafted.unsqueeze(1))
        accepted = holds.long().cumprod(dim=1).sum(dim=1)
        newest = ids[firsts + accepted]
        if judged is not None:
            accepted = judged.accepted.where(judged.drawn, accepted)
            newest = judged.own.where(judged.drawn, newest)
        self.accepted.index_copy_(0, slots, accepted)
        self._newest.put(slots, newest)
        self._newest.put_before(slots, given[firsts + accepted])

    def move(self, moves: Tensor, slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Write to slots [tokens] where keys and values go. Returns by how many positions rows move [rows],
        and their tokens [tokens].

        moves: what `fill_moves` wrote, on the device.
        """
        tokens = len(slots)
        sources, reach, row_of, places = torch.split(moves, [rows, rows, tokens, PLACES * tokens])
        accepted = self.accepted.index_select(0, sources)
        there = accepted.index_select(0, row_of).unsqueeze(1)
        slots.copy_(places.view(tokens, PLACES).gather(1, there).squeeze(1))
        by = torch.minimum(accepted, reach)
        return by, by.index_select(0, row_of)

    @staticmethod
    def fill_moves(words: Ints, rows: int, tokens: int, batch: Batch) -> None:
        """Write how a batch is to be moved, all of whose rows are sampled, in a shape of so many of both."""
        sources, reach, row_of, places = np.split(words, np.cumsum([rows, rows, tokens]))
        places = places.reshape(tokens, PLACES)
        sampled, there, count = batch.sampled_rows, batch.rows, len(batch.ids)
        sources[:], reach[:], row_of[:], places[:] = NOBODY, 0, 0, NO_SLOT
        reach[: len(sampled)], places[:count, 0] = batch.reach, batch.slots
        row_of[:count] = np.repeat(np.arange(len(sampled)), there.num_new)
        moves = np.array([row.num_maybe > 0 for row in sampled])
        sources[: len(sampled)][moves] = [batch.source_of(row) for row in sampled if row.num_maybe]
        moving = np.flatnonzero(moves[row_of[:count]])
        row, steps = row_of[moving][:, None], np.arange(PLACES)
        block, offset = np.divmod(batch.positions[moving][:, None] + steps, there.block_size)
        found = there.tables[row, block.clip(max=there.tables.shape[1] - 1)] * there.block_size + offset
        places[moving] = np.where(steps <= batch.reach[row], found, NO_SLOT)


def words_to_move(rows: int, tokens: int) -> int:
    """Words of 64 bits: whose drafts rows follow, how far they reach, tokens' rows and where they may go."""
    return 2 * rows + (1 + PLACES) * tokens
