"""What the knob benchmark measures: one entry for each knob, or for each value of one that is worth a look.

A new knob is one more `Spec` here, or a line in `NOT_MEASURED` that says why it has none; a test holds that
every knob of the registry is in one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ipc.messages import KnobValue
from tests.bench import knob_figures as f
from tests.bench import knob_workloads as w
from tests.bench.knob_figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """How one knob is measured.

    ``figures``: the first is the one that should move, and its ``better`` says which way ``on`` is meant to
    move it. ``base`` are other knobs' values during both arms; ``pool_tokens`` sizes the KV pool, in
    tokens of the model's own precision (None: the engine's own choice). ``expected`` says why the figure
    should move, ``otherwise`` what it means on this machine if it does not. ``segments`` > 0: instead of
    whole runs, one steady load is cut into so many pairs of stretches for each pair asked for, which shows
    small differences in the time of a step. ``at_most``: the ratio that the figure must stay below, for what
    has a cost only. ``called``: its name, where the knob's and the value's do not tell it from another entry.
    """

    knob: str
    off: KnobValue
    on: KnobValue
    workload: w.Workload
    figures: Sequence[Figure]
    expected: str
    otherwise: str
    base: Mapping[str, KnobValue] = field(default_factory=dict)
    pool_tokens: int | None = None
    segments: int = 0
    at_most: float | None = None
    called: str = ""


SPECS: tuple[Spec, ...] = (
    Spec(
        knob="batching",
        off="static",
        on="continuous",
        base={"max_num_seqs": 8},
        workload=w.mixed_lengths,
        figures=(f.OUT_TOK_S, f.idle_seats(8), f.ttft()),
        expected="A static batch waits for its slowest member with its other seats empty.",
        otherwise="Where a step takes as long with one request as with eight, empty seats cost little.",
    ),
    Spec(
        knob="batch_wait_ms",
        off=0.0,
        on=1000.0,
        base={"batching": "static", "max_num_seqs": 8},
        workload=w.trickle,
        figures=(f.BATCH_FILL, f.ttft(), f.OUT_TOK_S),
        expected="A batch that waits for more members starts with more of them, and its first one waits.",
        otherwise="Where a batch runs longer than requests need to gather, the next is full anyway.",
    ),
    Spec(
        knob="max_num_seqs",
        off=1,
        on=32,
        workload=w.batch(16, 32, 8),
        figures=(f.OUT_TOK_S, f.AT_ONCE, f.ttft()),
        expected="A decode step reads all weights once, for one request or for many.",
        otherwise="Where operations and not the weights' traffic bound a step, more requests only divide it.",
    ),
    Spec(
        knob="max_num_batched_tokens",
        off=2048,
        on=128,
        workload=w.streams_and_prompts(6, 256, 1),
        figures=(f.itl("streams"), f.ttft("prompts"), f.OUT_TOK_S),
        expected="Prompts that come together are not all computed in one step, so streams stall for less.",
        otherwise="Where a step of 2048 tokens takes hardly longer than one of 128, nothing stalls.",
    ),
    Spec(
        knob="chunked_prefill",
        off=False,
        on=True,
        base={"prefill_chunk_tokens": 128, "max_num_batched_tokens": 256},
        workload=w.streams_and_prompts(2, 1024, 64),
        figures=(f.itl("streams"), f.ttft("prompts"), f.OUT_TOK_S),
        expected="A long prompt is computed in pieces between the steps of those who are decoding.",
        otherwise="Where the whole prompt takes hardly longer than one piece, nothing stalls.",
    ),
    Spec(
        knob="prefill_chunk_tokens",
        off=512,
        on=64,
        workload=w.streams_and_prompts(2, 1024, 64),
        figures=(f.itl("streams"), f.ttft("prompts"), f.OUT_TOK_S),
        expected="Smaller pieces make shorter steps, and the prompt itself takes longer.",
        otherwise="Where 512 tokens take hardly longer than 64, the piece's size is nothing to feel.",
    ),
    Spec(
        knob="policy",
        off="fcfs",
        on="priority",
        base={"max_num_seqs": 4, "priority_ageing_s": 2.0},
        workload=w.urgent_among_low,
        figures=(f.ttft("urgent"), f.e2e("low"), f.PREEMPTIONS, f.RECOMPUTED),
        expected="An urgent request overtakes those that wait and displaces one that runs.",
        otherwise="Where seats are free when an urgent request comes, there is nobody to overtake.",
    ),
    Spec(
        knob="preemption",
        off="recompute",
        on="swap",
        base={"policy": "priority", "max_num_seqs": 2, "prefix_cache": False, "swap_space_gib": 1.0},
        pool_tokens=1696,
        workload=w.displaced_contexts,
        figures=(f.OUT_TOK_S, f.RECOMPUTED, f.RECOMPUTE_MS, f.LOST, f.SWAPPED_IN, f.COPY_MS),
        expected="A displaced context is copied back instead of being computed again.",
        otherwise="Where computing a context again is as fast as copying it, both cost the same.",
    ),
    Spec(
        knob="overlap",
        off=False,
        on=True,
        workload=w.long_streams,
        segments=4,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S, f.OVERLAP_MS),
        expected="Planning, preparing and delivering happen while the forward pass runs.",
        otherwise="On a CPU they are about one percent of a step, and they take the very cores that the "
        "forward pass computes on: there is next to nothing to hide. It is made for a GPU, whose steps are "
        "short and run beside the CPU.",
    ),
    Spec(
        knob="prefix_cache",
        off=False,
        on=True,
        workload=w.shared_prefix,
        figures=(f.OUT_TOK_S, f.ttft(), f.HIT_TOKENS, f.COMPUTED),
        expected="The shared 384 tokens are computed once instead of ten times.",
        otherwise="Where prompts are computed in no time, reusing them saves none.",
    ),
    Spec(
        knob="kv_allocation",
        off="contiguous",
        on="paged",
        pool_tokens=2048,
        workload=w.given_up_early,
        figures=(f.AT_ONCE, f.WASTED, f.OUT_TOK_S, f.ttft()),
        expected="Blocks are taken when they are needed instead of reserved for an answer that never comes.",
        otherwise="Where the pool holds everybody's most, reserving it costs nothing.",
    ),
    Spec(
        knob="block_size",
        off=16,
        on=128,
        workload=w.short_prefix,
        figures=(f.OUT_TOK_S, f.WASTED, f.HIT_TOKENS, f.DECODE_STEP_MS),
        expected="Larger blocks need fewer look-ups in a step, and waste and share less well: a trade.",
        otherwise="Keys and values are gathered by token here, so a step hardly feels the block's size; what "
        "is left is what larger blocks cost, room at the end and prefixes that they cannot share.",
    ),
    Spec(
        knob="kv_dtype",
        off="model",
        on="int8",
        pool_tokens=1024,
        workload=w.batch(24, 96, 24),
        figures=(f.AT_ONCE, f.OUT_TOK_S, f.DECODE_STEP_MS, f.PREEMPTIONS),
        expected="A key or value takes one byte, so the same memory holds more requests.",
        otherwise="Where everybody fits in the pool as it is, smaller keys and values seat nobody more.",
    ),
    Spec(
        knob="kv_dtype",
        off="model",
        on="fp8_e4m3",
        pool_tokens=1024,
        workload=w.batch(24, 96, 24),
        figures=(f.AT_ONCE, f.OUT_TOK_S, f.DECODE_STEP_MS, f.PREEMPTIONS),
        expected="A key or value takes one byte, so the same memory holds more requests.",
        otherwise="Where everybody fits in the pool as it is, smaller keys and values seat nobody more.",
    ),
    Spec(
        knob="kv_host_gib",
        off=0.0,
        on=1.0,
        base={"max_num_seqs": 2},
        pool_tokens=1280,
        workload=w.revisited_prefixes,
        figures=(f.ttft("revisits"), f.HOST_HITS, f.HIT_TOKENS, f.COMPUTED, f.COPY_MS),
        expected="Prefixes that the pool had to give up are copied back instead of being computed again.",
        otherwise="Where the pool holds all prefixes, or computing is as fast as copying, nothing is won.",
    ),
    Spec(
        knob="sliding_window",
        off=0,
        on=256,
        workload=w.batch(4, 1024, 32),
        figures=(f.USED_BLOCKS, f.DECODE_STEP_MS, f.OUT_TOK_S),
        expected="Blocks that every layer has left behind are given back, and a step reads fewer keys.",
        otherwise="Where weights dominate a step's traffic, fewer keys and values shorten it little.",
    ),
    Spec(
        knob="weight_dtype",
        off="model",
        on="int8",
        workload=w.batch(1, 64, 48),
        figures=(f.DECODE_STEP_MS, f.WEIGHTS_READ, f.OUT_TOK_S),
        expected="A step of one request is bound by reading weights, which take half the bytes.",
        otherwise="Where arithmetic or the number of operations bounds a step, fewer bytes gain little.",
    ),
    Spec(
        knob="weight_dtype",
        off="model",
        on="int4",
        base={"int4_method": "rtn"},
        workload=w.batch(1, 64, 48),
        figures=(f.DECODE_STEP_MS, f.WEIGHTS_READ, f.OUT_TOK_S),
        expected="A step of one request is bound by reading weights, which take a quarter of the bytes.",
        otherwise="Where arithmetic or the number of operations bounds a step, fewer bytes gain little.",
    ),
    Spec(
        knob="weight_dtype",
        off="model",
        on="fp8",
        workload=w.batch(1, 64, 48),
        figures=(f.WEIGHTS_READ, f.DECODE_STEP_MS, f.OUT_TOK_S),
        expected="Weights take half the bytes.",
        otherwise="No CPU computes in fp8: weights are expanded for each product, which costs time there.",
    ),
    Spec(
        knob="high_precision",
        off="head",
        on="none",
        base={"weight_dtype": "int8"},
        workload=w.batch(1, 64, 48),
        figures=(f.WEIGHTS_READ, f.DECODE_STEP_MS, f.OUT_TOK_S),
        expected="The output head, a large part of a small model, is read in one byte a weight too.",
        otherwise="Where the head is a small part of the model, it hardly shows.",
    ),
    Spec(
        knob="attention",
        off="naive",
        on="sdpa",
        workload=w.batch(8, 256, 24),
        figures=(f.OUT_TOK_S, f.DECODE_STEP_MS, f.ttft()),
        expected="The fused attention does not write its scores to memory.",
        otherwise="With contexts this short attention is a small part of a step.",
    ),
    Spec(
        knob="attention",
        off="sdpa",
        on="paged",
        workload=w.long_streams,
        segments=4,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S),
        expected="Keys and values are read where their blocks lie, not gathered for each layer and step.",
        otherwise="With contexts this short attention is a small part of a step.",
    ),
    Spec(
        knob="fused_norm",
        off=False,
        on=True,
        workload=w.long_streams,
        segments=4,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S),
        expected="The residual stream is read once for the addition and the norm behind it.",
        otherwise="Beside the products with the weights, norms are a small part of a step.",
    ),
    Spec(
        knob="fused_rope_kv",
        off=False,
        on=True,
        workload=w.long_streams,
        segments=4,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S),
        expected="Queries, keys and values are read once from their product to where attention reads them.",
        otherwise="Beside the products with the weights, this is a small part of a step.",
    ),
    Spec(
        knob="fused_sampling",
        off=False,
        on=True,
        workload=w.drawn_batch(32, 16, 24, temperature=1.0, top_p=0.9),
        figures=(f.SAMPLE_MS, f.DECODE_STEP_MS, f.OUT_TOK_S),
        expected="Each row is read a few times by one kernel: nothing is sorted, and no token drawn twice.",
        otherwise="Beside the forward pass of 32 requests choosing their tokens takes little either way.",
    ),
    Spec(
        knob="fused_sampling",
        off=False,
        on=True,
        called="fused_sampling-greedy",
        workload=w.batch(32, 16, 24),
        figures=(f.SAMPLE_MS, f.DECODE_STEP_MS, f.OUT_TOK_S),
        expected="One launch chooses the tokens of all requests.",
        otherwise="Greedy requests only need the largest logit, which is quickly found either way.",
    ),
    Spec(
        knob="cuda_graphs",
        off=False,
        on=True,
        base={"attention": "paged", "fused_rope_kv": True},
        workload=w.batch(8, 16, 96),
        figures=(f.DECODE_STEP_MS, f.OUT_TOK_S, f.tpot()),
        expected="A step's kernels are launched at once, not one by one from Python.",
        otherwise="Where kernels run for longer than it takes to launch them, nothing waits for launches.",
    ),
    Spec(
        knob="compile",
        off=False,
        on=True,
        workload=w.batch(8, 256, 24),
        figures=(f.DECODE_STEP_MS, f.OUT_TOK_S, f.ttft()),
        expected="Norms, rotation and activation read and write each number once.",
        otherwise="Each call of compiled code first looks at its arguments, which on a CPU takes longer than "
        "what it saves with so few tokens.",
    ),
    Spec(
        knob="fused_mlp",
        off=False,
        on=True,
        workload=w.long_streams,
        segments=4,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S),
        expected="The widest rows of the model are read once between the two products.",
        otherwise="Beside the products with the weights, the activation is a small part of a step.",
    ),
    Spec(
        knob="speculation",
        off="off",
        on="ngram",
        workload=w.copied_texts,
        figures=(f.tpot(), f.OUT_TOK_S, f.ACCEPTANCE, f.DRAFT_LENGTH),
        expected="What is copied is drafted, and several tokens are verified in a step that reads the "
        "weights once.",
        otherwise="Where a step of five tokens takes several times that of one, there is little to win.",
    ),
    Spec(
        knob="speculation",
        called="speculation-on-prose",
        off="off",
        on="ngram",
        workload=w.free_prose,
        at_most=1.03,
        figures=(f.tpot(), f.OUT_TOK_S, f.ACCEPTANCE, f.DRAFT_LENGTH),
        expected="Where little repeats, adaptive drafts are given up; looking for them may cost 3 percent.",
        otherwise="That it costs nothing that can be seen is what it should do.",
    ),
    Spec(
        knob="speculation",
        called="speculation-by-itself",
        off="off",
        on="self",
        workload=w.free_prose,
        figures=(f.tpot(), f.OUT_TOK_S, f.ACCEPTANCE, f.DRAFT_LENGTH),
        expected="A copy of the weights in eight bits is read in half the time, and nearly always agrees.",
        otherwise="Where the copy is hardly faster than the model, or a step of several tokens takes several "
        "times that of one, drafts are given up.",
    ),
    Spec(
        knob="spec_self_dtype",
        off="int8",
        on="int4",
        base={"speculation": "self", "spec_adaptive": False},
        workload=w.free_prose,
        figures=(f.tpot(), f.ACCEPTANCE, f.DRAFT_LENGTH),
        expected="Four bits are read in half the time of eight.",
        otherwise="What is read faster is accepted less often.",
    ),
    Spec(
        knob="spec_tokens",
        off=4,
        on=8,
        base={"speculation": "ngram"},
        workload=w.copied_texts,
        figures=(f.tpot(), f.ACCEPTANCE, f.DRAFT_LENGTH),
        expected="A copy goes on for long, so longer drafts bring more tokens a step.",
        otherwise="Where more tokens make a step longer by as much as they bring, longer drafts win nothing.",
    ),
    Spec(
        knob="spec_adaptive",
        off=False,
        on=True,
        base={"speculation": "ngram"},
        workload=w.free_prose,
        figures=(f.tpot(), f.OUT_TOK_S, f.ACCEPTANCE),
        expected="Drafts that would not hold are not verified.",
        otherwise="Where prose repeats nothing, there are no drafts that could be left out.",
    ),
    Spec(
        knob="batched_tokenize",
        off=False,
        on=True,
        workload=w.long_texts,
        figures=(f.TOKENIZE_MS, f.ttft("burst")),
        expected="Prompts that wait together are encoded in one call, on all cores.",
        otherwise="The encoder's other threads find cores only where the forward pass leaves some: on two "
        "cores that compute, a batch is encoded no faster than its texts one by one.",
    ),
    Spec(
        knob="batched_detokenize",
        off=False,
        on=True,
        workload=w.batch(48, 8, 24),
        figures=(f.TEXT_US, f.MESSAGES, f.itl()),
        expected="Tokens of a request that wait together become text in one push and leave in one message.",
        otherwise="Where a step takes much longer than turning its tokens into text, no request ever has two "
        "tokens waiting and both ways do the same. It matters with steps below a millisecond.",
    ),
    Spec(
        knob="result_cache",
        off=False,
        on=True,
        workload=w.repeated_prompts,
        figures=(f.ttft("repeats"), f.OUT_TOK_S, f.RESULT_HITS, f.COMPUTED),
        expected="An answer that is known is given at once and nothing is computed.",
        otherwise="Only deterministic requests that come again word for word can be answered so.",
    ),
    Spec(
        knob="forward_timing",
        off=False,
        on=True,
        workload=w.long_streams,
        segments=4,
        at_most=1.01,
        figures=(f.DECODE_STEP_MS, f.DECODE_TOK_S),
        expected="Reading the clock around the parts of each layer may cost at most one percent of a step.",
        otherwise="That it costs nothing that can be seen is what it should do.",
    ),
)

NOT_MEASURED: Mapping[str, str] = {
    "priority_ageing_s": "a bound on waiting, not a speed: `python -m tests.bench.soak --high-load` holds it",
    "max_num_queued": "a limit at the door; who is refused is told so, and nobody else is faster or slower",
    "kv_pool_gib": "a size, which the entries of the other memory knobs set",
    "int4_method": "how 4-bit codes are found, not how they are computed with; what it does to the model's "
    "predictions is in `tests/engine/precision/test_quality.py`",
    "spec_sampling": "a choice between the same text and more accepted drafts, and none for greedy ones; "
    "that both keep the distribution is in `tests/engine/test_draft_models.py`",
    "swap_space_gib": "a size, without effect of its own beside preemption",
}


def name(spec: Spec) -> str:
    """What an entry is called: the knob, and its value where a knob has several entries."""
    if spec.called:
        return spec.called
    several = sum(other.knob == spec.knob and not other.called for other in SPECS) > 1
    return f"{spec.knob}={spec.on}" if several else spec.knob


def listing(specs: Sequence[Spec]) -> str:
    """A line for each entry: its name and its two values; below, why the other knobs have none."""
    width = max(len(name(spec)) for spec in SPECS)
    lines = [f"{name(spec):{width}}  {spec.off} -> {spec.on}" for spec in specs]
    return "\n".join([*lines, "", *(f"no entry: {knob}: {why}" for knob, why in NOT_MEASURED.items())])


def chosen(only: str) -> list[Spec]:
    """The entries of a comma-separated list of knobs or entry names, all of an empty one. Or ValueError."""
    if not only:
        return list(SPECS)
    wanted = only.split(",")
    known = {spec.knob for spec in SPECS} | {name(spec) for spec in SPECS}
    unknown = [item for item in wanted if item not in known]
    if unknown:
        why = "; ".join(f"{item}: {NOT_MEASURED.get(item, 'there is no such entry')}" for item in unknown)
        raise ValueError(f"{why}. There are {', '.join(name(spec) for spec in SPECS)}")
    return [spec for spec in SPECS if spec.knob in wanted or name(spec) in wanted]
