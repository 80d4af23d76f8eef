"""What an engine says of itself as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc.messages import EngineState

if TYPE_CHECKING:
    from engine.loop import EngineCore


def state_of(core: EngineCore) -> EngineState:
    """Phase, counts, memory and model as they are now. Any thread."""
    pulse, pending = core.pulse, core.knobs.pending
    pool, runner, results, drafts = core.scheduler.pool, core.runner, core.results, core.drafts
    kv, profiled = runner.kv, core.memory_profile
    return EngineState(
        phase=pulse.phase,
        since_ns=pulse.since_ns,
        cfg_rev=core.knobs.rev,
        stage=pulse.stage,
        done_bytes=pulse.done_bytes,
        total_bytes=pulse.total_bytes,
        pending_apply=pending.apply_id if pending is not None else None,
        reason=pulse.reason[:4096],
        running=len(core.scheduler.running),
        waiting=len(core.scheduler.waiting),
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        kv_dtype="" if kv is None else str(kv.dtype).removeprefix("torch."),
        kv_bytes=0 if kv is None else kv.nbytes,
        host_kv_bytes=runner.host_nbytes("prefix"),
        swap_bytes=runner.host_nbytes("swap"),
        weight_bytes=runner.weight_bytes,
        weight_dtype="" if runner.precision is None else runner.precision.name,
        original_bytes=runner.original_bytes,
        draft_weight_bytes=drafts.weight_bytes,
        draft_kv_bytes=drafts.kv_bytes,
        step_bytes=0 if profiled is None else profiled.step,
        graph_budget_bytes=0 if profiled is None else profiled.graphs,
        result_n=results.num_answers,
        result_bytes=results.nbytes,
        result_hits=results.hits,
        graphs=runner.graphs.use(),
        speculation=core.speculator.reason[:4096],
        ended=max(0, core.num_begun - len(core.answers.live)) + results.hits,
        prefill_tok=core.pipeline.prefill_tokens,
        decode_tok=core.pipeline.decode_tokens,
        model=core.loaded.info,
        device=core.device_info,
    )
