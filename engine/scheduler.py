"""Who computes how many tokens in the next step.

There are no prefill and decode phases: every running request has tokens that are known but not computed
yet, and a plan gives it some of them. One that lacks a single token decodes. Running requests are kept in
one order, which also is the order of the queue and, from its end, the order in which victims of preemption
are chosen: a request that was preempted is therefore ahead of everything that came after it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from itertools import pairwise

from engine.admission import Grant, SchedulerKnobs, choose_victims, grant_pages, grant_run
from engine.block_pool import BlockPool, LedgerError
from engine.knobs import MAX_SEQS
from engine.plan import Preemption, PreemptReason, ScheduledRequest, StepPlan
from engine.prefix_cache import MISS_NO_RUN, MISS_OFF, Match, PrefixCache
from engine.request import NO_SLOT, Request

MAX_DEFERRED = 32  # waiting requests passed over in one plan because what they lack is being computed

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerKnobs", "StepPlan"]


class Scheduler:
    """Queue, running requests, block pool and prefix cache of one engine. The step thread owns it.

    ``identity`` names model, weights and precision for the prefix cache. ``release_slot`` is told of each
    runner slot that a request leaves, finished or preempted.
    """

    def __init__(
        self,
        knobs: SchedulerKnobs,
        *,
        num_blocks: int,
        block_size: int,
        identity: str,
        release_slot: Callable[[int], None],
    ) -> None:
        self.knobs = knobs
        self.waiting: list[Request] = []  # both lists are sorted by Request.order
        self.running: list[Request] = []
        self._identity = identity
        self._release_slot = release_slot
        self._free_slots = list(range(MAX_SEQS))  # a heap, so that low slots are used first
        self._in_flight: dict[bytes, int] = {}  # key of a block that a running request will fill -> its rid
        self._new_pool(num_blocks, block_size)

    def blocks_for(self, request: Request, block_size: int | None = None) -> int:
        """Blocks a request holds at its longest. Its last token is sampled but never computed."""
        size = block_size or self.pool.block_size
        return -(-max(request.max_total - 1, 1) // size)

    def add(self, request: Request) -> None:
        """Put a new request in its place in the queue."""
        request.order = self._order(request)
        insort(self.waiting, request, key=_by_order)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give back its blocks and slot."""
        if request.is_running:
            self.running.remove(request)
            self._leave(request)
        else:
            self.waiting.remove(request)

    def distrust(self, request: Request) -> None:
        """A running request's keys and values cannot be trusted: nothing that it holds is found any more.

        That goes for shared blocks too. Who shares them has computed with them and fails by itself; but once
        what is not finite in them was scrubbed, a later request would go on with it and never notice.
        """
        for block in request.block_table:
            if self.pool.is_kept(block):
                self.cache.forget(block)
                self.pool.drop(block)

    def configure(self, knobs: SchedulerKnobs) -> None:
        """Obey other knobs from the next plan on. Running requests stay as they are."""
        old, self.knobs = self.knobs, knobs
        if old.prefix_cache and not knobs.prefix_cache:
            self.cache.clear(self.pool)
            self._in_flight.clear()
            for request in self.running:
                request.num_keyed = 0
        for requests in (self.waiting, self.running):
            for request in requests:
                request.order = self._order(request)
            requests.sort(key=_by_order)

    def rebuild(self, num_blocks: int, block_size: int, now_ns: int) -> list[Preemption]:
        """Start over with another pool. Running requests go back to the queue."""
        preempted = [self.preempt(request, now_ns, "rebuild") for request in list(self.running)]
        for request in self.waiting:
            request.block_keys = []
        self._new_pool(num_blocks, block_size)
        return preempted

    def preempt(
        self, request: Request, now_ns: int, reason: PreemptReason = "blocks", by: int = 0
    ) -> Preemption:
        """Send a running request back to the queue; its tokens stay, their keys and values are given up."""
        lost = request.num_computed
        self.running.remove(request)
        self._leave(request)
        request.state = "preempted"
        request.num_computed = 0
        request.preempt_count += 1
        request.preempt_reason = reason
        request.lost_tokens += lost
        request.preempted_at_ns = now_ns
        insort(self.waiting, request, key=_by_order)
        return Preemption(request, by, reason, "recompute", lost)

    def plan(self, now_ns: int) -> StepPlan:
        """Decide the next step. Allocates its blocks; `advance` must follow once it was computed."""
        plan = StepPlan()
        ones: list[ScheduledRequest] = []
        longer: list[ScheduledRequest] = []
        if self.waiting and self.knobs.by_priority and not self.knobs.static:
            self._preempt_for_head(plan, now_ns)  # of a static batch nobody new could take the place
        for_priority = len(plan.preemptions)
        budget = self._plan_decodes(plan, ones, now_ns)
        budget = self._plan_prefills(plan, ones, longer, budget, now_ns)
        if self.waiting and len(plan.preemptions) == for_priority:
            self._admit(plan, ones, longer, budget, now_ns)
        plan.scheduled = ones + longer if longer else ones
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Note that a plan was computed: tokens are held, and full blocks may be reused from now on."""
        pool, keep, size = self.pool, self.knobs.prefix_cache, self.pool.block_size
        for scheduled in plan.scheduled:
            request, count = scheduled.request, scheduled.num_new
            start = request.num_computed
            end = start + count
            pool.write(request.block_table, start, end)
            request.num_computed = end
            request.computed_tokens += count
            if start < request.high_water:
                request.recompute_tokens += min(end, request.high_water) - start
            if end > request.high_water:
                request.high_water = end
            if keep and end // size > request.num_keyed:
                self._keep_full_blocks(request)

    def check(self) -> None:
        """Verify ledger, keys, slots and orders. Raises LedgerError."""
        self.pool.check((request.block_table, request.num_computed) for request in self.running)
        self.cache.check(self.pool)
        slots = [request.slot for request in self.running]
        if (
            len(set(slots) | set(self._free_slots)) != MAX_SEQS
            or len(slots) + len(self._free_slots) != MAX_SEQS
        ):
            raise LedgerError(
                f"slots {slots} of running requests and {len(self._free_slots)} free ones do not add up"
            )
        for requests in (self.waiting, self.running):
            if any(a.order > b.order for a, b in pairwise(requests)):
                raise LedgerError("requests are out of order")
        if any(request.block_table or request.slot != NO_SLOT for request in self.waiting):
            raise LedgerError("a waiting request holds blocks or a slot")
        if not self.running and self._in_flight:
            raise LedgerError("nothing runs but blocks are announced")

    # --- the parts of a plan ---

    def _plan_decodes(self, plan: StepPlan, ones: list[ScheduledRequest], now_ns: int) -> int:
        """Requests that lack one token go first. Returns what is left of the token budget."""
        budget, size, running = self.knobs.max_num_batched_tokens, self.pool.block_size, self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            if len(request.token_ids) - request.num_computed == 1:
                if request.num_computed // size >= len(request.block_table):
                    if not self._make_room(1, request, plan, now_ns):
                        break
                    request.block_table += self.pool.allocate(1, request.rid)
                ones.append(ScheduledRequest(request, 1))
                _count(plan, request, 1)
                budget -= 1
            index += 1
        return budget

    def _plan_prefills(
        self,
        plan: StepPlan,
        ones: list[ScheduledRequest],
        longer: list[ScheduledRequest],
        budget: int,
        now_ns: int,
    ) -> int:
        """Running requests that lack several tokens, oldest first. Returns what is left of the budget."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            lacking = len(request.token_ids) - request.num_computed
            if lacking < 2:
                continue
            take = self._take(lacking, budget, plan)
            if take == 0:
                continue
            target = -(-(request.num_computed + take) // self.pool.block_size)
            count = max(0, target - len(request.block_table))
            if count > self.pool.num_available and (
                ones or longer or not self._make_room(count, request, plan, now_ns)
            ):
                continue  # decoding requests go on and will give blocks back
            request.block_table += self.pool.allocate(count, request.rid)
            (ones if take == 1 else longer).append(ScheduledRequest(request, take))
            _count(plan, request, take)
            budget -= take
        return budget

    def _admit(
        self,
        plan: StepPlan,
        ones: list[ScheduledRequest],
        longer: list[ScheduledRequest],
        budget: int,
        now_ns: int,
    ) -> None:
        """Start waiting requests in their order while there are seats, tokens and blocks."""
        knobs, pool = self.knobs, self.pool
        batch_is_running = knobs.static and bool(self.running)
        promised = self._promised()
        index = deferred = 0
        while index < len(self.waiting):
            request = self.waiting[index]
            if len(self.running) >= knobs.max_num_seqs:
                plan.reason = f"all {knobs.max_num_seqs} seats are taken"
                return
            if request in plan.preempted:
                return
            if batch_is_running and request.state != "preempted":
                if not knobs.by_priority:
                    return  # members that were preempted come first in the queue
                index += 1
                continue
            match = self._match(request)
            if not knobs.static and self._is_coming(request, match):
                # A running request is computing the blocks it lacks: it keeps its place and will hit them.
                index, deferred = index + 1, deferred + 1
                if deferred == MAX_DEFERRED:
                    return
                continue
            hit = len(match.blocks) * pool.block_size
            take = self._take(len(request.token_ids) - hit, budget, plan)
            if take == 0 and not knobs.static:
                plan.reason = "the token budget is used up"
                return
            grant = self._allocate(request, match.blocks, hit + take, promised)
            if grant is None:
                needed = self.blocks_for(request) if knobs.contiguous else self._blocks_known(request)
                plan.reason = (
                    f"request {request.rid} needs {needed} blocks; {pool.num_available} of {pool.num_blocks} "
                    f"are available, {promised} of them promised to running requests"
                )
                return
            del self.waiting[index]
            self._start(request, match, grant, plan, now_ns)
            promised += max(0, self._blocks_known(request) - len(request.block_table))
            if take:
                (ones if take == 1 else longer).append(ScheduledRequest(request, take))
                _count(plan, request, take)
                budget -= take

    def _start(self, request: Request, match: Match, grant: Grant, plan: StepPlan, now_ns: int) -> None:
        """A waiting request has its blocks and begins to run."""
        hit = grant.num_shared * self.pool.block_size
        request.block_table = grant.blocks
        request.num_computed = hit
        request.num_keyed = grant.num_shared
        request.slot = heapq.heappop(self._free_slots)
        if request.preempted_at_ns is not None:
            request.preempted_ns += now_ns - request.preempted_at_ns
            request.preempted_at_ns = None
        if request.sched_ns is None:
            request.sched_ns = now_ns
            request.cached_tokens = hit
            request.miss_reason = match.miss_reason if grant.num_shared == len(match.blocks) else MISS_NO_RUN
            if self.knobs.prefix_cache:
                plan.query_tokens += len(request.token_ids)
                plan.hit_tokens += hit
        else:
            request.resume_hit_tokens += hit
        request.state = "prefill"
        insort(self.running, request, key=_by_order)
        plan.admitted.append(request)
        if self.knobs.prefix_cache:
            size = self.pool.block_size
            known = len(request.token_ids) // size
            self.cache.extend_keys(request.block_keys, request.token_ids, request.cache_salt, known * size)
            for key in request.block_keys[request.num_keyed : known]:
                self._in_flight.setdefault(key, request.rid)

    def _allocate(self, request: Request, shared: list[int], end: int, promised: int) -> Grant | None:
        if self.knobs.contiguous:
            return grant_run(self.pool, request.rid, shared, self.blocks_for(request), bool(self.running))
        known = self._blocks_known(request)
        reserve = promised + self._watermark
        return grant_pages(self.pool, request.rid, shared, known=known, end=end, reserve=reserve)

    def _preempt_for_head(self, plan: StepPlan, now_ns: int) -> None:
        """Make room for the first waiting request if running ones of strictly lower priority can give it."""
        head = self.waiting[0]
        if self._is_coming(head, self._match(head)):
            return
        needed = (
            self.blocks_for(head) if self.knobs.contiguous else self._blocks_known(head) + self._watermark
        )
        seats, in_a_row = self.knobs.max_num_seqs, self.knobs.contiguous
        for victim in choose_victims(self.pool, self.running, head, seats, needed, in_a_row=in_a_row):
            plan.preemptions.append(self.preempt(victim, now_ns, "priority", head.rid))

    # --- small parts ---

    def _take(self, lacking: int, budget: int, plan: StepPlan) -> int:
        """How many of the tokens it lacks a request may compute in this step."""
        if self.knobs.chunked_prefill:
            return max(0, min(lacking, self.knobs.prefill_chunk_tokens, budget))
        if lacking > budget and plan.prefill_requests:
            return 0
        return lacking

    def _make_room(self, count: int, request: Request, plan: StepPlan, now_ns: int) -> bool:
        """Preempt from the end of the order until ``count`` blocks are available. False: it went itself."""
        while self.pool.num_available < count:
            victim = self.running[-1]
            plan.preemptions.append(self.preempt(victim, now_ns, "blocks", request.rid))
            if victim is request:
                return False
        return True

    def _match(self, request: Request) -> Match:
        if not self.knobs.prefix_cache:
            return Match([], MISS_OFF)
        return self.cache.match(request.block_keys, request.token_ids, request.cache_salt)

    def _is_coming(self, request: Request, match: Match) -> bool:
        """Whether the first block that is missing is being computed by a running request."""
        index = len(match.blocks)
        return (
            bool(self._in_flight)
            and index < (len(request.token_ids) - 1) // self.pool.block_size
            and request.block_keys[index] in self._in_flight
        )

    def _keep_full_blocks(self, request: Request) -> None:
        full = request.num_computed // self.pool.block_size
        keys, ids, salt = request.block_keys, request.token_ids, request.cache_salt
        self.cache.extend_keys(keys, ids, salt, full * self.pool.block_size)
        for index in range(request.num_keyed, full):
            if self.cache.insert(keys, index, request.block_table[index], ids, salt):
                self.pool.keep(request.block_table[index])
            if self._in_flight.get(keys[index]) == request.rid:
                del self._in_flight[keys[index]]
        request.num_keyed = full

    def _leave(self, request: Request) -> None:
        for key in request.block_keys[request.num_keyed :]:
            if self._in_flight.get(key) == request.rid:
                del self._in_flight[key]
        self.pool.release(request.block_table)
        if self.pool.num_referenced(request.block_table[:1]):  # a chain is shared from its head on
            for other in self.running:
                self.pool.pass_on(request.block_table, other.block_table, other.rid)
        request.block_table = []
        request.num_keyed = 0
        heapq.heappush(self._free_slots, request.slot)
        self._release_slot(request.slot)
        request.slot = NO_SLOT

    def _blocks_known(self, request: Request) -> int:
        """Blocks that the tokens known so far take."""
        return -(-len(request.token_ids) // self.pool.block_size)

    @property
    def _watermark(self) -> int:
        """Blocks left alone when a request starts beside others, so that they do not run out at once."""
        return self.pool.num_blocks // 100 if self.running else 0

    def _promised(self) -> int:
        """Blocks that running requests still need for tokens they have already."""
        return sum(max(0, self._blocks_known(r) - len(r.block_table)) for r in self.running)

    def _order(self, request: Request) -> tuple[int, int]:
        if self.knobs.by_priority:
            return request.priority * self.knobs.ageing_ns + request.arrive_ns, request.rid
        return 0, request.rid

    def _new_pool(self, num_blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(self._identity, block_size)
        self.pool = BlockPool(num_blocks, block_size, self.cache.forget)
        self._in_flight.clear()


def _by_order(request: Request) -> tuple[int, int]:
    return request.order


def _count(plan: StepPlan, request: Request, count: int) -> None:
    start = request.num_computed
    if count == 1 and start >= request.num_prompt and start == len(request.token_ids) - 1:
        plan.decode_requests += 1
        plan.decode_tokens += 1
        return
    plan.prefill_requests += 1
    plan.prefill_tokens += count
    if start < request.high_water:
        plan.recompute_tokens += min(start + count, request.high_water) - start
