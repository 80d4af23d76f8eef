"""What may be captured yet: all graphs share one budget of device memory, and what they work in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from engine.out_of_memory import kind_of, recover, text_of

log = logging.getLogger(__name__)

RETRY_S = 30.0  # after which capturing is tried again where memory ran out

T = TypeVar("T")


class Captures:
    """Keeps the account of what was captured, and remembers what cannot be, or could not be lately."""

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.nbytes = 0
        """Bytes of device memory that graphs and their static memory took. Any thread may read it."""
        self._budget = budget_bytes
        self._device = device
        self._most = 0  # of memory that graphs share, by the one that works in the most of it
        self._refused: dict[Hashable, str] = {}
        self._short_until_s = 0.0  # nothing is captured before, for there was no memory

    @property
    def short(self) -> bool:
        """Whether memory ran out a moment ago."""
        return time.monotonic() < self._short_until_s

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the budget."""
        return self.nbytes + nbytes < self._budget

    def why_not(self, shape: Hashable, working: int, more: int = 0) -> str | None:
        """In a word why a shape is not to be captured, None if it may be tried.

        working: bytes that it works in, of memory that graphs share. more: bytes that it takes besides.
        """
        why = self._refused.get(shape)
        if why is None and self.short:
            why = "memory"
        if why is None and not self.has_room(max(0, working - self._most) + more):
            why = "budget"
        return why

    def why_failed(self, shape: Hashable) -> str:
        """In a word why `attempt` came to nothing."""
        return self._refused.get(shape, "memory")

    def attempt(self, shape: Hashable, name: str, make: Callable[[], T]) -> T | None:
        """What ``make`` captures; None, with the reason in the log, where that cannot be, or not now.

        Raises what a lost device does.
        """
        try:
            return make()
        except (RuntimeError, MemoryError) as error:
            kind = kind_of(error)
            if kind == "lost":
                raise
            if kind == "own":
                log.exception("%s cannot be captured in a CUDA graph and run without", name)
                self._refused[shape] = "failed"
                return None
            log.warning("no memory to capture %s, they run without: %s", name, text_of(error))
            recover(error, self._device)  # for the step itself, that runs now
            self.lacked()
            return None

    def forget_refused(self, kind: type) -> None:
        """What shapes of a kind stand for has changed: what could not be captured may be tried again."""
        self._refused = {shape: why for shape, why in self._refused.items() if not isinstance(shape, kind)}

    def lacked(self) -> None:
        """Memory ran out."""
        self._short_until_s = time.monotonic() + RETRY_S

    def add(self, name: str, nbytes: int, working: int) -> None:
        """Something was captured. nbytes: that it took, its part of what graphs share included."""
        self.nbytes += nbytes
        self._most = max(self._most, working)
        log.info("captured %s, graphs take %d MiB now", name, self.nbytes >> 20)
