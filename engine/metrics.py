"""What is measured of a step, and how each figure is defined.

Times are differences of one monotonic clock, whole microseconds. A step begins when its plan is made and
ends when its tokens were taken; what the sink took is told in the next step's ``publish_us``. Where steps
overlap, the next one begins before this one ends, and ``dur_us`` counts only what lies after that end, so
that no moment is counted twice. A request's ``sched_ns`` and ``first_ns`` keep their first value whatever
happens later. Prefix hits are counted once, when a request is first admitted: what it finds of its own blocks
after a preemption is in ``resume_hit_tok`` only. ``prefill_tok`` holds every computed token that is not a
decode step's single new one, so also those that a preemption made necessary again; ``recompute_tok`` is that
part of it. A request's ``computed_tok`` is all the work done for it: recomputed tokens count again, prefix
hits do not. Tokens of drafts are no part of ``prefill_tok`` and ``decode_tok``, but of ``computed_tok``,
whether or not they held; a step brings ``output_tok`` tokens, up to where their requests end. Of drafts that
proposed something, ``drafted_tok`` tokens were computed and ``accepted_tok`` held: the acceptance rate is
accepted by drafted tokens, the mean accepted length 1 + accepted tokens by drafts. The share of the pool in
use is ``used_blk / (used_blk + cached_blk + free_blk)``: cached blocks count as not in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipc.messages import StepRow

if TYPE_CHECKING:
    from engine.plan import StepPlan
    from engine.runner import StepOutput
    from engine.scheduler import Scheduler


class Meters:
    """Time spent on text and sockets since start, in nanoseconds.

    Other threads' work: each figure is only ever increased, and by one thread alone. Any thread may read it.
    """

    __slots__ = ("detokenize_ns", "send_ns", "tokenize_ns")

    def __init__(self) -> None:
        self.tokenize_ns = 0
        self.detokenize_ns = 0
        self.send_ns = 0


class StageTotals:
    """What the engine has spent on each stage of its steps since start, in nanoseconds.

    The step thread adds to it as a step ends. A request's share is the difference of two `now`s.
    """

    __slots__ = ("copy_ns", "forward_ns", "plan_ns", "prepare_ns", "sample_ns")

    def __init__(self) -> None:
        self.plan_ns = 0
        self.prepare_ns = 0
        self.copy_ns = 0
        self.forward_ns = 0
        self.sample_ns = 0

    def add(self, *, plan_ns: int, prepare_ns: int, copy_ns: int, forward_ns: int, sample_ns: int) -> None:
        """One step more."""
        self.plan_ns += plan_ns
        self.prepare_ns += prepare_ns
        self.copy_ns += copy_ns
        self.forward_ns += forward_ns
        self.sample_ns += sample_ns

    def now(self) -> tuple[int, int, int, int, int]:
        """Plan, prepare, copy, forward, sample."""
        return self.plan_ns, self.prepare_ns, self.copy_ns, self.forward_ns, self.sample_ns


class MeterReader:
    """What the meters have gained since they were last read here."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._read = self._now()

    def take(self) -> tuple[int, int, int]:
        """Whole microseconds of tokenizing, detokenizing and sending since the last call."""
        before, self._read = self._read, self._now()
        tokenize, detokenize, send = (now - then for now, then in zip(self._read, before, strict=True))
        return tokenize, detokenize, send

    def _now(self) -> tuple[int, int, int]:
        meters = self._meters
        return meters.tokenize_ns // 1000, meters.detokenize_ns // 1000, meters.send_ns // 1000


@dataclass(slots=True)
class StepClock:
    """Instants of one step in nanoseconds, in the order in which they are passed, and four durations.

    ``staged``: planned and prepared. ``computed``: its forward pass and sampling are done. ``end``: its
    tokens were taken. ``draft`` is what looking for drafts took, ``prepare`` all that preparing took,
    ``hidden`` the part of its planning and preparing, and of publishing the step before, that was done while
    a forward pass ran. ``beyond`` is for how long the next step was still being staged when this one was
    computed: that is the next one's time.
    """

    begin: int = 0
    planned: int = 0
    staged: int = 0
    launched: int = 0
    computed: int = 0
    end: int = 0
    draft: int = 0
    prepare: int = 0
    hidden: int = 0
    beyond: int = 0


def hidden_ns(begin_ns: int, end_ns: int, computed_ns: int) -> int:
    """The part of [begin_ns, end_ns] that lies before the forward pass beside it was done."""
    return max(0, min(end_ns, computed_ns) - begin_ns)


def step_row(
    step: int,
    clock: StepClock,
    plan: StepPlan,
    out: StepOutput,
    scheduler: Scheduler,
    *,
    text_us: tuple[int, int, int],
    recompute_ns: int,
    publish_ns: int,
    before_ns: int,
    output_tokens: int,
    attention: str,
    cfg_rev: int,
) -> StepRow:
    """One step's row, taken after its tokens were accepted.

    ``before_ns``: when the step before ended, less what it left of its time to this one. ``output_tokens``:
    those that requests took.
    """
    pool = scheduler.pool
    drafted_at, accepted_at = _places(plan, out)
    tokenize_us, detokenize_us, send_us = text_us
    return StepRow(
        v=3,
        step=step,
        t_ns=clock.begin,
        dur_us=(clock.end - clock.beyond - max(clock.begin, before_ns)) // 1000,
        tokenize_us=tokenize_us,
        plan_us=(clock.planned - clock.begin) // 1000,
        draft_us=clock.draft // 1000,
        prepare_us=clock.prepare // 1000,
        copy_us=round(out.copy_s * 1e6),
        forward_us=round(out.forward_s * 1e6),
        attention_us=_us(out.attention_s),
        linear_us=_us(out.linear_s),
        head_us=_us(out.head_s),
        sample_us=round(out.sample_s * 1e6),
        detokenize_us=detokenize_us,
        send_us=send_us,
        publish_us=publish_ns // 1000,
        overlap_us=clock.hidden // 1000,
        prefill_reqs=plan.prefill_requests,
        decode_reqs=plan.decode_requests,
        prefill_tok=plan.prefill_tokens,
        decode_tok=plan.decode_tokens,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preempted=len(plan.preemptions),
        recompute_tok=plan.recompute_tokens,
        recompute_us=recompute_ns // 1000,
        output_tok=output_tokens,
        draft_reqs=plan.draft_requests,
        drafted_tok=plan.draft_tokens,
        accepted_tok=sum(accepted_at),
        drafted_at=drafted_at,
        accepted_at=accepted_at,
        verify_us=_verify_us(plan, out),
        used_blk=pool.num_used,
        cached_blk=pool.num_cached,
        free_blk=pool.num_free,
        used_tok=pool.used_tokens,
        host_blk=scheduler.host_blocks_used,
        swapped_blk=scheduler.swap_blocks_used,
        copied_blk=out.copied_blocks,
        query_tok=plan.query_tokens,
        hit_tok=plan.hit_tokens,
        host_hit_tok=plan.host_hit_tokens,
        weight_bytes=out.weight_bytes,
        kv_bytes=out.kv_bytes,
        flops=out.flops,
        attention=attention,
        kernels=out.kernels,
        cfg_rev=cfg_rev,
    )


def _places(plan: StepPlan, out: StepOutput) -> tuple[list[int], list[int]]:
    """For each place of a draft, how many drafts had a token there, and how many of those held."""
    if not plan.draft_tokens:
        return [], []
    made = [(len(row.draft), kept) for row, kept in zip(plan.scheduled, out.accepted, strict=True)]
    places = range(max(count for count, _ in made))
    return (
        [sum(count > place for count, _ in made) for place in places],
        [sum(kept > place for _, kept in made) for place in places],
    )


def _verify_us(plan: StepPlan, out: StepOutput) -> int:
    """The share of the forward pass that drafted tokens had by their number."""
    if not plan.draft_tokens:
        return 0
    return round(out.forward_s * 1e6) * plan.draft_tokens // (plan.num_tokens + plan.draft_tokens)


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
