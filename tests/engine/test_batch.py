"""Index arrays of a step against a plain construction, token by token."""

from __future__ import annotations

import random

from engine.batch import Batch, BatchBuilder
from engine.plan import ScheduledRequest
from engine.request import Request
from ipc.messages import Sampling


def expected(scheduled: list[ScheduledRequest], batch: Batch, size: int) -> None:
    """Check every token of the batch against the request it belongs to."""
    starts = batch.rows.starts.tolist()
    order = sorted(range(len(scheduled)), key=lambda i: starts[order_of(i, scheduled, batch)])
    at = 0
    for i in order:
        request, new = scheduled[i].request, scheduled[i].num_new
        for position in range(request.num_computed, request.num_computed + new):
            assert batch.ids[at] == request.token_ids[position]
            assert batch.positions[at] == position
            assert batch.slots[at] == request.block_table[position // size] * size + position % size
            at += 1
        last = request.num_computed + new == request.num_tokens
        assert (i in batch.sampled) == last
        if last:
            assert batch.logit_tokens[batch.sampled.index(i)] == at - 1
    assert at == len(batch.ids)


def order_of(i: int, scheduled: list[ScheduledRequest], batch: Batch) -> int:
    """The row of entry i: the one whose first token stands where its slot in the pool says."""
    request = scheduled[i].request
    size = batch.rows.block_size
    first = request.block_table[request.num_computed // size] * size + request.num_computed % size
    return next(r for r, start in enumerate(batch.rows.starts.tolist()) if batch.slots[start] == first)


def test_indices_through_growth_preemption_and_changing_hands() -> None:
    """Requests grow, lose their blocks, swap slots and leave; every step's arrays are right."""
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
                while len(request.block_table) * size < request.num_computed + new:
                    request.block_table.append(free.pop(rng.randrange(len(free))))
                rows.append(ScheduledRequest(request, new))
            batch = builder.build(rows)
            expected(rows, batch, size)
            singles = batch.rows.lengths[: batch.rows.num_single].tolist()
            assert singles == sorted(singles, reverse=True)
            for row in rows:
                request = row.request
                request.num_computed += row.num_new
                if request.num_computed == request.num_tokens:
                    request.token_ids.append(rng.randrange(1000))
                if request.num_tokens > 80:
                    free += request.block_table
                    requests.remove(request)
