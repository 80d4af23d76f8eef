"""What a card's memory is needed for beside the KV pool, found by running the largest step once.

As vLLM does it (`gpu_memory_utilization`): of the part of a card that may be used, what is left by weights,
the largest step and CUDA graphs is the pool's. The step runs over a pool of a single block, which stands for
every block of every row: what is written there is overwritten again and again, but what attention gathers and
what the output head and sampling take is as large as it ever gets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.batch import TextRow
from engine.config import EngineConfig
from engine.graphs import driver
from engine.graphs.switch import BUDGET_BYTES
from engine.memory import host_pool_bytes
from engine.out_of_memory import CardMemory, kind_of, recover, text_of
from engine.runner import ModelRunner
from engine.speculation.base import Draft
from engine.speculation.draft_models import DraftModels
from engine.speculation.proposals import DraftFailed
from ipc.messages import KnobValue, Sampling

log = logging.getLogger(__name__)

GIB = 1 << 30
SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # has to look at the whole distribution
DUMMY = 1  # the token that all of it consists of


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that knob values allow.

    ``tokens``: of all rows together, drafts included. ``rows``: requests in it, each of which wants logits
    for ``drafted`` tokens and one more.
    """

    tokens: int
    rows: int
    drafted: int

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> LargestStep:
        drafted = int(values["spec_tokens"] or 0) if values["speculation"] != "off" else 0
        tokens = int(values["max_num_batched_tokens"] or 0)
        return cls(tokens, max(1, min(int(values["max_num_seqs"] or 0), tokens // (drafted + 1))), drafted)

    def rows_of(self, block_size: int, context: int, drafts: Sequence[Draft] = ()) -> list[TextRow]:
        """The rows over block 0: as many prompts as fill the step up, the first at the end of a context of
        ``context`` tokens, which none exceeds, and requests that decode.

        drafts: one for each row, else made up.
        """
        each = self.drafted + 1
        room = max(0, self.tokens - each * self.rows)
        lengths = []
        for row in range(self.rows):
            more = min(room, max(0, context - each))
            room -= more
            new = 1 + more
            lengths.append((new if row else max(new, context - self.drafted), new))
        return [
            TextRow(
                token_ids=[DUMMY] * length,
                block_table=[0] * -(-(length + self.drafted) // block_size),
                num_new=new,
                num_computed=length - new,
                rid=slot,
                slot=slot,
                sampling=SAMPLING,
                draft=drafts[slot] if drafts else Draft([DUMMY] * self.drafted),
            )
            for slot, (length, new) in enumerate(lengths)
        ]


@dataclass(frozen=True, slots=True)
class _Step:
    scheduled: list[TextRow]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a card. ``used``: without any pool, by the weights and whatever else runs on it.

    ``step``: what the largest step takes beside the pool, and what the drafts for it do before, where a draft
    model is there. ``graphs``: the budget of CUDA graphs.
    """

    total: int
    used: int
    step: int
    graphs: int

    def pool_bytes(self, utilization: float) -> int:
        """What is left for pools. MemoryError, with every part, if that is nothing."""
        usable = int(self.total * utilization)
        left = usable - self.used - self.step - self.graphs
        if left <= 0:
            raise MemoryError(
                f"nothing is left for a KV pool: {_gib(usable)} of the card's {_gib(self.total)} may be used "
                f"(gpu_memory_utilization {utilization}), {_gib(self.used)} are in use, the largest step "
                f"takes {_gib(self.step)} and CUDA graphs may take {_gib(self.graphs)}; use a smaller model, "
                "fewer max_num_batched_tokens or max_num_seqs, or a higher gpu_memory_utilization"
            )
        return left


def size_pool(
    config: EngineConfig, runner: ModelRunner, drafts: DraftModels, values: Mapping[str, KnobValue]
) -> tuple[MemoryProfile | None, int]:
    """What a card's memory is needed for, None on a CPU, and the bytes of the KV pool.

    See `EngineConfig`. MemoryError if there is no room for the largest step, or then for a pool.
    """
    found = None
    if runner.device.type == "cuda":
        found = profile(runner, values, config.gpu_memory_utilization, drafts)
    if config.kv_pool_bytes is not None:
        return found, config.kv_pool_bytes
    if found is None:
        return None, host_pool_bytes()
    # Such a pool fills the card, so that what may come later has to be thought of.
    return found, drafts.leave_room(found.pool_bytes(config.gpu_memory_utilization))


def profile(
    runner: ModelRunner,
    values: Mapping[str, KnobValue],
    utilization: float,
    drafts: DraftModels | None = None,
) -> MemoryProfile:
    """Run the largest step that ``values`` allow on a GPU. There must be no pool, and there is none after it.

    drafts: a draft model that is there drafts for it, as often as ``values`` say, and with probabilities if
    they are kept then.
    MemoryError, with what there is, if even that step does not fit.
    """
    device, largest = runner.device, LargestStep.of(values)
    block_size, kv_dtype = int(values["block_size"] or 0), str(values["kv_dtype"])
    runner.set_window(int(values["sliding_window"] or 0))
    try:
        runner.allocate_kv(1, block_size, kv_dtype)  # calibrates, which is no part of a step
        torch.cuda.empty_cache()
        before = CardMemory.of(device)
        # No request is longer than what a pool that takes all the rest could hold.
        most = int(before.total * utilization) - (before.total - before.free)
        held = max(1, most // runner.kv_bytes_per_block(block_size, kv_dtype)) * block_size
        context = min(runner.max_len, held)
        torch.cuda.reset_peak_memory_stats(device)
        made = _drafts(drafts, largest, context, values)
        runner.execute(_Step(largest.rows_of(block_size, context, made)))
        step = max(0, torch.cuda.max_memory_reserved(device) - before.reserved)
    except (RuntimeError, MemoryError) as error:
        if kind_of(error) != "memory":
            raise
        why = text_of(error)
        recover(error, device)
        raise MemoryError(
            f"the largest step, {largest.tokens} tokens of {largest.rows} requests, does not fit beside the "
            f"weights: {why}; lower max_num_batched_tokens, max_num_seqs or max_model_len, or choose another "
            "attention"
        ) from error
    finally:
        runner.free_kv()
    after = CardMemory.of(device)
    graphs = BUDGET_BYTES if driver.probe(device) is None else 0
    found = MemoryProfile(after.total, after.total - after.free, step, graphs)
    log.info(
        "of the card's %s, %s are in use after loading; the largest step (%d tokens, %d requests, %d drafted "
        "for each, a context of %d) takes %s, CUDA graphs may take %s",
        _gib(found.total), _gib(found.used), largest.tokens, largest.rows, largest.drafted, context,
        _gib(found.step), _gib(found.graphs),
    )  # fmt: skip
    return found


def _drafts(
    drafts: DraftModels | None, largest: LargestStep, context: int, values: Mapping[str, KnobValue]
) -> list[Draft]:
    """What a draft model makes for the largest step, none if there is no such model."""
    drafter = None if drafts is None or not largest.drafted else drafts.to_measure()
    if drafter is None:
        return []
    drafter.drawn = values["spec_sampling"] == "rejection"
    try:
        return drafter.largest(largest.rows, context, largest.drafted, SAMPLING)
    except DraftFailed as error:  # it will say so again when it is to draft; its memory was taken
        log.warning("the draft model could not be measured: %s", error)
        return []
    finally:
        drafter.close()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
