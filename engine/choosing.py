"""What the logits of a step come to: the next tokens of its requests, and which of these must fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.sampling import Sampled
from engine.speculation.verify import DraftSampler, Verified
from engine.step import StepOutput


def choose_tokens(
    sampler: DraftSampler, logits: Tensor, batch: Batch, kv: KVCache, out: StepOutput, padded: Tensor | None
) -> None:
    """Put the tokens that float32 logits [rows, vocab_size] come to into ``out``; the logits are changed.

    ``padded``: ids that no token belongs to, which are never chosen. A request whose logits are not finite
    gets none, and its blocks are cleaned.
    """
    if not batch.sampled:
        return
    if padded is not None:
        logits.index_fill_(1, padded, float("-inf"))
    if any(batch.drafts):
        put_verified(sampler.verify(logits, batch.sampled_rows, batch.drafts), batch, kv, out)
    else:
        put_sampled(sampler.sample(logits, batch.sampled_rows), batch, kv, out)


def put_sampled(sampled: Sampled, batch: Batch, kv: KVCache, out: StepOutput) -> None:
    """Put one token for each request that gets any into ``out``."""
    for i, token, logprob in zip(batch.sampled, sampled.token_ids, sampled.logprobs, strict=True):
        if token is not None:
            out.token_ids[i], out.logprobs[i] = [token], [logprob]
        else:
            out.nonfinite[i] = True
            kv.scrub(batch.blocks_of(i))


def fail_nonfinite(finite: Tensor, batch: Batch, kv: KVCache, out: StepOutput) -> None:
    """Fail the requests of whose tokens one that counts is not finite: finite [tokens].

    A rejected draft's do not count; what they wrote is cleaned all the same.
    """
    if bool(finite.all()):
        return
    rows = batch.rows
    bad = (~finite).nonzero().squeeze(1).cpu().numpy()
    # The first bad token of each row: if that one was drafted and rejected, so were those behind it.
    at, first = np.unique(np.searchsorted(rows.starts, bad, side="right") - 1, return_index=True)
    for row, token in zip(at.tolist(), bad[first].tolist(), strict=True):
        entry = batch.order[row]
        if not out.nonfinite[entry]:
            kv.scrub(batch.blocks_of(entry))
        rejected = batch.drafted[row] - out.accepted[entry]
        if token < rows.starts[row] + rows.num_new[row] - rejected:
            out.token_ids[entry], out.logprobs[entry] = [], []
            out.accepted[entry], out.nonfinite[entry] = 0, True


def put_verified(found: Sequence[Verified], batch: Batch, kv: KVCache, out: StepOutput) -> None:
    """Put the tokens into ``out`` where some requests have drafts."""
    for i, verified in zip(batch.sampled, found, strict=True):
        out.token_ids[i], out.logprobs[i] = verified.token_ids, verified.logprobs
        out.accepted[i], out.nonfinite[i] = verified.accepted, verified.nonfinite
        if verified.nonfinite or verified.nonfinite_beyond:
            kv.scrub(batch.blocks_of(i))
