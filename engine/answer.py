"""What becomes of the tokens of a step: text, stream items, and the one way in which a request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.block_pool import BlockView
from engine.metrics import StepClock
from engine.plan import StepPlan
from engine.request import Request
from engine.scheduler import Scheduler
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
    """Live requests by id, and the events since the last flush. The step thread owns it.

    Every request enters through `begin` and leaves through `finish`, whatever ends it: stop, length, cancel,
    a client that vanished, an error. That frees its blocks, flushes held text, ends its stream and gives
    its last row, once.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.cfg_rev = 0
        self.live: dict[int, Request] = {}
        self.events: list[Event] = []
        self._scheduler = scheduler

    def begin(self, request: Request) -> None:
        """A request enters the queue."""
        self.live[request.rid] = request
        self._scheduler.add(request)
        self.events.append(request.row())

    def note_plan(self, plan: StepPlan) -> None:
        """Tell of the requests that planning moved."""
        for request in plan.preempted:
            self.events.append(request.row())
        for request in plan.admitted:
            if request.preempt_count == 0:
                request.rev_first = self.cfg_rev
            self.events.append(request.row())

    def accept(self, plan: StepPlan, out: StepOutput, clock: StepClock, clock_ns: Callable[[], int]) -> None:
        """Take a step's tokens: append them, make text of them, end what has ended."""
        now = clock.computed
        taken: list[tuple[Request, int, TokenLogprob | None]] = []
        for index, scheduled in enumerate(plan.scheduled):
            token = out.token_ids[index]
            request = scheduled.request
            if token is not None:
                request.token_ids.append(token)
                request.token_ns.append(now)
                request.last_ns = now
                if request.state == "prefill":
                    self._begin_decode(request, now)
                taken.append((request, token, out.logprobs[index]))
            elif out.nonfinite[index]:
                self._scheduler.distrust(request)
                self.finish(request, "error", now, code="internal", message=NONFINITE)
        clock.accepted = clock_ns()
        for request, token, logprob in taken:
            self._deliver(request, token, logprob, now)
        clock.detokenized = clock_ns()

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
        if request.preempted_at_ns is not None:
            request.preempted_ns += now_ns - request.preempted_at_ns
        request.state, request.finish, request.end_ns = "finished", finish, now_ns
        request.code, request.message, request.rev_last = code, message[:4096], self.cfg_rev
        rest = request.detokenizer.flush() if request.detokenizer is not None else ""
        row = request.row()
        self.events.append(row)
        streamed = request.stream
        self.events.append(
            Done(
                rid=request.rid,
                finish=finish,
                text=rest if streamed else "".join(request.text_parts) + rest,
                row=row,
                ids=None if streamed else request.output_ids,
                logprobs=None if streamed else request.logprobs,
                stop_reason=stop_reason,
                code=code,
                message=request.message,
            )
        )

    def _begin_decode(self, request: Request, now_ns: int) -> None:
        request.state = "decode"
        if request.first_ns is None:
            request.first_ns = now_ns
        self.events.append(request.row())

    def _deliver(self, request: Request, token: int, logprob: TokenLogprob | None, now_ns: int) -> None:
        """Release the text of one token and see whether it was the last. A stop id's own text is left out."""
        sampling, detokenizer = request.sampling, request.detokenizer
        produced = len(request.token_ids) - request.num_prompt
        stopped = token in request.stop_ids and produced > sampling.min_tokens
        text = ""
        stop_reason: str | int | None = None
        if stopped:
            stop_reason = token
        elif detokenizer is not None:
            text = detokenizer.push((token,))
            if detokenizer.matched is not None:
                stopped, stop_reason = True, detokenizer.matched
            elif produced == sampling.min_tokens:
                detokenizer.watch(sampling.stop)
        if request.stream:
            self.events.append(
                Tokens(
                    rid=request.rid,
                    index=produced - 1,
                    ids=[token],
                    text=text,
                    t_ns=[now_ns],
                    logprobs=None if logprob is None else [logprob],
                )
            )
        else:
            request.text_parts.append(text)
            if logprob is not None:
                request.logprobs = request.logprobs or []
                request.logprobs.append(logprob)
        if stopped:
            self.finish(request, "stop", now_ns, stop_reason=stop_reason)
        elif len(request.token_ids) >= request.max_total:
            self.finish(request, "length", now_ns)
