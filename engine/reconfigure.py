"""Changing the configuration of a running engine between two steps, and back if it does not work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.door import RequestRefused, check_fit
from engine.knob_store import PatchRefused, Proposal
from engine.scheduler import SchedulerKnobs
from ipc.messages import KnobValue

if TYPE_CHECKING:
    from engine.loop import EngineCore


def reconfigure(core: EngineCore, proposal: Proposal, now_ns: int) -> int:
    """Make the proposed values real. Returns how many running requests will go on by recompute.

    On failure everything is put back as it was, but for the content of the KV pool where that was rebuilt
    already, and the error is raised: PatchRefused, MemoryError, RuntimeError or ValueError.
    """
    old = core.knobs.values
    new = {**old, **proposal.changed}
    if proposal.mode in ("reload", "restart"):
        raise PatchRefused("unsupported", f"{', '.join(proposal.changed)} can only be chosen at start")
    _check_live_requests_fit(core, new)
    preempted = 0
    try:
        if new["attention"] != old["attention"]:
            core.runner.set_attention(str(new["attention"]))
        core.scheduler.configure(SchedulerKnobs.of(new))
        if proposal.mode == "rebuild_kv":
            preempted = _rebuild(core, new, now_ns)
    except (MemoryError, RuntimeError, ValueError):
        _put_back(core, old, now_ns)
        raise
    return preempted


def _rebuild(core: EngineCore, values: Mapping[str, KnobValue], now_ns: int) -> int:
    block_size = int(values["block_size"] or 0)
    num_blocks = core.num_blocks_of(block_size)
    preempted = core.scheduler.rebuild(num_blocks, block_size, now_ns)
    core.answers.events.extend(request.row() for request in preempted)
    core.runner.free_kv()
    core.runner.allocate_kv(num_blocks, block_size)
    return len(preempted)


def _put_back(core: EngineCore, old: Mapping[str, KnobValue], now_ns: int) -> None:
    if core.runner.attention_name != old["attention"]:
        core.runner.set_attention(str(old["attention"]))
    core.scheduler.configure(SchedulerKnobs.of(old))
    kv = core.runner.kv
    pool = core.scheduler.pool
    block_size = int(old["block_size"] or 0)
    if kv is None or kv.block_size != block_size or pool.block_size != block_size:
        _rebuild(core, old, now_ns)


def _check_live_requests_fit(core: EngineCore, values: Mapping[str, KnobValue]) -> None:
    block_size = int(values["block_size"] or 0)
    num_blocks = core.num_blocks_of(block_size)
    for request in core.answers.live.values():
        try:
            check_fit(request, core.scheduler.blocks_for(request, block_size), num_blocks, block_size)
        except RequestRefused as refused:
            raise PatchRefused("invalid", f"request {request.rid} would not fit: {refused.message}") from None
