"""Rejection sampling of drafts that were drawn from known distributions (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.draw import inverse_cdf


def reject(
    target: Tensor,
    proposal: Tensor,
    tokens: Sequence[int],
    lengths: Sequence[int],
    finite: Tensor,
    u_accept: Tensor,
    u_own: Tensor,
) -> tuple[list[int], list[int]]:
    """How much of each draft stays, and the token of the target's own that follows it.

    Draft i has lengths[i] >= 1 tokens, neighbours in ``tokens`` and in ``proposal`` [all tokens, n],
    and lengths[i] + 1 neighbouring rows of ``target`` [all tokens + drafts, n]; rows sum to 1. A draft ends
    before a place whose ``finite`` [rows] is false. u_accept and u_own: float64 [rows], one number in [0, 1)
    for each place and purpose, independent of each other and of how the draft was drawn.

    The host waits for the device twice.
    """
    device = target.device
    sizes = np.array(lengths)
    draft_first = sizes.cumsum() - sizes  # of each draft, in ``tokens``
    row_first = draft_first + np.arange(len(sizes))  # and in ``target``: each draft has one row more
    places = np.arange(int(sizes.sum())) + np.arange(len(sizes)).repeat(sizes)
    at = torch.from_numpy(places).to(device)
    ids = torch.tensor(tokens, device=device)
    p = target[at, ids].double()
    q = proposal.gather(1, ids.unsqueeze(1)).squeeze(1).double()
    stays = ((u_accept[at] * q < p) & finite[at]).tolist()
    accepted = [
        next((i for i in range(k) if not stays[first + i]), k)
        for first, k in zip(draft_first.tolist(), lengths, strict=True)
    ]
    last = torch.from_numpy(row_first + np.array(accepted)).to(device)
    rest = target[last]
    refused = [i for i, (kept, k) in enumerate(zip(accepted, lengths, strict=True)) if kept < k]
    if refused:
        drafted = torch.tensor([int(draft_first[i]) + accepted[i] for i in refused], device=device)
        where = torch.tensor(refused, device=device)
        residual = (rest[where] - proposal[drafted]).clamp_(min=0.0)
        # Nothing is left where p equals q but for rounding; then p itself is right.
        empty = residual.sum(dim=-1, keepdim=True) <= 0
        rest[where] = torch.where(empty, rest[where], residual)
    own: list[int] = inverse_cdf(rest, u_own[last]).tolist()
    return accepted, own
