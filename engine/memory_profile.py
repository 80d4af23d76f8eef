"""What a card's memory is needed for beside the KV pool, found by running the largest step once.

As vLLM does it (`gpu_memory_utilization`): of the part of a card that may be used, what is left by weights,
the largest step and CUDA graphs is the pool's. Steps run over a single block, which stands for every block of
every row: what is written there is overwritten again and again, but what attention gathers and what the
output head and sampling take is as large as it ever gets.

Steps are run without fused parts, which take less, but for one: tokens chosen on the device in a step that is
not replayed. What that takes besides is known without running it, and added.

Which step is the largest depends on the attention: one long prompt, all requests decoding over long contexts,
or pieces of many prompts. So one of each is run. Knobs that allow a larger one later have it run then
(`measure_again`), before they count as applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.batch import TextRow
from engine.config import GIB, EngineConfig
from engine.graphs import driver
from engine.graphs.direct import choice_bytes
from engine.graphs.switch import BUDGET_BYTES
from engine.kernels import availability
from engine.memory import host_pool_bytes
from engine.ops.plain import PLAIN
from engine.out_of_memory import CardMemory, kind_of, recover, text_of
from engine.runner import ModelRunner
from engine.sizes import counted, size
from engine.speculation.base import Draft
from engine.speculation.draft_models import DraftModels
from engine.speculation.model_drafter import ModelDrafter
from engine.speculation.proposals import DraftFailed
from engine.speculation.rounds import RoundDrafter, settings
from ipc.messages import MAX_LOGPROBS, KnobValue, Sampling

log = logging.getLogger(__name__)

# Has to look at the whole distribution, and once more for log-probabilities.
SAMPLING = Sampling(temperature=1.0, top_p=0.9, logprobs=MAX_LOGPROBS)
DUMMY = 1  # the token that all of it consists of
SHARED_TOKENS = 1 << 22
"""Of all requests together where they share blocks: as much as to take all that attention gathers at once
(`engine.attention.base.GATHER_BYTES`). Beyond it only masks and indices grow, by some bytes a token.
"""
WAYS = ("kv_dtype", "sliding_window", "weight_dtype", "int4_method", "high_precision")
"""Knobs by which what computes a step changes, beside the attention. Fused parts are none: steps are measured
without, which takes the most.
"""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that knob values allow.

    ``tokens``: of all rows together, drafts included. ``rows``: requests in it, each of which wants logits
    for ``drafted`` tokens and one more. ``shared``: they may have blocks in common, so that together they
    look at more than the pool holds. ``way``: by what it is computed, as far as memory depends on it.
    ``by_model``: a draft model drafts before it. ``drawn``: drafts come with their probabilities.
    ``undrafted``: requests in a step that has no drafts, which may be more.
    """

    tokens: int
    rows: int
    drafted: int
    shared: bool = False
    way: tuple[object, ...] = ()
    by_model: bool = False
    drawn: bool = False
    undrafted: int = 0

    @classmethod
    def of(cls, values: Mapping[str, KnobValue], attention: str = "") -> LargestStep:
        """``attention`` is the name of what runs, which ``values`` may leave open."""
        kind = values["speculation"]
        drafted = int(values["spec_tokens"] or 0) if kind != "off" else 0
        tokens = int(values["max_num_batched_tokens"] or 0)
        seqs = int(values["max_num_seqs"] or 0)
        rows, undrafted = (max(1, min(seqs, tokens // each)) for each in (drafted + 1, 1))
        way = (attention, *(values.get(knob) for knob in WAYS))
        drawn = kind in ("draft", "self") and values.get("spec_sampling") == "rejection"
        shared = bool(values.get("prefix_cache"))
        return cls(tokens, rows, drafted, shared, way, kind == "draft", drawn, undrafted)

    def covers(self, other: LargestStep) -> bool:
        """Whether the other step takes no more than this one."""
        pairs = [(self.tokens, other.tokens), (self.rows, other.rows), (self.drafted, other.drafted)]
        pairs.append((self.undrafted, other.undrafted))
        return (
            self.way == other.way
            and self.shared >= other.shared
            and self.by_model >= other.by_model
            and self.drawn >= other.drawn
            and all(own >= others for own, others in pairs)
        )

    def run(
        self, runner: ModelRunner, block_size: int, context: int, held: int, drafts: Sequence[Draft] = ()
    ) -> None:
        """Run a step of each form, over block 0 of a pool; no row is longer than ``context`` tokens.

        ``held``: tokens in all blocks of the pool, more than which rows that share none do not have.
        ``drafts``: one for each row, else made up.
        """
        drafts = drafts or self._made_up(runner)
        each, longest = self.drafted + 1, self.longest(context, held)
        few = [(max(each, longest), each)] * self.rows
        spread = max(each, min(self.tokens // self.rows, longest))
        pieces = [(max(spread, longest), spread)] * self.rows
        alike = [self._alike(lengths, block_size, drafts) for lengths in (few, pieces)]
        for rows in (self.rows_of(block_size, context, drafts), *alike):
            runner.execute(_Step(rows))
            for row in rows:
                runner.release(row.slot)

    def longest(self, context: int, held: int) -> int:
        """Tokens of each row where all have as many: see `run`."""
        return min(context, max(1, (SHARED_TOKENS if self.shared else held) // self.rows))

    def _made_up(self, runner: ModelRunner) -> list[Draft]:
        """Drafts with probabilities, which take more than those without; none if these are enough."""
        if not self.drawn:
            return []
        shape = self.rows, self.drafted, runner.spec.vocab_size
        probs = torch.full(shape, 1 / shape[-1], dtype=torch.float32, device=runner.device)
        return [Draft([DUMMY] * self.drafted, each) for each in probs]

    def _alike(
        self, lengths: Sequence[tuple[int, int]], block_size: int, drafts: Sequence[Draft]
    ) -> list[TextRow]:
        """Rows of as many tokens with their drafts, and new ones among them, as ``lengths`` says."""
        longest = max(length for length, _ in lengths)
        # They are long, and nobody writes to them.
        texts = {length: [DUMMY] * (length - self.drafted) for length, _ in lengths}
        table = [0] * -(-longest // block_size)
        return [
            self._row(slot, texts[length], table, new - self.drafted, drafts)
            for slot, (length, new) in enumerate(lengths)
        ]

    def rows_of(self, block_size: int, context: int, drafts: Sequence[Draft] = ()) -> list[TextRow]:
        """The rows over block 0: as many prompts as fill the step up, the first at the end of a context of
        ``context`` tokens, which none exceeds, and requests that decode. ``drafts`` as in `run`.
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
            self._row(slot, [DUMMY] * length, [0] * -(-(length + self.drafted) // block_size), new, drafts)
            for slot, (length, new) in enumerate(lengths)
        ]

    def _row(self, slot: int, ids: list[int], table: list[int], new: int, drafts: Sequence[Draft]) -> TextRow:
        return TextRow(
            token_ids=ids,
            block_table=table,
            num_new=new,
            num_computed=len(ids) - new,
            rid=slot,
            slot=slot,
            sampling=SAMPLING,
            draft=drafts[slot] if drafts else Draft([DUMMY] * self.drafted),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    scheduled: list[TextRow]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a card. ``used``: without any pool, by the weights and whatever else runs on it.

    ``step``: what the largest step takes beside the pool, and what the drafts for it do before, where a draft
    model is there. ``graphs``: the budget of CUDA graphs.
    ``measured``: the steps that were run and take no more than that.
    """

    total: int
    used: int
    step: int
    graphs: int
    measured: tuple[LargestStep, ...] = field(default=(), compare=False)

    def covers(self, step: LargestStep) -> bool:
        """Whether it is known that a step takes no more."""
        return any(known.covers(step) for known in self.measured)

    def check_pool(self, num_bytes: int) -> None:
        """MemoryError, with every part, for a pool that leaves the largest step no room."""
        if self.used + self.step + num_bytes > self.total:
            raise MemoryError(
                f"a KV pool of {size(num_bytes)} leaves the largest step no room: {size(self.used)} of the "
                f"card's {size(self.total)} are in use and the step takes {size(self.step)}; ask for a "
                "smaller pool, or fewer max_num_batched_tokens or max_num_seqs"
            )

    def pool_bytes(self, utilization: float) -> int:
        """What is left for pools. MemoryError, with every part, if that is nothing."""
        usable = int(self.total * utilization)
        left = usable - self.used - self.step - self.graphs
        if left <= 0:
            raise MemoryError(
                f"nothing is left for a KV pool: {size(usable)} of the card's {size(self.total)} may be used "
                f"(gpu_memory_utilization {utilization}), {size(self.used)} are in use, the largest step "
                f"takes {size(self.step)} and CUDA graphs may take {size(self.graphs)}; use a smaller model, "
                "fewer max_num_batched_tokens or max_num_seqs, or a higher gpu_memory_utilization"
            )
        return left


def size_pool(
    config: EngineConfig, runner: ModelRunner, drafts: DraftModels, values: Mapping[str, KnobValue]
) -> tuple[MemoryProfile | None, int]:
    """What a card's memory is needed for, None on a CPU, and the bytes of the KV pool.

    See `EngineConfig`. MemoryError if there is no room for the largest step, or then for a pool, or for the
    one that is asked for.
    """
    found = None
    if runner.device.type == "cuda":
        found = profile(runner, values, config.gpu_memory_utilization, drafts)
    asked = int(float(values.get("kv_pool_gib") or 0) * GIB) or config.kv_pool_bytes
    if found is not None and asked is not None:
        found.check_pool(asked)
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
    device, largest = runner.device, LargestStep.of(values, runner.attention_name)
    block_size, kv_dtype = int(values["block_size"] or 0), str(values["kv_dtype"])
    runner.set_window(int(values["sliding_window"] or 0))
    try:
        runner.allocate_kv(1, block_size, kv_dtype)  # calibrates, which is no part of a step
        torch.cuda.empty_cache()
        now = CardMemory.of(device)
        # No request is longer than what a pool that takes all the rest could hold.
        most = int(now.total * utilization) - (now.total - now.free)
        held = max(1, most // runner.kv_bytes_per_block(block_size, kv_dtype)) * block_size
        step = _measure(
            runner, largest, block_size, held, lambda *lengths: _first_drafts(drafts, largest, *lengths)
        )
    except (RuntimeError, MemoryError) as error:
        raise MemoryError(
            f"the largest step, {counted(largest.tokens, 'token')} of {counted(largest.rows, 'request')}, "
            f"does not fit beside the weights: {_shortage(error, device)}; "
            "lower max_num_batched_tokens, max_num_seqs or max_model_len, or choose another attention"
        ) from error
    finally:
        runner.free_kv()
    after = CardMemory.of(device)
    graphs = BUDGET_BYTES if driver.probe(device) is None else 0
    found = MemoryProfile(after.total, after.total - after.free, step, graphs, (largest,))
    log.info(
        "of the card's %s, %s are in use after loading; the largest step (%d tokens, %d requests, %d drafted "
        "for each, contexts of up to %d) takes %s, CUDA graphs may take %s",
        size(found.total), size(found.used), largest.tokens, largest.rows, largest.drafted,
        min(runner.max_len, held), size(found.step), size(found.graphs),
    )  # fmt: skip
    return found


def _first_drafts(drafts: DraftModels | None, largest: LargestStep, context: int, alike: int) -> list[Draft]:
    """What a draft model that is there makes for the largest step, over a pool that is gone after it."""
    drafter = None if drafts is None or not largest.drafted else drafts.to_measure()
    if drafter is None:
        return []
    drafter.drawn = largest.drawn
    try:
        return _drafts(drafter, largest, context, alike)
    finally:
        drafter.close()


def _drafts(drafter: RoundDrafter | None, largest: LargestStep, context: int, alike: int) -> list[Draft]:
    """What a draft model makes for the largest step, none if there is no such model: see `largest` there."""
    if not isinstance(drafter, ModelDrafter):
        return []
    try:
        return drafter.largest(largest.rows, context, alike, largest.drafted, settings(SAMPLING))
    except DraftFailed as error:  # it will say so again when it is to draft; its memory was taken
        log.warning("the draft model could not be measured: %s", error)
        return []


def measure_again(
    runner: ModelRunner,
    values: Mapping[str, KnobValue],
    known: MemoryProfile,
    drafter: RoundDrafter | None = None,
) -> MemoryProfile:
    """Run the largest step that ``values`` allow beside the pools, nobody having blocks or a slot.

    ``drafter``: the one that there is; a draft model drafts for it, over its own pool.
    MemoryError, with what there is, if it does not fit.
    """
    kv, largest = runner.kv, LargestStep.of(values, runner.attention_name)
    if kv is None:
        raise RuntimeError("no KV pool: call allocate_kv first")
    try:
        with runner.graphs.paused():  # a step that is not replayed takes more
            step = _measure(
                runner, largest, kv.block_size, kv.num_blocks * kv.block_size,
                lambda *lengths: _drafts(drafter, largest, *lengths),
            )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        raise MemoryError(
            f"the largest step, {counted(largest.tokens, 'token')} of {counted(largest.rows, 'request')}, "
            f"does not fit beside the KV pool: {_shortage(error, runner.device)}; a smaller KV pool "
            "(kv_pool_gib) leaves more"
        ) from error
    finally:
        runner.sampler.clear()
    log.info(
        "the largest step is now one of %d tokens, %d requests, %d drafted for each, with attention %s; it "
        "takes %s",
        largest.tokens, largest.rows, largest.drafted, runner.attention_name, size(step),
    )  # fmt: skip
    return replace(known, step=max(known.step, step), measured=(*known.measured, largest))


def _measure(
    runner: ModelRunner,
    largest: LargestStep,
    block_size: int,
    held: int,
    draft: Callable[[int, int], Sequence[Draft]],
) -> int:
    """Bytes that a step, and what drafts for it, take beside what there is.

    ``draft`` is asked with the longest context, and with that of rows which are all alike.
    """
    context = min(runner.max_len, held)
    decoder, sampler = runner.decoder, runner.sampler
    ops, fused = decoder.ops, sampler.fused
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    decoder.ops, sampler.fused = PLAIN, None
    try:
        largest.run(runner, block_size, context, held, draft(context, largest.longest(context, held)))
    finally:
        decoder.ops, sampler.fused = ops, fused
    measured = max(0, torch.cuda.max_memory_reserved(runner.device) - before)
    return measured + _chosen_there(runner, largest.undrafted)


def _chosen_there(runner: ModelRunner, rows: int) -> int:
    """Bytes that a step takes besides where its tokens are chosen on the device and it is not replayed; both
    can be switched on at any time, where they can be at all.
    """
    if driver.probe(runner.device) is not None or availability.probe(runner.device) is not None:
        return 0
    return choice_bytes(rows, runner.spec.vocab_size)


def _shortage(error: RuntimeError | MemoryError, device: torch.device) -> str:
    """What memory a step lacked; errors of another kind are raised again."""
    if kind_of(error) != "memory":
        raise error
    why = text_of(error)
    recover(error, device)
    return why
