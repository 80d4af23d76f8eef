"""Drives the real scheduler without a model: tokens come from a rule, keys and values from a checked memory.

The memory holds, for every block and place in it, which token of which context was written there. Before a
step is noted every position a request has computed is read back through its block table, so a wrongly
shared, reused or missing block is found at once.
"""

from __future__ import annotations

from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.plan import StepPlan
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerKnobs
from ipc.messages import KnobValue, Sampling


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
    """A scheduler, a clock that moves 10 ms a step, and everything that has finished."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, **values: KnobValue) -> None:
        self.values = dict(values)
        self.now_ns = 0
        self.released: list[int] = []
        self.scheduler = Scheduler(
            knobs(**values),
            num_blocks=num_blocks,
            block_size=block_size,
            identity="rule",
            release_slot=self.released.append,
        )
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.done: dict[int, Request] = {}
        self.trace: list[list[tuple[int, int]]] = []
        self.plans: list[StepPlan] = []
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
        self.scheduler.rebuild(num_blocks, block_size, self.now_ns)
        self.memory.clear()

    def step(self) -> StepPlan:
        self.now_ns += 10_000_000
        plan = self.scheduler.plan(self.now_ns)
        for row in plan.scheduled:
            self._compute(row.request, row.num_new)
        self.scheduler.advance(plan)
        self.scheduler.check()
        for row in plan.scheduled:
            request = row.request
            if request.num_computed == request.num_tokens:
                request.token_ids.append(next_token(request.token_ids))
                request.token_ns.append(self.now_ns)
                request.first_ns = request.first_ns or self.now_ns
                request.state = "decode"
                if request.num_tokens >= request.max_total:
                    self.finish(request)
        self.trace.append([(row.request.rid, row.num_new) for row in plan.scheduled])
        self.plans.append(plan)
        return plan

    def finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.state = "finished"
        self.done[request.rid] = request

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; returns how many steps it took."""
        for count in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                return count
            plan = self.step()
            assert plan.scheduled, f"work waits and nothing is scheduled: {plan.reason}"
        raise AssertionError(f"not finished after {limit} steps")

    def _compute(self, request: Request, count: int) -> None:
        size, table, ids = self.scheduler.pool.block_size, request.block_table, request.token_ids
        assert request.num_computed + count <= len(ids)
        assert len(table) * size >= request.num_computed + count
        for position in range(request.num_computed):
            held = self.memory[table[position // size], position % size]
            assert held == (*_salted(request), *ids[: position + 1]), "another context's keys and values"
        for position in range(request.num_computed, request.num_computed + count):
            self.memory[table[position // size], position % size] = (*_salted(request), *ids[: position + 1])


def _salted(request: Request) -> tuple[int, ...]:
    return tuple(request.cache_salt.encode())
