"""How much of a draft stays, and the token that follows what does.

Where the target chose a token at every place, a draft holds as far as it says the same (`match_drafts`).
Drafts that were drawn from known probabilities are judged by rejection sampling (arXiv 2211.17192,
2302.01318); the rules and the random numbers are those of `engine.speculation.rejection`: token x of a draft
stays with probability min(1, p(x) / q(x)); the first that does not is replaced by one drawn from
max(p - q, 0), and where all stay one more is drawn from p.

What stays is settled by a program a request, which looks at a few numbers. What follows takes whole rows:
they are cut into segments as in `engine.kernels.vocabulary`, each a program of its own, and their sums are of
whole numbers, probabilities in units of 2^-62, so that no token follows from how its row is cut.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch, cdiv, next_power_of_2
from engine.kernels.uniform import uniform
from engine.kernels.vocabulary import by_segment, segment_of

SEGMENT = 2048  # probabilities of a program
_DRAFTED = 16  # tokens of a draft that are looked at at once
_UNIT = tl.constexpr(float(1 << 62))  # a probability of 1; rows that add up to less than 2 fit


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


@triton.jit(do_not_specialize_on_alignment=["tokens", "cu", "finite", "seeds", "positions", "accepted"])
def _accept(
    target,
    proposal,
    tokens,
    cu,
    finite,
    seeds,
    positions,
    accepted,
    n,
    ACCEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(cu + request).to(tl.int64)
    drafted = tl.load(cu + request + 1) - first
    place = first + request  # each draft has one row more in the target
    seed, position = tl.load(seeds + request), tl.load(positions + request)
    kept = first * 0
    going = drafted > 0
    while going:
        i = kept + tl.arange(0, BLOCK)
        here = i < drafted
        token = tl.load(tokens + first + i, mask=here, other=-1)
        there = token >= 0  # -1 pads a draft
        p = tl.load(target + (place + i) * n + token, mask=there, other=0.0)
        q = tl.load(proposal + (first + i) * n + token, mask=there, other=0.0)
        good = tl.load(finite + place + i, mask=here, other=0) != 0
        u = uniform(seed, position + i, ACCEPT)
        stays = there & good & (u * q.to(tl.float64) < p.to(tl.float64))
        count = tl.min(tl.where(stays, BLOCK, tl.arange(0, BLOCK)), axis=0)
        kept += count
        going = (count == BLOCK) & (kept < drafted)
    tl.store(accepted + request, kept.to(tl.int32))


@triton.jit
def _rows_behind(target, proposal, tokens, cu, accepted, request, n):
    """(row of the target behind the tokens that stay, the proposal's there, whether that one was refused)."""
    first = tl.load(cu + request).to(tl.int64)
    drafted = tl.load(cu + request + 1) - first
    kept = tl.load(accepted + request)
    at = first + kept
    # By padding nothing was proposed.
    refused = tl.load(tokens + at, mask=kept < drafted, other=-1) >= 0
    return target + (at + request) * n, proposal + tl.where(refused, at, 0) * n, refused


@triton.jit
def _weights(p_row, q_row, segment, n, refused, SEGMENT: tl.constexpr):
    """(ids, what p has and q has not, all of p) of a segment; the same twice if nothing was refused."""
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    p = tl.load(p_row + ids, mask=ids < n, other=0.0)
    q = tl.load(q_row + ids, mask=(ids < n) & refused, other=0.0)
    # Not a maximum: of NaN that is one or the other, and as a whole number NaN could be any.
    rest, whole = tl.where(p > q, p - q, 0.0), tl.where(p > 0.0, p, 0.0)
    return ids, (rest * _UNIT).to(tl.int64), (whole * _UNIT).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["tokens", "cu", "accepted", "sums"])
def _add_up_rest(target, proposal, tokens, cu, accepted, sums, n, SEGMENT: tl.constexpr):
    request, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    p_row, q_row, refused = _rows_behind(target, proposal, tokens, cu, accepted, request, n)
    _, rest, whole = _weights(p_row, q_row, segment, n, refused, SEGMENT)
    to = sums + request * 2 * segments + segment
    tl.store(to, tl.sum(rest, axis=0))
    tl.store(to + segments, tl.sum(whole, axis=0))


@triton.jit(do_not_specialize_on_alignment=["tokens", "cu", "seeds", "positions", "accepted", "own", "sums"])
def _draw_rest(
    target,
    proposal,
    tokens,
    cu,
    seeds,
    positions,
    accepted,
    own,
    sums,
    n,
    RESIDUAL: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """What follows, of which only the segment that it lies in is looked at."""
    request, segments = tl.program_id(0).to(tl.int64), (n + SEGMENT - 1) // SEGMENT
    p_row, q_row, refused = _rows_behind(target, proposal, tokens, cu, accepted, request, n)
    rest = by_segment(sums, request * 2, segments, 0, SEGMENTS)
    whole = by_segment(sums, request * 2 + 1, segments, 0, SEGMENTS)
    is_left = tl.sum(rest, axis=0) > 0  # where p equals q but for rounding p itself is right
    position, kept = tl.load(positions + request), tl.load(accepted + request)
    number = uniform(tl.load(seeds + request), position + kept, RESIDUAL)
    goal, segment, before = segment_of(tl.where(is_left, rest, whole), number, SEGMENTS)
    ids, left, _ = _weights(p_row, q_row, segment, n, refused & is_left, SEGMENT)
    passes = before + tl.cumsum(left, axis=0) > goal
    found = tl.min(tl.where(passes, ids, 0x7FFFFFFF), axis=0)
    # From a row of nothing but zeros, or of NaN, none can be drawn.
    tl.store(own + request, tl.where(goal >= 0, found, -1).to(tl.int64))


def sums_for(requests: int, n: int, device: torch.device) -> Tensor:
    """Memory for what `rejection_sample` finds of each segment, for rows of ``n`` probabilities.

    int64 [requests, 2, segments]: what the target has and the proposal has not, and all of the target.
    """
    return torch.empty(requests, 2, cdiv(n, SEGMENT), dtype=torch.int64, device=device)


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
    sums: Tensor,
    *,
    accept: int,
    residual: int,
) -> tuple[Launch, ...]:
    """The launches, one after the other, that find how many tokens of each draft stay, ``accepted`` int32
    [requests], and what follows, ``own`` int64; -1 where the target's row is no distribution.

    Draft r is tokens [cu[r], cu[r + 1]) (cu_drafts: int32 [requests + 1], from 0) of ``tokens`` int64 and of
    ``proposal`` float32 [tokens, n], contiguous; -1 pads it. Its rows in ``target`` float32
    [tokens + requests, n], contiguous, begin at cu[r] + r and are one more. Rows sum to 1. finite: int8
    [tokens + requests], 0 ends a draft before that place. seeds: int64 [requests]; positions: int64
    [requests], of the first place. sums: memory to work in, see `sums_for`. accept, residual: the numbers of
    the two streams of random numbers.
    """
    requests, _, segments = sums.shape
    rows: dict[str, Any] = {"target": target, "proposal": proposal, "n": target.shape[1]}
    rows |= {"tokens": tokens, "cu": cu_drafts, "accepted": accepted}
    drawn = {"seeds": seeds, "positions": positions}
    sizes = {"SEGMENT": SEGMENT}
    return (
        Launch(
            _accept,
            (requests,),
            rows | drawn | {"finite": finite},
            {"ACCEPT": accept, "BLOCK": _DRAFTED},
            num_warps=1,
        ),
        Launch(_add_up_rest, (requests, segments), rows | {"sums": sums}, sizes),
        Launch(
            _draw_rest,
            (requests,),
            rows | drawn | {"own": own, "sums": sums},
            {"RESIDUAL": residual, "SEGMENTS": next_power_of_2(segments), **sizes},
        ),
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
