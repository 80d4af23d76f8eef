"""A card at the edge of torch.cuda: its memory, without one being there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

GIB = 1 << 30


@dataclass
class FakeCard:
    """Bytes as `torch.cuda` tells them. ``peak``: the most that was reserved. ``kept``: what is reserved and
    not in use, and cannot be given back.
    """

    total: int = 80 * GIB
    free: int = 50 * GIB
    reserved: int = 20 * GIB
    allocated: int = 18 * GIB
    peak: int = 20 * GIB
    emptied: int = 0
    kept: int = 2 * GIB

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in {
            "init": lambda: None,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self._reset(),
            "empty_cache": self._empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def _reset(self) -> None:
        self.peak = self.reserved

    def _empty(self) -> None:
        self.emptied += 1
        self.free += max(0, self.reserved - self.allocated - self.kept)
        self.reserved = min(self.reserved, self.allocated + self.kept)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    made = FakeCard()
    made.install(monkeypatch)
    return made
