"""A request at each place of its draft, as the sampler is to see it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.penalties import SampledRequest, has_penalty
from engine.speculation.base import Draft
from ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A request as if the first tokens of its draft, ``drafted``, were part of its output already.

    ``num_tokens`` counts them; ``token_ids`` are the verified tokens alone, which all rows of a request
    share. ``drafted`` is only filled for a request with penalties, which count them.
    """

    rid: int
    slot: int
    sampling: Sampling
    seed: int
    num_prompt: int
    num_tokens: int
    token_ids: list[int]
    drafted: Sequence[int] = ()


def draft_rows(request: SampledRequest, draft: Draft) -> list[DraftRow]:
    """One row for each place that the step gives logits for: before each token of the draft, and after it."""
    counted = has_penalty(request.sampling)
    return [
        DraftRow(
            request.rid,
            request.slot,
            request.sampling,
            request.seed,
            request.num_prompt,
            request.num_tokens + i,
            request.token_ids,
            draft.token_ids[:i] if counted else (),
        )
        for i in range(len(draft) + 1)
    ]
