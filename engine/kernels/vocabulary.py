"""What kernels do with rows of scores over the vocabulary: their largest, and the cut by top-k and top-p.

A row is cut into segments, each a program of its own, so that few rows use a whole card too. What segments
find is put together by the launch behind. Sums are of whole numbers, weights in units of 2^-40 of the
largest, and so the same in whatever order they are added up: a token follows neither from how its row is cut
nor from the rows beside it.

Nothing is sorted. The cut is a threshold, found by a search over the scores as integers of the same order:
each launch asks for several thresholds at once how much lies above them, and the one behind it keeps the
interval in which the answer changes. Equal scores fall on the same side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch, cdiv, next_power_of_2

SEGMENT = 4096  # scores of a program
_BLOCK = 512  # that it looks at at once
_PIVOTS = 16  # thresholds of a launch
_STEPS = 8  # launches of a search: as many as narrow 2^32 numbers down to one
UNIT = tl.constexpr(1 << 40)  # a weight of 1; 2^22 tokens that weigh as much still fit
_STAGES = tl.constexpr(3)  # blocks that are loaded ahead: there is no product that Triton would do it for
_LEAST_KEY = tl.constexpr(-2147483648)
ALL_DRAWN = -1.0
"""For ``greedy_below``: no row's largest score decides by itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """Memory for what the segments of each row find, which the launches behind read.

    tops: float32 [rows, segments], the largest score, NaN if any is; firsts: int32, its first id.
    intervals: int64 [2, 2, rows, 2], the interval of keys that even launches, and odd ones, of the search by
    top-k and of that by top-p look at; above: int64 [2, 2, rows, segments, pivots], what lies above each
    threshold in it. totals: int64 [2, rows, segments], the weight of what top-k keeps, and of what is kept in
    the end.
    """

    tops: Tensor
    firsts: Tensor
    intervals: Tensor
    above: Tensor
    totals: Tensor

    @classmethod
    def allocate(cls, rows: int, n: int, device: torch.device) -> Found:
        """For ``rows`` rows of ``n`` scores."""
        segments = cdiv(n, SEGMENT)
        return cls(
            torch.empty(rows, segments, dtype=torch.float32, device=device),
            torch.empty(rows, segments, dtype=torch.int32, device=device),
            torch.empty(2, 2, rows, 2, dtype=torch.int64, device=device),
            torch.empty(2, 2, rows, segments, _PIVOTS, dtype=torch.int64, device=device),
            torch.empty(2, rows, segments, dtype=torch.int64, device=device),
        )

    @classmethod
    def bytes_for(cls, rows: int, n: int) -> int:
        """Bytes that `allocate` takes."""
        made = cls.allocate(rows, n, torch.device("meta"))
        return sum(getattr(made, part.name).nbytes for part in fields(made))


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
def weigh(scores, top, temperature):
    """exp((score - top) / temperature): softmax without its division; the most likely one weighs 1."""
    return tl.exp((scores - top) / temperature)


@triton.jit
def in_units(weights):
    """Weights of 0 to 1 as whole numbers of units."""
    return (weights * UNIT).to(tl.int64)


@triton.jit
def kept_weights(row, start, n, floor, min_p, top, temperature, BLOCK: tl.constexpr):
    """(ids, weights) of a part of a row, 0 for what is cut."""
    ids, scores = load_scores(row, start, n, BLOCK)
    weights = weigh(scores, top, temperature)
    kept = (key_of(scores) >= floor) & (weights >= min_p) & (ids < n)
    return ids, tl.where(kept, weights, 0.0)


@triton.jit
def parts_of(segment, n, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of a segment that hold scores."""
    return tl.minimum(SEGMENT // BLOCK, (n - segment * SEGMENT + BLOCK - 1) // BLOCK)


@triton.jit
def by_segment(held, row, segments, other, SEGMENTS: tl.constexpr):
    """What each segment of a row found, ``other`` behind the last: [SEGMENTS]."""
    at = tl.arange(0, SEGMENTS)
    return tl.load(held + row * segments + at, mask=at < segments, other=other)


@triton.jit
def top_of(tops, row, segments, SEGMENTS: tl.constexpr):
    """The largest score of a row, NaN if any is."""
    each = by_segment(tops, row, segments, float("-inf"), SEGMENTS)
    # The maximum of a device leaves NaN out.
    bad = tl.max((each != each).to(tl.int32), axis=0) > 0
    return tl.where(bad, float("nan"), tl.max(each, axis=0))


@triton.jit
def first_of(tops, firsts, row, segments, SEGMENTS: tl.constexpr):
    """The first id of the largest score of a row that has no NaN."""
    each = by_segment(tops, row, segments, float("-inf"), SEGMENTS)
    ids = by_segment(firsts, row, segments, 0x7FFFFFFF, SEGMENTS)
    return tl.min(tl.where(each == tl.max(each, axis=0), ids, 0x7FFFFFFF), axis=0)


@triton.jit
def segment_of(each, number, SEGMENTS: tl.constexpr):
    """(running sum that is to be passed, segment in which it is, sum before that) for ``number`` in [0, 1),
    float64, of what is drawn from. each: weights of the segments, int64 [SEGMENTS]; the first is -1 if these
    are 0."""
    total = tl.sum(each, axis=0)
    # Below the total, which a product that is rounded need not be.
    goal = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    at = tl.arange(0, SEGMENTS)
    segment = tl.min(tl.where(tl.cumsum(each, axis=0) > goal, at, SEGMENTS), axis=0)
    return goal, segment, tl.sum(tl.where(at < segment, each, 0), axis=0)


@triton.jit
def is_drawn(temperature, top_k, GREEDY_BELOW: tl.constexpr):
    """Whether a row's distribution matters: its largest score does not decide by itself."""
    return (GREEDY_BELOW < 0.0) | ((temperature >= GREEDY_BELOW) & (top_k != 1))


@triton.jit
def _thresholds(low, high, PIVOTS: tl.constexpr):
    """Of an interval (low, high] of keys, int64 [PIVOTS]; the last is ``high``."""
    return low + ((high - low) * (1 + tl.arange(0, PIVOTS))) // PIVOTS


@triton.jit
def _narrowed(intervals, above, row, segments, limit, SEGMENTS: tl.constexpr, PIVOTS: tl.constexpr):
    """An interval (low, high] that was looked at, narrowed: above ``low`` lies ``limit`` at least, above
    ``high`` less."""
    low, high = tl.load(intervals + row * 2), tl.load(intervals + row * 2 + 1)
    segment = tl.arange(0, SEGMENTS)
    at = (row * segments + segment)[:, None] * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    sums = tl.sum(tl.load(above + at, mask=(segment < segments)[:, None], other=0), axis=0)
    pivots = _thresholds(low, high, PIVOTS)
    inside = (sums.to(tl.float64) < limit) | (pivots == high)
    narrow = tl.maximum(low, tl.max(tl.where(inside, low, pivots), axis=0))
    return narrow, tl.min(tl.where(inside, pivots, high), axis=0)


@triton.jit
def _count_floor(intervals, above, row, n, segments, top_k, SEGMENTS: tl.constexpr, PIVOTS: tl.constexpr):
    """The least key that top-k keeps, from the last launch of the search for it."""
    floor = tl.full((), _LEAST_KEY, tl.int64)
    if (top_k > 0) & (top_k < n):
        _, floor = _narrowed(intervals, above, row, segments, top_k.to(tl.float64), SEGMENTS, PIVOTS)
    return floor.to(tl.int32)


@triton.jit
def floor_of(
    intervals, above, totals, row, n, segments, top_k, top_p, SEGMENTS: tl.constexpr, PIVOTS: tl.constexpr
):
    """The least key that top-k, and then top-p of what it leaves, keep, once both searches are over.

    intervals, above: of the last launches of both, as rows of the first and then rows of the second.
    """
    rows = tl.num_programs(0)
    floor = _count_floor(intervals, above, row, n, segments, top_k, SEGMENTS, PIVOTS)
    if top_p < 1.0:
        limit = top_p.to(tl.float64) * tl.sum(by_segment(totals, row, segments, 0, SEGMENTS), axis=0)
        _, key = _narrowed(intervals, above, rows + row, segments, limit, SEGMENTS, PIVOTS)
        floor = tl.maximum(floor, key.to(tl.int32))
    return floor


@triton.jit(do_not_specialize_on_alignment=["tops", "firsts"])
def _highest(logits, tops, firsts, stride, n, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores = logits + row * stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for part in tl.range(0, parts_of(segment, n, SEGMENT, BLOCK), num_stages=_STAGES):
        ids, each = load_scores(scores, segment * SEGMENT + part * BLOCK, n, BLOCK)
        bad |= (each != each).to(tl.int32)
        higher = each > best
        best = tl.where(higher, each, best)
        at = tl.where(higher, ids, at)
    top = tl.max(best, axis=0)
    to = row * tl.num_programs(1) + segment
    tl.store(firsts + to, tl.min(tl.where(best == top, at, 0x7FFFFFFF), axis=0))
    tl.store(tops + to, tl.where(tl.max(bad, axis=0) > 0, float("nan"), top))


@triton.jit(
    do_not_specialize=["step"],
    do_not_specialize_on_alignment=["tops", "temperature", "top_k", "top_p", "totals"],
)
def _narrow(
    logits,
    tops,
    temperature,
    top_k,
    top_p,
    counted,
    above_counted,
    before,
    above_before,
    now,
    above_now,
    totals,
    stride,
    n,
    step,
    COUNT: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A launch of the search by top-k (COUNT) or top-p: what a segment has above each threshold."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    searched = (k > 0) & (k < n) if COUNT else p < 1.0
    if (searched & is_drawn(t, k, GREEDY_BELOW)) == 0:
        return
    top = top_of(tops, row, segments, SEGMENTS)
    if (top - top) != 0.0:  # infinite or NaN
        return
    floor = tl.full((), _LEAST_KEY, tl.int32)
    if not COUNT:
        floor = _count_floor(counted, above_counted, row, n, segments, k, SEGMENTS, PIVOTS)
    low, high = tl.full((), _LEAST_KEY, tl.int64), key_of(top).to(tl.int64)
    if step > 0:
        limit = k.to(tl.float64)
        if not COUNT:
            limit = p.to(tl.float64) * tl.sum(by_segment(totals, row, segments, 0, SEGMENTS), axis=0)
        low, high = _narrowed(before, above_before, row, segments, limit, SEGMENTS, PIVOTS)
    pivots = _thresholds(low, high, PIVOTS).to(tl.int32)
    sums = tl.zeros((PIVOTS, BLOCK), tl.int32 if COUNT else tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for part in tl.range(0, parts_of(segment, n, SEGMENT, BLOCK), num_stages=_STAGES):
        ids, scores = load_scores(logits + row * stride, segment * SEGMENT + part * BLOCK, n, BLOCK)
        keys = key_of(scores)
        if COUNT:
            weights = (ids < n).to(tl.int32)
        else:
            weights = in_units(tl.where(keys >= floor, weigh(scores, top, t), 0.0))
            total += weights
        sums += tl.where(keys[None, :] > pivots[:, None], weights[None, :], 0)
    to = row * segments + segment
    tl.store(above_now + to * PIVOTS + tl.arange(0, PIVOTS), tl.sum(sums, axis=1).to(tl.int64))
    if segment == 0:
        tl.store(now + row * 2, low)
        tl.store(now + row * 2 + 1, high)
    if not COUNT:  # noqa: SIM102  # one is settled when it is compiled
        if step == 0:
            tl.store(totals + to, tl.sum(total, axis=0))


@triton.jit(
    do_not_specialize_on_alignment=["tops", "temperature", "top_k", "top_p", "min_p", "totals", "kept"]
)
def _add_up(
    logits,
    tops,
    temperature,
    top_k,
    top_p,
    min_p,
    intervals,
    above,
    totals,
    kept,
    stride,
    n,
    GREEDY_BELOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weight of what is kept of a segment."""
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    t, k = tl.load(temperature + row), tl.load(top_k + row)
    if is_drawn(t, k, GREEDY_BELOW) == 0:
        return
    top = top_of(tops, row, segments, SEGMENTS)
    if (top - top) != 0.0:  # infinite or NaN
        return
    floor = floor_of(
        intervals, above, totals, row, n, segments, k, tl.load(top_p + row), SEGMENTS, PIVOTS
    )  # fmt: skip
    least = tl.load(min_p + row)
    total = tl.zeros((BLOCK,), tl.int64)
    for part in tl.range(0, parts_of(segment, n, SEGMENT, BLOCK), num_stages=_STAGES):
        start = segment * SEGMENT + part * BLOCK
        _, weights = kept_weights(logits + row * stride, start, n, floor, least, top, t, BLOCK)
        total += in_units(weights)
    tl.store(kept + row * segments + segment, tl.sum(total, axis=0))


def searches(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    found: Found,
    *,
    greedy_below: float,
) -> Iterator[Launch]:
    """The launches behind which ``found`` says of each row what is the largest, and what is kept of it.

    For the arguments see `engine.kernels.sample.sample`.
    """
    grid = tuple(found.tops.shape)
    row: dict[str, Any] = {"logits": logits, "stride": logits.stride(0), "n": logits.shape[1]}
    row |= {"tops": found.tops}
    sizes: dict[str, Any] = {"SEGMENT": SEGMENT, "BLOCK": _BLOCK}
    yield Launch(_highest, grid, row | {"firsts": found.firsts}, sizes)
    row |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "totals": found.totals[0]}
    sizes = {"GREEDY_BELOW": greedy_below, **sizes_of(found)}
    both = zip(found.intervals, found.above, strict=True)  # of even launches and of odd ones
    pairs = [list(zip(intervals, above, strict=True)) for intervals, above in both]  # by search
    counted, above_counted = pairs[1][0]
    for search, counts in enumerate((True, False)):
        of_search = sizes | {"COUNT": counts}
        for step in range(_STEPS):
            now, before = pairs[step % 2][search], pairs[(step + 1) % 2][search]
            looked_at = {
                "counted": counted, "above_counted": above_counted, "before": before[0],
                "above_before": before[1], "now": now[0], "above_now": now[1], "step": step,
            }  # fmt: skip
            yield Launch(_narrow, grid, row | looked_at, of_search)
    row |= {"min_p": min_p, "kept": found.totals[1], **last_of(found)}
    yield Launch(_add_up, grid, row, sizes)


def sizes_of(found: Found) -> dict[str, int]:
    """What kernels that read what segments found are compiled for."""
    segments = next_power_of_2(found.tops.shape[1])
    return {"SEGMENTS": segments, "SEGMENT": SEGMENT, "BLOCK": _BLOCK, "PIVOTS": _PIVOTS}


def last_of(found: Found) -> dict[str, Tensor]:
    """What the last launches of both searches found, as `floor_of` takes it."""
    return {"intervals": found.intervals[1], "above": found.above[1]}
