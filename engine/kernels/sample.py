"""One token a row from logits, and the distribution that it is drawn from.

The rules are those of `engine.sampling`: temperature, once; top-k; top-p of what that leaves; min-p. A token
is the place at which the running sum of the weights passes a uniform number of the request's seed and
position.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch, next_power_of_2
from engine.kernels.uniform import uniform
from engine.kernels.vocabulary import PIVOTS, cut, highest, kept_weights, place_in_block, total_from

_BLOCK = 1024  # scores that a program looks at at once; twice as many spill registers
NOT_FINITE = -1
"""The id of a row whose largest logit is not finite."""


@triton.jit(
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "seeds", "positions", "ids"]
)
def _sample(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    ids,
    stride,
    n,
    GREEDY_BELOW: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * stride
    top, best = highest(scores, n, BLOCK)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    chosen = best
    if (top - top) != 0.0:  # infinite or NaN
        chosen = best * 0 - 1
    elif (t >= GREEDY_BELOW) & (k != 1):
        floor = cut(scores, n, top, t, k, tl.load(top_p + row), PIVOTS, BLOCK)
        least = tl.load(min_p + row)
        total = total_from(scores, n, floor, least, top, t, BLOCK)
        target = uniform(tl.load(seeds + row), tl.load(positions + row), 0) * total
        start = best * 0
        found = start - 1
        before = total * 0.0
        while (found < 0) & (start < n):
            at, weights = kept_weights(scores, start, n, floor, least, top, t, BLOCK)
            found, before = place_in_block(at, weights, before, target)
            start += BLOCK
        chosen = found
    tl.store(ids + row, chosen.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _probabilities(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    out,
    stride,
    n,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * stride
    top, _ = highest(scores, n, BLOCK)
    t = tl.load(temperature + row)
    floor = cut(scores, n, top, t, tl.load(top_k + row), tl.load(top_p + row), PIVOTS, BLOCK)
    least = tl.load(min_p + row)
    total = total_from(scores, n, floor, least, top, t, BLOCK)
    for start in range(0, n, BLOCK):
        at, weights = kept_weights(scores, start, n, floor, least, top, t, BLOCK)
        tl.store(out + row * n + at, (weights.to(tl.float64) / total).to(tl.float32), mask=at < n)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ids: Tensor,
    *,
    greedy_below: float,
) -> Launch:
    """Choose ids (int64 [rows]) from float32 logits [rows, vocabulary], `NOT_FINITE` where no largest is.

    temperature, top_p, min_p: float32 [rows]; below ``greedy_below`` and for top_k 1 the first of the most
    likely tokens is taken. top_k: int32 [rows], 0 for all; equals at the border all stay. seeds: int64
    [rows], the bits of the unsigned seeds; positions: int64 [rows].
    """
    rows, n = logits.shape
    return Launch(
        _sample,
        (rows,),
        {
            "logits": logits,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seeds": seeds,
            "positions": positions,
            "ids": ids,
            "stride": logits.stride(0),
            "n": n,
        },
        {"GREEDY_BELOW": greedy_below, "PIVOTS": PIVOTS, "BLOCK": min(_BLOCK, next_power_of_2(n))},
        num_warps=8,
    )


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor
) -> Launch:
    """The distributions that `sample` draws from, float32 ``out`` [rows, vocabulary], contiguous.

    For the arguments see `sample`; temperatures are above 0, logits finite or -inf.
    """
    rows, n = logits.shape
    return Launch(
        _probabilities,
        (rows,),
        {
            "logits": logits,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "out": out,
            "stride": logits.stride(0),
            "n": n,
        },
        {"PIVOTS": PIVOTS, "BLOCK": min(_BLOCK, next_power_of_2(n))},
        num_warps=8,
    )


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
