"""Drafts for the steps of one engine: who makes them, how long they may be, and what became of them.

The step thread owns it. Drafts are put into a plan that was just made and is launched at once, while no other
step is in flight, as they follow a request's newest token. Only those that the device makes may follow one
that the host does not know, behind a step in flight: there are as many as fit even if all drafts of that step
hold. What they add to a step is taken from the budget, the blocks and the context that the plan has left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from engine.out_of_memory import kind_of, let_go, text_of
from engine.plan import ScheduledRequest, StepPlan
from engine.request import Request
from engine.scheduler import Scheduler
from engine.speculation.adaptive import AdaptiveDrafts
from engine.speculation.base import Draft, Drafter
from engine.speculation.launched import LaunchedDrafts
from engine.speculation.limits import cut_draft, draft_room, share
from engine.speculation.ngram import NgramDrafter
from engine.speculation.proposals import DraftFailed
from engine.speculation.rounds import RoundDrafter
from engine.speculation.self_drafter import SelfDrafter
from engine.step import StepOutput
from ipc.messages import KnobValue

log = logging.getLogger(__name__)

CHEAP_LOOK = 0.005  # of a step's time: up to this, looking for drafts at every step costs nothing to speak of
QUIET_LOOKS = 4  # in vain, after which looks that are not cheap become rare
QUIET_STEPS = 8  # without a look between two rare ones
SAYS_OFF = 32  # steps without drafts after which it is said why
SAYS_AGAIN = 2048  # steps before the log says again that drafts are off, so that it is not filled
RATE = 0.1  # how fast the expected costs follow what is measured

DRAFT_ERRORS = (DraftFailed, RuntimeError, ValueError, IndexError, MemoryError)
"""What may go wrong with drafts, which nothing but drafts depends on."""

NO_BUDGET = "a step's token budget is used up without drafts"
NOTHING_REPEATS = "nothing that requests wrote lately occurs earlier in their text"


class Speculator:
    """Puts drafts into plans. ``vocab_size`` is the target's.

    ``makers`` holds, for each kind of speculation there is, what makes its drafter from the knob values.
    """

    def __init__(self, vocab_size: int) -> None:
        self.makers: dict[str, Callable[[Mapping[str, KnobValue]], Drafter]] = {
            "ngram": lambda _: NgramDrafter()
        }
        self.reason = ""
        """Why no drafts are made although they are switched on; "" while they are."""
        self._vocab_size = vocab_size
        self._made_of: tuple[str, str] = ("off", "")  # the kind, and what else its drafter is made of
        self._drafter: Drafter | None = None
        self._adaptive = AdaptiveDrafts(sequential=False)
        self._is_adaptive = True
        self._most = 0
        self._launched = 0  # plans whose drafts the device makes, and nobody has taken
        self._failure: Exception | None = None  # to be told of, and drafts given up for, when these are taken
        self._look_s = 0.0  # expected
        self._step_s = 0.0
        self._why = ""  # the last look led to nothing
        self._quiet = 0  # looks since the last one that led to drafts which were expected to pay
        self._quiet_steps = 0  # steps since then
        self._unlooked = 0  # steps since the last look
        self._steps = 0
        self._plans = 0  # made until now, some of those that are passed over twice
        self._said_at = -SAYS_AGAIN  # the step in which the log last said why drafts are off

    def configure(self, values: Mapping[str, KnobValue]) -> None:
        """Obey these knob values from the next step on. Raises what making a drafter does; it is off then."""
        kind = str(values["speculation"])
        made_of = kind, str(values["spec_self_dtype"]) if kind == "self" else ""
        self._most = int(values["spec_tokens"] or 0)
        self._is_adaptive = bool(values["spec_adaptive"])
        self._quiet = self._quiet_steps = self._unlooked = 0
        self._said_at = -SAYS_AGAIN
        self.reason = self._why = ""
        if made_of != self._made_of:
            self.stop()
            self._drafter = None if kind == "off" else self.makers[kind](values)
            self._made_of = made_of
            self._look_s = 0.0  # the one before may have been far dearer to ask
            self._adaptive = AdaptiveDrafts(sequential=self._drafter is not None and self._drafter.sequential)
        if isinstance(self._drafter, RoundDrafter):
            self._drafter.drawn = values["spec_sampling"] == "rejection"

    def stop(self) -> None:
        """Make no drafts until `configure` is called again, and give up what making them takes."""
        if isinstance(self._drafter, RoundDrafter):
            self._drafter.close()
        self._made_of = ("off", "")
        self._drafter = None

    @property
    def kind(self) -> str:
        """The kind of drafts that are made, "off" for none."""
        return self._made_of[0]

    @property
    def wants_next(self) -> bool:
        """Whether to look for drafts in the next step, which must then not be staged behind another one."""
        if self._drafter is None or self._failure is not None:
            return False
        return self._quiet < QUIET_LOOKS or self._unlooked >= QUIET_STEPS

    @property
    def would_look(self) -> bool:
        """Whether `draft` would look for drafts in the next step. Else nothing is lost if that is staged
        behind another one."""
        if self._drafter is None or self._failure is not None:
            return False
        return self.wants_next or self._look_s <= CHEAP_LOOK * self._step_s

    @property
    def num_remembered(self) -> int:
        """Requests that something is remembered of."""
        return self._adaptive.num_requests

    @property
    def makes_on_device(self) -> bool:
        """Whether drafts may be made by the device alone."""
        return isinstance(self._drafter, RoundDrafter)

    def why_waits(self, requests: Sequence[Request]) -> str:
        """In a word why `draft` can put none into a step of these requests while another one is in flight,
        whose drafts were launched as they would be; "" if it can.
        """
        if not isinstance(self._drafter, RoundDrafter):
            return "text"
        return self._drafter.why_waits(requests)

    def draft(
        self,
        plan: StepPlan,
        scheduler: Scheduler,
        clock_ns: Callable[[], int],
        pending: Mapping[int, int] | None = None,
    ) -> int:
        """Add drafts to a plan. Returns the nanoseconds it took.

        Of drafts that were only launched then (``plan.launched``) `settle` tells the rest. pending: the slots
        that newest tokens are chosen for by the step in flight, by request; None if there is none. Where one
        is, `why_waits` has found nothing against it.
        """
        self._plans += 1
        if self._drafter is None or not plan.decode_requests:
            return 0
        budget = scheduler.knobs.max_num_batched_tokens - plan.num_tokens
        if not self.would_look:
            self.pass_over(plan)
            return 0
        self._unlooked = 0
        if budget < 1:
            self._note_quiet(NO_BUDGET)
            return 0
        began = clock_ns()
        rows = _decoding(plan)
        if pending is not None:
            rows = [row for row in rows if pending.get(row.request.rid, row.request.slot) == row.request.slot]
        if isinstance(self._drafter, RoundDrafter):
            self._drafter.behind = pending is not None
        if self._drafter.sequential:
            longest = self._make(rows, self._drafter, budget, plan, scheduler)
        else:
            longest = 1
            drafts = self._propose(rows, self._drafter, budget)
            self._put(rows, self._choose(rows, drafts, plan), plan, scheduler)
        took_ns = clock_ns() - began
        self._look_s += RATE * (took_ns / 1e9 - self._look_s)
        if self._is_adaptive and longest:
            self._adaptive.observe_drafting(longest, took_ns / 1e9)
        return took_ns

    def pass_over(self, plan: StepPlan) -> None:
        """A step is made without looking for drafts."""
        self._plans += 1
        if self._drafter is None or not plan.decode_requests:
            return
        self._unlooked += 1
        self._count_quiet()
        if self._is_adaptive:
            self._adaptive.pass_over([row.request.rid for row in _decoding(plan)])

    def settle(self, plan: StepPlan, *, forgone: bool = False) -> int:
        """A step is done, and so are drafts that were launched for it: take them. The nanoseconds it took.

        forgone: nobody takes what the step brought, as what it goes on from may not hold. So if its drafts
        are not finite, that says nothing of the drafter.
        """
        launched, plan.launched = plan.launched, None
        if launched is None:
            return 0
        self._launched -= 1
        launched.take()
        try:
            launched.check()
        except DraftFailed as error:
            if not forgone:
                self._failure = self._failure or error
        if self._failure is not None:
            self._give_up(self._failure)
        seconds = launched.seconds
        if self._is_adaptive and not launched.caught_up:
            self._adaptive.observe_drafting(launched.longest, seconds)
        return round(seconds * 1e9)

    def learn(self, plan: StepPlan, out: StepOutput) -> None:
        """A step was computed."""
        if self._drafter is None:
            return
        self._steps += 1
        seconds = out.forward_s + out.sample_s
        self._step_s += RATE * (seconds - self._step_s)
        if self._is_adaptive:
            self._adaptive.observe_step(plan.num_tokens + plan.draft_tokens, seconds)
        if plan.draft_tokens and self._is_adaptive:
            made = [(i, row) for i, row in enumerate(plan.scheduled) if row.draft and not out.nonfinite[i]]
            self._adaptive.observe(
                [row.request.rid for _, row in made],
                [len(row.draft) for _, row in made],
                [out.accepted[i] for i, _ in made],
            )

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot, whose request finished or was preempted."""
        if self._drafter is not None:
            self._drafter.release(slot)

    def forget(self, rid: int) -> None:
        """Forget a request that ended."""
        self._adaptive.release(rid)

    def _propose(self, rows: Sequence[ScheduledRequest], drafter: Drafter, budget: int) -> list[Draft]:
        """Drafts as far as context, answer and token budget have room, blocks not being looked at yet."""
        rooms = [self._room(row.request) for row in rows]
        found = drafter.propose([row.request for row in rows], rooms)
        drafts = [
            cut_draft(draft, room, row.request.stop_ids, self._vocab_size)
            for row, draft, room in zip(rows, found, rooms, strict=True)
        ]
        counts = share([len(draft) for draft in drafts], budget)
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def _make(
        self,
        rows: Sequence[ScheduledRequest],
        drafter: Drafter,
        budget: int,
        plan: StepPlan,
        scheduler: Scheduler,
    ) -> int:
        """Let drafts be made that cost time for each token: as many as are expected to pay, and no more.

        Returns the rounds that it took, 0 where the time says nothing about a round.
        """
        counts = self._counts(rows, share([self._room(row.request) for row in rows], budget), plan)
        asked = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        wanted = [(row.request, _most_tokens(row.request) + count) for row, count in asked]
        rooms = [
            min(count, draft_room(_most_tokens(row.request), row.request.max_total, covered))
            for (row, count), covered in zip(asked, scheduler.lend(wanted), strict=True)
        ]
        if not any(rooms):
            return 0
        if isinstance(drafter, SelfDrafter) and scheduler.has_copies:
            return 0  # it works in the target's blocks, some of which are still to be copied
        if isinstance(drafter, RoundDrafter):
            drafter.plan = self._plans
        try:
            drafts = drafter.propose([row.request for row, _ in asked], rooms)
        except DRAFT_ERRORS as error:
            if kind_of(error) == "lost":  # every later step would fail too
                raise
            self._give_up(error)
            return 0
        for (row, _), draft, room in zip(asked, drafts, rooms, strict=True):
            if isinstance(draft.source, LaunchedDrafts):  # nobody knows yet what is in it
                self._launched += plan.launched is None
                row.draft, plan.launched = draft, draft.source
            else:
                row.draft = cut_draft(draft, room, row.request.stop_ids, self._vocab_size)
            plan.draft_tokens += len(row.draft)
            plan.draft_requests += bool(row.draft)
        if plan.launched is not None:
            return 0  # see `settle`
        caught_up = drafter.caught_up if isinstance(drafter, RoundDrafter) else 0
        return 0 if caught_up else max(map(len, drafts))

    def _counts(
        self, rows: Sequence[ScheduledRequest], rooms: Sequence[int], plan: StepPlan
    ) -> Sequence[int]:
        """How many tokens to draft for each, before any is drafted."""
        rids = [row.request.rid for row in rows]
        if not self._is_adaptive:
            self._note_drafting()
            return rooms
        choice = self._adaptive.choose(rids, rooms, plan.num_tokens - len(rows))
        if choice.reason:
            self._note_quiet(choice.reason)
        else:
            self._note_drafting()
        return choice.k

    def _give_up(self, error: Exception) -> None:
        """A drafter failed: requests go on without drafts until the configuration changes.

        What it holds is given back when it has no more to do.
        """
        if self._launched:
            self._failure = self._failure or error
            return
        self._failure = None
        kind = self.kind
        self.stop()
        self.reason = f"speculation={kind} was given up because drafting failed: {text_of(error)}"
        log.error("%s; switch it off and on to try again", self.reason, exc_info=error)
        let_go(error)

    def _room(self, request: Request) -> int:
        return min(self._most, draft_room(_most_tokens(request), request.max_total, request.max_total))

    def _choose(self, rows: Sequence[ScheduledRequest], drafts: list[Draft], plan: StepPlan) -> list[Draft]:
        """The part of the drafts that is expected to pay."""
        rids = [row.request.rid for row in rows]
        if not any(drafts):
            if self._is_adaptive:
                self._adaptive.pass_over(rids)
            self._note_quiet(NOTHING_REPEATS)
            return drafts
        if not self._is_adaptive:
            self._note_drafting()
            return drafts
        choice = self._adaptive.choose(rids, list(map(len, drafts)), plan.num_tokens - len(rows))
        if choice.reason:  # though one may be tried all the same
            self._note_quiet(choice.reason)
        else:
            self._note_drafting()
        return [draft.first(count) for draft, count in zip(drafts, choice.k, strict=True)]

    def _put(
        self,
        rows: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        plan: StepPlan,
        scheduler: Scheduler,
    ) -> None:
        """Give the rows their drafts, cut to the blocks that there are for them."""
        made = [(row, draft) for row, draft in zip(rows, drafts, strict=True) if draft]
        wanted = [(row.request, row.request.num_tokens + len(draft)) for row, draft in made]
        for (row, draft), covered in zip(made, scheduler.lend(wanted), strict=True):
            request = row.request
            row.draft = draft.first(draft_room(request.num_tokens, request.max_total, covered))
            plan.draft_tokens += len(row.draft)
            plan.draft_requests += bool(row.draft)

    def _note_drafting(self) -> None:
        self._quiet = self._quiet_steps = 0
        self.reason = ""

    def _note_quiet(self, why: str) -> None:
        self._why = why
        self._quiet += 1
        self._count_quiet()

    def _count_quiet(self) -> None:
        self._quiet_steps += 1
        if self._quiet_steps < SAYS_OFF:
            return
        if not self.reason and self._steps - self._said_at >= SAYS_AGAIN:
            self._said_at = self._steps
            log.info("Speculation makes no drafts for now: %s.", self._why)
        self.reason = self._why


def _most_tokens(request: Request) -> int:
    """The most tokens that a request may have by the next step, as far as it does not end before."""
    return request.num_known + request.num_maybe


def _decoding(plan: StepPlan) -> list[ScheduledRequest]:
    """Rows that compute the newest token of an answer, of requests that may have drafts."""
    return [
        row
        for row in plan.scheduled
        if row.num_new == 1
        and row.request.num_computed >= row.request.num_prompt
        and row.request.num_computed + 1 == row.request.num_known
        and row.request.may_draft
    ]
