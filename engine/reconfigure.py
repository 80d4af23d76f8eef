"""Changing the configuration of a running engine between two steps, and back if it does not work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from engine.attention_choice import resolve
from engine.compiling import compile_drafter, compile_kernels
from engine.door import RequestRefused, check_fit
from engine.identity import kv_identity
from engine.knob_store import PatchRefused, Proposal
from engine.knobs import BY_ID
from engine.layout import Layout, NoRoom, check_room, layout_of
from engine.memory_profile import LargestStep, measure_again
from engine.models.errors import ModelError
from engine.models.reading import Progress
from engine.ops.choice import COMPILE, FUSED, SAMPLING
from engine.out_of_memory import kind_of, recover, text_of
from engine.plan import Arena, StepPlan
from engine.runner import CopyFailed
from engine.scheduler import SchedulerKnobs
from engine.speculation.draft_models import DraftWeights
from engine.weight_precision import WeightPrecision
from ipc.messages import ApplyEvent, KnobValue, Preempted

if TYPE_CHECKING:
    from engine.loop import EngineCore

log = logging.getLogger(__name__)

MIB = 1 << 20
ARENAS: tuple[Arena, ...] = ("prefix", "swap")


class NoWayBack(Exception):
    """A change failed and so did going back: the engine has no KV pool any more and cannot go on."""


def what_to_fetch(core: EngineCore, proposal: Proposal) -> Callable[[Progress], None] | None:
    """What loads or compiles what a change needs, for a thread beside the steps; None if all is there."""
    values = {**core.knobs.values, **proposal.changed}
    weights, code = core.drafts.must_fetch(values), core.runner.must_compile(values)
    if proposal.mode == "restart" or not (weights or code):
        return None

    def fetch(progress: Progress) -> None:
        if code:
            core.runner.compile_parts(progress)
        if weights:
            core.drafts.fetch(values, core.layout, _wanted(core, values), progress)

    return fetch


def carry_out(core: EngineCore, proposal: Proposal, now_ns: int, error: Exception | None = None) -> None:
    """Make the proposed values real and tell of it. No step may be in flight.

    ``error``: why what the change needs could not be loaded or compiled.

    On failure everything is put back as it was, but for the content of what was rebuilt already, and the
    reason is told. NoWayBack if even that fails, torch.AcceleratorError if the device is lost.
    """
    events = core.answers.events
    before, why = len(events), ""
    try:
        if error is not None:
            _refuse(error)
        core.knobs.heed_cancel()
        make_copies(core, now_ns)
        _reconfigure(core, proposal, now_ns)
    except (PatchRefused, ModelError, NoRoom, MemoryError, RuntimeError, ValueError) as caught:
        if kind_of(caught) == "lost":  # there is no going on without the device
            raise
        why = text_of(caught)
        recover(caught, core.runner.device)
        core.knobs.abandon()
        log.warning("change %d was rolled back: %s", proposal.apply_id, why)
    else:
        core.answers.cfg_rev = core.knobs.commit(proposal)
    finally:
        core.drafts.forget_fetched()
    done_ns = core.clock_ns()
    events.append(
        ApplyEvent(
            apply_id=proposal.apply_id,
            from_rev=proposal.from_rev,
            to_rev=core.knobs.rev,
            result="rolled_back" if why else "ok",
            t_ns=done_ns,
            at_step=core.step_count + 1,
            took_us=(done_ns - now_ns) // 1000,
            mode=proposal.mode,
            patch=dict(proposal.changed),
            preempted=sum(isinstance(event, Preempted) for event in events[before:]),
            why=why[:4096],
        )
    )


def _refuse(error: Exception) -> NoReturn:
    """Raise what loading ended with. Nothing was changed by it, so whatever it was, the engine can go on."""
    if isinstance(error, ModelError | NoRoom | MemoryError | RuntimeError | ValueError):
        raise error
    log.error("loading what a change needs met an error of its own", exc_info=error)
    raise RuntimeError(f"what it needs could not be loaded: {type(error).__name__}: {error}") from error


def set_up(core: EngineCore) -> None:
    """Make the start values real, once there is a pool. PatchRefused or MemoryError if that cannot be."""
    values = core.knobs.values
    layout = _wanted(core, values)
    _check(core, layout, rebuild=False)
    _check_drafts(core, values, layout)
    _apply(core, values, layout, 0, rebuild=False)


def start_over(core: EngineCore, now_ns: int) -> None:
    """Empty the pool and the arenas, whose content cannot be relied on, and let everybody compute again."""
    layout = core.layout
    core.answers.note_preempted(
        core.scheduler.rebuild(
            layout.num_blocks,
            layout.block_size,
            now_ns,
            identity=kv_identity(core.loaded.info, core.runner, core.knobs.values),
            window=core.drafts.kept_window,
        )
    )


def make_copies(core: EngineCore, now_ns: int) -> None:
    """Make the copies that a plan ordered which was not launched, before the arenas may change."""
    copies = core.scheduler.take_copies()
    if not copies:
        return
    try:
        core.runner.execute(StepPlan(), copies)
    except CopyFailed as error:
        log.error("blocks could not be copied, everybody computes again: %s", error)
        start_over(core, now_ns)


def swap_space_is_idle(core: EngineCore) -> bool:
    """Whether swap space is held though swapping is off and everybody has come back who was in it."""
    return bool(
        core.layout.swap_blocks and core.knobs["preemption"] != "swap" and not core.scheduler.num_swapped
    )


def release_swap_space(core: EngineCore, now_ns: int) -> None:
    """Free idle swap space. No step may be in flight."""
    make_copies(core, now_ns)
    _resize(core, "swap", 0)


def _reconfigure(core: EngineCore, proposal: Proposal, now_ns: int) -> None:
    """Make the proposed values real, or put everything back and raise."""
    old = core.knobs.values
    new = {**old, **proposal.changed}
    if proposal.mode == "restart":
        raise PatchRefused("unsupported", f"{', '.join(proposal.changed)} can only be chosen at start")
    layout = _wanted(core, new)
    rebuild = any(BY_ID[knob].apply == "rebuild_kv" for knob in proposal.changed)
    _check(core, layout, rebuild=rebuild)
    try:
        core.runner.check_precision(WeightPrecision.of(new))
    except NoRoom as error:
        raise PatchRefused("oom", str(error)) from None
    _check_drafts(core, new, layout)
    pool, drafter = core.runner.kv, core.drafts.drafter
    try:
        _apply(core, new, layout, now_ns, rebuild=rebuild)
        _measure_step(core, new, now_ns)
    except (MemoryError, RuntimeError, ValueError) as error:
        if kind_of(error) == "lost":  # going back needs the device too
            raise
        recover(error, core.runner.device)  # what was begun leaves room for what there was
        try:  # a pool that is as large as before may still have been laid out for the new values
            _apply(core, old, _wanted(core, old), now_ns, rebuild=rebuild)
        except (MemoryError, RuntimeError, ValueError) as worse:
            raise NoWayBack(
                f"the change could neither be applied nor undone: {text_of(error)}; then {text_of(worse)}"
            ) from worse
        raise

    def told(done: int, total: int, what: str = "kernels:") -> None:
        core.pulse.progress(f"compiling {what} {done + 1} of {total}", 0, 0)

    if core.runner.kv is not pool:  # a pool with blocks of another kind is read by other kernels
        compile_kernels(core.runner, told, core.drafts.drafter)
    elif core.drafts.drafter is not drafter:  # and other weights, of other sizes, draft by others
        compile_drafter(core.runner, core.drafts.drafter, told)
    most = int(new["max_num_seqs"] or 0)
    if most > int(old["max_num_seqs"] or 0):  # steps come in larger shapes
        core.runner.warm_up(most, lambda done, total: told(done, total, "the kernels of graphs: shape"))


def _measure_step(core: EngineCore, values: Mapping[str, KnobValue], now_ns: int) -> None:
    """On a card, run the largest step again if these values allow one that it may have no room for.

    Everybody computes again: it is run over their blocks. MemoryError, with what there is, without room.
    """
    known = core.memory_profile
    if known is None or known.covers(LargestStep.of(values, core.runner.attention_name)):
        return
    start_over(core, now_ns)
    core.memory_profile = measure_again(core.runner, values, known, core.drafts.drafter)
    core.drafts.kept_bytes = core.memory_profile.step


def _wanted(core: EngineCore, values: Mapping[str, KnobValue]) -> Layout:
    layout = layout_of(values, core.runner, core.pool_bytes)
    if core.scheduler.num_swapped and values["preemption"] != "swap" and layout.pool == core.layout.pool:
        return replace(layout, swap_blocks=core.layout.swap_blocks)  # until they have come back
    return layout


def _check(core: EngineCore, layout: Layout, *, rebuild: bool) -> None:
    """Refuse what memory cannot hold, and a pool that a live request would never fit in."""
    try:
        check_room(core.runner.device, core.layout, layout, core.drafts.kept_bytes)
    except NoRoom as error:
        raise PatchRefused("oom", str(error)) from None
    if not rebuild:
        return
    for request in core.answers.live.values():
        try:
            needed = core.scheduler.blocks_for(request, layout.block_size)
            check_fit(request, needed, layout.num_blocks, layout.block_size)
        except RequestRefused as refused:
            raise PatchRefused("invalid", f"request {request.rid} would not fit: {refused.message}") from None


def _check_drafts(core: EngineCore, values: Mapping[str, KnobValue], layout: Layout) -> None:
    """Refuse a draft model that memory cannot hold, or that would draft with the model's own weights."""
    try:
        core.drafts.check(values, core.layout, layout)
    except NoRoom as error:
        raise PatchRefused("oom", str(error)) from None
    except ValueError as error:
        raise PatchRefused("invalid", str(error)) from None


def _apply(
    core: EngineCore, values: Mapping[str, KnobValue], layout: Layout, now_ns: int, *, rebuild: bool
) -> None:
    """Bring everything to these values; what is so already is left alone. What may fail comes first."""
    runner, precision = core.runner, WeightPrecision.of(values)
    if precision != runner.precision:
        _convert_weights(core, precision, layout)
    attention = resolve(values, core.knobs.context)
    if core.attention != attention:
        runner.set_attention(attention)
        core.attention = attention
    fused = {knob: bool(values[knob]) for knob in (*FUSED, SAMPLING, COMPILE)}
    runner.set_fused(fused)
    core.scheduler.configure(SchedulerKnobs.of(values))
    if layout.pool != core.layout.pool:
        _replace_pool(core, values, layout, now_ns)
    elif rebuild:
        start_over(core, now_ns)
    for arena in ARENAS:
        _resize(core, arena, _blocks(layout, arena))
    runner.set_forward_timing(bool(values["forward_timing"]))
    _speculate(core, values)
    core.drafts.set_fused(fused)
    runner.graphs.switch(bool(values["cuda_graphs"]))
    core.pipeline.set_overlap(bool(values["overlap"]))
    core.answers.delivery.batched = bool(values["batched_detokenize"])
    core.results.configure(values)


def _speculate(core: EngineCore, values: Mapping[str, KnobValue]) -> None:
    """Make the drafter that is asked for, once what another one took is given back."""
    try:
        core.speculator.configure(values)
    except ModelError as error:  # its files were changed since the start
        raise ValueError(str(error)) from None
    core.drafts.keep_only(DraftWeights.of(values))


def _convert_weights(core: EngineCore, precision: WeightPrecision, layout: Layout) -> None:
    """Convert the weights once the pool is gone, whose content belongs to the old ones.

    Room is left for the pool of ``layout``.
    """
    core.speculator.stop()
    for arena in ARENAS:
        _resize(core, arena, 0)
    runner = core.runner
    runner.free_kv()
    core.layout = replace(core.layout, num_blocks=0)
    before, began_ns = runner.weight_bytes, core.clock_ns()
    log.info("converting the weights to %s; requests wait", precision.name)
    try:
        runner.set_precision(precision, core.progress, layout.pool_bytes)
    except NoRoom as error:  # memory has become less, or the weights are best held in several layouts
        raise MemoryError(str(error)) from None
    took_s, now = (core.clock_ns() - began_ns) * 1e-9, runner.weight_bytes
    log.info(
        "converting took %.1f s; the weights take %.0f MiB, before it %.0f MiB (%+.0f MiB)",
        took_s, now / MIB, before / MIB, (now - before) / MIB,
    )  # fmt: skip


def _replace_pool(core: EngineCore, values: Mapping[str, KnobValue], layout: Layout, now_ns: int) -> None:
    """Everybody goes back to the queue, then the old pool is freed before the new one is taken."""
    runner, scheduler = core.runner, core.scheduler
    core.speculator.stop()  # drafts are made over a pool of the same blocks
    for arena in ARENAS:
        _resize(core, arena, 0)
    runner.free_kv()
    core.layout = replace(core.layout, num_blocks=0)
    runner.set_window(layout.window)
    core.answers.note_preempted(
        scheduler.rebuild(
            layout.num_blocks,
            layout.block_size,
            now_ns,
            identity=kv_identity(core.loaded.info, core.runner, values),
            window=core.drafts.kept_window,
        )
    )
    core.pulse.progress("allocating the KV pool", 0, layout.pool_bytes)
    runner.allocate_kv(layout.num_blocks, layout.block_size, layout.kv_dtype)
    core.layout = replace(layout, prefix_blocks=0, swap_blocks=0)


def _resize(core: EngineCore, arena: Arena, num_blocks: int) -> None:
    """Give an arena this many blocks. Its content is lost if they are not as many as before."""
    if _blocks(core.layout, arena) == num_blocks:
        return
    # The old one goes first, so that memory need not hold both.
    _tell(core, arena, 0)
    core.runner.allocate_host(arena, 0)
    if num_blocks:
        core.runner.allocate_host(arena, num_blocks)
        _tell(core, arena, num_blocks)


def _tell(core: EngineCore, arena: Arena, num_blocks: int) -> None:
    there = core.layout
    there = (
        replace(there, prefix_blocks=num_blocks)
        if arena == "prefix"
        else replace(there, swap_blocks=num_blocks)
    )
    core.layout = there
    core.answers.note_preempted(core.scheduler.set_host(there.prefix_blocks, there.swap_blocks))


def _blocks(layout: Layout, arena: Arena) -> int:
    return layout.prefix_blocks if arena == "prefix" else layout.swap_blocks
