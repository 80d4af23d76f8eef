"""What the scheduler hands to the runner each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.request import Request
from engine.speculation.base import NO_DRAFT, Draft

if TYPE_CHECKING:
    from engine.speculation.launched import LaunchedDrafts

Arena = Literal["swap", "prefix"]
Direction = Literal["out", "in"]
PreemptReason = Literal["blocks", "priority", "rebuild"]
PreemptMode = Literal["recompute", "swap"]


@dataclass(slots=True)
class ScheduledRequest:
    """``num_new`` tokens of ``request`` to compute, at positions [num_computed, num_computed + num_new).

    Its block table already covers them. It needs a sampled token when they reach ``num_known``.
    ``recompute`` of the tokens were computed once before. The tokens of ``draft`` are computed behind them;
    how many of them hold is known when the step is done.
    """

    request: Request
    num_new: int
    recompute: int = 0
    draft: Draft = NO_DRAFT


@dataclass(frozen=True, slots=True)
class Copy:
    """Whole blocks to copy between the KV pool and host memory, ``blocks[i]`` with ``host_blocks[i]``.

    ``direction`` is "out" to host memory and "in" from there, ``arena`` the part of host memory: that of
    preempted requests ("swap") or that of evicted prefixes ("prefix").
    """

    arena: Arena
    direction: Direction
    blocks: list[int]
    host_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running request lost its place.

    ``by`` is the request that needed its blocks or its seat (perhaps the victim itself), 0 for a rebuild.
    ``lost_tokens`` were computed and are to be computed again, unless the prefix cache still has them;
    ``swapped_blocks`` were moved to host memory. ``why`` says why ``mode`` is not what was asked for.
    """

    request: Request
    by: int
    reason: PreemptReason
    mode: PreemptMode
    lost_tokens: int
    swapped_blocks: int = 0
    why: str = ""


@dataclass(slots=True)
class StepPlan:
    """One step: rows with one new token first, then the longer ones; and what planning it did.

    ``preemptions`` and ``admitted`` tell of the requests whose state changed while planning.
    Token counts are of this step: ``prefill_tokens`` and ``decode_tokens`` add up to ``num_tokens``;
    ``recompute_tokens`` is the part of ``prefill_tokens`` that had been computed once before;
    ``query_tokens`` and ``hit_tokens`` are prefix-cache look-ups at first admission, not on a resume, and
    ``host_hit_tokens`` is the part of the hits that came from host memory. ``draft_tokens`` of
    ``draft_requests`` are computed besides. Nothing happens before ``wake_ns`` though requests wait, unless
    another one comes or goes. ``copied_blocks`` were copied, in ``copy_s`` seconds, for one that was dropped.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefill_requests: int = 0
    decode_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    draft_requests: int = 0
    draft_tokens: int = 0
    launched: LaunchedDrafts | None = None  # drafts whose ids are not on the host yet
    copied_blocks: int = 0
    copy_s: float = 0.0
    wake_ns: int | None = None
    turns: dict[int, int] | None = None  # rid -> when its turn was, if decoding requests must take turns
    reason: str = ""  # why nothing is scheduled although work waits

    @property
    def num_tokens(self) -> int:
        """Known tokens that are computed."""
        return self.prefill_tokens + self.decode_tokens

    def drop(self, rows: list[ScheduledRequest]) -> None:
        """Take rows out, and out of the counts."""
        if not rows:
            return
        gone = set(map(id, rows))
        self.scheduled = [row for row in self.scheduled if id(row) not in gone]
        for row in rows:
            start = row.request.num_computed
            self.draft_requests -= bool(row.draft)
            self.draft_tokens -= len(row.draft)
            if row.num_new == 1 and start >= row.request.num_prompt and start + 1 >= row.request.num_known:
                self.decode_requests -= 1
                self.decode_tokens -= 1
            else:
                self.prefill_requests -= 1
                self.prefill_tokens -= row.num_new
                self.recompute_tokens -= row.recompute

    def absorb(self, other: StepPlan) -> None:
        """Add what planning ``other`` did: whom it preempted, what it found, and what was copied for it."""
        self.preemptions += other.preemptions
        self.query_tokens += other.query_tokens
        self.hit_tokens += other.hit_tokens
        self.host_hit_tokens += other.host_hit_tokens
        self.copied_blocks += other.copied_blocks
        self.copy_s += other.copy_s

    def share_drafting(self, draft_ns: int, forward_ns: int) -> None:
        """Add what drafts and their verification took to the requests that had them, by tokens."""
        for row in self.scheduled:
            if row.draft:
                row.request.draft_ns += draft_ns * len(row.draft) // self.draft_tokens
                row.request.verify_ns += forward_ns * len(row.draft) // (self.num_tokens + self.draft_tokens)
