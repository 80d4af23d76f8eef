"""What is measured of a step, and how each figure is defined.

Times are differences of one monotonic clock, whole microseconds. A step begins when its plan is made and
ends when its rows are ready for the sink; what the sink took is told in the next step's ``publish_us``. A
request's ``sched_ns`` and ``first_ns`` keep their first value whatever happens later. Prefix hits are
counted once, when a request is first admitted: what it finds of its own blocks after a preemption is in
``resume_hit_tok`` only. ``prefill_tok`` holds every computed token that is not a decode step's single new
one, so also those that a preemption made necessary again; ``recompute_tok`` is that part of it. A request's
``computed_tok`` is all the work done for it: recomputed tokens count again, prefix hits do not. The share
of the pool in use is ``used_blk / (used_blk + cached_blk + free_blk)``: cached blocks count as not in use.
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


@dataclass(slots=True)
class StepClock:
    """Instants of one step in nanoseconds, in the order in which they are passed."""

    begin: int = 0
    planned: int = 0
    computed: int = 0
    accepted: int = 0
    detokenized: int = 0
    end: int = 0


def step_row(
    step: int,
    clock: StepClock,
    plan: StepPlan,
    out: StepOutput,
    scheduler: Scheduler,
    *,
    publish_ns: int,
    attention: str,
    cfg_rev: int,
) -> StepRow:
    """One step's row, taken after its tokens were accepted."""
    pool = scheduler.pool
    return StepRow(
        v=2,
        step=step,
        t_ns=clock.begin,
        dur_us=(clock.end - clock.begin) // 1000,
        tokenize_us=0,
        plan_us=(clock.planned - clock.begin) // 1000,
        prepare_us=round(out.prepare_s * 1e6),
        copy_us=0,
        forward_us=round(out.forward_s * 1e6),
        attention_us=None,
        linear_us=None,
        head_us=None,
        sample_us=round(out.sample_s * 1e6),
        detokenize_us=(clock.detokenized - clock.accepted) // 1000,
        send_us=0,
        publish_us=publish_ns // 1000,
        overlap_us=0,
        prefill_reqs=plan.prefill_requests,
        decode_reqs=plan.decode_requests,
        prefill_tok=plan.prefill_tokens,
        decode_tok=plan.decode_tokens,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preempted=len(plan.preempted),
        recompute_tok=plan.recompute_tokens,
        recompute_us=0,
        used_blk=pool.num_used,
        cached_blk=pool.num_cached,
        free_blk=pool.num_free,
        used_tok=pool.used_tokens,
        host_blk=0,
        swapped_blk=0,
        copied_blk=0,
        query_tok=plan.query_tokens,
        hit_tok=plan.hit_tokens,
        host_hit_tok=0,
        weight_bytes=out.weight_bytes,
        kv_bytes=out.kv_bytes,
        flops=out.flops,
        attention=attention,
        kernels=out.kernels,
        cfg_rev=cfg_rev,
    )
