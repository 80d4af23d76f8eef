"""Drives the real scheduler without a model: tokens come from a rule, keys and values from a checked memory.

The memory holds, for every block and place in it, which token of which context was written there; copies move
blocks between it and a host memory of the same kind, in the order in which they were asked for. Whenever a
step is launched, every position that any running request still looks at is read back through its block table,
so a wrongly shared, reused, swapped, restored or missing block is found at once.
"""

from __future__ import annotations

from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.plan import Copy, Preemption, StepPlan
from engine.request import NO_BLOCK, Request
from engine.scheduler import Scheduler, SchedulerKnobs
from ipc.messages import KnobValue, Sampling

STEP_NS = 10_000_000
Content = dict[int, tuple[int, ...]]  # place in a block -> the context that was computed there


def knobs(**values: KnobValue) -> SchedulerKnobs:
    return SchedulerKnobs.of(KnobStore(KnobContext(), values).values)


def next_token(ids: list[int]) -> int:
    """The rule that stands for the model: depends on every token before."""
    return (sum((i + 1) * t for i, t in enumerate(ids)) * 31 + 7) % 97


def expected_output(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class Drive:
    """A scheduler, a clock that moves 10 ms a step, and everything that has finished.

    With ``overlap`` each step is planned while the one before it still owes its tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        window: int | None = None,
        prefix_blocks: int = 0,
        swap_blocks: int = 0,
        overlap: bool = False,
        **values: KnobValue,
    ) -> None:
        self.values = dict(values)
        self.now_ns = 0
        self.window = window
        self.overlap = overlap
        self.released: list[int] = []
        self.scheduler = Scheduler(
            knobs(**values),
            num_blocks=num_blocks,
            block_size=block_size,
            identity="rule",
            release_slot=self.released.append,
            window=window,
        )
        self.scheduler.set_host(prefix_blocks, swap_blocks)
        self.memory: dict[int, Content] = {}
        self.host: dict[tuple[str, int], Content] = {}
        self.done: dict[int, Request] = {}
        self.trace: list[list[tuple[int, int]]] = []
        self.plans: list[StepPlan] = []
        self.preemptions: list[Preemption] = []
        self.copies: list[Copy] = []
        self.flight: StepPlan | None = None
        self.next_rid = 1

    def add(self, prompt: list[int], max_tokens: int = 4, *, priority: int = 0, salt: str = "") -> Request:
        request = Request(
            self.next_rid,
            prompt,
            Sampling(max_tokens=max_tokens),
            priority=priority,
            cache_salt=salt,
            arrive_ns=self.now_ns + 1,
        )
        self.next_rid += 1
        self.scheduler.add(request)
        return request

    def flip(self, **values: KnobValue) -> None:
        self.values.update(values)
        self.scheduler.configure(knobs(**self.values))

    def rebuild(self, num_blocks: int, block_size: int) -> None:
        self.land()
        self.preemptions += self.scheduler.rebuild(
            num_blocks, block_size, self.now_ns, identity="rule", window=self.window
        )
        self.memory.clear()
        self.host.clear()

    def set_host(self, prefix_blocks: int, swap_blocks: int) -> None:
        self.land()
        kv = self.scheduler.kv
        for arena, old, new in (
            ("prefix", kv.host.arena.num_blocks, prefix_blocks),
            ("swap", kv.swap_space.num_blocks, swap_blocks),
        ):
            if old != new:
                self.host = {place: held for place, held in self.host.items() if place[0] != arena}
        self.preemptions += self.scheduler.set_host(prefix_blocks, swap_blocks)
        self.scheduler.check()

    def preempt(self, request: Request) -> Preemption:
        preemption = self.scheduler.preempt(request, self.now_ns)
        self.preemptions.append(preemption)
        return preemption

    def plan(self) -> StepPlan:
        """Plan a step that is not launched unless `launch` follows."""
        plan = self.scheduler.plan(self.now_ns)
        self.preemptions += plan.preemptions
        self.scheduler.check()
        return plan

    def step(self) -> StepPlan:
        self.now_ns += STEP_NS
        plan = self.plan()
        self.land()
        plan.scheduled = [row for row in plan.scheduled if row.request.is_running]
        if plan.scheduled:
            self.launch(plan)
            if not self.overlap:
                self.land()
        self.trace.append([(row.request.rid, row.num_new) for row in plan.scheduled])
        self.plans.append(plan)
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Make the copies, compute the rows, and tell the scheduler."""
        for copy in self.scheduler.take_copies():
            self._copy(copy)
        for request in self.scheduler.running:
            self._read_back(request)
        for row in plan.scheduled:
            self._compute(row.request, row.num_new)
        self.scheduler.advance(plan)
        for row in plan.scheduled:
            if row.request.num_computed == row.request.num_tokens:
                row.request.num_pending = 1
        self.scheduler.check()
        self.flight = plan

    def land(self) -> None:
        """Hand out the tokens of the step in flight, whatever became of its requests meanwhile."""
        plan, self.flight = self.flight, None
        for row in plan.scheduled if plan is not None else ():
            request = row.request
            if not request.num_pending or request.is_finished:
                continue
            request.num_pending = 0
            request.token_ids.append(next_token(request.token_ids))
            request.token_ns.append(self.now_ns)
            request.first_ns = request.first_ns or self.now_ns
            if request.is_running:
                request.state = "decode"
            if request.num_tokens >= request.max_total:
                self.finish(request)

    def finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.state = "finished"
        self.done[request.rid] = request

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; returns how many steps it took."""
        for count in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                return count
            landed = self.flight is not None
            plan = self.step()
            assert plan.scheduled or landed or plan.wake_ns, (
                f"work waits, nothing is scheduled: {plan.reason}"
            )
        raise AssertionError(f"not finished after {limit} steps")

    def _copy(self, copy: Copy) -> None:
        """All blocks of one copy at once, as a device would: none of them may depend on another."""
        assert len(copy.blocks) == len(copy.host_blocks) > 0
        assert len(set(copy.blocks)) == len(copy.blocks)
        places = [(copy.arena, host_block) for host_block in copy.host_blocks]
        if copy.direction == "out":
            assert len(set(places)) == len(places)
            content = [dict(self.memory[block]) for block in copy.blocks]
            self.host.update(zip(places, content, strict=True))
        else:
            content = [dict(self.host[place]) for place in places]
            self.memory.update(zip(copy.blocks, content, strict=True))
        self.copies.append(copy)

    def _read_back(self, request: Request) -> None:
        size, table, ids = self.scheduler.pool.block_size, request.block_table, request.token_ids
        first = 0 if self.window is None else max(0, request.num_computed + 1 - self.window)
        for position in range(first, request.num_computed):
            block = table[position // size]
            assert block != NO_BLOCK, "a block inside the window was given back"
            held = self.memory[block][position % size]
            assert held == (*_salted(request), *ids[: position + 1]), "another context's keys and values"

    def _compute(self, request: Request, count: int) -> None:
        size, table, ids = self.scheduler.pool.block_size, request.block_table, request.token_ids
        assert count > 0
        assert request.num_computed + count <= len(ids)
        assert len(table) * size >= request.num_computed + count
        for position in range(request.num_computed, request.num_computed + count):
            block = self.memory.setdefault(table[position // size], {})
            block[position % size] = (*_salted(request), *ids[: position + 1])


def _salted(request: Request) -> tuple[int, ...]:
    return tuple(request.cache_salt.encode())
