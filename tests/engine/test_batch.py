"""Index arrays of a step against a plain construction, token by token."""

from __future__ import annotations

import random

import pytest

from engine.attention.base import MAX_SHORT
from engine.batch import Batch, BatchBuilder
from engine.plan import ScheduledRequest
from engine.request import NO_BLOCK, Request
from engine.speculation.base import MAX_DRAFT, NO_DRAFT, Draft
from ipc.messages import Sampling


def expected(scheduled: list[ScheduledRequest], batch: Batch, size: int) -> None:
    """Check every token of the batch against the request it belongs to."""
    starts = batch.rows.starts.tolist()
    order = sorted(range(len(scheduled)), key=lambda i: starts[order_of(i, scheduled, batch)])
    at, logits = 0, list[int]()
    for i in order:
        request, new = scheduled[i].request, scheduled[i].num_new
        draft = scheduled[i].draft.token_ids
        first = at
        for position in range(request.num_computed, request.num_computed + new + len(draft)):
            assert batch.ids[at] == (request.token_ids + draft)[position]
            assert batch.positions[at] == position
            assert batch.slots[at] == request.block_table[position // size] * size + position % size
            at += 1
        last = request.num_computed + new == request.num_tokens
        assert (i in batch.sampled) == last
        if last:
            assert batch.drafts[batch.sampled.index(i)] is scheduled[i].draft
            logits += range(first + new - 1, at)
    assert at == len(batch.ids)
    assert batch.logit_tokens.tolist() == logits
    assert batch.drafted.tolist() == [len(scheduled[i].draft) for i in batch.order]


def order_of(i: int, scheduled: list[ScheduledRequest], batch: Batch) -> int:
    """The row of entry i: the one whose first token stands where its slot in the pool says."""
    request = scheduled[i].request
    size = batch.rows.block_size
    first = request.block_table[request.num_computed // size] * size + request.num_computed % size
    return next(r for r, start in enumerate(batch.rows.starts.tolist()) if batch.slots[start] == first)


def test_indices_through_growth_preemption_and_changing_hands() -> None:
    """Requests grow, lose their blocks, swap slots and leave, some with drafts; all arrays are right."""
    rng = random.Random(1)
    for size in (1, 4, 16):
        free = list(range(600))
        builder = BatchBuilder(size, 600)
        requests: list[Request] = []
        for rid in range(1, 400):
            if len(requests) < 6:
                request = Request(rid, [rng.randrange(1000) for _ in range(rng.randint(1, 50))], Sampling())
                request.slot = next(s for s in range(40) if s not in {r.slot for r in requests})
                requests.append(request)
            if rng.random() < 0.2:
                a, b = rng.choice(requests), rng.choice(requests)
                a.slot, b.slot = b.slot, a.slot
            if rng.random() < 0.2:
                victim = rng.choice(requests)
                free += victim.block_table
                victim.block_table, victim.num_computed = [], 0
                if rng.random() < 0.5:
                    builder.release(victim.slot)
            rows = []
            for request in rng.sample(requests, rng.randint(1, len(requests))):
                new = rng.randint(1, request.num_tokens - request.num_computed)
                draft = NO_DRAFT
                if request.num_computed + new == request.num_tokens and rng.random() < 0.5:
                    draft = Draft([rng.randrange(1000) for _ in range(rng.randint(1, MAX_DRAFT))])
                while len(request.block_table) * size < request.num_computed + new + len(draft):
                    request.block_table.append(free.pop(rng.randrange(len(free))))
                rows.append(ScheduledRequest(request, new, draft=draft))
            batch = builder.build(rows)
            expected(rows, batch, size)
            singles = batch.rows.lengths[: batch.rows.num_single].tolist()
            assert singles == sorted(singles, reverse=True)
            shapes = list(zip(batch.rows.num_new.tolist(), (-batch.rows.lengths).tolist(), strict=True))
            short = [shape for shape in shapes if shape[0] <= MAX_SHORT]
            assert shapes[: len(short)] == sorted(short)
            for row in rows:
                request = row.request
                request.num_computed += row.num_new
                if request.num_computed == request.num_tokens:
                    request.token_ids.append(rng.randrange(1000))
                if request.num_tokens > 80:
                    free += request.block_table
                    requests.remove(request)


def test_a_pending_token_gets_its_place_now_and_its_id_later() -> None:
    builder = BatchBuilder(4, 20)
    pending = Request(1, [11, 12, 13, 14, 15], Sampling(repetition_penalty=1.5))
    pending.slot, pending.block_table, pending.num_computed, pending.num_pending = 0, [7, 3], 5, 1
    chunk = Request(2, [21, 22, 23], Sampling())
    chunk.slot, chunk.block_table = 1, [5]
    batch = builder.build([ScheduledRequest(chunk, 2), ScheduledRequest(pending, 1)])
    assert batch.ids.tolist() == [0, 21, 22]
    assert batch.positions.tolist() == [5, 0, 1]
    assert batch.slots.tolist() == [3 * 4 + 1, 20, 21]
    assert (batch.sampled, batch.order) == ([1], [1, 0])
    assert not batch.filled
    with pytest.raises(ValueError, match="request 1 is in the step, but its token 5 never came"):
        batch.fill()
    pending.token_ids.append(16)
    batch.fill()
    assert batch.filled
    assert batch.ids.tolist() == [16, 21, 22]
    assert batch.sampled_rows[0].num_tokens == 6
    assert batch.sampled_rows[0].token_ids == [11, 12, 13, 14, 15, 16]
    # The batch is its own: what happens to requests later does not reach it.
    pending.token_ids.append(17)
    pending.slot, pending.block_table[0] = -1, 9
    assert batch.sampled_rows[0].token_ids == [11, 12, 13, 14, 15, 16]
    assert batch.sampled_rows[0].slot == 0
    assert batch.blocks_of(1) == [7, 3]
    assert batch.blocks_of(0) == [5]


def test_only_the_newest_token_may_lie_behind_drafts_that_nobody_has_judged() -> None:
    """Not what starts over meanwhile: the tokens in between are not there yet."""
    builder = BatchBuilder(4, 20)
    request = Request(1, [11, 12, 13, 14, 15], Sampling())
    request.slot, request.block_table, request.num_pending, request.num_maybe = 0, [7, 3, 5], 1, 2
    for computed, new in ((0, 6), (4, 2), (0, 3)):
        request.num_computed = computed
        with pytest.raises(ValueError, match=f"request 1: {new} new tokens planned behind 2 drafted ones"):
            builder.build([ScheduledRequest(request, new)])
    request.num_computed = 5
    batch = builder.build([ScheduledRequest(request, 1)])
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.reach.tolist()) == ([0], [5], [2])
    assert batch.may_move
    assert batch.blocks_of(0) == [7, 3]
    request.num_maybe = 3
    assert builder.build([ScheduledRequest(request, 1)]).blocks_of(0) == [7, 3, 5]
    with pytest.raises(ValueError, match="drafted behind a token that is not computed in this step, or not"):
        builder.build([ScheduledRequest(request, 1, draft=Draft([1]))])


class Launched:
    """Drafts that are on their way."""

    taken = False

    def take(self) -> None:
        """Never comes to that."""


def test_a_draft_behind_another_one_lies_in_blocks_that_are_there() -> None:
    """Its tokens may all count, however many hold of the other: a row of one token may lie beyond its blocks,
    as it goes to nobody then."""
    builder = BatchBuilder(4, 20)
    request = Request(1, [11, 12, 13, 14, 15], Sampling())
    request.slot, request.num_pending, request.num_maybe, request.num_computed = 0, 1, 4, 5
    request.block_table = [7, 3, 5]
    batch = builder.build([ScheduledRequest(request, 1, draft=Draft([-2, -3], source=Launched()))])
    assert batch.ids.tolist() == [0, -2, -3]
    assert (batch.positions.tolist(), batch.reach.tolist()) == ([5, 6, 7], [4])
    with pytest.raises(ValueError, match="request 1: tokens up to 9 planned behind 4 drafted ones, but its"):
        builder.build([ScheduledRequest(request, 1, draft=Draft([-2, -3, -4], source=Launched()))])
    request.num_maybe = 9
    assert builder.build([ScheduledRequest(request, 1)]).reach.tolist() == [6]


@pytest.mark.parametrize(("window", "gone"), [(None, 0), (1, 3), (4, 2), (5, 2), (6, 1), (12, 0), (13, 0)])
def test_only_blocks_outside_the_window_may_be_given_up(window: int | None, gone: int) -> None:
    """12 tokens computed in blocks of 4: the next one attends to positions from 13 - window on."""
    builder = BatchBuilder(4, 20, window)
    request = Request(1, list(range(13)), Sampling())
    request.slot, request.num_computed = 0, 12
    for missing in range(4):
        request.block_table = [NO_BLOCK] * missing + [1, 2, 3, 4][missing:]
        row = [ScheduledRequest(request, 1)]
        if missing <= gone:
            batch = builder.build(row)
            assert batch.slots.tolist() == [16]
            assert batch.blocks_of(0) == [1, 2, 3, 4][missing:]
        else:
            with pytest.raises(ValueError, match=rf"its block {gone} was given up"):
                builder.build(row)


def test_a_draft_follows_a_known_newest_token_in_blocks_of_its_own() -> None:
    builder = BatchBuilder(4, 20)
    request = Request(1, [11, 12, 13, 14, 15], Sampling())
    request.slot, request.block_table, request.num_computed = 0, [7, 3], 4
    with pytest.raises(ValueError, match="tokens up to 9 planned, drafts included, but it has 2 blocks of 4"):
        builder.build([ScheduledRequest(request, 1, draft=Draft([1, 2, 3, 4]))])
    batch = builder.build([ScheduledRequest(request, 1, draft=Draft([1, 2, 3]))])
    assert batch.slots.tolist() == [12, 13, 14, 15]
    assert batch.logit_tokens.tolist() == [0, 1, 2, 3]
    request.num_pending = 1
    for computed in (3, 4, 5):
        request.num_computed = computed
        with pytest.raises(ValueError, match="1 tokens are drafted behind a token that is not computed"):
            builder.build([ScheduledRequest(request, 1, draft=Draft([1]))])
