"""Every optimization, declared once.

The engine advertises this registry, the console draws its panel from it, the command line its flags, the
comparison runner its arms and the store its diffs. A new optimization is one entry here plus its
implementation. What is listed but cannot be used says so itself, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.attention_choice import AUTO, pool_reason
from engine.knob import Knob, KnobContext
from engine.speculation import MAX_DRAFT
from ipc.messages import KnobInfo, KnobValue

DRAFTING = "ngram or draft or self"
MAX_SEQS = 1024  # most requests that may run at once, so the runner's slots are [0, MAX_SEQS)


def _attention_reason(choice: str, context: KnobContext) -> str:
    if choice == AUTO or choice in context.attention:
        return ""
    return context.reasons.get(f"attention={choice}", f"cannot run on {context.device}")


def _attention_conflict(values: Mapping[str, KnobValue], context: KnobContext) -> str:
    return pool_reason(str(values["attention"]), values, context)


def _weight_reason(choice: str, context: KnobContext) -> str:
    if choice == "model" or not context.quantization:
        return ""
    return f"the model's weights are quantized already: {context.quantization}"


def _speculation_reason(choice: str, context: KnobContext) -> str:
    if choice == "draft" and not context.draft_model:
        return "the engine was started without --draft-model"
    if choice == "self" and context.quantization:
        return f"the model's weights are quantized already: {context.quantization}"
    return ""


_BATCHING = (
    Knob(
        id="batching",
        group="batching",
        title="Batching",
        type="choice",
        default="continuous",
        choices=("static", "continuous"),
        help="Continuous lets a request start as soon as there is room. Static is the classic baseline: a "
        "batch is formed from what waits, and nothing new starts until its slowest member has ended.",
    ),
    Knob(
        id="max_num_seqs",
        group="batching",
        title="Running requests",
        type="int",
        default=64,
        unit="requests",
        minimum=1,
        maximum=MAX_SEQS,
        help="Most requests that run at once. More raises throughput and each request's time per token. When "
        "it is lowered, running requests finish and none starts until their number fits.",
    ),
    Knob(
        id="max_num_batched_tokens",
        group="batching",
        title="Token budget of a step",
        type="int",
        default=2048,
        unit="tokens",
        minimum=1,
        maximum=1 << 20,
        help="Most tokens computed in one step, decode and prefill together. Decoding requests are served "
        "first. Smaller steps keep the time between tokens even; larger ones finish prompts sooner.",
    ),
    Knob(
        id="chunked_prefill",
        group="batching",
        title="Chunked prefill",
        type="bool",
        default=True,
        help="Long prompts are computed in pieces between decode steps. Off, a prompt is computed in one "
        "piece: one longer than what is left of the token budget waits for a step in which it is the "
        "first prompt and then exceeds the budget, and running requests stall for that long.",
    ),
    Knob(
        id="prefill_chunk_tokens",
        group="batching",
        title="Prefill chunk",
        type="int",
        default=512,
        unit="tokens",
        minimum=1,
        maximum=1 << 20,
        requires={"chunked_prefill": "true"},
        help="Most prompt tokens one request may compute in one step.",
    ),
    Knob(
        id="policy",
        group="batching",
        title="Order",
        type="choice",
        default="fcfs",
        choices=("fcfs", "priority"),
        help="First come, first served, or by priority (smaller runs earlier) with ageing. Under priority a "
        "request may preempt running ones of strictly lower priority, never an equal.",
    ),
    Knob(
        id="priority_ageing_s",
        group="batching",
        title="Ageing",
        type="float",
        default=2.0,
        unit="s",
        minimum=0.001,
        maximum=3600.0,
        requires={"policy": "priority"},
        help="Waiting time that weighs as much as one level of priority. A request is overtaken only by "
        "those that arrive within this time multiplied by the difference of their levels, so its wait "
        "is bounded.",
    ),
    Knob(
        id="max_num_queued",
        group="batching",
        title="Waiting requests",
        type="int",
        default=4096,
        unit="requests",
        minimum=1,
        maximum=1 << 20,
        help="Most requests that may wait. Further ones are refused at once and told to come back.",
    ),
    Knob(
        id="batch_wait_ms",
        group="batching",
        title="Batch wait",
        type="float",
        default=0.0,
        unit="ms",
        minimum=0.0,
        maximum=10000.0,
        requires={"batching": "static"},
        help="Time a static batch waits for more members before it starts, counted from the arrival of its "
        "oldest one. It starts at once when the seats are full.",
    ),
    Knob(
        id="preemption",
        group="batching",
        title="Preemption",
        type="choice",
        default="recompute",
        choices=("recompute", "swap"),
        help="What becomes of a request that loses its KV blocks to another one: its tokens are computed "
        "again, or its blocks are copied to host memory (swap space) and back. What finds no room "
        "there is computed again.",
    ),
    Knob(
        id="swap_space_gib",
        group="batching",
        title="Swap space",
        type="float",
        default=1.0,
        unit="GiB",
        minimum=0.001,
        maximum=1024.0,
        requires={"preemption": "swap"},
        help="Host memory for the blocks of preempted requests. It is taken when preemption is by swap.",
    ),
    Knob(
        id="overlap",
        group="batching",
        title="Overlap",
        type="bool",
        default=False,
        help="The next step is planned and prepared, and the answers of the last one are sent, while the "
        "current step computes. Where graphs choose the tokens (CUDA graphs with fused sampling) it is "
        "launched too, and takes its tokens on the device, before the host has read them.",
    ),
)

_KV = (
    Knob(
        id="prefix_cache",
        group="kv memory",
        title="Prefix cache",
        type="bool",
        default=True,
        help="Blocks of computed tokens are kept and reused by later requests that begin with the same "
        "tokens. Turned off, all kept blocks are dropped.",
    ),
    Knob(
        id="block_size",
        group="kv memory",
        title="Block size",
        type="int",
        default=16,
        unit="tokens",
        minimum=1,
        maximum=1024,
        apply="rebuild_kv",
        help="Tokens a KV block holds. Small blocks waste less and share more; large ones need fewer look- "
        "ups.",
    ),
    Knob(
        id="kv_allocation",
        group="kv memory",
        title="KV allocation",
        type="choice",
        default="paged",
        choices=("contiguous", "paged"),
        apply="rebuild_kv",
        help="Paged takes a block when it is needed. Contiguous is the classic baseline: a request reserves "
        "one run of neighbouring blocks for the most tokens it may reach, and starts only if there is "
        "such a run.",
    ),
    Knob(
        id="kv_pool_gib",
        group="kv memory",
        title="KV pool",
        type="float",
        default=0.0,
        unit="GiB",
        minimum=0.0,
        maximum=4096.0,
        apply="rebuild_kv",
        help="Memory for keys and values; 0 takes the size chosen at start. A small pool forces preemption.",
    ),
    Knob(
        id="kv_dtype",
        group="kv memory",
        title="KV precision",
        type="choice",
        default="model",
        choices=("model", "fp8_e4m3", "int8"),
        apply="rebuild_kv",
        lossy=True,
        help="Precision in which keys and values are kept. Eight bits hold two to four times the tokens in "
        "the same memory. The scales, one for each layer and head, are measured on a text when this "
        "is switched on.",
    ),
    Knob(
        id="kv_host_gib",
        group="kv memory",
        title="Host KV memory",
        type="float",
        default=0.0,
        unit="GiB",
        minimum=0.0,
        maximum=4096.0,
        requires={"prefix_cache": "true"},
        help="Host memory for prefix blocks that the pool evicts; a later request that begins alike has "
        "them copied back instead of computed. 0 keeps none.",
    ),
    Knob(
        id="sliding_window",
        group="kv memory",
        title="Sliding window",
        type="int",
        default=0,
        unit="tokens",
        minimum=0,
        maximum=1 << 20,
        apply="rebuild_kv",
        lossy=True,
        help="Each token attends to this many last tokens only, in every layer whose own window is not "
        "smaller; 0 leaves the model as it is. Blocks that no layer sees any more are given back.",
    ),
)

_KERNELS = (
    Knob(
        id="attention",
        group="kernels",
        title="Attention",
        type="choice",
        default=AUTO,
        choices=(AUTO, "naive", "sdpa", "paged", "flash_attn", "varlen"),
        choice_reason=_attention_reason,
        conflict=_attention_conflict,
        conflicts_with=("block_size", "kv_dtype"),
        help="The implementation of attention. Auto takes paged, and what comes next where that cannot "
        "run. Naive is the plain reference; sdpa gathers the blocks of keys and "
        "values for torch's fused one; paged is a kernel that reads them where they lie; flash_attn is that "
        "of the flash-attn package, varlen torch's own. Each step says which one ran.",
    ),
    Knob(
        id="fused_norm",
        group="kernels",
        title="Fused norm",
        type="bool",
        default=False,
        help="The residual addition and the norm behind it run as one kernel, which reads and writes each "
        "number once, and writes fp8 for products that take it. In 16 bits results differ by rounding, as "
        "between implementations of attention.",
    ),
    Knob(
        id="fused_rope_kv",
        group="kernels",
        title="Fused RoPE and KV write",
        type="bool",
        default=False,
        help="The norm of query and key heads, the rotary embedding, and the write of keys and values to the "
        "cache, quantization included, run as one kernel. In 16 bits results differ by rounding.",
    ),
    Knob(
        id="fused_mlp",
        group="kernels",
        title="Fused MLP",
        type="bool",
        default=False,
        help="The activation of the feed-forward layers, SiLU of the gate times the other half, runs as one "
        "kernel between the two matrix products, which writes fp8 for a product that takes it. In 16 bits "
        "results differ by rounding.",
    ),
    Knob(
        id="fused_sampling",
        group="kernels",
        title="Fused sampling",
        type="bool",
        default=False,
        lossy=True,
        help="Temperature, top-k, top-p, min-p and the draw run as kernels that sort nothing; penalties and "
        "the judgement of drawn drafts are kernels too. Greedy text is the same; with a temperature "
        "tokens come from the same distribution, but a seed may give another text.",
    ),
    Knob(
        id="cuda_graphs",
        group="kernels",
        title="CUDA graphs",
        type="bool",
        default=False,
        requires={"attention": "paged or auto", "fused_rope_kv": "true"},
        help="Steps without prompts are padded to one of some shapes and replayed from a graph, which "
        "launches all of their kernels at once. A shape is captured when it is first met; switched on at "
        "start, kernels of decoding steps are compiled before the first request. With fused sampling the "
        "graph chooses the tokens too, but for steps with penalties on a text of more than 8,192 distinct "
        "tokens, or with too many ends to hide before min_tokens. Each step says which it was replayed in, "
        "or none.",
    ),
    Knob(
        id="compile",
        group="kernels",
        title="torch.compile",
        type="bool",
        default=False,
        help="Of the three fused parts, those that are off run as code that torch.compile made, instead of "
        "one operation after the other. Steps go on while it is made, the first time for up to some minutes. "
        "In 16 bits results differ by rounding.",
    ),
)

_WEIGHTS = (
    Knob(
        id="weight_dtype",
        group="weights",
        title="Weight precision",
        type="choice",
        default="model",
        choices=("model", "fp8", "int8", "int4"),
        choice_reason=_weight_reason,
        apply="reload",
        lossy=True,
        help="Precision in which the weights of linear layers are kept: fewer bits take less memory and less "
        "time to read. They are converted from the original weights, which stay in host memory as long "
        "as there is room.",
    ),
    Knob(
        id="int4_method",
        group="weights",
        title="4-bit rounding",
        type="choice",
        default="awq",
        choices=("awq", "rtn"),
        apply="reload",
        lossy=True,
        requires={"weight_dtype": "int4"},
        help="AWQ reads a text and protects the weights that matter most for it, which takes minutes the "
        "first time; its codes are kept. RTN rounds to nearest at once and loses more.",
    ),
    Knob(
        id="high_precision",
        group="weights",
        title="Layers kept precise",
        type="choice",
        default="head",
        choices=("none", "head", "ends", "sensitive"),
        apply="reload",
        lossy=True,
        help="What keeps the model's precision when weight_dtype is another: only the embedding (none), the "
        "output head too (head), also the first and the last layer (ends), or also the eighth of the "
        "layers whose results err most on a text (sensitive).",
    ),
)

_SPECULATION = (
    Knob(
        id="speculation",
        group="speculation",
        title="Speculation",
        type="choice",
        default="off",
        choices=("off", "ngram", "draft", "self"),
        choice_reason=_speculation_reason,
        help="Further tokens of an answer are drafted cheaply and verified together in one step; those that "
        "the model itself would choose stay. In float32 the text is that without drafts. In 16 bits it is "
        "so up to rounding, which depends on what is computed together, as in any other batch. ngram drafts "
        "what followed the last tokens where they occurred before in prompt or answer: it pays where text "
        "repeats, as in editing, extraction and code. draft asks a smaller model (--draft-model) with the "
        "same tokenizer. self asks a copy of the model's own weights in fewer bits.",
    ),
    Knob(
        id="spec_tokens",
        group="speculation",
        title="Draft tokens",
        type="int",
        default=4,
        unit="tokens",
        minimum=1,
        maximum=MAX_DRAFT,
        requires={"speculation": DRAFTING},
        help="Most tokens drafted for one request in one step. More bring more where they are accepted, and "
        "make the step longer for everybody where they are not.",
    ),
    Knob(
        id="spec_adaptive",
        group="speculation",
        title="Adaptive drafts",
        type="bool",
        default=True,
        requires={"speculation": DRAFTING},
        help="Drafts are as long as pays by what steps cost and how many drafted tokens were accepted, and "
        "stop where they lose, with a try now and then. Off, every draft that is found is verified.",
    ),
    Knob(
        id="spec_self_dtype",
        group="speculation",
        title="Self-draft precision",
        type="choice",
        default="int8",
        choices=("int4", "int8"),
        requires={"speculation": "self"},
        help="Precision of the copy of the linear layers' weights that drafts; embedding, head and norms are "
        "shared. Fewer bits are read faster and take less memory, more agree with the model more often.",
    ),
    Knob(
        id="spec_sampling",
        group="speculation",
        title="Sampled drafts",
        type="choice",
        default="coupled",
        choices=("coupled", "rejection"),
        lossy=True,
        requires={"speculation": "draft or self"},
        help="How drafts of requests with a temperature are made and checked. Coupled: drawn with the random "
        "numbers that the model itself would use, and kept where it says the same, as without temperature. "
        "Rejection: drawn freely and kept with the probability that leaves the model's distribution as it "
        "is; more are kept, but a seed no longer gives the same text twice.",
    ),
)

_TEXT = (
    Knob(
        id="batched_tokenize",
        group="text",
        title="Batched tokenization",
        type="bool",
        default=False,
        help="Prompts that wait are turned into tokens together, on several cores, instead of one after "
        "the other.",
    ),
    Knob(
        id="batched_detokenize",
        group="text",
        title="Batched detokenization",
        type="bool",
        default=False,
        help="All new tokens of a request that wait for their text are turned into text and sent together, "
        "instead of one by one.",
    ),
    Knob(
        id="result_cache",
        group="text",
        title="Result cache",
        type="bool",
        default=False,
        help="The answer of a deterministic request (temperature 0, or with a seed) is kept and given "
        "again to an equal one. Turned off, all kept answers are dropped.",
    ),
)

_MEASURING = (
    Knob(
        id="forward_timing",
        group="measuring",
        title="Split the forward pass",
        type="bool",
        default=False,
        help="The time of attention, linear layers and output head is taken apart in each step. Nothing "
        "that is computed changes.",
    ),
)

KNOBS: tuple[Knob, ...] = (
    *_BATCHING,
    *_KV,
    *_WEIGHTS,
    *_KERNELS,
    *_SPECULATION,
    *_TEXT,
    *_MEASURING,
)
BY_ID: Mapping[str, Knob] = {knob.id: knob for knob in KNOBS}


def list_knobs(context: KnobContext | None = None) -> list[KnobInfo]:
    """The registry as the protocol shows it, without an engine."""
    return [knob.info(context or KnobContext()) for knob in KNOBS]
