"""How much of a draft stays, one program a request.

Where the target chose a token at every place, a draft holds as far as it says the same (`match_drafts`).
Drafts that were drawn from known probabilities are judged by rejection sampling (arXiv 2211.17192,
2302.01318); the rules and the random numbers are those of `engine.speculation.rejection`: token x of a draft
stays with probability min(1, p(x) / q(x)); the first that does not is replaced by one drawn from
max(p - q, 0), and where all stay one more is drawn from p.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch, next_power_of_2
from engine.kernels.uniform import uniform

_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["ids", "tokens", "cu", "accepted", "own"])
def _match_drafts(ids, tokens, cu, accepted, own, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    first = tl.load(cu + request)
    drafted = tl.load(cu + request + 1) - first
    place = first + request  # each draft has one place more
    i = tl.arange(0, BLOCK)
    token = tl.load(tokens + first + i, mask=i < drafted, other=-1)
    chosen = tl.load(ids + place + i, mask=i < drafted, other=-1)
    differs = (token != chosen) | (token < 0)  # -1 pads a draft, and marks a place that is not finite
    kept = tl.min(tl.where(differs, i, BLOCK), axis=0)
    tl.store(accepted + request, kept)
    tl.store(own + request, tl.load(ids + place + kept))


def match_drafts(
    ids: Tensor, tokens: Tensor, cu_drafts: Tensor, accepted: Tensor, own: Tensor, *, max_drafted: int
) -> Launch:
    """How many tokens of each draft are those that were chosen, and the chosen one after them.

    ids: int64 [tokens + requests], as `engine.kernels.sample` chose them: draft r has the places from
    cu[r] + r on, one more than tokens, of which it has at most ``max_drafted``. For the other arguments see
    `rejection_sample`.
    """
    return Launch(
        _match_drafts,
        (own.shape[0],),
        {"ids": ids, "tokens": tokens, "cu": cu_drafts, "accepted": accepted, "own": own},
        {"BLOCK": next_power_of_2(max_drafted + 1)},
        num_warps=1,
    )


@triton.jit
def _rest(p_row, q_row, start, n, refused, BLOCK: tl.constexpr):
    """(ids, weights) of a part of the distribution that the token after the accepted ones is drawn from."""
    ids = start + tl.arange(0, BLOCK)
    p = tl.load(p_row + ids, mask=ids < n, other=0.0)
    q = tl.load(q_row + ids, mask=(ids < n) & (refused != 0), other=0.0)
    return ids, tl.maximum(p - q, 0.0)


@triton.jit
def _rest_total(p_row, q_row, n, refused, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        _, weights = _rest(p_row, q_row, start, n, refused, BLOCK)
        total += tl.sum(weights.to(tl.float64), axis=0)
    return total


@triton.jit
def _place_in_block(ids, weights, before, target):
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


@triton.jit(
    do_not_specialize_on_alignment=["tokens", "cu", "finite", "seeds", "positions", "accepted", "own"]
)
def _rejection_sample(
    target,
    proposal,
    tokens,
    cu,
    finite,
    seeds,
    positions,
    accepted,
    own,
    n,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(cu + request)
    drafted = tl.load(cu + request + 1) - first
    place = (first + request).to(tl.int64)  # each draft has one row more in the target
    seed = tl.load(seeds + request)
    position = tl.load(positions + request)
    kept = first * 0
    going = drafted > 0
    while going:
        token = tl.load(tokens + first + kept)
        there = token >= 0  # -1 pads a draft
        p = tl.load(target + (place + kept) * n + token, mask=there, other=0.0)
        q = tl.load(proposal + (first + kept).to(tl.int64) * n + token, mask=there, other=0.0)
        u = uniform(seed, position + kept, ACCEPT)
        stays = there & (u * q.to(tl.float64) < p.to(tl.float64)) & (tl.load(finite + place + kept) != 0)
        kept += stays.to(tl.int32)
        going = stays & (kept < drafted)
    p_row = target + (place + kept) * n
    refused = (kept < drafted).to(tl.int32)
    q_row = proposal + (first + tl.minimum(kept, tl.maximum(drafted - 1, 0))).to(tl.int64) * n
    if refused != 0:  # by padding nothing was proposed
        refused = (tl.load(tokens + first + kept) >= 0).to(tl.int32)
    total = _rest_total(p_row, q_row, n, refused, BLOCK)
    if (refused != 0) & (total <= 0.0):  # where p equals q but for rounding p itself is right
        refused = refused * 0
        total = _rest_total(p_row, q_row, n, refused, BLOCK)
    goal = uniform(seed, position + kept, RESIDUAL) * total
    start = first * 0
    found = start - 1
    before = total * 0.0
    while (found < 0) & (start < n):
        ids, weights = _rest(p_row, q_row, start, n, refused, BLOCK)
        found, before = _place_in_block(ids, weights, before, goal)
        start += BLOCK
    tl.store(accepted + request, kept)
    tl.store(own + request, found.to(tl.int64))


def rejection_sample(
    target: Tensor,
    proposal: Tensor,
    tokens: Tensor,
    cu_drafts: Tensor,
    finite: Tensor,
    seeds: Tensor,
    positions: Tensor,
    accepted: Tensor,
    own: Tensor,
    *,
    accept: int,
    residual: int,
) -> Launch:
    """How many tokens of each draft stay, ``accepted`` int32 [requests], and what follows, ``own`` int64.

    Draft r is tokens [cu[r], cu[r + 1]) (cu_drafts: int32 [requests + 1], from 0) of ``tokens`` int64 and of
    ``proposal`` float32 [tokens, n]; -1 pads it. Its rows in ``target`` float32 [tokens + requests, n] begin
    at cu[r] + r and are one more. Rows sum to 1. finite: int8 [tokens + requests], 0 ends a draft before that
    place. seeds: int64 [requests]; positions: int64 [requests], of the first place. accept, residual: the
    numbers of the two streams of random numbers.
    """
    n = target.shape[1]
    return Launch(
        _rejection_sample,
        (own.shape[0],),
        {
            "target": target,
            "proposal": proposal,
            "tokens": tokens,
            "cu": cu_drafts,
            "finite": finite,
            "seeds": seeds,
            "positions": positions,
            "accepted": accepted,
            "own": own,
            "n": n,
        },
        {"ACCEPT": accept, "RESIDUAL": residual, "BLOCK": min(_BLOCK, next_power_of_2(n))},
        num_warps=8,
    )


def reference_rejection_sample(
    target: Tensor,
    proposal: Tensor,
    tokens: list[int],
    lengths: list[int],
    finite: list[bool],
    accept: list[float],
    own: list[float],
) -> tuple[list[int], list[int]]:
    """How many tokens of each draft stay, and what follows, by the definition, in float64.

    Draft i has the next lengths[i] of ``tokens`` and of the rows of ``proposal``, and one row more of
    ``target``, ``finite``, ``accept`` and ``own``: the random numbers of each place.
    """
    kept, following = [], []
    first = 0
    for i, count in enumerate(lengths):
        place, stays = first + i, 0
        for token in tokens[first : first + count]:
            at = place + stays
            q = 0.0 if token < 0 else float(proposal[first + stays, token])
            if token < 0 or not finite[at] or not accept[at] * q < float(target[at, token]):
                break
            stays += 1
        rest = target[place + stays].double()
        if stays < count and tokens[first + stays] >= 0:
            residual = (rest - proposal[first + stays].double()).clamp(min=0.0)
            rest = residual if residual.sum() > 0 else rest
        running = rest.cumsum(0)
        passed = int((running <= own[place + stays] * running[-1]).sum())
        kept.append(stays)
        following.append(min(passed, int(rest.nonzero().max())))
        first += count
    return kept, following
