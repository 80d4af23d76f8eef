"""Who computes how many tokens in the next step.

There are no prefill and decode phases: every running request has tokens that are known but not computed
yet, and a plan gives it some of them. One that lacks a single token decodes. Running requests are kept in
one order, which also is the order of the queue and, from its end, the order in which victims of preemption
are chosen: a request that was preempted is therefore ahead of everything that came after it.

A plan may be made while the step before it still computes: the token that a request is owed (`num_pending`)
counts as known then. And it may be dropped: planning allocates, admits and preempts, but only `advance`, when
a step is launched, marks tokens as computed.

Drafts are no part of this. Blocks for them are lent from what nobody needs and taken back before the next
plan, so they change nobody's turn and preempt nobody; and what was drafted counts as computed once it is
known to hold (`keep_drafts`), so that nothing has to be undone where it does not. A plan that is made while a
step with drafts computes counts on none of them. But its step may turn out to lie behind some (`num_maybe`):
`make_way` has lent it blocks for that, else there is no such plan.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import pairwise

from engine.admission import Grant, SchedulerKnobs
from engine.block_pool import BlockView, LedgerError
from engine.knobs import MAX_SEQS
from engine.kv_manager import KVManager
from engine.lending import Lending
from engine.plan import Copy, Preemption, PreemptReason, ScheduledRequest, StepPlan
from engine.planner import Planner
from engine.prefix_cache import MISS_NO_RUN, Match
from engine.request import NO_BLOCK, NO_SLOT, Request

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerKnobs", "StepPlan"]


class Scheduler:
    """Queue, running requests and their blocks of one engine. The step thread owns it.

    ``identity`` names model, weights and precision for the prefix cache. ``release_slot`` is told of each
    runner slot that a request leaves, finished or preempted. ``window`` is the largest attention window over
    all layers, None if some layer sees everything; with paged allocation blocks outside it are given back.
    """

    def __init__(
        self,
        knobs: SchedulerKnobs,
        *,
        num_blocks: int,
        block_size: int,
        identity: str,
        release_slot: Callable[[int], None],
        window: int | None = None,
    ) -> None:
        self.knobs = knobs
        self.waiting: list[Request] = []  # both lists are sorted by Request.order
        self.running: list[Request] = []
        self._identity = identity
        self._window = window
        self._release_slot = release_slot
        self._free_slots = list(range(MAX_SEQS))  # a heap, so that low slots are used first
        self._in_flight: dict[bytes, int] = {}  # key of a block that a running request will fill -> its rid
        self._now_ns = 0  # of the last plan
        self._new_pool(num_blocks, block_size, 0, 0)

    @property
    def num_swapped(self) -> int:
        """Requests that wait with blocks in swap space."""
        return len(self.kv.swapped)

    @property
    def host_blocks_used(self) -> int:
        """Blocks of host memory that hold evicted prefixes."""
        return self.kv.host.arena.num_held

    @property
    def swap_blocks_used(self) -> int:
        """Blocks of host memory that hold preempted requests."""
        return self.kv.swap_space.num_held

    def blocks_for(self, request: Request, block_size: int | None = None) -> int:
        """Blocks a request holds at its longest. Its last token is sampled but never computed.

        A window is not taken off: with chunked prefill off, a prompt is computed whole and needs them all.
        """
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
            self.kv.forget_swapped(request)

    def distrust(self, request: Request) -> None:
        """A request's keys and values cannot be trusted: nothing that it computed or holds is found any more.

        That goes for shared blocks too. Who shares them has computed with them and fails by itself; but once
        what is not finite in them was scrubbed, a later request would go on with it and never notice.
        """
        self.kv.distrust(request)
        request.lost_tokens += self.kv.forget_swapped(request)

    def configure(self, knobs: SchedulerKnobs) -> None:
        """Obey other knobs from the next plan on. Running requests stay as they are, swapped ones too."""
        old, self.knobs = self.knobs, knobs
        if old.prefix_cache and not knobs.prefix_cache:
            self.kv.clear_prefixes()
            self._in_flight.clear()
            for request in self.running:
                request.num_keyed = 0
        for requests in (self.waiting, self.running):
            for request in requests:
                request.order = self._order(request)
            requests.sort(key=_by_order)

    def rebuild(
        self,
        num_blocks: int,
        block_size: int,
        now_ns: int,
        *,
        identity: str,
        window: int | None,
    ) -> list[Preemption]:
        """Start over with another, empty pool; running requests go back to the queue.

        What lies in host memory and the queued copies are dropped too.
        """
        preempted = [self.preempt(request, now_ns, "rebuild") for request in list(self.running)]
        for request in self.waiting:
            request.block_keys = []
            request.lost_tokens += self.kv.forget_swapped(request)
        self._identity, self._window = identity, window
        self._new_pool(num_blocks, block_size, self.kv.host.arena.num_blocks, self.kv.swap_space.num_blocks)
        return preempted

    def set_host(self, num_prefix_blocks: int, num_swap_blocks: int) -> list[Preemption]:
        """Say how many blocks host memory holds. An arena whose size changes starts empty.

        Requests that were swapped there go on by recompute. Where blocks are still to be copied back from it,
        the pool's content cannot be completed any more, so everything starts over as in a rebuild: only then
        running requests are preempted, and returned.
        """
        kv, preempted = self.kv, list[Preemption]()
        resize_prefix = num_prefix_blocks != kv.host.arena.num_blocks
        resize_swap = num_swap_blocks != kv.swap_space.num_blocks
        if (resize_prefix and kv.copies.restores_from("prefix")) or (
            resize_swap and kv.copies.restores_from("swap")
        ):
            pool = self.pool
            preempted = self.rebuild(
                pool.num_blocks,
                pool.block_size,
                self._now_ns,
                identity=self._identity,
                window=self._window,
            )
            kv = self.kv
        if resize_prefix:
            kv.resize_prefix(num_prefix_blocks)
        if resize_swap:
            for request in list(kv.swapped.values()):
                request.lost_tokens += kv.forget_swapped(request)
            kv.resize_swap(num_swap_blocks)
        return preempted

    def preempt(
        self, request: Request, now_ns: int, reason: PreemptReason = "blocks", by: int = 0
    ) -> Preemption:
        """Send a running request back to the queue. Its tokens stay.

        Their keys and values are swapped or given up, as `SchedulerKnobs.swap` says; for a ``reason`` of
        "rebuild" they are given up.
        """
        lost, why, swapped = request.num_computed, "", 0
        if self.knobs.swap:
            why = "its blocks cannot be kept" if reason == "rebuild" else self.kv.swap_out(request)
        if request.swap is not None:
            lost, swapped = 0, sum(block != NO_BLOCK for block in request.swap.host_blocks)
            request.swap_count += 1
        self.running.remove(request)
        self._leave(request)
        request.state = "preempted"
        request.num_computed = 0
        request.preempt_count += 1
        request.preempt_reason = reason
        request.lost_tokens += lost
        request.preempted_at_ns = now_ns
        insort(self.waiting, request, key=_by_order)
        return Preemption(request, by, reason, "swap" if swapped else "recompute", lost, swapped, why)

    def plan(self, now_ns: int) -> StepPlan:
        """Decide the next step. Allocates its blocks; `advance` must follow when it is launched."""
        self._now_ns = now_ns
        self._lending.take_back()
        return Planner(self, now_ns).make()

    def find(self, request: Request) -> Match:
        """What there is of a waiting request's tokens, in the pool and in host memory."""
        return self.kv.find(request, prefix_cache=self.knobs.prefix_cache)

    def is_coming(self, request: Request, match: Match) -> bool:
        """Whether the first block that is missing is being computed by a running request."""
        index = len(match.blocks)
        return (
            bool(self._in_flight)
            and match.arena == "prefix"
            and index < (len(request.token_ids) - 1) // self.pool.block_size
            and request.block_keys[index] in self._in_flight
        )

    def start(self, request: Request, match: Match, grant: Grant, plan: StepPlan, now_ns: int) -> None:
        """A waiting request has its blocks and begins to run."""
        used = grant.match
        copied = self.kv.place(request, grant)
        request.slot = heapq.heappop(self._free_slots)
        request.served_ns = now_ns
        if request.preempted_at_ns is not None:
            request.preempted_ns += now_ns - request.preempted_at_ns
            request.preempted_at_ns = None
        if request.sched_ns is None:
            request.sched_ns = now_ns
            request.cached_tokens = used.num_tokens
            request.host_hit_tokens = copied
            request.miss_reason = used.miss_reason if used is match else MISS_NO_RUN
            if self.knobs.prefix_cache:
                plan.query_tokens += len(request.token_ids)
                plan.hit_tokens += used.num_tokens
                plan.host_hit_tokens += copied
        elif used.arena == "swap":
            outside = self.kv.lead(used.num_tokens) * self.pool.block_size
            request.swap_in_tokens += copied
            request.resume_hit_tokens += used.num_tokens - outside - copied
        else:
            request.resume_hit_tokens += used.num_tokens
        # What comes back from swap space with one token to go has not left the phase it was in.
        goes_on = used.arena == "swap" and request.num_known - used.num_tokens == 1
        request.state = "decode" if goes_on and request.num_known > request.num_prompt else "prefill"
        insort(self.running, request, key=_by_order)
        plan.admitted.append(request)
        if self.knobs.prefix_cache:
            self.kv.keep_full_blocks(request)
            self._announce(request)

    def advance(self, plan: StepPlan) -> None:
        """Note that a plan is launched: tokens are held, and full blocks may be reused from now on."""
        turns = plan.turns
        for scheduled in plan.scheduled:
            request = scheduled.request
            request.computed_tokens += scheduled.num_new
            if scheduled.recompute:
                request.recompute_tokens += scheduled.recompute
            if turns is not None:
                request.served_ns = turns.get(request.rid, request.served_ns)
            self._mark(request, scheduled.num_new)

    def lend(self, wanted: Sequence[tuple[Request, int]]) -> list[int]:
        """Give running requests blocks for so many tokens, drafts included, as far as nobody misses them.

        Returns how many tokens each one's blocks cover then. What was lent and is not in use by then is taken
        back by the next plan, but for what a step in flight uses, or the one behind it may.
        """
        return self._lending.lend(wanted)

    def make_way(self) -> bool:
        """Lend who may get drafted tokens with the pending one the blocks that his next step takes then.

        False if that step is not to be planned yet: there are not enough that nobody misses, or somebody
        waits who could start, perhaps from tokens that are not known yet.
        """
        knobs = self.knobs
        if self.waiting and (knobs.by_priority or len(self.running) < knobs.max_num_seqs):
            return False
        return self._lending.make_way()

    def keep_drafts(self, request: Request, drafted: int, accepted: int) -> None:
        """The first ``accepted`` of ``drafted`` tokens hold, behind the computed ones in ``token_ids``."""
        request.computed_tokens += drafted
        if accepted:
            self._mark(request, accepted)

    @property
    def has_copies(self) -> bool:
        """Whether copies were ordered since the last call of `take_copies`."""
        return bool(self.kv.copies)

    def take_copies(self) -> list[Copy]:
        """All copies ordered since the last call, in the order in which they must be made before a launch."""
        return self.kv.take_copies()

    def view(self, now_ns: int) -> BlockView:
        """The block map: the pool, then the host memory for evicted prefixes, then the swap space."""
        return self.kv.view(now_ns)

    def check(self) -> None:
        """Verify ledger, keys, host memory, slots and orders. Raises LedgerError."""
        self.pool.check((request.block_table, request.num_computed) for request in self.running)
        self.kv.check()
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
        if {r.rid for r in self.waiting if r.swap is not None} != self.kv.swapped.keys():
            raise LedgerError("those that wait with swapped blocks are not those that are counted")
        for request in self.running:
            if request.block_table.count(NO_BLOCK) != self.kv.lead(request.num_computed):
                raise LedgerError(
                    f"request {request.rid} holds blocks outside its window, or misses some in it"
                )
        if not self.running and self._in_flight:
            raise LedgerError("nothing runs but blocks are announced")

    def _mark(self, request: Request, count: int) -> None:
        """Count the next ``count`` tokens of a request as held."""
        kv, start = self.kv, request.num_computed
        end = start + count
        self.pool.write(request.block_table, start, end)
        request.num_computed = end
        if end > request.high_water:
            request.high_water = end
        if self.knobs.prefix_cache and end // self.pool.block_size > request.num_keyed:
            self._keep_full_blocks(request)
        if kv.window is not None and (first := kv.lead(start)) < kv.lead(end):
            self._show_sharers(kv.release_outside(request, first), first)

    def _announce(self, request: Request) -> None:
        """Tell whoever waits which blocks this request is going to fill."""
        size = self.pool.block_size
        known = len(request.token_ids) // size
        self.cache.extend_keys(request.block_keys, request.token_ids, request.cache_salt, known * size)
        for key in request.block_keys[request.num_keyed : known]:
            self._in_flight.setdefault(key, request.rid)

    def _keep_full_blocks(self, request: Request) -> None:
        before = request.num_keyed
        self.kv.keep_full_blocks(request)
        for key in request.block_keys[before : request.num_keyed]:
            if self._in_flight.get(key) == request.rid:
                del self._in_flight[key]

    def _leave(self, request: Request) -> None:
        for key in request.block_keys[request.num_keyed :]:
            if self._in_flight.get(key) == request.rid:
                del self._in_flight[key]
        self._show_sharers(self.kv.leave(request))
        self._lending.forget(request.rid)
        heapq.heappush(self._free_slots, request.slot)
        self._release_slot(request.slot)
        request.slot = NO_SLOT

    def _show_sharers(self, blocks: list[int], first: int = 0) -> None:
        """Blocks were given back, the first of them at index ``first``: show them with an owner that runs."""
        held = [block for block in blocks if block != NO_BLOCK]
        if self.kv.window is None:
            held = held[:1]  # a chain is shared from its head on
        if self.pool.num_referenced(held):
            for other in self.running:
                self.pool.pass_on(blocks, other.block_table[first:], other.rid)

    def _order(self, request: Request) -> tuple[int, int]:
        if self.knobs.by_priority:
            return request.priority * self.knobs.ageing_ns + request.arrive_ns, request.rid
        return 0, request.rid

    def _new_pool(
        self, num_blocks: int, block_size: int, num_prefix_blocks: int, num_swap_blocks: int
    ) -> None:
        self.kv = KVManager(
            num_blocks,
            block_size,
            identity=self._identity,
            window=None if self.knobs.contiguous else self._window,
            num_prefix_blocks=num_prefix_blocks,
            num_swap_blocks=num_swap_blocks,
        )
        self.pool, self.cache = self.kv.pool, self.kv.cache
        self._lending = Lending(self.pool, self.running)
        self._in_flight.clear()


def _by_order(request: Request) -> tuple[int, int]:
    return request.order
