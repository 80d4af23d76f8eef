"""Changing the configuration of a running engine between two steps, and back if it does not work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.config import GIB
from engine.door import RequestRefused, check_fit
from engine.knob_store import PatchRefused, Proposal
from engine.memory import free_bytes
from engine.scheduler import SchedulerKnobs
from ipc.messages import KnobValue

if TYPE_CHECKING:
    from engine.loop import EngineCore


class NoWayBack(Exception):
    """A change failed and so did going back: the engine has no KV pool any more and cannot go on."""


def reconfigure(core: EngineCore, proposal: Proposal, now_ns: int) -> int:
    """Make the proposed values real. Returns how many running requests will go on by recompute.

    On failure everything is put back as it was, but for the content of the KV pool where that was rebuilt
    already, and the error is raised: PatchRefused, MemoryError, RuntimeError or ValueError. NoWayBack if even
    that fails.
    """
    old = core.knobs.values
    new = {**old, **proposal.changed}
    if proposal.mode in ("reload", "restart"):
        raise PatchRefused("unsupported", f"{', '.join(proposal.changed)} can only be chosen at start")
    if proposal.mode == "rebuild_kv":
        _check_pool(core, new)
    preempted = 0
    try:
        if new["attention"] != old["attention"]:
            core.runner.set_attention(str(new["attention"]))
        core.scheduler.configure(SchedulerKnobs.of(new))
        if proposal.mode == "rebuild_kv":
            preempted = _rebuild(core, new, now_ns)
    except (MemoryError, RuntimeError, ValueError) as error:
        try:
            _put_back(core, old, now_ns)
        except (MemoryError, RuntimeError, ValueError) as worse:
            raise NoWayBack(
                f"the change could neither be applied nor undone: {text_of(error)}; then {text_of(worse)}"
            ) from worse
        raise
    return preempted


def text_of(error: Exception) -> str:
    """What an error says, or its kind where it says nothing, as Python's own MemoryError does."""
    return str(error) or type(error).__name__


def _rebuild(core: EngineCore, values: Mapping[str, KnobValue], now_ns: int) -> int:
    shape = core.pool_shape(values)
    preempted = core.scheduler.rebuild(*shape, now_ns)
    core.answers.events.extend(preemption.request.row() for preemption in preempted)
    if _shape_of_pool(core) != shape:
        core.runner.free_kv()
        core.runner.allocate_kv(*shape)
    return len(preempted)


def _put_back(core: EngineCore, old: Mapping[str, KnobValue], now_ns: int) -> None:
    if core.runner.attention_name != old["attention"]:
        core.runner.set_attention(str(old["attention"]))
    core.scheduler.configure(SchedulerKnobs.of(old))
    pool, shape = core.scheduler.pool, core.pool_shape(old)
    if _shape_of_pool(core) != shape or (pool.num_blocks, pool.block_size) != shape:
        _rebuild(core, old, now_ns)


def _shape_of_pool(core: EngineCore) -> tuple[int, int] | None:
    kv = core.runner.kv
    return (kv.num_blocks, kv.block_size) if kv is not None else None


def _check_pool(core: EngineCore, values: Mapping[str, KnobValue]) -> None:
    """Refuse a pool that memory cannot hold, or that a live request would never fit in."""
    num_blocks, block_size = core.pool_shape(values)
    kv = core.runner.kv
    if kv is not None and (num_blocks, block_size) != (kv.num_blocks, kv.block_size):
        if num_blocks < 1:
            raise PatchRefused("invalid", f"the pool would not hold even one block of {block_size} tokens")
        needed = num_blocks * block_size * core.loaded.spec.kv_bytes_per_token(kv.dtype)
        available = free_bytes(kv.device) + kv.nbytes
        if needed > available:
            raise PatchRefused(
                "oom", f"the pool would take {needed / GIB:.2f} GiB, {available / GIB:.2f} GiB can be had"
            )
    for request in core.answers.live.values():
        try:
            check_fit(request, core.scheduler.blocks_for(request, block_size), num_blocks, block_size)
        except RequestRefused as refused:
            raise PatchRefused("invalid", f"request {request.rid} would not fit: {refused.message}") from None
