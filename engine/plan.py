"""What the scheduler hands to the runner each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """``num_new`` tokens of ``request`` to compute, at positions [num_computed, num_computed + num_new).

    Its block table already covers them. It needs a sampled token when they reach ``num_tokens``.
    """

    request: Request
    num_new: int


@dataclass(slots=True)
class StepPlan:
    """One step: rows with one new token first, then the longer ones; and what planning it did.

    ``preempted`` and ``admitted`` are the requests whose state changed while planning.
    Token counts are of this step: ``prefill_tokens`` and ``decode_tokens`` add up to ``num_tokens``;
    ``recompute_tokens`` is the part of ``prefill_tokens`` that had been computed once before;
    ``query_tokens`` and ``hit_tokens`` are prefix-cache look-ups at first admission, not on a resume.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefill_requests: int = 0
    decode_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    reason: str = ""  # why nothing is scheduled although work waits

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens
