"""What kernels do with one row of scores over the vocabulary: its largest, and the cut by top-k and top-p.

Nothing is sorted. The cut is a threshold, found by a search over the scores as integers of the same order:
each pass over the row asks for several thresholds at once how much lies above them, and keeps the interval
in which the answer changes. Equal scores fall on the same side.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = 8  # thresholds a pass: 11 passes for the 2^32 numbers, out of the second-level cache


@triton.jit
def key_of(score):
    """float32 as int32 of the same order; scores are not NaN."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_scores(row, start, n, BLOCK: tl.constexpr):
    """(ids, scores) of a part of a row; behind its end -inf."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(row + ids, mask=ids < n, other=float("-inf"))


@triton.jit
def highest(row, n, BLOCK: tl.constexpr):
    """(largest score, its first id). The score is NaN if any is."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        ids, scores = load_scores(row, start, n, BLOCK)
        bad |= (scores != scores).to(tl.int32)
        higher = scores > best
        best = tl.where(higher, scores, best)
        at = tl.where(higher, ids, at)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, at, n), axis=0)
    return tl.where(tl.max(bad, axis=0) > 0, float("nan"), top), first


@triton.jit
def weigh(scores, top, temperature):
    """exp((score - top) / temperature): softmax without its division; the most likely one weighs 1."""
    return tl.exp((scores - top) / temperature)


@triton.jit
def _above(
    row, n, floor, pivots, top, temperature, COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The weight (or number) of what lies above each pivot, of all from ``floor`` on: float64 [PIVOTS]."""
    sums = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        ids, scores = load_scores(row, start, n, BLOCK)
        keys = key_of(scores)
        if COUNT:
            weights = (ids < n).to(tl.float32)
        else:
            weights = tl.where(keys >= floor, weigh(scores, top, temperature), 0.0)
        sums += tl.where(keys[None, :] > pivots[:, None], weights[None, :], 0.0)
    return tl.sum(sums.to(tl.float64), axis=1)


@triton.jit
def least_key(
    row, n, floor, limit, top, temperature, COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least key above which less than ``limit`` lies: what is at least as large is within the cut."""
    low = tl.full((), -2147483648, tl.int64)
    high = key_of(top).to(tl.int64)
    step = 1 + tl.arange(0, PIVOTS)
    while high - low > 1:
        pivots = low + ((high - low) * step) // PIVOTS
        above = _above(row, n, floor, pivots.to(tl.int32), top, temperature, COUNT, PIVOTS, BLOCK)
        inside = (above < limit) | (pivots == high)  # the most likely one is always within
        low = tl.maximum(low, tl.max(tl.where(inside, low, pivots), axis=0))
        high = tl.min(tl.where(inside, pivots, high), axis=0)
    return high.to(tl.int32)


@triton.jit
def total_from(row, n, floor, min_p, top, temperature, BLOCK: tl.constexpr):
    """The weight of all from ``floor`` on that weigh at least ``min_p``, float64."""
    total = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        _, weights = kept_weights(row, start, n, floor, min_p, top, temperature, BLOCK)
        total += tl.sum(weights.to(tl.float64), axis=0)
    return total


@triton.jit
def kept_weights(row, start, n, floor, min_p, top, temperature, BLOCK: tl.constexpr):
    """(ids, weights) of a part of a row, 0 for what is cut."""
    ids, scores = load_scores(row, start, n, BLOCK)
    weights = weigh(scores, top, temperature)
    kept = (key_of(scores) >= floor) & (weights >= min_p) & (ids < n)
    return ids, tl.where(kept, weights, 0.0)


@triton.jit
def cut(row, n, top, temperature, top_k, top_p, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key that top-k, and then top-p of what it leaves, keep."""
    floor = tl.full((), -2147483648, tl.int32)
    if (top_k > 0) & (top_k < n):
        floor = least_key(row, n, floor, top_k.to(tl.float64), top, temperature, True, PIVOTS, BLOCK)
    if top_p < 1.0:
        total = total_from(row, n, floor, 0.0, top, temperature, BLOCK)
        limit = top_p.to(tl.float64) * total
        floor = tl.maximum(floor, least_key(row, n, floor, limit, top, temperature, False, PIVOTS, BLOCK))
    return floor


@triton.jit
def place_in_block(ids, weights, before, target):
    """(id at which the running sum passes ``target``, -1 if none does; the running sum behind the block)."""
    exact = weights.to(tl.float64)
    running = before + tl.cumsum(exact, axis=0)
    after = before + tl.sum(exact, axis=0)
    passes = (running > target) & (weights > 0)
    first = tl.min(tl.where(passes, ids, 0x7FFFFFFF), axis=0)
    # The running sum may be rounded to a little less than the sum that said that the target is in here.
    last = tl.max(tl.where(weights > 0, ids, -1), axis=0)
    found = tl.where(first < 0x7FFFFFFF, first, last)
    return tl.where(after > target, found, -1), after
