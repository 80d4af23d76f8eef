"""Drawing one token a row from a distribution, and finding its largest.

Everything here is a pure function of scores, settings, seeds and positions, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.messages import Sampling

SEGMENTS = 512  # a long row is reduced in two stages, over about this many segments first
SPARE_TIES = 32  # equals at the border of top_k that are looked for among the most likely tokens
MAX_ROUNDS = 32  # of drawing for top-p; then the row's most likely token is taken

U64s = NDArray[np.uint64]
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# Of Philox 4x32: what words 0 and 2 of the counter are multiplied by, and by how much the key has grown
# in each round.
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_GROWTH = np.array([[[i * 0x9E3779B9], [i * 0xBB67AE85]] for i in range(10)], dtype=np.uint64)


def uniform(seeds: U64s, positions: U64s, draw: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position: 53 bits of Philox 4x32-10.

    The key is the seed, the counter the position and ``draw``, which numbers further numbers of the same
    pair and is below 2^32.
    """
    even, odd = np.zeros((2, len(seeds)), dtype=np.uint64), np.zeros((2, len(seeds)), dtype=np.uint64)
    np.bitwise_and(positions, _LOW, even[0])
    np.right_shift(positions, _HALF, odd[0])
    even[1] = draw
    philox(even, odd, np.array((seeds & _LOW, seeds >> _HALF)))
    bits: U64s = (odd[0] << _HALF | even[0]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(even: U64s, odd: U64s, key: U64s) -> None:
    """Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) in place: counters become what follows from them.

    even, odd: [2, n], words 0 and 2, and words 1 and 3 of each counter; key: [2, n]. All hold 32 bits. It
    runs with every step on the host, and for few rows: what counts is how often a round calls numpy.
    """
    product = np.empty_like(even)
    crossed = product[::-1]  # what comes of word 0 goes on in word 2 and the other way around
    for round_key in (key + _GROWTH) & _LOW:
        np.multiply(even, _FACTORS, product)
        np.right_shift(crossed, _HALF, even)
        np.bitwise_xor(even, odd, even)
        np.bitwise_xor(even, round_key, even)
        np.bitwise_and(crossed, _LOW, odd)


def max_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its first index of each row of float32 x [rows, n]. NaN counts as largest.

    On a CPU numpy searches, which takes a fifth of torch's time for one row and for many: it keeps the index
    in vectors, and wakes no second thread.
    """
    if not x.is_cpu:
        return max_in_two_stages(x)
    at = torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.gather(-1, at.unsqueeze(-1)).squeeze(-1), at


def max_in_two_stages(x: Tensor) -> tuple[Tensor, Tensor]:
    """`max_of_rows` where reading everything with a plain maximum is far faster than with indices: the second
    stage searches one segment."""
    rows, n = x.shape
    width = _segment_width(n)
    if width is None:
        values, at = x.max(dim=-1)
        return values, at
    parts = x.reshape(rows, n // width, width)
    segment = parts.amax(dim=-1).argmax(dim=-1)
    inside = parts[torch.arange(rows, device=x.device), segment]
    values, at = inside.max(dim=-1)
    return values, segment * width + at


def draw_top_k(
    scores: Tensor, highest: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s
) -> Tensor:
    """Draw ids [rows] from softmax(scores / T) cut to top_k >= 1, then by top-p, then by min-p.

    Equals at the border of a cut all stay, as in transformers. The draw runs over the ids in their order, so
    that without top-p it is that of `draw_all`. scores: [rows, n], finite or -inf; highest: [rows], the
    largest of each row, finite.
    """
    n, device = scores.shape[1], scores.device
    top_k = [min(s.top_k, n) for s in settings]
    values, ids = scores.topk(min(n, max(top_k) + SPARE_TIES), dim=-1)
    rank = torch.arange(values.shape[1], device=device)
    border = values.gather(1, torch.tensor(top_k, device=device).unsqueeze(1) - 1)
    # How far a row is looked at depends on no other row; where it ends in equals there may be more of them.
    looked = torch.tensor([min(k + SPARE_TIES, n) for k in top_k], device=device).unsqueeze(1)
    tied = (values.gather(1, looked - 1) == border) & (looked < n) & border.isfinite()
    weights = _exponentials(values, highest, settings)
    weights.masked_fill_((values < border) | (rank >= looked), 0.0)
    if any(s.top_p < 1.0 for s in settings):
        total, before = totals(weights)
        # Of equals none is less likely than another: what stands before the first counts for all.
        new = torch.ones_like(weights, dtype=torch.bool)
        new[:, 1:] = values[:, 1:] != values[:, :-1]
        before = before.gather(1, torch.where(new, rank, 0).cummax(dim=-1).values)
        weights.masked_fill_(before >= _column(settings, "top_p", device) * total, 0.0)
    if any(s.min_p > 0.0 for s in settings):
        weights.masked_fill_(weights < _column(settings, "min_p", device).float(), 0.0)
    ids, order = ids.sort(dim=-1)
    u = torch.from_numpy(uniform(seeds, positions)).to(device)
    drawn = ids.gather(1, inverse_cdf(weights.gather(1, order), u).unsqueeze(1)).squeeze(1)
    many: list[int] = tied.squeeze(1).nonzero().squeeze(1).tolist()
    if many:
        at = torch.tensor(many, device=device)
        drawn[at] = draw_all(
            scores[at], highest[at], [settings[i] for i in many], seeds[many], positions[many]
        )
    return drawn


def draw_all(
    scores: Tensor, highest: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s
) -> Tensor:
    """Draw ids [rows] from softmax(scores / T) cut by top_k, top-p and min-p. Overwrites scores.

    Nothing is sorted for top-p: a token is drawn from all and taken if those more likely than it do not
    reach top-p already; else it and all that are as unlikely are dropped and another is drawn. What is taken
    so is distributed as the cut distribution is. (Rejection with a rising pivot, as in FlashInfer.)
    """
    device = scores.device
    cut_top_k(scores, settings)
    weights = _exponentials(scores, highest, settings, in_place=True)
    allowed = weights
    if any(s.min_p > 0.0 for s in settings):
        floor = _column(settings, "min_p", device).float()
        allowed = torch.where(weights >= floor, weights, 0.0)
    ids = inverse_cdf(allowed, torch.from_numpy(uniform(seeds, positions)).to(device))
    open_rows = [i for i, s in enumerate(settings) if s.top_p < 1.0]
    if open_rows:
        limits = _column(settings, "top_p", device) * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
        _redraw(ids, open_rows, weights, allowed, limits, seeds, positions)
    return ids


def _redraw(
    ids: Tensor,
    rows: list[int],
    weights: Tensor,
    allowed: Tensor,
    limits: Tensor,
    seeds: U64s,
    positions: U64s,
) -> None:
    """Replace ids in place until each of ``rows`` is within top-p, whose weight is ``limits`` [rows, 1]."""
    for draw in range(1, MAX_ROUNDS + 1):
        at = torch.tensor(rows, device=ids.device)
        whole = weights[at]
        pivot = whole.gather(1, ids[at].unsqueeze(1))
        above = torch.where(whole > pivot, whole, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        refused = (above >= limits[at]).squeeze(1).nonzero().squeeze(1)
        left = refused.tolist()
        if not left:
            return
        rows = [rows[i] for i in left]
        at = at[refused]
        rest = allowed[at]
        rest.masked_fill_(rest <= pivot[refused], 0.0)
        if draw == MAX_ROUNDS:
            ids[at] = rest.argmax(dim=-1)
        else:
            u = torch.from_numpy(uniform(seeds[rows], positions[rows], draw)).to(ids.device)
            ids[at] = inverse_cdf(rest, u)


def cut_top_k(scores: Tensor, settings: Sequence[Sampling]) -> None:
    """Set to -inf what lies below the top_k-th score of its row [rows, n]. Equals at the border all stay."""
    n = scores.shape[1]
    rows = [i for i, s in enumerate(settings) if 0 < s.top_k < n]
    if not rows:
        return
    top_k = [settings[i].top_k for i in rows]
    at = torch.tensor(rows, device=scores.device)
    some = scores[at]
    last = torch.tensor(top_k, device=scores.device).unsqueeze(1) - 1
    border = some.topk(max(top_k), dim=-1).values.gather(1, last)
    scores[at] = some.masked_fill_(some < border, float("-inf"))


def _exponentials(
    scores: Tensor, highest: Tensor, settings: Sequence[Sampling], *, in_place: bool = False
) -> Tensor:
    """exp((scores - highest) / T): softmax without its division, so that the most likely one has weight 1."""
    temperature = _column(settings, "temperature", scores.device).float()
    out = scores.sub_(highest.unsqueeze(1)) if in_place else scores - highest.unsqueeze(1)
    return out.div_(temperature).exp_()


def _column(settings: Sequence[Sampling], name: str, device: torch.device) -> Tensor:
    """One number of each row's settings, float64 [rows, 1]."""
    values = [getattr(s, name) for s in settings]
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def totals(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum [rows, 1] of each row, and what stands before each of its entries."""
    exact = weights.double()
    running = exact.cumsum(dim=-1)
    return running[:, -1:], running - exact


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The index at which the running sum of each row of ``weights`` passes the part ``u`` of its total.

    weights: [rows, n], 0 or more, not all 0 in a row; an index of weight 0 is never returned. u: float64
    [rows], in [0, 1). Sums are float64 and run over segments first, then within one.
    """
    rows, n = weights.shape
    width = _segment_width(n) or n
    parts = weights.reshape(rows, n // width, width)
    sums = parts.sum(dim=-1).double()
    running = sums.cumsum(dim=-1)
    target = u.unsqueeze(1) * running[:, -1:]
    segment = _first_above(running, target, sums)
    at = torch.arange(rows, device=weights.device)
    inside = parts[at, segment].double()
    before = (running[at, segment] - sums[at, segment]).unsqueeze(1)
    index = _first_above(inside.cumsum(dim=-1) + before, target, inside)
    return segment * width + index


def _first_above(running: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """The first index [rows] whose running sum is above target [rows, 1], else the last with a weight."""
    n = weights.shape[-1]
    last = n - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    found = torch.searchsorted(running, target, right=True).squeeze(1)
    return torch.minimum(found, last)


def _segment_width(n: int) -> int | None:
    """A width that cuts n into equal segments, or None where n is short or has no such divisor."""
    if n < 8 * SEGMENTS:
        return None
    return next((w for w in range(-(-n // SEGMENTS), 4 * n // SEGMENTS + 1) if n % w == 0), None)
