"""How likely each place of a draft is accepted, learned for each request and over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.speculation.base import MAX_DRAFT

PRIOR = 0.7  # acceptance before anything was seen
WEIGHT = 1.5  # how many observations an assumption weighs
FADE = 0.9  # of a request's observations, for each further draft of it
FADE_ALL = 0.98  # of those of all requests together

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


class AcceptanceTable:
    """A row for each request, made when it is first asked for.

    A place is only tried where all places before it were accepted, so what is counted of it is its acceptance
    given those. What is assumed of a place that was seldom tried is what the one before it shows, changed as
    it changes from that place to this one over all requests; of the first place, what it shows over all. As
    old observations fade, a place not seen for long is thus tried again where the places before it hold.
    """

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._tries = np.zeros((0, MAX_DRAFT))
        self._hits = np.zeros((0, MAX_DRAFT))
        self._survival = np.zeros((0, MAX_DRAFT))
        self._all_tries = np.zeros((1, MAX_DRAFT))
        self._all_hits = np.zeros((1, MAX_DRAFT))
        self.everywhere = self._everywhere()
        """Acceptance of each place, given those before it, over all requests: [MAX_DRAFT]."""

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, rids: Sequence[int]) -> Rows:
        """The rows of requests; one that is new gets one, with what is assumed of it."""
        new = [rid for rid in rids if rid not in self._row_of]
        if new:
            self._add(new)
        return np.fromiter((self._row_of[rid] for rid in rids), np.int64, len(rids))

    def survival(self, rows: Rows) -> Floats:
        """How likely a draft is accepted up to each place and that place too: [rows, MAX_DRAFT]."""
        out: Floats = self._survival[rows]
        return out

    def observe(self, rows: Rows, drafted: Rows, accepted: Rows) -> None:
        """Drafts of ``drafted`` >= 1 tokens, one of each of these rows, had ``accepted`` of them accepted."""
        place = np.arange(MAX_DRAFT)
        tried = place < np.minimum(accepted + 1, drafted)[:, None]
        held = place < accepted[:, None]
        self._tries[rows] = self._tries[rows] * FADE + tried
        self._hits[rows] = self._hits[rows] * FADE + held
        fade = FADE_ALL ** len(rows)
        self._all_tries = self._all_tries * fade + tried.sum(axis=0)
        self._all_hits = self._all_hits * fade + held.sum(axis=0)
        self.everywhere = self._everywhere()
        self._survival[rows] = self._estimate(rows)

    def release(self, rid: int) -> None:
        """Forget a request, of which there may be nothing."""
        row = self._row_of.pop(rid, None)
        if row is not None:
            self._free.append(row)

    def _add(self, rids: Sequence[int]) -> None:
        lacking = len(rids) - len(self._free)
        if lacking > 0:
            old = len(self._tries)
            more = max(lacking, old, 16)
            self._free += range(old + more - 1, old - 1, -1)
            grown = [
                np.concatenate((a, np.zeros((more, MAX_DRAFT))))
                for a in (self._tries, self._hits, self._survival)
            ]
            self._tries, self._hits, self._survival = grown
        rows = np.array([self._free.pop() for _ in rids])
        self._row_of.update(zip(rids, rows.tolist(), strict=True))
        self._tries[rows] = self._hits[rows] = 0.0
        self._survival[rows] = self._estimate(rows)

    def _everywhere(self) -> Floats:
        unchanged = np.full(MAX_DRAFT, PRIOR)
        out: Floats = _leaning(self._all_hits, self._all_tries, unchanged)[0]
        return out

    def _estimate(self, rows: Rows) -> Floats:
        return _leaning(self._hits[rows], self._tries[rows], self.everywhere).cumprod(axis=1)


def _leaning(hits: Floats, tries: Floats, shape: Floats) -> Floats:
    """Acceptance [rows, places] as seen, leaning on ``shape`` [places] where little was seen."""
    out = np.empty_like(hits)
    before = np.full(len(hits), shape[0])
    change = np.diff(shape, prepend=shape[0])
    weight = tries + WEIGHT
    for i in range(MAX_DRAFT):
        assumed = np.minimum(np.maximum(before + change[i], 0.0), 1.0)
        before = out[:, i] = (hits[:, i] + WEIGHT * assumed) / weight[:, i]
    return out
