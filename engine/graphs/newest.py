"""The newest token of each slot, on the device: where the next step takes it before the host has read it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.knobs import MAX_SEQS

NOBODY = MAX_SEQS  # a slot that no request has: where what nobody asked for goes


class Newest:
    """Tokens by slot, int64 on the device. What it launches depends on shapes alone."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(NOBODY + 1, dtype=torch.int64, device=device)

    def known(self, ids: Tensor) -> Tensor:
        """Ids of any shape, those that are `awaited` replaced by the newest one of their slot."""
        newest = self._ids.index_select(0, (-1 - ids).clamp(min=0).view(-1)).view_as(ids)
        return torch.where(ids < 0, newest, ids)

    def put(self, slots: Tensor, ids: Tensor) -> None:
        """Keep ids [tokens] as the newest of their slots.

        -1 is no token: whoever gets that one fails, and what follows is of no use.
        """
        self._ids.index_copy_(0, slots, ids.clamp(min=0))


def awaited(slot: int) -> int:
    """What stands for the newest token of a slot where the host does not know it yet."""
    return -1 - slot
