"""What a waiting request needs to start: the knobs that decide, blocks for it, and whom it may displace."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_cache import Match
from engine.request import NO_BLOCK, Request
from ipc.messages import KnobValue


@dataclass(frozen=True, slots=True)
class SchedulerKnobs:
    """The knobs the scheduler obeys, as plain attributes."""

    static: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefill_chunk_tokens: int
    prefix_cache: bool
    contiguous: bool
    by_priority: bool
    ageing_ns: int
    batch_wait_ns: int = 0
    swap: bool = False

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> SchedulerKnobs:
        """From validated knob values."""
        return cls(
            static=values["batching"] == "static",
            max_num_seqs=int(values["max_num_seqs"] or 0),
            max_num_batched_tokens=int(values["max_num_batched_tokens"] or 0),
            chunked_prefill=bool(values["chunked_prefill"]),
            prefill_chunk_tokens=int(values["prefill_chunk_tokens"] or 0),
            prefix_cache=bool(values["prefix_cache"]),
            contiguous=values["kv_allocation"] == "contiguous",
            by_priority=values["policy"] == "priority",
            ageing_ns=int(float(values["priority_ageing_s"] or 0) * 1e9),
            batch_wait_ns=int(float(values["batch_wait_ms"] or 0) * 1e6),
            swap=values["preemption"] == "swap",
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """The block table a request starts with, and the match that fills its first blocks."""

    blocks: list[int]
    match: Match


def grant_pages(
    pool: BlockPool, owner: int, match: Match, *, lead: int, needed: int, end: int, reserve: int
) -> Grant | None:
    """Blocks up to token position ``end``; None, and nothing taken, if the request must wait.

    The first ``lead`` blocks lie outside every window and are left out. It waits unless all ``needed`` blocks
    fit beside ``reserve`` blocks that are spoken for: starting it must not force a preemption at once.
    """
    shared = _on_device(match.blocks[lead:])
    revived = len(shared) - pool.num_referenced(shared)
    fresh = max(0, -(-end // pool.block_size) - lead - len(shared))
    if max(needed - len(shared), fresh) + revived + reserve > pool.num_available:
        return None
    pool.share(shared, owner)
    return Grant(_fill_in(match.blocks, lead, pool.allocate(fresh, owner)), match)


def grant_run(
    pool: BlockPool, owner: int, match: Match, total: int, *, others_run: bool, unshared: Match
) -> Grant | None:
    """One run of neighbouring blocks for the most a request may ever hold, ``total`` less the shared ones.

    ``unshared`` is what is left of the match where it must do without blocks of the pool.
    """
    shared = _on_device(match.blocks)
    pool.share(shared, owner)
    run = pool.allocate_run(total - len(shared), owner)
    if run is not None:
        return Grant(_fill_in(match.blocks, 0, run), match)
    pool.release(shared)
    if others_run or not shared:
        return None
    run = pool.allocate_run(total, owner)  # the shared blocks lay in the way of the only run
    return Grant(run, unshared) if run is not None else None


def _on_device(blocks: Sequence[int]) -> list[int]:
    return [block for block in blocks if block != NO_BLOCK]


def _fill_in(blocks: Sequence[int], lead: int, fresh: Sequence[int]) -> list[int]:
    """A table of the matched blocks from ``lead`` on, fresh ones where none matched and after them."""
    rest = iter(fresh)
    table = [NO_BLOCK] * lead
    table += [block if block != NO_BLOCK else next(rest) for block in blocks[lead:]]
    return [*table, *rest]


def choose_turns(
    decoding: Sequence[Request], budget: int, knobs: SchedulerKnobs, now_ns: int
) -> dict[int, int]:
    """The ``budget`` requests whose turn it is, where a step has too few tokens for every one: rid -> time.

    Those who waited longest since their last turn; of two that had it in one step, the one served first.
    Under priority a level weighs as much as in the queue: whoever is lower comes behind all that are higher
    until it has waited for the ageing of the difference.
    """
    ageing_ns = knobs.ageing_ns if knobs.by_priority else 0

    def turn(request: Request) -> tuple[int, tuple[int, int]]:
        return request.priority * ageing_ns + request.served_ns, request.order

    chosen = heapq.nsmallest(budget, decoding, key=turn)
    return {request.rid: now_ns + rank for rank, request in enumerate(chosen)}


def choose_victims(
    pool: BlockPool,
    running: Sequence[Request],
    head: Request,
    max_num_seqs: int,
    needed: int,
    *,
    match: Match,
    lead: int,
    in_a_row: bool,
    lacks: Callable[[Request], int],
) -> list[Request]:
    """The fewest running requests, from the end of the order, that ``head`` may displace to get its place.

    Only those of strictly lower priority that are also behind it in the order, ageing included. Empty if it
    has its place already or if even all of them would not be enough: enough for ``needed`` blocks less those
    of its ``match`` from ``lead`` on, which it will share, and ``in_a_row`` for as many neighbouring ones.
    ``lacks`` counts the blocks a running request still needs.
    """
    shared = _on_device(match.blocks[lead:])
    if in_a_row:
        return _choose_neighbours(pool, running, head, max_num_seqs, needed, shared)
    kept = frozenset(shared)
    lacking = {request.rid: lacks(request) for request in running}
    seats = max_num_seqs - len(running)
    spare = pool.num_available - sum(lacking.values()) - needed + pool.num_referenced(shared)
    chosen: list[Request] = []
    for victim in reversed(running):
        if seats >= 1 and spare >= 0:
            break
        if _may_displace(head, victim):
            chosen.append(victim)
            seats += 1
            given_up = [block for block in victim.held_blocks if block not in kept]
            spare += pool.num_released_by(given_up) + lacking[victim.rid]
    return chosen if seats >= 1 and spare >= 0 else []


def _choose_neighbours(
    pool: BlockPool,
    running: Sequence[Request],
    head: Request,
    max_num_seqs: int,
    needed: int,
    shared: Sequence[int],
) -> list[Request]:
    def suffice(victims: Sequence[Request]) -> bool:
        tables = [victim.block_table for victim in victims]
        run = pool.longest_run(tables, shared)
        return max_num_seqs - len(running) + len(victims) >= 1 and run >= needed - len(shared)

    chosen = [victim for victim in running if _may_displace(head, victim)]
    if suffice([]) or not suffice(chosen):
        return []
    for victim in list(chosen):  # those in front are spared first
        rest = [other for other in chosen if other is not victim]
        if suffice(rest):
            chosen = rest
    return chosen[::-1]


def _may_displace(head: Request, victim: Request) -> bool:
    return victim.priority > head.priority and victim.order > head.order
