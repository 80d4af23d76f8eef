"""What becomes of the tokens of a step, and the one way in which a request ends.

The step thread appends a token, sees whether an end token or the request's length ends it, and hands it to
`engine.delivery`, which makes the text, finds stop strings and tells the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from engine.block_pool import BlockView
from engine.delivery import Batch, Delivery, NewToken, Outlet
from engine.metrics import Meters, StageTotals
from engine.plan import Preemption, ScheduledRequest, StepPlan
from engine.request import Request
from engine.result_cache import Answer, ResultCache
from engine.scheduler import Scheduler
from engine.speculation.limits import until_end
from engine.text import Tokenizer
from ipc.messages import (
    ApplyEvent,
    Done,
    EngineState,
    ErrorCode,
    Finish,
    Preempted,
    RequestRow,
    StepRow,
    TokenLogprob,
    Tokens,
)

if TYPE_CHECKING:
    from engine.runner import StepOutput

Event = Tokens | Done | StepRow | RequestRow | ApplyEvent | Preempted | EngineState | BlockView

NONFINITE = "non-finite logits: the model gave NaN or infinity for this request"


class Answers:
    """Live requests by id, and the events since the last flush. The step thread owns it, but for `enter`.

    Every request enters through `enter` and `begin` and leaves through `finish`, whatever ends it: stop,
    length, cancel, a client that vanished, an error. That frees its blocks; its last tokens, its row and the
    end of its stream follow from the delivery thread, once. ``sink`` is called by both threads: with what
    happens to the engine by `flush`, with what clients are told by the delivery thread. ``on_stop`` is called
    by the latter with the id of a request that has met a stop string, which is then to be `stopped` here.
    ``on_end`` is called by the step thread with the id of a request that it lets go of.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        sink: Callable[[list[Event]], None],
        *,
        on_stop: Callable[[int], None],
        on_end: Callable[[int], None],
        results: ResultCache,
        meters: Meters,
        stages: StageTotals,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.cfg_rev = 0
        self.live: dict[int, Request] = {}
        self.events: list[Event] = []
        self.delivery = Delivery(sink, on_stop, results=results, meters=meters, clock_ns=clock_ns)
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._sink = sink
        self._on_end = on_end
        self._results = results
        self._stages = stages
        self._clock = clock_ns
        self._rows: list[NewToken] = []  # of the delivery's next batch

    def enter(self, request: Request) -> bool:
        """Prepare the way out of a request that was not begun yet; any thread.

        True if its answer was known: then it is on its way and the request must not be begun.
        """
        ticket = self._results.ticket(request)
        request.outlet = Outlet(request, self._tokenizer, ticket)
        answer = self._results.get(ticket) if ticket is not None else None
        if answer is None:
            return False
        request.outlet.ticket = None
        self._replay(request, request.outlet, answer)
        return True

    def begin(self, request: Request) -> None:
        """A request enters the queue."""
        self.live[request.rid] = request
        self._scheduler.add(request)
        self.events.append(request.row())

    def note_plan(self, plan: StepPlan) -> None:
        """Tell of the requests that planning moved."""
        if plan.preemptions:
            self.note_preempted(plan.preemptions)
        for request in plan.admitted:
            request.stages_at = self._stages.now()
            if request.preempt_count == 0:
                request.rev_first = self.cfg_rev
            self.events.append(request.row())

    def note_preempted(self, preemptions: Iterable[Preemption]) -> None:
        """Tell of requests that have lost their place."""
        now_ns = self._clock()
        for each in preemptions:
            self._leave_stages(each.request)
            self.events.append(
                Preempted(
                    t_ns=now_ns,
                    rid=each.request.rid,
                    by=each.by,
                    reason=each.reason,
                    mode=each.mode,
                    lost_tok=each.lost_tokens,
                    swapped_blk=each.swapped_blocks,
                    why=each.why[:256],
                    cfg_rev=self.cfg_rev,
                )
            )
            self.events.append(each.request.row())

    def accept(self, plan: StepPlan, out: StepOutput, computed_ns: int) -> int:
        """Take a step's tokens: append them and end what ends with them. Who has ended already gets none.

        Returns how many were taken.
        """
        taken = 0
        for index, scheduled in enumerate(plan.scheduled):
            request = scheduled.request
            if request.is_finished:
                continue
            request.num_pending = request.num_maybe = 0
            ids = out.token_ids[index]
            if scheduled.draft:
                request.drafts += 1
                request.drafted_tokens += len(scheduled.draft)
                request.accepted_tokens += out.accepted[index]
            if ids:
                taken += self._take(scheduled, ids, out.logprobs[index], out.accepted[index], computed_ns)
            elif out.nonfinite[index]:
                self._scheduler.distrust(request)
                if scheduled.draft:
                    self._scheduler.keep_drafts(request, len(scheduled.draft), 0)
                    self._try_without_drafts(request, computed_ns)
                else:
                    self.finish(request, "error", computed_ns, code="internal", message=NONFINITE)
        return taken

    def stopped(self, rid: int, now_ns: int) -> None:
        """A stop string was found in a request's text. It may have ended meanwhile."""
        request = self.live.get(rid)
        if request is not None:
            self.finish(request, "stop", now_ns)

    def finish(
        self,
        request: Request,
        finish: Finish,
        now_ns: int,
        *,
        stop_reason: str | int | None = None,
        code: ErrorCode | None = None,
        message: str = "",
    ) -> None:
        """End a request. It must be live."""
        self._scheduler.remove(request)
        self._end(request, finish, now_ns, stop_reason=stop_reason, code=code, message=message)

    def finish_all(
        self, finish: Finish, now_ns: int, *, code: ErrorCode | None = None, message: str = ""
    ) -> None:
        """End every live request, for good: the scheduler is not asked, as it may be what failed."""
        for request in list(self.live.values()):
            self._end(request, finish, now_ns, code=code, message=message)

    def tell(self, event: Event) -> None:
        """Give the sink one event at once, ahead of those that wait for `flush`."""
        self._sink([event])

    def flush(self) -> None:
        """Give the sink what happened, then the delivery the new tokens and ends.

        In this order, for the last row of a request must come after all its others.
        """
        events, self.events = self.events, []
        if events:
            self._sink(events)
        rows, self._rows = self._rows, []
        if rows:
            self.delivery.put(Batch(self.cfg_rev, rows))
        self.delivery.flush()

    def _take(
        self,
        scheduled: ScheduledRequest,
        ids: list[int],
        logprobs: list[TokenLogprob | None],
        accepted: int,
        now_ns: int,
    ) -> int:
        """Append what a request got, up to where it ends. All of it came at one instant. Returns how many."""
        request = scheduled.request
        count, end = until_end(
            ids,
            num_output=request.num_output,
            min_tokens=request.sampling.min_tokens,
            stop_ids=request.stop_ids,
            room=request.max_total - len(request.token_ids),
        )
        request.token_ids += ids[:count]
        request.token_ns += [now_ns] * count
        request.last_ns = now_ns
        if request.first_ns is None:
            request.first_ns = now_ns
        if request.state == "prefill":
            request.state = "decode"
            self.events.append(request.row())
        if scheduled.draft:
            # One that lost its blocks while the step computed starts over anyway.
            kept = min(accepted, count) if request.is_running else 0
            self._scheduler.keep_drafts(request, len(scheduled.draft), kept)
        outlet = _outlet(request)
        for token, logprob in zip(ids[:count], logprobs, strict=False):
            self._rows.append(NewToken(outlet, token, now_ns, logprob))
        if end == "stop":
            self._rows[-1] = self._rows[-1]._replace(is_stop_id=True)
            self.finish(request, "stop", now_ns, stop_reason=ids[count - 1])
        elif end == "length":
            self.finish(request, "length", now_ns)
        return count

    def _try_without_drafts(self, request: Request, now_ns: int) -> None:
        """What was not finite may come of its draft alone, for a masked NaN spoils a sum all the same."""
        request.may_draft = False
        if request.is_running:
            self.note_preempted([self._scheduler.preempt(request, now_ns, "rebuild")])

    def _end(
        self,
        request: Request,
        finish: Finish,
        now_ns: int,
        *,
        stop_reason: str | int | None = None,
        code: ErrorCode | None = None,
        message: str = "",
    ) -> None:
        del self.live[request.rid]
        if request.preempted_at_ns is not None:  # by a plan that may be newer than the step that ended it
            request.preempted_ns += max(0, now_ns - request.preempted_at_ns)
        self._leave_stages(request)
        request.state, request.finish, request.end_ns = "finished", finish, now_ns
        request.stop_reason, request.code, request.message = stop_reason, code, message[:4096]
        request.rev_last = self.cfg_rev
        self._rows.append(NewToken(_outlet(request), None, now_ns))
        self._on_end(request.rid)

    def _leave_stages(self, request: Request) -> None:
        """A request runs no more: what the engine spent meanwhile is its."""
        if request.stages_at is not None:
            now, then = self._stages.now(), request.stages_at
            request.stage_ns = [
                held + after - before for held, after, before in zip(request.stage_ns, now, then, strict=True)
            ]
            request.stages_at = None

    def _replay(self, request: Request, outlet: Outlet, answer: Answer) -> None:
        """Send a known answer, as if all of it had been computed just now."""
        now_ns = self._clock()
        request.token_ids += answer.ids
        request.token_ns = [now_ns] * len(answer.ids)
        request.first_ns = request.last_ns = request.end_ns = now_ns
        request.state, request.finish, request.stop_reason = "finished", answer.finish, answer.stop_reason
        request.rev_first = request.rev_last = self.cfg_rev
        request.result_cached = True
        logprobs: Sequence[TokenLogprob | None] = answer.logprobs or [None] * len(answer.ids)
        rows = [
            NewToken(outlet, token, now_ns, logprob)
            for token, logprob in zip(answer.ids, logprobs, strict=True)
        ]
        if isinstance(answer.stop_reason, int):
            rows[-1] = rows[-1]._replace(is_stop_id=True)
        rows.append(NewToken(outlet, None, now_ns))
        self.delivery.put(Batch(self.cfg_rev, rows, whole=True))


def _outlet(request: Request) -> Outlet:
    if request.outlet is None:
        raise RuntimeError(f"request {request.rid} has no way out: it did not enter")
    return request.outlet
