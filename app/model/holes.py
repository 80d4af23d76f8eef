"""`Holes`: step numbers that did not arrive, until a snapshot brings them or they count as lost."""

from __future__ import annotations

from dataclasses import dataclass

from app.model.figures import Gap

PATIENCE_S = 3.0  # what no snapshot filled by then is a gap


@dataclass(slots=True)
class _Hole:
    """How many of the numbers from ``first`` to ``last`` are missing still, and around when."""

    first: int
    last: int
    missing: int
    t0_s: float
    t1_s: float
    seen_s: float


class Holes:
    """The holes of one engine's steps."""

    def __init__(self) -> None:
        self._holes: list[_Hole] = []

    def open(self, first: int, last: int, t0_s: float, t1_s: float, now_s: float) -> None:
        """Steps ``first`` to ``last`` are missing, somewhere from ``t0_s`` to ``t1_s``."""
        self._holes.append(_Hole(first, last, last - first + 1, t0_s, t1_s, now_s))

    def fill(self, step: int) -> None:
        """One came late."""
        for hole in self._holes:
            if hole.first <= step <= hole.last:
                hole.missing -= 1

    def close(self, now_s: float) -> list[Gap]:
        """Drop the holes that are filled or too old; the latter are returned as gaps."""
        over = [h for h in self._holes if h.missing <= 0 or now_s - h.seen_s > PATIENCE_S]
        self._holes = [h for h in self._holes if h not in over]
        return [Gap(h.t0_s, h.t1_s, _lost(h.missing)) for h in over if h.missing > 0]

    def clear(self) -> None:
        self._holes.clear()


def _lost(rows: int) -> str:
    return f"{rows} step row was lost" if rows == 1 else f"{rows} step rows were lost"
