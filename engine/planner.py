"""One step's plan in the making: who gets how many tokens, who starts, and who must make room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.admission import Grant, choose_turns, choose_victims, grant_pages, grant_run
from engine.plan import ScheduledRequest, StepPlan
from engine.prefix_cache import Match
from engine.request import Request
from engine.sizes import counted

if TYPE_CHECKING:
    from engine.scheduler import Scheduler

MAX_DEFERRED = 32  # waiting requests passed over in one plan because what they lack is being computed


class Planner:
    """Makes one plan for a scheduler: decoding requests first, then running prompts, then new requests."""

    def __init__(self, scheduler: Scheduler, now_ns: int) -> None:
        self._scheduler = scheduler
        self._knobs = scheduler.knobs
        self._kv = scheduler.kv
        self._pool = scheduler.pool
        self._running = scheduler.running
        self._waiting = scheduler.waiting
        self._now_ns = now_ns
        self._budget = scheduler.knobs.max_num_batched_tokens
        self._plan = StepPlan()
        self._ones: list[ScheduledRequest] = []
        self._longer: list[ScheduledRequest] = []

    def make(self) -> StepPlan:
        """Decide the step, allocate its blocks, preempt and admit."""
        plan, knobs = self._plan, self._knobs
        if self._waiting and knobs.by_priority and not knobs.static:
            self._preempt_for_head()  # of a static batch nobody new could take the place
        for_priority = len(plan.preemptions)
        self._continue_decodes()
        self._continue_prefills()
        if self._waiting and len(plan.preemptions) == for_priority and not self._must_wait():
            self._admit()
        plan.scheduled = self._ones + self._longer if self._longer else self._ones
        return plan

    def _continue_decodes(self) -> None:
        """Requests that lack one token go first."""
        budget, size, running, ones = self._budget, self._pool.block_size, self._running, self._ones
        turns = self._turns() if len(running) > budget else None
        index = decodes = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            computed, pending = request.num_computed, request.num_pending
            if len(request.token_ids) + pending - computed != 1:
                continue
            if (pending and _is_ending(request)) or (turns is not None and request.rid not in turns):
                continue
            if computed // size >= len(request.block_table):
                if not self._make_room(1, request):
                    break
                request.block_table += self._pool.allocate(1, request.rid)
            budget -= 1
            if computed >= request.num_prompt:
                ones.append(ScheduledRequest(request, 1))
                decodes += 1
            else:
                self._note_prefill(ones, request, 1)
        self._plan.decode_requests = self._plan.decode_tokens = decodes
        self._budget = budget
        if turns is not None and budget > 0:
            self._pass_turns_on(turns)

    def _turns(self) -> dict[int, int] | None:
        """Who may decode where the budget is less than one token for each that could; None: everybody."""
        decoding = list(filter(_decodes, self._running))
        if len(decoding) <= self._budget:
            return None
        self._plan.turns = choose_turns(decoding, self._budget, self._knobs, self._now_ns)
        return self._plan.turns

    def _pass_turns_on(self, turns: dict[int, int]) -> None:
        """Some whose turn it was had to make room. Others go instead, as far as there are blocks for them."""
        rest = [request for request in self._running if _decodes(request) and request.rid not in turns]
        instead = choose_turns(rest, self._budget, self._knobs, self._now_ns + len(turns))
        turns |= instead
        for request in rest:
            if request.rid not in instead:
                continue
            if request.num_computed // self._pool.block_size >= len(request.block_table):
                if not self._pool.num_available:
                    continue
                request.block_table += self._pool.allocate(1, request.rid)
            self._give(request, 1)

    def _continue_prefills(self) -> None:
        """Running requests that lack several tokens, oldest first."""
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            lacking = len(request.token_ids) + request.num_pending - request.num_computed
            if lacking < 2:
                continue
            take = self._take(lacking)
            if take == 0:
                continue
            target = -(-(request.num_computed + take) // self._pool.block_size)
            count = max(0, target - len(request.block_table))
            if count > self._pool.num_available and (
                self._ones or self._longer or not self._make_room(count, request)
            ):
                continue  # decoding requests go on and will give blocks back
            request.block_table += self._pool.allocate(count, request.rid)
            self._give(request, take)

    def _must_wait(self) -> bool:
        """Whether a static batch that could start waits for more members. Preempted ones just go on."""
        knobs, waiting = self._knobs, self._waiting
        if not (knobs.static and knobs.batch_wait_ns) or self._running:
            return False
        if len(waiting) >= knobs.max_num_seqs or any(r.state == "preempted" for r in waiting):
            return False
        starts_ns = min(request.arrive_ns for request in waiting) + knobs.batch_wait_ns
        if self._now_ns >= starts_ns:
            return False
        self._plan.wake_ns = starts_ns
        self._plan.reason = f"a batch of {len(waiting)} waits for up to {knobs.max_num_seqs} members"
        return True

    def _admit(self) -> None:
        """Start waiting requests in their order while there are seats, tokens and blocks."""
        knobs, plan, waiting = self._knobs, self._plan, self._waiting
        batch_goes_on = knobs.static and (
            bool(self._running) or any(request.state == "preempted" for request in waiting)
        )
        gone = {preemption.request.rid for preemption in plan.preemptions}
        promised = sum(map(self._lacks, self._running))
        index = deferred = 0
        while index < len(waiting):
            request = waiting[index]
            if len(self._running) >= knobs.max_num_seqs:
                plan.reason = f"all {knobs.max_num_seqs} seats are taken"
                return
            if request.rid in gone:
                return
            if _is_ending(request) or (batch_goes_on and request.state != "preempted"):
                index += 1
                continue
            match = self._scheduler.find(request)
            if not knobs.static and self._scheduler.is_coming(request, match):
                # A running request is computing the blocks it lacks: it keeps its place and will hit them.
                index, deferred = index + 1, deferred + 1
                if deferred == MAX_DEFERRED:
                    return
                continue
            take = self._take(request.num_known - match.num_tokens)
            if take == 0 and not knobs.static:
                plan.reason = "the token budget is used up"
                return
            grant = self._allocate(request, match, match.num_tokens + take, promised)
            if grant is None:
                plan.reason = self._why_not(request, match, promised)
                return
            del waiting[index]
            self._scheduler.start(request, match, grant, plan, self._now_ns)
            promised += self._lacks(request)
            if take:
                self._give(request, take)

    def _allocate(self, request: Request, match: Match, end: int, promised: int) -> Grant | None:
        kv, pool = self._kv, self._pool
        kv.host.guard({block for _index, block in match.host} if match.arena == "prefix" else ())
        try:
            if self._knobs.contiguous:
                return grant_run(
                    pool,
                    request.rid,
                    match,
                    self._scheduler.blocks_for(request),
                    others_run=bool(self._running),
                    unshared=kv.without_pool(request, match),
                )
            return grant_pages(
                pool,
                request.rid,
                match,
                lead=kv.lead(match.num_tokens),
                needed=self._blocks_needed(request, match),
                end=end,
                reserve=promised + self._watermark,
            )
        finally:
            kv.host.guard(())

    def _why_not(self, request: Request, match: Match, promised: int) -> str:
        if self._knobs.contiguous:
            needed = self._scheduler.blocks_for(request)
        else:
            needed = self._blocks_needed(request, match)
        pool = self._pool
        return (
            f"request {request.rid} needs {counted(needed, 'block')}; {pool.num_available} of "
            f"{pool.num_blocks} are available, {promised} of them promised to running requests"
        )

    def _preempt_for_head(self) -> None:
        """Make room for the first waiting request if running ones of strictly lower priority can give it."""
        head, scheduler, in_a_row = self._waiting[0], self._scheduler, self._knobs.contiguous
        match = scheduler.find(head)
        if _is_ending(head) or scheduler.is_coming(head, match):
            return
        needed = (
            scheduler.blocks_for(head) if in_a_row else self._blocks_needed(head, match) + self._watermark
        )
        for victim in choose_victims(
            self._pool,
            self._running,
            head,
            self._knobs.max_num_seqs,
            needed,
            match=match,
            lead=self._kv.lead(match.num_tokens),
            in_a_row=in_a_row,
            lacks=self._lacks,
        ):
            self._plan.preemptions.append(scheduler.preempt(victim, self._now_ns, "priority", head.rid))

    def _make_room(self, count: int, request: Request) -> bool:
        """Preempt from the end of the order until ``count`` blocks are available. False: it went itself."""
        while self._pool.num_available < count:
            victim = self._running[-1]
            preemption = self._scheduler.preempt(victim, self._now_ns, "blocks", request.rid)
            self._plan.preemptions.append(preemption)
            if victim is request:
                return False
        return True

    def _take(self, lacking: int) -> int:
        """How many of the tokens it lacks a request may compute in this step."""
        if self._knobs.chunked_prefill:
            return max(0, min(lacking, self._knobs.prefill_chunk_tokens, self._budget))
        if lacking > self._budget and self._plan.prefill_requests:
            return 0
        return lacking

    def _give(self, request: Request, take: int) -> None:
        """Put ``take`` tokens of a request that did not decode before into the step."""
        plan, rows = self._plan, self._ones if take == 1 else self._longer
        self._budget -= take
        if (
            take == 1
            and request.num_computed >= request.num_prompt
            and request.num_known - request.num_computed == 1
        ):
            rows.append(ScheduledRequest(request, 1))
            plan.decode_requests += 1
            plan.decode_tokens += 1
        else:
            self._note_prefill(rows, request, take)

    def _note_prefill(self, rows: list[ScheduledRequest], request: Request, count: int) -> None:
        start = request.num_computed
        recompute = max(0, min(start + count, request.high_water) - start)
        rows.append(ScheduledRequest(request, count, recompute))
        self._plan.prefill_requests += 1
        self._plan.prefill_tokens += count
        self._plan.recompute_tokens += recompute

    def _blocks_needed(self, request: Request, match: Match) -> int:
        """Blocks that a request will hold at once for the tokens known so far."""
        known = -(-request.num_known // self._pool.block_size)
        if (window := self._kv.window) is None:
            return known
        return min(known - self._kv.lead(match.num_tokens), self._most_at_once(request, window))

    def _lacks(self, request: Request) -> int:
        """Blocks that a running request still needs for tokens it has already."""
        table = request.block_table
        lacking = max(0, -(-request.num_known // self._pool.block_size) - len(table))
        if not lacking or (window := self._kv.window) is None:
            return lacking
        held = len(table) - self._kv.lead(request.num_computed)
        return max(0, min(lacking, self._most_at_once(request, window) - held))

    def _most_at_once(self, request: Request, window: int) -> int:
        """Blocks that a window and one chunk after it can span."""
        chunk = self._knobs.prefill_chunk_tokens if self._knobs.chunked_prefill else request.num_known
        return (window + chunk - 1) // self._pool.block_size + 2

    @property
    def _watermark(self) -> int:
        """Blocks left alone when a request starts beside others, so that they do not run out at once."""
        return self._pool.num_blocks // 100 if self._running else 0


def _decodes(request: Request) -> bool:
    return request.num_known - request.num_computed == 1 and not _is_ending(request)


def _is_ending(request: Request) -> bool:
    """Whether the token that it is owed is its last one."""
    return request.num_pending > 0 and request.num_known >= request.max_total
