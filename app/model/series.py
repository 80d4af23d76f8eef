"""Fixed-size series for charts: ring buffers written twice, time bins, and percentiles with their n.

A ring of capacity N keeps each value at i and at i + N, so that any window of the newest values is one
contiguous slice: no copy, no wrap-around in the reader, and no growth however long the console runs.
In arrays NaN marks a gap (nothing was measured there); single figures say None instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

PERCENTILE_RULE = "linear interpolation between closest ranks (numpy 'linear')"


class Ring:
    """A table of float64 columns that keeps the newest ``capacity`` rows."""

    def __init__(self, columns: Sequence[str], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"A ring needs room for one row at least; capacity is {capacity}.")
        self.columns = tuple(columns)
        self.capacity = capacity
        self.total = 0  # rows ever appended
        self._at = {name: i for i, name in enumerate(self.columns)}
        self._data = np.full((len(self.columns), 2 * capacity), math.nan)

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def append(self, rows: ArrayLike) -> None:
        """Add one row [columns] or several [n, columns], oldest first."""
        new = np.atleast_2d(np.asarray(rows, dtype=np.float64))[-self.capacity :]
        count = new.shape[0]
        where = (self.total + np.arange(count)) % self.capacity
        self._data[:, where] = new.T
        self._data[:, where + self.capacity] = new.T
        self.total += count

    def column(self, name: str, newest: int | None = None) -> F64:
        """The newest values of a column, oldest first: a view [n], valid until the next append."""
        count = len(self) if newest is None else min(newest, len(self))
        end = (self.total - 1) % self.capacity + 1 + self.capacity if self.total else 0
        return self._data[self._at[name], end - count : end]

    def newest_since(self, column: str, value: float) -> int:
        """How many of the newest rows have ``column`` >= value, where that column never falls."""
        held = self.column(column)
        return len(held) - int(np.searchsorted(held, value, side="left"))


class BinTable:
    """Values gathered into bins of equal width on one time axis; bin k covers [k*bin_s, (k+1)*bin_s).

    A value that arrives late still lands in its own bin, as long as the bin is held.
    """

    def __init__(self, columns: Sequence[str], bin_s: float, capacity: int) -> None:
        self.columns = tuple(columns)
        self.bin_s = bin_s
        self.capacity = capacity
        self.last: int | None = None  # number of the newest bin
        self.first: int | None = None  # number of the oldest bin ever begun
        self._at = {name: i for i, name in enumerate(self.columns)}
        self._data = np.full((len(self.columns), 2 * capacity), math.nan)

    def bin_of(self, t_s: float) -> int:
        return math.floor(t_s / self.bin_s)

    def advance(self, t_s: float) -> list[int]:
        """Begin bins up to the one of ``t_s``; returns the numbers of those begun, all still empty."""
        number = self.bin_of(t_s)
        if self.last is None or self.first is None:
            self.first = number
            begun = [number]
        else:
            start = max(self.last + 1, number - self.capacity + 1)
            begun = list(range(start, number + 1))
        if begun:
            self.last = number
            slots = np.asarray(begun) % self.capacity
            self._data[:, slots] = math.nan
            self._data[:, slots + self.capacity] = math.nan
        return begun

    def holds(self, number: int) -> bool:
        if self.last is None or self.first is None:
            return False
        return max(self.first, self.last - self.capacity + 1) <= number <= self.last

    def put(self, number: int, column: str, value: float) -> None:
        """Set one value of a held bin; ignored when the bin is gone."""
        if self.holds(number):
            row, slot = self._at[column], number % self.capacity
            self._data[row, slot] = self._data[row, slot + self.capacity] = value

    def add_row(self, number: int, values: F64, put: NDArray[np.bool_]) -> None:
        """Add a value to every column of a held bin, an empty one counting as 0; set those of ``put``."""
        if self.holds(number):
            slot = number % self.capacity
            old = self._data[:, slot]
            new = np.where(put, values, np.where(np.isnan(old), 0.0, old) + values)
            self._data[:, slot] = self._data[:, slot + self.capacity] = new

    def row(self, number: int) -> dict[str, float]:
        """All values of a bin, NaN where it is empty or not held."""
        if not self.holds(number):
            return dict.fromkeys(self.columns, math.nan)
        return dict(zip(self.columns, self._data[:, number % self.capacity].tolist(), strict=True))

    def get(self, number: int, column: str) -> float:
        """One value, NaN where the bin is empty or not held."""
        return float(self._data[self._at[column], number % self.capacity]) if self.holds(number) else math.nan

    def _span(self, span_s: float | None) -> tuple[int, int]:
        if self.last is None or self.first is None:
            return 0, 0
        count = min(self.last - self.first + 1, self.capacity)
        if span_s is not None:
            count = min(count, max(1, round(span_s / self.bin_s)))
        return self.last - count + 1, count

    def times(self, span_s: float | None = None) -> F64:
        """The bins' midpoints [n], in seconds of the console's monotonic clock, oldest first."""
        start, count = self._span(span_s)
        return (np.arange(start, start + count, dtype=np.float64) + 0.5) * np.float64(self.bin_s)

    def column(self, name: str, span_s: float | None = None) -> F64:
        """Values [n] beside `times`, NaN for gaps: a view, valid until the next change."""
        _, count = self._span(span_s)
        end = (self.last % self.capacity) + 1 + self.capacity if self.last is not None else 0
        return self._data[self._at[name], end - count : end]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample by `PERCENTILE_RULE`, with its size. Values are None for an empty sample."""

    n: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    values: Mapping[float, float | None]  # percentile in 0..100 -> value

    def __getitem__(self, percent: float) -> float | None:
        return self.values[percent]


DEFAULT_PERCENTS = (50.0, 90.0, 95.0, 99.0)


def percentiles(sample: ArrayLike, percents: Sequence[float] = DEFAULT_PERCENTS) -> Percentiles:
    """Percentiles of a sample; NaN entries are refused, since they are undefined rather than small."""
    data = np.asarray(sample, dtype=np.float64).ravel()
    if np.isnan(data).any():
        raise ValueError("A sample for percentiles holds NaN; leave undefined values out and count them.")
    if data.size == 0:
        return Percentiles(0, None, None, None, dict.fromkeys(percents))
    found = np.percentile(data, list(percents), method="linear")
    return Percentiles(
        n=int(data.size),
        mean=float(data.mean()),
        minimum=float(data.min()),
        maximum=float(data.max()),
        values={p: float(v) for p, v in zip(percents, found, strict=True)},
    )
