"""Steps on their way: planned and prepared, then launched, then landed with their results.

There is one path, whether or not steps overlap. Without overlap a step lands as soon as it is launched. With
it the step computes on a thread of its own, and the next one is staged meanwhile: at most one step is in
flight and one is staged. Where the tokens are chosen on the device and fed to the next step there, that one
is launched as soon as it is staged, so that the device never waits for the host; what is known of it on the
host changes when the one before has landed, as always. Requests that turn out to have ended were computed
for once more then, and nobody takes what they got; what that wrote to their blocks lies there before whoever
has these by now writes his own, and if it was not finite, what was launched behind it is dropped. With
prompts it is the same, though the host launches each operation of such a step. `Flight.feeds` says which
steps have to wait for the host. Copies that were ordered before a step are put in front of it, behind the one
in flight. Where they cannot be made, the one in flight still lands, and then everybody starts over, as
nothing that the pool holds is to be trusted.

What a plan assumes is marked when it is launched (or when the step before has landed, if that comes later),
not when its result is known, so the next plan goes on from there; a plan that is never launched has only
taken blocks and seats.

Drafts follow the newest token. Those that are looked up need the text itself, which is on the host, so they
are only put into a step that is staged while none is in flight. Where tokens are chosen on the device a
model's drafts are only launched (`StepPlan.launched`): round by round they feed each other, and the step that
verifies them, and the first begins with what the step in flight chooses. What was drafted comes to the host
with what the step chose. A step that cannot be replayed with its choice is computed once the host has read
its drafts.

Behind a step with drafts nobody knows how many tokens it will bring, and on that depend the positions, the
blocks and the contexts' lengths of the next one, and of the rounds that draft for it. It is staged all the
same, as if none of those held: launched behind the other, rounds and rows are moved on the device to where
they belong (see `engine.graphs.moving`), and a step that is not launched there is prepared again when that
has landed. But only where nobody could start in it: there would be something to compute that is not moved,
and who was preempted meanwhile would start over from tokens that nobody knows. And how many tokens to draft
is chosen by what was learned until then, and so that they fit even if all of those hold. Where drafts wait
for the host instead, it is counted why (`GraphCounts.drafts_waited`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Literal

from engine import out_of_memory
from engine.answer import Answers
from engine.forward_worker import ForwardWorker, Outcome, compute
from engine.metrics import MeterReader, StageTotals, StepClock, hidden_ns, step_row
from engine.plan import StepPlan
from engine.request import Request
from engine.runner import CopyFailed, ModelRunner, Prepared, StepOutput
from engine.scheduler import Scheduler
from engine.speculation.launched import LaunchedDrafts
from engine.speculation.speculator import Speculator
from engine.staged_step import Step
from ipc.messages import ErrorCode

log = logging.getLogger(__name__)

STEP_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)
"""What may end a step's requests and leaves the engine as it was."""

Landing = Literal["clean", "doubtful", "copies lost"]


class Pipeline:
    """Stages, launches and lands steps. The step thread owns it; only the computing itself may be elsewhere.

    ``check`` verifies the block ledger after every step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        answers: Answers,
        totals: StageTotals,
        meters: MeterReader,
        speculator: Speculator,
        clock_ns: Callable[[], int],
        *,
        check: bool = False,
    ) -> None:
        self.overlap = False
        self.num_launched = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.published_ns = (0, 0)  # begin and end of the last flush
        self._runner = runner
        self._scheduler = scheduler
        self._answers = answers
        self._totals = totals
        self._meters = meters
        self._speculator = speculator
        self._clock_ns = clock_ns
        self._check = check
        self._worker = ForwardWorker(clock_ns)
        self._flight: Step | None = None
        self._ahead: Step | None = None  # launched, while the one before has not landed
        self._drafting: LaunchedDrafts | None = None  # behind the step in flight
        self._copies_lost = False  # of a step that was to be launched ahead
        self._unlaunched = StepPlan()  # what plans that were not launched did all the same
        self._ended_ns = 0  # of the last step that landed
        self._beyond_ns = 0
        self._computed_ns = 0

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def may_stage_ahead(self) -> bool:
        """Whether the next step may be staged behind the one in flight, as far as drafts go."""
        step, speculator = self._flight, self._speculator
        behind = step is not None and step.plan.draft_tokens > 0
        pending = any(request.num_pending for request in self._scheduler.running)
        if speculator.would_look if behind else speculator.wants_next and pending:
            why = self._why_drafts_wait()
            if why:
                self._note_waits(why)
                return False
        if not behind:
            return True
        if step is None or step.flight is None:
            return False
        if not self._scheduler.make_way():
            self._note_waits("room")
            return False
        return True

    def holds(self, request: Request) -> bool:
        """Whether the step in flight computes something for a request."""
        return self._flight is not None and any(row.request is request for row in self._flight.plan.scheduled)

    def release(self, slot: int) -> None:
        """A slot was left: forget it, in the runner once no step that uses it is in flight."""
        self._speculator.release(slot)
        last = self._ahead or self._flight
        if last is not None:
            last.freed_slots.append(slot)
        else:
            self._runner.release(slot)

    def stage(self, without: Container[int] = ()) -> Step:
        """Plan and prepare the next step. Requests whose rid is in ``without`` are left out of it."""
        clock = StepClock(begin=self._clock_ns())
        plan = self._scheduler.plan(clock.begin)
        self._answers.note_plan(plan)
        plan.drop([row for row in plan.scheduled if row.request.rid in without])
        if self._flight is None:
            clock.planned = self._clock_ns()
            clock.draft = self._speculator.draft(plan, self._scheduler, self._clock_ns)
            drafted = self._clock_ns()
        elif self._flight.flight is not None and self._speculator.would_look and not self._why_drafts_wait():
            clock.planned = self._clock_ns()
            clock.draft = self._speculator.draft(
                plan, self._scheduler, self._clock_ns, self._flight.flight.slots
            )
            self._drafting = plan.launched
            drafted = self._clock_ns()
        else:
            self._speculator.pass_over(plan)
            clock.planned = drafted = self._clock_ns()
        step = Step(plan, clock)
        self._prepare(step, drafted)
        return step

    def settle(self, step: Step, landing: Landing) -> Step | None:
        """What is left of a staged step after the one before has landed: None if there is nothing to launch.

        Requests that have ended meanwhile are taken out. A step that followed a doubtful one is dropped; who
        was admitted to it may share blocks that hold nothing to rely on, and is computed again.
        """
        plan = step.plan
        step.clock.hidden += hidden_ns(step.clock.begin, step.clock.staged, self._computed_ns)
        if landing == "doubtful":
            self._preempt_admitted(plan)
        ended = [row for row in plan.scheduled if not row.request.is_running]
        if landing == "clean":
            if ended and step.flight is not None:  # launched with them
                step.entries = [i for i, row in enumerate(plan.scheduled) if row.request.is_running]
            plan.drop(ended)
            prepared = step.prepared
            if step.flight is None and (ended or (prepared is not None and prepared.batch.may_move)):
                self._prepare(step, self._clock_ns())
        if landing == "clean" and plan.scheduled:
            return step
        self.forgo(step)
        return None

    def forgo(self, step: Step) -> None:
        """A staged step will not be launched: the next one reports what planning it did, and what was copied.

        Of one that was launched ahead nobody takes anything else, and what it left is clean when this
        returns.
        """
        if step.flight is not None:
            dropped = step.flight.land()
            step.plan.copied_blocks += dropped.copied_blocks
            step.plan.copy_s += dropped.copy_s
            self._ahead = None
            self._runner.graphs.forget_texts()
            for slot in step.freed_slots:
                self._runner.release(slot)
        self._speculator.settle(step.plan, forgone=True)
        self._unlaunched.absorb(step.plan)

    def launch_ahead(self, step: Step) -> None:
        """Launch a staged step behind the one in flight if that feeds it. Else it waits for the landing."""
        before, prepared = self._flight, step.prepared
        if not self.overlap or before is None or before.flight is None or prepared is None:
            return
        sources = before.flight.feeds(prepared)
        if sources is None:
            return
        begin = self._clock_ns()
        prepared.batch.sources = sources
        # The one before may still write to blocks of requests that have ended, and are another's now: before
        # anything that this one does there, or that is copied there.
        self._try_launch(step, prepared)
        if step.flight is not None:
            self._ahead = step
        elif step.error is not None and step.has_copies:
            log.error("a step or the copies ahead of it failed, and everybody starts over: %s", step.error)
            self._copies_lost = True
        step.clock.prepare += self._clock_ns() - begin

    def launch(self, step: Step) -> None:
        """Begin to compute a staged step, if it was not launched ahead. The one before must have landed."""
        plan, clock = step.plan, step.clock
        plan.absorb(self._unlaunched)
        self._unlaunched = StepPlan()
        self.num_launched += 1
        step.number = self.num_launched
        if self._ahead is not None:  # this one, and it is not dropped any more
            self._runner.graphs.counts.ahead += 1
            self._ahead = None
        begin = self._clock_ns()
        prepared = step.prepared
        if prepared is not None and step.flight is None:
            try:
                prepared.fill()
            except STEP_ERRORS as caught:
                step.error = caught
            if self.overlap and step.error is None:
                self._try_launch(step, prepared)
        if prepared is None or step.error is not None:
            step.outcome = Outcome(None, step.error, self._clock_ns())
            self._flight = step
            return
        # What was ordered since a step was launched ahead is made before the next one.
        copies = [] if step.flight is not None else self._scheduler.take_copies()
        step.has_copies |= bool(copies)
        self._scheduler.advance(plan)
        for row in plan.scheduled:
            request = row.request
            if request.num_computed == len(request.token_ids):
                request.num_pending, request.num_maybe = 1, len(row.draft)
        clock.launched = self._clock_ns()
        clock.prepare += clock.launched - begin
        self._flight = step
        if step.flight is not None:
            return
        ready, runner = prepared, self._runner

        def job() -> StepOutput:
            return runner.compute(ready, copies)

        if self.overlap:
            self._worker.start(job)
        else:
            step.outcome = compute(job, self._clock_ns)

    def land(self) -> Landing:
        """Wait for the step in flight and act on its results.

        An error that is the step's own ends its requests. Any other is raised: the engine cannot go on.
        """
        step = self._flight
        assert step is not None
        waited_from = self._clock_ns()
        outcome = step.outcome or self._wait(step)
        if step.outcome is None:  # what staging took beyond this step belongs to the staged one
            step.clock.beyond = max(0, waited_from - outcome.ended_ns)
        self._flight = None
        for slot in step.freed_slots:
            self._runner.release(slot)
        step.clock.computed = self._computed_ns = outcome.ended_ns
        copies_lost, self._copies_lost = self._copies_lost, False
        drafting, self._drafting = self._drafting, None
        landing: Landing
        if outcome.out is None:
            landing = self._fail(step, outcome.error)
        else:
            self._accept(step, outcome.out)
            bad = any(outcome.out.nonfinite) or outcome.out.dropped_nonfinite
            landing = "doubtful" if bad else "clean"
            rows = zip(step.plan.scheduled, outcome.out.accepted, strict=True)
            accepted = {row.request.rid: count for row, count in rows}
            if self._ahead is not None and self._ahead.prepared is not None and not bad:
                self._runner.settle(self._ahead.prepared, accepted)
            if drafting is not None and not bad:
                drafting.move(accepted)
        return "copies lost" if copies_lost else landing

    def abandon(self) -> None:
        """Let the step in flight end and forget it: the engine has failed."""
        if self._flight is not None and self._flight.outcome is None and self._flight.flight is None:
            self._worker.outcome()
        self._flight = self._ahead = None

    def set_overlap(self, overlap: bool) -> None:
        """Compute steps on a thread of their own from now on, or not. Nothing may be in flight."""
        self.overlap = overlap
        if not overlap:
            self._worker.stop()

    def stop(self) -> None:
        """End the computing thread."""
        self._worker.stop()

    def _why_drafts_wait(self) -> str:
        """In a word why drafts are put into no step behind the one in flight, "" if they may be."""
        step = self._flight
        if step is None or step.flight is None:
            return "computed"  # by the other thread, or not at all
        if step.plan.draft_tokens and step.plan.launched is None:
            return "text"  # what it verifies is on the host
        decoding = [each for each in self._scheduler.running if each.num_known - each.num_computed == 1]
        return self._speculator.why_waits(decoding)

    def _note_waits(self, why: str) -> None:
        """Count a step that is staged when the tokens before were read, as a model drafts for it."""
        if self._speculator.makes_on_device:
            self._runner.graphs.counts.drafts_waited[why] += 1

    def _prepare(self, step: Step, begin_ns: int) -> None:
        step.prepared, step.error = None, None
        if step.plan.scheduled:
            try:
                step.prepared = self._runner.prepare(step.plan.scheduled)
            except STEP_ERRORS as error:
                step.error = error
        step.clock.staged = self._clock_ns()
        step.clock.prepare += step.clock.staged - begin_ns

    def _wait(self, step: Step) -> Outcome:
        """What the step in flight came to, once it has ended, be it on the device or on the other thread."""
        flight = step.flight
        if flight is None:
            return self._worker.outcome()
        # No other thread is needed to wait: what there was to do meanwhile is done.
        return compute(lambda: flight.land(step.entries), self._clock_ns)

    def _try_launch(self, step: Step, prepared: Prepared) -> None:
        """Launch a step, behind the copies that were ordered, if the choice of its tokens goes with it."""
        if self._scheduler.has_copies and prepared.way.direct is None:
            return  # it may turn out that it is computed by the other thread, and these with it
        copies = self._scheduler.take_copies()
        step.has_copies = bool(copies)
        try:
            step.flight = self._runner.launch(prepared, copies)
        except STEP_ERRORS as caught:
            step.error = caught

    def _accept(self, step: Step, out: StepOutput) -> None:
        plan, clock = step.plan, step.clock
        # The device drafted while the host went on: what it took beyond that is the draft's too, and hid what
        # the host prepared meanwhile, unless the step before hid that.
        more = max(0, self._speculator.settle(plan) - clock.draft)
        clock.draft += more
        clock.hidden = max(clock.hidden, min(more, clock.prepare))
        out.copied_blocks += plan.copied_blocks
        out.copy_s += plan.copy_s
        forward_ns = round(out.forward_s * 1e9)
        self._totals.add(
            plan_ns=clock.planned - clock.begin + clock.draft,
            prepare_ns=clock.prepare,
            copy_ns=round(out.copy_s * 1e9),
            forward_ns=forward_ns,
            sample_ns=round(out.sample_s * 1e9),
        )
        recompute_ns = 0
        tokens = plan.num_tokens + plan.draft_tokens
        if plan.recompute_tokens:
            for row in plan.scheduled:
                share = forward_ns * row.recompute // tokens
                row.request.recompute_ns += share
                recompute_ns += share
        if plan.draft_tokens:
            plan.share_drafting(clock.draft, forward_ns)
        self._speculator.learn(plan, out)
        self.prefill_tokens += plan.prefill_tokens
        self.decode_tokens += plan.decode_tokens
        output_tokens = self._answers.accept(plan, out, clock.computed)
        if self._check:
            self._scheduler.check()
        clock.end = self._clock_ns()
        begin, end = self.published_ns
        clock.hidden += hidden_ns(max(begin, clock.launched), end, clock.computed)
        self._answers.events.append(
            step_row(
                step.number,
                clock,
                plan,
                out,
                self._scheduler,
                text_us=self._meters.take(),
                recompute_ns=recompute_ns,
                publish_ns=end - begin,
                before_ns=self._ended_ns - self._beyond_ns,
                output_tokens=output_tokens,
                attention=self._runner.attention_name,
                cfg_rev=self._answers.cfg_rev,
            )
        )
        self._ended_ns, self._beyond_ns = clock.end, clock.beyond

    def _fail(self, step: Step, error: BaseException | None) -> Landing:
        kind = "lost" if error is None else out_of_memory.kind_of(error)
        if error is None or kind == "lost" or not isinstance(error, STEP_ERRORS):
            # With its device's context lost, or after a fault of its own, every later step would fail too.
            raise error or RuntimeError(f"step {step.number} was launched without having been prepared")
        plan = step.plan
        self._speculator.settle(plan)
        self._runner.graphs.forget_texts()
        for row in plan.scheduled:
            row.request.num_pending = row.request.num_maybe = 0
        if isinstance(error, CopyFailed):
            log.error("step %d was not computed: %s", step.number, error)
            return "copies lost"
        log.error(
            "step %d failed; its %d requests end with an error",
            step.number,
            len(plan.scheduled),
            exc_info=error,
        )
        code: ErrorCode = "oom" if kind == "memory" else "internal"
        now, why = self._clock_ns(), out_of_memory.text_of(error)
        if code == "oom":  # what the step held would be missed by the next one
            out_of_memory.recover(error, self._runner.device)
        for row in plan.scheduled:
            self._scheduler.distrust(row.request)
        for row in plan.scheduled:
            self._answers.finish(row.request, "error", now, code=code, message=why)
        return "copies lost" if step.has_copies else "doubtful"  # nobody knows how far it came

    def _preempt_admitted(self, plan: StepPlan) -> None:
        now = self._clock_ns()
        again = StepPlan()
        for request in plan.admitted:
            if request.is_running and request.num_computed:
                again.preemptions.append(self._scheduler.preempt(request, now, "rebuild"))
        self._answers.note_plan(again)
        plan.absorb(again)
