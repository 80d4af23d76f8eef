"""One token a row from logits, and the distribution that it is drawn from.

The rules are those of `engine.sampling`: temperature, once; top-k; top-p of what that leaves; min-p. A token
is the place at which the running sum of the weights passes a uniform number of the request's seed and
position. How rows are searched, by many programs each, says `engine.kernels.vocabulary`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch
from engine.kernels.uniform import uniform
from engine.kernels.vocabulary import (
    ALL_DRAWN,
    UNIT,
    Found,
    by_segment,
    first_of,
    floor_of,
    in_units,
    is_drawn,
    kept_weights,
    last_of,
    parts_of,
    searches,
    segment_of,
    sizes_of,
    top_of,
)

NOT_FINITE = -1
"""The id of a row whose largest logit is not finite."""


@triton.jit(
    do_not_specialize_on_alignment=[
        "tops", "firsts", "temperature", "top_k", "top_p", "min_p", "totals", "kept", "seeds", "positions",
        "ids",
    ]
)  # fmt: skip
def _draw(
    logits,
    tops,
    firsts,
    temperature,
    top_k,
    top_p,
    min_p,
    intervals,
    above,
    totals,
    kept,
    seeds,
    positions,
    ids,
    stride,
    n,
    GREEDY_BELOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's token, of which only the segment that it lies in is looked at."""
    row, segments = tl.program_id(0).to(tl.int64), (n + SEGMENT - 1) // SEGMENT
    t, k = tl.load(temperature + row), tl.load(top_k + row)
    top = top_of(tops, row, segments, SEGMENTS)
    chosen = first_of(tops, firsts, row, segments, SEGMENTS)
    if (top - top) != 0.0:  # infinite or NaN
        chosen = chosen * 0 - 1
    elif is_drawn(t, k, GREEDY_BELOW):
        each = by_segment(kept, row, segments, 0, SEGMENTS)
        number = uniform(tl.load(seeds + row), tl.load(positions + row), 0)
        goal, segment, before = segment_of(each, number, SEGMENTS)
        p, least = tl.load(top_p + row), tl.load(min_p + row)
        floor = floor_of(intervals, above, totals, row, n, segments, k, p, SEGMENTS, PIVOTS)
        chosen = chosen * 0 + 0x7FFFFFFF
        for part in range(parts_of(segment, n, SEGMENT, BLOCK)):
            start = segment * SEGMENT + part * BLOCK
            here, weights = kept_weights(logits + row * stride, start, n, floor, least, top, t, BLOCK)
            units = in_units(weights)
            passes = before + tl.cumsum(units, axis=0) > goal
            chosen = tl.minimum(chosen, tl.min(tl.where(passes, here, 0x7FFFFFFF), axis=0))
            before += tl.sum(units, axis=0)
    tl.store(ids + row, chosen.to(tl.int64))


@triton.jit(
    do_not_specialize_on_alignment=["tops", "temperature", "top_k", "top_p", "min_p", "totals", "kept"]
)
def _distribute(
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
    out,
    stride,
    n,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    top, least = top_of(tops, row, segments, SEGMENTS), tl.load(min_p + row)
    floor = floor_of(intervals, above, totals, row, n, segments, k, p, SEGMENTS, PIVOTS)
    total = tl.sum(by_segment(kept, row, segments, 0, SEGMENTS), axis=0).to(tl.float64)
    for part in range(parts_of(segment, n, SEGMENT, BLOCK)):
        start = segment * SEGMENT + part * BLOCK
        at, weights = kept_weights(logits + row * stride, start, n, floor, least, top, t, BLOCK)
        share = tl.where((top - top) == 0.0, weights.to(tl.float64) * UNIT / total, float("nan"))
        tl.store(out + row * n + at, share.to(tl.float32), mask=at < n)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ids: Tensor,
    found: Found,
    *,
    greedy_below: float,
) -> tuple[Launch, ...]:
    """The launches, one after the other, that choose ids (int64 [rows]) from float32 logits [rows,
    vocabulary], `NOT_FINITE` where no largest is.

    temperature, top_p, min_p: float32 [rows]; below ``greedy_below`` and for top_k 1 the first of the most
    likely tokens is taken. top_k: int32 [rows], 0 for all; equals at the border all stay. seeds: int64
    [rows], the bits of the unsigned seeds; positions: int64 [rows]. found: memory to work in, of that shape.
    """
    before = searches(logits, temperature, top_k, top_p, min_p, found, greedy_below=greedy_below)
    last = Launch(
        _draw,
        (len(logits),),
        {
            **_row(logits, temperature, top_k, top_p, min_p, found),
            "firsts": found.firsts,
            "seeds": seeds,
            "positions": positions,
            "ids": ids,
        },
        {"GREEDY_BELOW": greedy_below, **sizes_of(found)},
    )
    return *before, last


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
    found: Found,
) -> tuple[Launch, ...]:
    """The launches behind which the distributions that `sample` draws from are in ``out``, float32
    [rows, vocabulary], contiguous.

    For the arguments see `sample`; temperatures are above 0. A row whose largest logit is not finite is NaN.
    """
    before = searches(logits, temperature, top_k, top_p, min_p, found, greedy_below=ALL_DRAWN)
    last = Launch(
        _distribute,
        tuple(found.tops.shape),
        {**_row(logits, temperature, top_k, top_p, min_p, found), "out": out},
        sizes_of(found),
    )
    return *before, last


def _row(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, found: Found
) -> dict[str, Any]:
    """What is known of rows once they were searched."""
    return {
        "logits": logits,
        "stride": logits.stride(0),
        "n": logits.shape[1],
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "tops": found.tops,
        "totals": found.totals[0],
        "kept": found.totals[1],
        **last_of(found),
    }


def reference_probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """The distribution of one row of logits, in float64: sorted, summed and cut as the definitions say."""
    weights = ((logits.double() - logits.max().double()) / temperature).exp()
    kept = weights
    if 0 < top_k < len(logits):
        floor = logits.topk(top_k).values[-1]
        kept = kept.masked_fill(logits < floor, 0.0)
    if top_p < 1.0:
        values, order = logits.sort(descending=True, stable=True)
        ordered = kept[order]
        # What lies above an entry, equals not counted.
        first_equal = (values.unsqueeze(0) == values.unsqueeze(1)).int().argmax(0)
        before = (ordered.cumsum(0) - ordered)[first_equal]
        within = (before < top_p * ordered.sum()) | (values == values[0])
        kept = kept.masked_fill(~within[order.argsort()], 0.0)
    kept = kept.masked_fill(weights < min_p, 0.0)
    return kept / kept.sum()
