"""Every optimization, declared once.

The engine advertises this registry, the console draws its panel from it, the command line its flags, the
comparison runner its arms and the store its diffs. A new optimization is one entry here plus its
implementation. What is listed but cannot be used says so itself, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from engine.knob import Knob, KnobContext
from ipc.messages import ApplyMode, KnobInfo, KnobValue

NOT_BUILT = "not built yet"
MAX_SEQS = 1024  # most requests that may run at once, so the runner's slots are [0, MAX_SEQS)


def _attention_reason(choice: str, context: KnobContext) -> str:
    if choice in context.attention:
        return ""
    return NOT_BUILT if choice in ("paged", "flash_attn") else f"cannot run on {context.device}"


def _later(
    id: str,
    group: str,
    title: str,
    help: str,
    type: Literal["bool", "int", "float", "choice"],
    default: KnobValue,
    apply: ApplyMode = "step",
    *,
    lossy: bool = False,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    requires: Mapping[str, str] | None = None,
) -> Knob:
    return Knob(
        id=id,
        group=group,
        title=title,
        help=help,
        type=type,
        default=default,
        apply=apply,
        lossy=lossy,
        unit=unit,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        requires=requires or {},
        reason=NOT_BUILT,
    )


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
    _later(
        "batch_wait_ms",
        "batching",
        "Batch wait",
        "Time a static batch waits for more members before it starts.",
        "float",
        0.0,
        unit="ms",
        minimum=0.0,
        maximum=10_000.0,
        requires={"batching": "static"},
    ),
    _later(
        "preemption",
        "batching",
        "Preemption",
        "A preempted request is recomputed, or its blocks are swapped to host memory and back.",
        "choice",
        "recompute",
        choices=("recompute", "swap"),
    ),
    _later(
        "overlap", "batching", "Overlap", "Plans the next step while the current one runs.", "bool", False
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
    _later(
        "kv_dtype",
        "kv memory",
        "KV precision",
        "Precision in which keys and values are kept.",
        "choice",
        "model",
        "rebuild_kv",
        lossy=True,
        choices=("model", "fp8_e4m3", "int8"),
    ),
    _later(
        "kv_host_gib",
        "kv memory",
        "Host KV memory",
        "Evicted prefix blocks are kept in host memory and hit from there.",
        "float",
        0.0,
        "rebuild_kv",
        unit="GiB",
        minimum=0.0,
        maximum=4096.0,
        requires={"prefix_cache": "true"},
    ),
    _later(
        "sliding_window",
        "kv memory",
        "Sliding window",
        "Each token attends to this many last tokens only; 0 is the model's own rule.",
        "int",
        0,
        lossy=True,
        unit="tokens",
        minimum=0,
        maximum=1 << 20,
    ),
)

_KERNELS = (
    Knob(
        id="attention",
        group="kernels",
        title="Attention",
        type="choice",
        default="sdpa",
        choices=("naive", "sdpa", "paged", "flash_attn"),
        choice_reason=_attention_reason,
        help="The implementation of attention. Naive is the plain reference; sdpa uses torch's fused one.",
    ),
    _later("fused_norm", "kernels", "Fused norm", "Residual add and RMSNorm in one kernel.", "bool", False),
    _later(
        "fused_rope_kv",
        "kernels",
        "Fused RoPE and KV write",
        "Rotary embedding and the KV write in one kernel.",
        "bool",
        False,
    ),
    _later("fused_mlp", "kernels", "Fused MLP", "Gate, SiLU and product in one kernel.", "bool", False),
    _later("fused_sampling", "kernels", "Fused sampling", "Filters and draw in one kernel.", "bool", False),
    _later(
        "cuda_graphs",
        "kernels",
        "CUDA graphs",
        "Decode steps are replayed from captured graphs.",
        "bool",
        False,
    ),
    _later("compile", "kernels", "torch.compile", "The decoder's layers are compiled.", "bool", False),
)

_WEIGHTS = (
    _later(
        "weight_dtype",
        "weights",
        "Weight precision",
        "Precision of the linear layers' weights; embedding, head and norms stay as they are.",
        "choice",
        "model",
        "reload",
        lossy=True,
        choices=("model", "fp8", "int8", "int4"),
    ),
)

_SPECULATION = (
    _later(
        "speculation",
        "speculation",
        "Speculation",
        "Draft tokens are proposed cheaply and checked together.",
        "choice",
        "off",
        choices=("off", "ngram", "draft", "self"),
    ),
    _later(
        "spec_tokens",
        "speculation",
        "Draft tokens",
        "Tokens proposed in one step.",
        "int",
        4,
        unit="tokens",
        minimum=1,
        maximum=16,
    ),
    _later(
        "spec_adaptive",
        "speculation",
        "Adaptive drafts",
        "The number of drafts follows how many are accepted.",
        "bool",
        False,
    ),
)

_TEXT = (
    _later(
        "batched_tokenize",
        "text",
        "Batched tokenization",
        "Waiting prompts are tokenized together.",
        "bool",
        False,
    ),
    _later(
        "batched_detokenize",
        "text",
        "Batched detokenization",
        "New tokens of a step are turned into text together, off the step thread.",
        "bool",
        False,
    ),
    _later(
        "result_cache",
        "text",
        "Result cache",
        "The answer of a deterministic request is kept and given again.",
        "bool",
        False,
    ),
)

KNOBS: tuple[Knob, ...] = (*_BATCHING, *_KV, *_WEIGHTS, *_KERNELS, *_SPECULATION, *_TEXT)
BY_ID: Mapping[str, Knob] = {knob.id: knob for knob in KNOBS}


def list_knobs(context: KnobContext | None = None) -> list[KnobInfo]:
    """The registry as the protocol shows it, without an engine."""
    return [knob.info(context or KnobContext()) for knob in KNOBS]
