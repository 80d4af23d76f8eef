"""Drafts beside the scheduler, without a model: blocks are lent and come back, rejects are written over.

Every position that a running request looks at is read back through its block table before each step, so a
rejected draft that were taken for computed, or a block that were lent twice, would be found at once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.plan import ScheduledRequest, StepPlan
from engine.request import Request
from engine.speculation.limits import draft_room
from tests.engine.drive import STEP_NS, Drive, expected_output, next_token

WRONG = -1


class DraftingDrive(Drive):
    """Each decoding request gets a draft of a random length, of which a random part holds."""

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(**options)
        self.rng = rng
        self.drafts: dict[int, tuple[int, int]] = {}  # rid -> drafted, of them accepted
        self.lent = 0

    def launch(self, plan: StepPlan) -> None:
        rows = [r.request for r in plan.scheduled if r.request.num_computed + 1 == r.request.num_tokens]
        wanted = [
            (r, r.num_tokens + min(self.rng.randrange(7), draft_room(r.num_tokens, r.max_total, r.max_total)))
            for r in rows
        ]
        before = [len(request.block_table) for request in rows]
        covered = self.scheduler.lend(wanted)
        self.lent += sum(len(r.block_table) for r in rows) - sum(before)
        self.scheduler.check()
        self.drafts = {}
        for (request, end), tokens in zip(wanted, covered, strict=True):
            assert tokens == len(request.block_table) * self.scheduler.pool.block_size
            room = draft_room(request.num_tokens, request.max_total, tokens)
            count = min(end - request.num_tokens, room)
            self.drafts[request.rid] = count, self.rng.randint(0, count)
        super().launch(plan)
        for request in rows:
            self._write(request, *self.drafts[request.rid])
            request.num_maybe = self.drafts[request.rid][0]

    def land(self) -> None:
        plan, self.flight = self.flight, None
        for row in plan.scheduled if plan is not None else ():
            request = row.request
            if not request.num_pending or request.is_finished:
                continue
            request.num_pending = request.num_maybe = 0
            drafted, accepted = self.drafts.get(request.rid, (0, 0))
            for _ in range(accepted + 1):
                request.token_ids.append(next_token(request.token_ids))
            request.token_ns += [self.now_ns] * (accepted + 1)
            request.first_ns = request.first_ns or self.now_ns
            if request.is_running:
                request.state = "decode"
            self.scheduler.keep_drafts(request, drafted, accepted if request.is_running else 0)
            assert request.num_tokens <= request.max_total
            if request.num_tokens == request.max_total:
                self.finish(request)
        self.scheduler.check()

    def _write(self, request: Request, drafted: int, accepted: int) -> None:
        """Keys and values of the draft: right ones as far as it holds, wrong ones behind."""
        size, ids = self.scheduler.pool.block_size, list(request.token_ids)
        for i in range(drafted):
            ids.append(next_token(ids) if i < accepted else WRONG)
            position = len(ids) - 1
            block = self.memory.setdefault(request.block_table[position // size], {})
            block[position % size] = (*request.cache_salt.encode(), *ids)


class StagingDrive(DraftingDrive):
    """Every other step is planned before anybody knows what held of the drafts of the one before it.

    If it only decodes, it is computed then too, as on a device that moves its rows.
    """

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(rng, overlap=True, **options)
        self.moved = self.refused = 0  # steps that were computed so, and that could not be planned so

    def step(self) -> StepPlan:
        flight = self.flight
        if flight is None or not any(drafted for drafted, _ in self.drafts.values()):
            return super().step()
        if not self.scheduler.make_way():
            self.refused += 1
            self.land()
            return super().step()
        self.now_ns += STEP_NS
        plan = self.plan()
        if all(row.num_new == 1 and row.request.num_pending for row in plan.scheduled):
            self.moved += 1
            for copy in self.scheduler.take_copies():
                self._copy(copy)
            for row in plan.scheduled:
                self._write_behind(row.request)
        self.land()
        self.drafts = {}
        plan.scheduled = [row for row in plan.scheduled if row.request.is_running]
        if plan.scheduled:
            Drive.launch(self, plan)
        self.plans.append(plan)
        return plan

    def _write_behind(self, request: Request) -> None:
        """The newest token's keys and values, where the drafted tokens that hold put it."""
        size, ids = self.scheduler.pool.block_size, list(request.token_ids)
        for _ in range(self.drafts.get(request.rid, (0, 0))[1] + 1):
            ids.append(next_token(ids))
        if len(ids) == request.max_total:
            return  # it ends, and may lack a block for that one
        block = self.memory.setdefault(request.block_table[(len(ids) - 1) // size], {})
        block[(len(ids) - 1) % size] = (*request.cache_salt.encode(), *ids)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [DraftingDrive, StagingDrive])
@pytest.mark.parametrize("options", [
    {}, {"window": 6}, {"prefix_cache": False}, {"preemption": "swap", "swap_blocks": 12},
    {"prefix_blocks": 8}, {"kv_allocation": "contiguous"}, {"policy": "priority"},
    {"window": 5, "preemption": "swap", "swap_blocks": 12, "prefix_blocks": 4}, {"max_num_seqs": 2},
], ids=str)  # fmt: skip
def test_drafts_leave_keys_values_and_blocks_right(
    options: dict[str, Any], kind: type[DraftingDrive], seed: int
) -> None:
    """A18, A41: with preemption by recompute and swap, the prefix cache and its host tier, and windows."""
    rng = random.Random(seed)
    drive = kind(rng, num_blocks=20, block_size=rng.choice([1, 2, 4]), **options)
    size = drive.scheduler.pool.block_size
    requests, longest = [], 20 * size // 2
    prefix = [rng.randrange(97) for _ in range(longest)]
    for _ in range(150):
        if rng.random() < 0.25:
            length = rng.randint(1, longest - 2)
            tail = [rng.randrange(97) for _ in range(length - min(length - 1, longest // 2))]
            text = prefix[: length - len(tail)] + tail
            made = drive.add(text, rng.randint(1, longest - length), priority=rng.randrange(3))
            requests.append(made)
        if rng.random() < 0.05 and drive.scheduler.running:
            drive.preempt(rng.choice(drive.scheduler.running))
        if rng.random() < 0.04 and drive.scheduler.running:
            victim = rng.choice(drive.scheduler.running)
            drive.finish(victim)
            requests.remove(victim)
        drive.step()
    drive.run()
    for request in requests:
        assert request.output_ids == expected_output(
            request.token_ids[: request.num_prompt], request.num_output
        )
        assert request.num_tokens == request.max_total
    assert drive.scheduler.pool.num_used == 0
    assert drive.lent == 0 if "kv_allocation" in options else drive.lent > 0
    if isinstance(drive, StagingDrive):
        assert drive.moved > 5
        assert drive.refused > 0


def test_nothing_is_lent_that_somebody_needs() -> None:
    """Three requests at the ends of their blocks in a pool of 8: the five left are for their next tokens, and
    what is more is lent, first come, first served, until the next plan."""
    drive = Drive(num_blocks=8, block_size=4)
    for n in range(3):
        drive.add([n] * 3, 20)
    drive.step()
    running = drive.scheduler.running
    assert [request.num_tokens for request in running] == [4, 4, 4]
    covered = drive.scheduler.lend([(request, 12) for request in running])
    assert covered == [12, 4, 4]
    assert drive.scheduler.pool.num_available == 3
    drive.scheduler.check()
    drive.plan()
    assert [len(request.block_table) for request in running] == [1, 1, 1]
    assert drive.scheduler.pool.num_available == 5


def test_what_is_lent_is_no_reason_to_preempt_or_to_wait() -> None:
    drive = Drive(num_blocks=8, block_size=4)
    first = drive.add([1] * 3, 20)
    drive.step()
    assert drive.scheduler.lend([(first, 24)]) == [24]
    second = drive.add([2] * 20, 4)
    plan = drive.step()
    assert {row.request for row in plan.scheduled} == {first, second}
    assert not drive.preemptions
    assert len(first.block_table) == 1


def test_a_plan_behind_drafts_leaves_the_blocks_that_it_may_come_to() -> None:
    """Four tokens, three drafted: the next one may be the eighth, then the ninth. What it does not come to is
    taken back once that is known."""
    drive = Drive(num_blocks=8, block_size=4)
    request = drive.add([1] * 3, 20)
    drive.step()
    drive.land()
    scheduler = drive.scheduler
    plan = drive.plan()
    assert scheduler.lend([(request, 8)]) == [8]
    scheduler.advance(plan)
    request.num_pending, request.num_maybe = 1, 4
    assert scheduler.make_way()
    assert len(request.block_table) == 3
    for _ in range(2):
        behind = drive.plan()
        assert [row.request for row in behind.scheduled] == [request]
        assert len(request.block_table) == 3
    request.num_pending = request.num_maybe = 0
    request.token_ids += [2, 3]
    scheduler.keep_drafts(request, 4, 1)
    drive.plan()
    assert len(request.block_table) == 2
    scheduler.check()


@pytest.mark.parametrize(("num_blocks", "is_made"), [(5, False), (6, True)])
def test_no_way_is_made_at_the_cost_of_others(num_blocks: int, is_made: bool) -> None:
    """Each has four tokens in a block and the fifth on its way: one block is for that of the other. The first
    may have nine then, in three blocks."""
    drive = Drive(num_blocks=num_blocks, block_size=4)
    first, second = drive.add([1] * 3, 8), drive.add([2] * 3, 8)
    drive.step()
    scheduler = drive.scheduler
    scheduler.advance(drive.plan())
    first.num_pending = second.num_pending = 1
    first.num_maybe = 4
    assert scheduler.make_way() == is_made
    if is_made:
        plan = drive.plan()
        assert [len(row.request.block_table) for row in plan.scheduled] == [3, 2]
    assert not drive.preemptions


def test_no_way_is_made_in_blocks_that_were_lent_before_and_somebody_misses_now() -> None:
    drive = Drive(num_blocks=4, block_size=4)
    first = drive.add([1] * 3, 12)
    drive.step()
    scheduler = drive.scheduler
    scheduler.advance(drive.plan())
    assert scheduler.lend([(first, 12)]) == [12]
    first.num_pending, first.num_maybe = 1, 7
    assert scheduler.make_way()
    second = drive.add([2] * 3, 8)
    plan = drive.plan()
    assert plan.admitted == [second]
    plan.drop([row for row in plan.scheduled if row.request is first])
    scheduler.advance(plan)
    second.num_pending = 1
    assert scheduler.pool.num_available == 0
    assert not scheduler.make_way()


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 2}, {"policy": "priority"}], ids=str
)
def test_no_way_is_made_where_somebody_may_start_instead(options: dict[str, Any]) -> None:
    """Unless all seats are taken, whatever blocks there are."""
    drive = Drive(num_blocks=8, block_size=4, **options)
    first = drive.add([1] * 3, 20)
    drive.step()
    drive.scheduler.advance(drive.plan())
    first.num_pending, first.num_maybe = 1, 4
    assert drive.scheduler.make_way()
    drive.add([2] * 3, 8)
    assert drive.scheduler.make_way() == (options.get("max_num_seqs") == 1)


def test_no_block_is_lent_for_a_token_that_is_never_computed() -> None:
    """The draft may bring the last token that there is room for."""
    drive = Drive(num_blocks=4, block_size=4)
    request = drive.add([1] * 3, 6)
    drive.step()
    scheduler = drive.scheduler
    scheduler.advance(drive.plan())
    assert scheduler.lend([(request, 8)]) == [8]
    request.num_pending, request.num_maybe = 1, 4
    assert scheduler.make_way()
    assert len(request.block_table) == 2


def test_lent_blocks_go_with_whoever_leaves() -> None:
    for leave in ("finish", "preempt", "rebuild"):
        drive = Drive(num_blocks=8, block_size=4)
        request = drive.add([1] * 3, 20)
        drive.step()
        drive.scheduler.lend([(request, 20)])
        if leave == "finish":
            drive.finish(request)
        elif leave == "preempt":
            drive.preempt(request)
        else:
            drive.rebuild(8, 2)
        assert drive.scheduler.pool.num_used == 0
        drive.plan()
        drive.scheduler.check()


def test_accepted_tokens_fill_blocks_that_others_find() -> None:
    """A draft that holds over the end of a block: the block is found by its tokens, rejected ones are not."""
    drive = Drive(num_blocks=16, block_size=4)
    request = drive.add([1, 2, 3], 12)
    drive.step()
    scheduler = drive.scheduler
    scheduler.lend([(request, 9)])
    scheduler.advance(StepPlan([ScheduledRequest(request, 1)]))
    request.token_ids += [5, 6, 7, 8, 9]  # of a draft of five tokens four held; and one of the model's own
    scheduler.keep_drafts(request, 5, 4)
    assert request.num_computed == 8
    assert request.computed_tokens == 3 + 1 + 5
    scheduler.check()
    later = Request(9, [*request.token_ids[:8], 50, 51, 52], request.sampling)
    assert scheduler.find(later).num_tokens == 8
