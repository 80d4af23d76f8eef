"""The newest token of each slot, what was drafted behind it, and the one before it, on the device: where
whoever computes them takes them before the host has read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.knobs import MAX_SEQS
from engine.speculation import MAX_DRAFT

NOBODY = MAX_SEQS  # a slot that no request has: where what nobody asked for goes
_SLOTS = NOBODY + 1
BEFORE = MAX_DRAFT + 1  # the place of the token before the newest, where that was chosen behind a draft


class Newest:
    """Tokens by slot and place, int64 on the device. What it launches depends on shapes alone.

    Place 0 is a slot's newest token, place n the n-th one that was drafted behind it since; for the last one
    see `BEFORE`. -1 is no token: whoever gets it fails, or it ends the draft that it is in, and what follows
    is of no use.
    """

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros((BEFORE + 1) * _SLOTS, dtype=torch.int64, device=device)

    def known(self, ids: Tensor) -> Tensor:
        """Ids of any shape, those that are `awaited` replaced by what stands there, 0 for no token."""
        return self.found(ids).clamp(min=0)

    def found(self, ids: Tensor) -> Tensor:
        """As `known`, but for no token -1."""
        there = self._ids.index_select(0, (-1 - ids).clamp(min=0).view(-1)).view_as(ids)
        return torch.where(ids < 0, there, ids)

    def put(self, cells: Tensor, ids: Tensor) -> None:
        """Keep ids [tokens] where their `cell_of` says; a slot is the cell of its newest token."""
        self._ids.index_copy_(0, cells, ids)

    def put_before(self, slots: Tensor, ids: Tensor) -> None:
        """Keep ids [slots] as those before the newest token of each."""
        self.put(slots + cell_of(0, BEFORE), ids)

    def drafted(self, rounds: int) -> Tensor:
        """The tokens at places 1 to ``rounds`` of all slots: [rounds * slots], see `of_slot`."""
        return self._ids[_SLOTS : (rounds + 1) * _SLOTS]


def cell_of(slot: int, place: int) -> int:
    """Where in the table a slot's token at a place is kept."""
    return place * _SLOTS + slot


def awaited(slot: int, place: int = 0) -> int:
    """What stands for a slot's token at a place where the host does not know it yet."""
    return -1 - cell_of(slot, place)


def of_slot(drafted: Tensor, slot: int, count: int) -> list[int]:
    """The first ``count`` tokens drafted for a slot, of what `Newest.drafted` gave, on the host."""
    ids: list[int] = drafted.view(-1, _SLOTS)[:count, slot].tolist()
    return ids
