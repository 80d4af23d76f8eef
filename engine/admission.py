"""What a waiting request needs to start: the knobs that decide, blocks for it, and whom it may displace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.request import Request
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
    """The block table a request starts with; its first ``num_shared`` blocks hold computed tokens already."""

    blocks: list[int]
    num_shared: int


def grant_pages(
    pool: BlockPool, owner: int, shared: list[int], *, known: int, end: int, reserve: int
) -> Grant | None:
    """Blocks up to token position ``end``; None, and nothing taken, if the request must wait.

    It waits unless all ``known`` blocks of its tokens fit beside ``reserve`` blocks that are spoken for, so
    that starting it does not force a preemption at once.
    """
    revived = len(shared) - pool.num_referenced(shared)
    if known - len(shared) + revived + reserve > pool.num_available:
        return None
    pool.share(shared, owner)
    fresh = max(0, -(-end // pool.block_size) - len(shared))
    return Grant(shared + pool.allocate(fresh, owner), len(shared))


def grant_run(pool: BlockPool, owner: int, shared: list[int], total: int, others_run: bool) -> Grant | None:
    """One run of neighbouring blocks for the most a request may ever hold, ``total`` less the shared ones."""
    pool.share(shared, owner)
    run = pool.allocate_run(total - len(shared), owner)
    if run is not None:
        return Grant(shared + run, len(shared))
    pool.release(shared)
    if others_run or not shared:
        return None
    run = pool.allocate_run(total, owner)  # the shared blocks lay in the way of the only run
    return Grant(run, 0) if run is not None else None


def choose_victims(
    pool: BlockPool,
    running: Sequence[Request],
    head: Request,
    max_num_seqs: int,
    needed: int,
    *,
    in_a_row: bool,
) -> list[Request]:
    """The fewest running requests, from the end of the order, that ``head`` may displace to get its place.

    Only those of strictly lower priority that are also behind it in the order, ageing included. Empty if it
    has its place already or if even all of them would not be enough: enough for ``needed`` blocks, and
    ``in_a_row`` for as many neighbouring ones.
    """
    if in_a_row:
        return _choose_neighbours(pool, running, head, max_num_seqs, needed)
    size = pool.block_size
    lacking = {r.rid: max(0, -(-len(r.token_ids) // size) - len(r.block_table)) for r in running}
    seats = max_num_seqs - len(running)
    spare = pool.num_available - sum(lacking.values()) - needed
    chosen: list[Request] = []
    for victim in reversed(running):
        if seats >= 1 and spare >= 0:
            break
        if _may_displace(head, victim):
            chosen.append(victim)
            seats += 1
            spare += pool.num_released_by(victim.block_table) + lacking[victim.rid]
    return chosen if seats >= 1 and spare >= 0 else []


def _choose_neighbours(
    pool: BlockPool, running: Sequence[Request], head: Request, max_num_seqs: int, needed: int
) -> list[Request]:
    def suffice(victims: Sequence[Request]) -> bool:
        tables = [victim.block_table for victim in victims]
        return max_num_seqs - len(running) + len(victims) >= 1 and pool.longest_run(tables) >= needed

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
