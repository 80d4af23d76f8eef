"""A small chain model whose every distribution is known, and requests decoded with drafts from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.request import Request
from engine.speculation.base import Draft
from engine.speculation.limits import cut_draft, draft_room, until_end
from engine.speculation.verify import DraftSampler
from ipc.messages import Sampling

CPU = torch.device("cpu")
Z_AT_1E4 = 3.719  # a standard normal variable exceeds it once in 10,000 trials

Propose = Callable[[Request, int], Draft]


class Chain:
    """Logits of the next token by the last one: a model with a memory of one token."""

    def __init__(self, vocab_size: int, seed: int = 0, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.table = torch.randn(vocab_size, vocab_size, generator=generator) * spread

    def logits(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> Tensor:
        """What a step's forward pass gives: rows of all places of all requests."""
        last = [t for r, d in zip(requests, drafts, strict=True) for t in (r.token_ids[-1], *d.token_ids)]
        return self.table[last]


def request(rid: int, prompt: Sequence[int], **settings: object) -> Request:
    made = Request(rid, prompt, Sampling(**settings))  # type: ignore[arg-type]
    made.slot = rid
    return made


def generate(
    chain: Chain,
    sampler: DraftSampler,
    requests: Sequence[Request],
    propose: Propose,
    *,
    steps: int = 10_000,
    most: int = 4,
) -> tuple[int, int]:
    """Decode all requests together until each has ended. Returns drafted and accepted tokens.

    ``propose(request, k)`` drafts at most k tokens; the limits and ends are the product's own.
    """
    drafted = accepted = 0
    open_requests = list(requests)
    while open_requests and steps:
        steps -= 1
        drafts = []
        for r in open_requests:
            room = min(most, draft_room(r.num_tokens, r.max_total, r.max_total))
            drafts.append(cut_draft(propose(r, room), room, r.stop_ids, chain.vocab_size))
        out = sampler.verify(chain.logits(open_requests, drafts), open_requests, drafts)
        for r, draft, verified in zip(open_requests, drafts, out, strict=True):
            drafted += len(draft)
            accepted += verified.accepted
            count, finish = until_end(
                verified.token_ids,
                num_output=r.num_output,
                min_tokens=r.sampling.min_tokens,
                stop_ids=r.stop_ids,
                room=r.max_total - r.num_tokens,
            )
            r.token_ids += verified.token_ids[:count]
            if finish is not None:
                r.finish, r.state = finish, "finished"
        open_requests = [r for r in open_requests if r.finish is None]
    return drafted, accepted


def nothing(_request: Request, _k: int) -> Draft:
    """Propose nothing."""
    return Draft()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic of observed counts against probabilities, and its limit at one in 10,000."""
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    want = expected[kept] / expected.sum() * counts.sum()
    assert want.min() >= 5, "too few draws for the smallest cell"
    free = int(kept.sum()) - 1
    limit = free * (1 - 2 / (9 * free) + Z_AT_1E4 * math.sqrt(2 / (9 * free))) ** 3
    return float(((counts[kept] - want) ** 2 / want).sum()), limit
