"""Rings, bins and percentiles."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from app.model.series import BinTable, Ring, percentiles


def add(bins: BinTable, t_s: float, value: float) -> None:
    """Add to the bin of a time, in a table of one column."""
    bins.add_row(bins.bin_of(t_s), np.array([float(value)]), np.array([False]))


def test_a_window_of_a_ring_is_the_newest_rows_in_order_wherever_it_wraps() -> None:
    ring = Ring(("t", "v"), 7)
    for i in range(40):
        ring.append((i, i * 10))
        expected = np.arange(max(0, i - 6), i + 1)
        assert ring.column("t").tolist() == expected.tolist()
        assert ring.column("v", 3).tolist() == (expected[-3:] * 10).tolist()
        assert ring.column("t").base is not None  # a view, not a copy


def test_a_ring_takes_more_rows_at_once_than_it_holds() -> None:
    ring = Ring(("t",), 4)
    ring.append(np.arange(11, dtype=float)[:, None])
    assert ring.column("t").tolist() == [7, 8, 9, 10]
    ring.append((11.0,))
    assert ring.column("t").tolist() == [8, 9, 10, 11]


def test_newest_since_counts_rows_by_a_column_that_never_falls() -> None:
    ring = Ring(("t",), 5)
    ring.append([[t] for t in (1.0, 2.0, 2.0, 3.0)])
    assert [ring.newest_since("t", t) for t in (0.0, 2.0, 2.5, 4.0)] == [4, 3, 1, 0]


def test_bins_take_late_values_and_leave_gaps() -> None:
    bins = BinTable(("n",), 0.5, 10)
    bins.advance(10.1)
    add(bins, 10.1, 1)
    bins.advance(11.6)
    add(bins, 10.7, 2)  # late, and its bin exists
    add(bins, 10.7, 3)
    add(bins, 2.0, 9)  # long gone
    values = bins.column("n")
    assert values[:2].tolist() == [1, 5]
    assert np.isnan(values[2:]).all()
    assert bins.times().tolist() == [10.25, 10.75, 11.25, 11.75]


def test_bins_forget_the_oldest_and_skip_long_pauses() -> None:
    bins = BinTable(("n",), 1.0, 3)
    for t in (0.0, 1.0, 2.0, 3.0):
        bins.advance(t)
        add(bins, t, t)
    assert bins.column("n").tolist() == [1, 2, 3]
    bins.advance(100.0)
    assert bins.times().tolist() == [98.5, 99.5, 100.5]
    assert np.isnan(bins.column("n")).all()


@pytest.mark.parametrize("n", [1, 2, 10, 100])
def test_percentiles_follow_the_stated_rule(n: int) -> None:
    """C08: numpy's 'linear', on small samples too."""
    values = np.random.default_rng(n).lognormal(size=n)
    found = percentiles(values, (50.0, 90.0, 99.0))
    ordered = np.sort(values)
    for percent in (50.0, 90.0, 99.0):
        rank = percent / 100 * (n - 1)
        low, high = math.floor(rank), math.ceil(rank)
        by_hand = ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
        assert found[percent] == pytest.approx(by_hand, rel=1e-12)
    assert found.n == n


def test_percentiles_of_nothing_are_undefined_and_of_nan_refused() -> None:
    found = percentiles([])
    assert (found.n, found.mean, found[99.0]) == (0, None, None)
    with pytest.raises(ValueError, match="NaN"):
        percentiles([1.0, math.nan])


def test_appending_for_long_does_not_grow() -> None:
    ring, bins = Ring(("t", "v"), 500), BinTable(("v",), 0.5, 500)
    bins.advance(0.0)

    def go_on(start: int) -> None:
        for i in range(start, start + 6_000):
            ring.append((i / 10, i))
            bins.advance(i / 10)
            add(bins, i / 10, 1.0)

    go_on(0)
    before = (ring._data.nbytes, bins._data.nbytes)
    tracemalloc.start()
    try:
        go_on(6_000)
        # Only what these classes hold counts: other threads of the test run allocate too.
        held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/app/model/series.py")])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in held.traces) < 10_000
    assert (ring._data.nbytes, bins._data.nbytes) == before
