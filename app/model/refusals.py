"""`RefusalBook`: requests that engines refused, the newest of them with their reasons."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ipc.messages import Refusal

KEPT = 100


@dataclass(frozen=True, slots=True)
class RefusedView:
    """One refused request. ``n`` numbers those that were told of; ``t_s`` is of the console's clock."""

    n: int
    row: Refusal
    t_s: float


class RefusalBook:
    """Bounded: a client that is refused again and again must not cost more than a few rows."""

    def __init__(self) -> None:
        self.kept: deque[RefusedView] = deque(maxlen=KEPT)  # oldest first
        self.told = 0  # ever, of all engines
        self.told_before = 0  # of them, those of engines before the present one
        self.present = 0  # refused by the present engine, the untold ones too
        self._before = 0

    @property
    def total(self) -> int:
        """All that were refused, the untold ones too, by the engines of this window."""
        return self._before + self.present

    def new_engine(self) -> None:
        """Another engine process counts from 0."""
        self._before, self.present = self.total, 0
        self.told_before = self.told

    def take(self, rows: Iterable[Refusal], total: int | None, offset_ns: int) -> None:
        """Rows in order of arrival; ``offset_ns`` is the engine's clock minus ours."""
        for row in rows:
            self.told += 1
            self.kept.append(RefusedView(self.told, row, (row.t_ns - offset_ns) * 1e-9))
        if total is not None:
            self.present = max(self.present, total)
