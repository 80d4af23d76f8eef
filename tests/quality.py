"""What a lossy change does to a model: teacher-forced comparison with the model as it was, on one text.

Both models read the same text, and at each position their distributions of the next token are compared. The
text is given, so one early difference does not make everything after it differ, as it would in generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import TextRow
from engine.runner import ModelRunner

ROWS = 64  # positions that are compared at once: a vocabulary is wide


@dataclass(frozen=True, slots=True)
class Quality:
    """Over ``positions`` positions of a text.

    mean_kl_nats, p99_kl_nats: divergence of the changed distribution from the reference, KL(reference ||
    changed), its mean and 99th percentile. top1_agreement: the part of the positions where both hold the same
    token for the most likely. perplexity_ratio: the changed model's perplexity on the text over that of the
    reference.
    """

    positions: int
    mean_kl_nats: float
    p99_kl_nats: float
    top1_agreement: float
    perplexity_ratio: float


def log_probabilities(
    runner: ModelRunner, ids: Sequence[int], *, kv_dtype: str = "model", window: int = 0, block_size: int = 16
) -> Tensor:
    """Log-probabilities of every next token, float32 [len(ids), vocab_size], under these settings.

    The runner's pool is replaced by one for the text, and must not be in use.
    """
    runner.set_window(window)
    runner.allocate_kv(-(-len(ids) // block_size), block_size, kv_dtype)
    parts = [torch.log_softmax(logits, dim=-1).cpu() for logits in score(runner, ids)]
    return torch.cat(parts)


def compare(reference: Tensor, changed: Tensor, ids: Sequence[int]) -> Quality:
    """Quality of ``changed`` against ``reference``, log-probabilities [len(ids), vocab_size] of one text."""
    kl, same = [], 0
    for first in range(0, len(ids), ROWS):
        p, q = reference[first : first + ROWS].double(), changed[first : first + ROWS].double()
        kl.append((p.exp() * (p - q)).sum(dim=-1))
        same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
    divergence = torch.cat(kl).clamp(min=0)  # rounding may leave it just below
    following = torch.tensor(ids[1:]).unsqueeze(1)
    lost = reference[:-1].gather(1, following) - changed[:-1].gather(1, following)
    return Quality(
        positions=len(ids),
        mean_kl_nats=float(divergence.mean()),
        p99_kl_nats=float(divergence.quantile(0.99)),
        top1_agreement=same / len(ids),
        perplexity_ratio=math.exp(float(lost.double().mean())),
    )


def score(runner: ModelRunner, ids: Sequence[int], chunk: int = 256) -> Iterator[torch.Tensor]:
    """Float32 logits of every position of a text, [up to chunk, vocab_size] at a time, in order.

    The text is run through the pool as it is, in its precision and with its windows, and lies in its first
    blocks afterwards: not beside requests. ValueError if the pool or the model's context is too short for it.
    """
    kv = runner.kv
    assert kv is not None
    blocks = -(-len(ids) // kv.block_size)
    if len(ids) > runner.max_len or blocks > kv.num_blocks:
        raise ValueError(
            f"a text of {len(ids)} tokens needs {blocks} blocks of {kv.block_size}, the pool has "
            f"{kv.num_blocks}; the longest context is {runner.max_len} tokens"
        )
    row = TextRow(list(ids), list(range(blocks)))
    while row.num_computed < len(ids):
        row.num_new = min(chunk, len(ids) - row.num_computed)
        prepared = runner.prepare([row])
        prepared.fill()
        with torch.inference_mode():
            logits = runner.forward(prepared, None)
        yield logits
        row.num_computed += row.num_new
