"""Every message of the protocol between the engine and its clients, as msgspec structs.

Two sockets. ``ctl`` (engine ROUTER, client DEALER) carries `Command`s one way and `Reply` and
`StreamItem` structs the other. ``tel`` (engine PUB) carries `Telemetry`, framed as
``[topic][seq: u64 big endian][body]`` with one sequence per topic that starts at 1 in each session.

Rules that every struct here keeps: a tag, no unknown fields, a bound on every number, string and
list, a unit in every name. Times ending in ``_ns`` are the engine's monotonic clock. A quantity that
is undefined is ``None``, never 0 or NaN. Changing a struct needs a new `PROTOCOL`; a new struct does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL = 6

MAX_PROMPT_CHARS = 1 << 20
MAX_PROMPT_TOKENS = 1 << 20
MAX_BLOCKS = 1 << 22
MAX_LOGPROBS = 20  # most likely tokens that a request may ask for at each place

Id = Annotated[int, Meta(ge=1, le=(1 << 53) - 1)]
UInt = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Pos = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Ns = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
UFloat = Annotated[float, Meta(ge=0.0, le=1e18)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
LongText = Annotated[str, Meta(max_length=1 << 20)]
Count = UInt

MAX_FLOAT = 1e18
Float = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]  # bounds refuse NaN and infinities too
LogProb = Annotated[float, Meta(le=0.001)]  # minus infinity is a value, NaN is not
MAX_REASON = 1024  # characters
Reason = Annotated[str, Meta(max_length=MAX_REASON)]

KnobValue = (
    bool
    | Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
    | Float
    | Annotated[str, Meta(max_length=1024)]
    | None
)
KnobValues = Annotated[dict[Name, KnobValue], Meta(max_length=256)]
Counts = Annotated[dict[Name, UInt], Meta(max_length=64)]
Finish = Literal["stop", "length", "cancelled", "error"]
Phase = Literal["starting", "loading", "warming", "ready", "applying", "stalled", "stopping", "failed"]
ApplyMode = Literal["step", "rebuild_kv", "reload", "restart"]
RequestState = Literal["waiting", "prefill", "decode", "preempted", "finished"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


# --- shared parts -------------------------------------------------------------------------------


class Sampling(_Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. Defaults are greedy decoding, as temperature 0 says."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    # Scores are float32, and so far from overflow: of infinite ones no distribution can be made.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 53) - 1)] | None = None
    # None: off; n: that of the chosen token and of the n most likely ones.
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Pos = 128
    min_tokens: UInt = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []


class ChatMessage(_Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]


class KnobInfo(_Struct, frozen=True, kw_only=True):
    """One optimization as the engine's registry declares it."""

    id: Name
    group: Name
    title: Text
    help: Text
    type: Literal["bool", "int", "float", "choice"]
    apply: ApplyMode
    default: KnobValue
    lossy: bool = False
    unit: Annotated[str, Meta(max_length=32)] = ""
    choices: Annotated[list[Name], Meta(max_length=64)] = []
    minimum: Float | None = None
    maximum: Float | None = None
    requires: Annotated[dict[Name, Reason], Meta(max_length=16)] = {}
    available: bool = True
    reason: Text = ""  # why it is not available here
    choice_reasons: Annotated[dict[Name, Reason], Meta(max_length=64)] = {}  # unavailable choices and why


class ModelInfo(_Struct, frozen=True, kw_only=True):
    name: Text
    path: Text
    architecture: Name
    format: Name  # safetensors, gguf, dummy
    dtype: Name
    num_layers: Pos
    hidden_size: Pos
    num_heads: Pos
    num_kv_heads: Pos
    head_dim: Pos
    vocab_size: Pos
    max_model_len: Pos
    num_params: UInt
    weight_bytes: UInt
    kv_bytes_per_token: UInt
    sha256: Annotated[str, Meta(max_length=64)] = ""
    tokenizer_sha256: Annotated[str, Meta(max_length=64)] = ""
    has_chat_template: bool = True
    quantization: Text = ""  # how the checkpoint's linear weights are quantized; "" if they are not


class DeviceInfo(_Struct, frozen=True, kw_only=True):
    kind: Literal["cpu", "cuda"]
    name: Text
    uuid: Annotated[str, Meta(max_length=96)] = ""
    memory_bytes: UInt = 0
    copy_bytes_per_s: UFloat | None = None  # measured at start, read + write
    read_bytes_per_s: UFloat | None = None  # measured at start
    flops_per_s: UFloat | None = None  # measured at start, a large matrix product in the model's dtype
    driver: Text = ""
    threads: UInt = 0


class EngineInfo(_Struct, frozen=True, kw_only=True):
    version: Name
    pid: Pos
    host: Text
    started_unix_ms: UInt
    torch: Text = ""
    python: Text = ""
    packages: Annotated[dict[Name, Name], Meta(max_length=64)] = {}


# --- commands: client -> engine, on ctl ----------------------------------------------------------


class Hello(_Struct, tag="hello", frozen=True, kw_only=True):
    id: Id
    proto_min: Pos
    proto_max: Pos
    client: Name
    version: Name
    pid: UInt = 0


class Ping(_Struct, tag="ping", frozen=True, kw_only=True):
    id: Id


class Snapshot(_Struct, tag="snapshot", frozen=True, kw_only=True):
    """Ask for the whole present state and the sequence number of each topic that it is as of."""

    id: Id


class CfgGet(_Struct, tag="cfg.get", frozen=True, kw_only=True):
    id: Id


class CfgSet(_Struct, tag="cfg.set", frozen=True, kw_only=True):
    """Change knobs, all of them or none. Refused with ``conflict`` unless ``expect_rev`` is current."""

    id: Id
    expect_rev: UInt
    patch: Annotated[dict[Name, KnobValue], Meta(min_length=1, max_length=128)]
    dry_run: bool = False


class CfgCancel(_Struct, tag="cfg.cancel", frozen=True, kw_only=True):
    """Give up a change that is on its way. ``not_found`` if it is not, or not any more.

    ``Ok`` says that it was asked for in time. How it ended is told by its `ApplyEvent`: rolled back with
    `CANCELLED` as the reason, or applied, where it was past the last point at which it could be given up.
    """

    id: Id
    apply_id: UInt


class Submit(_Struct, tag="req.submit", frozen=True, kw_only=True):
    """Generate. Exactly one of ``prompt`` (raw text), ``messages`` (chat) and ``tokens`` (ids) is given."""

    id: Id
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=256)] | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    sampling: Sampling = Sampling()
    stream: bool = True
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # smaller runs earlier, as in vLLM
    tag: Annotated[str, Meta(max_length=64)] = ""  # a label only; ids are the engine's own
    cache_salt: Annotated[str, Meta(max_length=128)] = ""
    detach: bool = False  # goes on when its client vanishes


class Cancel(_Struct, tag="req.cancel", frozen=True, kw_only=True):
    """Cancel one request (``rid``), those with a tag (both of any client), or all of this client's.

    Idempotent: a request that has ended, or never was, counts as none cancelled.
    """

    id: Id
    rid: Id | None = None
    tag: Annotated[str, Meta(max_length=64)] | None = None
    all: bool = False


class LogTail(_Struct, tag="log.tail", frozen=True, kw_only=True):
    id: Id
    after: UInt = 0
    max: Annotated[int, Meta(ge=1, le=2000)] = 500


class Shutdown(_Struct, tag="shutdown", frozen=True, kw_only=True):
    id: Id
    mode: Literal["drain", "now"] = "now"
    timeout_ms: Annotated[int, Meta(ge=0, le=600_000)] = 5000


Command = Hello | Ping | Snapshot | CfgGet | CfgSet | CfgCancel | Submit | Cancel | LogTail | Shutdown


# --- replies: engine -> client, on ctl -----------------------------------------------------------

ErrorCode = Literal[
    "bad_message", "proto_mismatch", "unauthorized", "unknown_command", "invalid", "conflict", "busy",
    "not_ready", "not_found", "too_large", "too_long", "rate_limited", "timeout", "cancelled", "oom",
    "unsupported", "internal",
]  # fmt: skip


class Error(_Struct, tag="error", frozen=True, kw_only=True):
    """A command that was not carried out. ``id`` is 0 where the command's own could not be read."""

    id: UInt
    code: ErrorCode
    message: Text
    keys: Annotated[dict[Name, Reason], Meta(max_length=128)] = {}  # one reason for each refused knob
    retry_after_ms: UInt | None = None


class Welcome(_Struct, tag="welcome", frozen=True, kw_only=True):
    id: Id
    proto: Pos
    session: Name  # new in each engine process
    engine: EngineInfo
    tel_endpoint: Text
    mono_ns: Ns
    unix_ms: UInt
    max_frame_bytes: UInt


class Pong(_Struct, tag="pong", frozen=True, kw_only=True):
    id: Id
    mono_ns: Ns


class Cfg(_Struct, tag="cfg", frozen=True, kw_only=True):
    id: Id
    rev: UInt
    values: KnobValues
    knobs: Annotated[list[KnobInfo], Meta(max_length=256)]


class CfgAccepted(_Struct, tag="cfg.accepted", frozen=True, kw_only=True):
    """A patch was validated and is queued (or, dry, would be). `ApplyEvent` tells how it ended."""

    id: Id
    apply_id: UInt
    mode: ApplyMode
    changed: KnobValues
    running: UInt  # requests that will go on by recompute where the mode rebuilds


class Accepted(_Struct, tag="req.accepted", frozen=True, kw_only=True):
    id: Id
    rid: Id
    prompt_tokens: UInt


class Cancelled(_Struct, tag="req.cancelled", frozen=True, kw_only=True):
    id: Id
    n: UInt


class LogLines(_Struct, tag="log.lines", frozen=True, kw_only=True):
    id: Id
    lines: Annotated[list[LogLine], Meta(max_length=2000)]


class Ok(_Struct, tag="ok", frozen=True, kw_only=True):
    id: Id


class Probe(_Struct, tag="probe", frozen=True, kw_only=True):
    """Sent unasked to find out whether a client is still there. Needs no answer."""

    mono_ns: Ns


class TopLogprob(_Struct, frozen=True, kw_only=True):
    token: TokenId
    logprob: LogProb


class TokenLogprob(_Struct, frozen=True, kw_only=True):
    token: TokenId
    logprob: LogProb
    top: Annotated[list[TopLogprob], Meta(max_length=32)] = []


TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
TokenLogprobs = Annotated[list[TokenLogprob], Meta(max_length=MAX_PROMPT_TOKENS)]


class Tokens(_Struct, tag="req.tokens", frozen=True, kw_only=True):
    """New tokens of a streamed request: ids from output index ``index`` on, and the text they release.

    Text may lag ids (an unfinished character, a possible stop string), and the texts of a request joined
    equal its full text. ``t_ns`` holds one engine time for each id.
    """

    rid: Id
    index: UInt
    ids: TokenIds
    text: LongText
    t_ns: Annotated[list[Ns], Meta(max_length=MAX_PROMPT_TOKENS)]
    logprobs: TokenLogprobs | None = None


class Done(_Struct, tag="req.done", frozen=True, kw_only=True):
    """The last message of a request, whatever ended it. Without ``stream`` it carries ids and text."""

    rid: Id
    finish: Finish
    text: LongText = ""  # what was held back (streamed), or the whole text (not streamed)
    row: RequestRow
    ids: TokenIds | None = None
    logprobs: TokenLogprobs | None = None
    stop_reason: Annotated[str, Meta(max_length=256)] | TokenId | None = (
        None  # the stop string or stop id that ended it
    )
    code: ErrorCode | None = None
    message: Text = ""


class SnapshotReply(_Struct, tag="snapshot.reply", frozen=True, kw_only=True):
    id: Id
    seq: Counts  # per topic, the last one contained
    state: EngineState
    cfg: Cfg
    steps: Annotated[list[StepRow], Meta(max_length=512)]  # the newest, oldest first
    requests: Annotated[list[RequestRow], Meta(max_length=16_384)]  # the live ones, and newest ended ones
    blocks: BlockKeyframe | None
    events: Annotated[list[ApplyEvent], Meta(max_length=1024)]
    preemptions: Annotated[list[Preempted], Meta(max_length=1024)] = []  # the newest, oldest first
    device: DeviceInfo | None
    model: ModelInfo | None


StreamItem = Tokens | Done
Reply = (
    Error | Welcome | Pong | Cfg | CfgAccepted | Accepted | Cancelled | LogLines | Ok | Probe
    | SnapshotReply | Tokens | Done
)  # fmt: skip


# --- telemetry: engine -> every client, on tel ---------------------------------------------------


class GraphUse(_Struct, frozen=True, kw_only=True):
    """What became of steps since CUDA graphs were last switched on: replayed, or run without, and why."""

    replayed_n: UInt = 0  # steps
    replayed_tok: UInt = 0  # tokens that they computed, padding included
    padded_tok: UInt = 0  # of them, those that nobody had: they filled a shape up
    missed_n: Counts = {}  # steps by reason
    logits_n: Counts = {}  # replayed ones whose tokens were chosen outside the graph, by reason
    ahead_n: UInt = 0  # launched before the tokens of the step before were read, replayed or not
    drafted_n: UInt = 0  # whose drafts a model made in replayed rounds that nobody waited for
    drafts_missed_n: Counts = {}  # whose drafts a model made in rounds that the host read, by reason
    drafts_read_n: UInt = 0  # of the first, those whose drafts the host had to read before it verified them
    drafts_waited_n: Counts = {}  # steps made when the tokens before were read, for drafts' sake, by reason
    graphs_n: UInt = 0  # that are held now
    graph_bytes: UInt = 0  # of device memory that they took
    budget_bytes: UInt = 0  # past which none is captured


class EngineState(_Struct, tag="state", frozen=True, kw_only=True):
    """The engine's phase. Published on each change and once a second; in every snapshot."""

    phase: Phase
    since_ns: Ns
    cfg_rev: UInt
    stage: Text = ""  # while loading or applying: what is being done
    done_bytes: UInt = 0
    total_bytes: UInt = 0
    pending_apply: UInt | None = None  # apply_id
    reason: Text = ""  # why it failed or stalled, for the person who reads it
    running: UInt = 0
    waiting: UInt = 0
    num_blocks: UInt = 0
    block_size: UInt = 0
    kv_dtype: Annotated[str, Meta(max_length=32)] = ""  # in which keys and values are kept, as torch names it
    kv_bytes: UInt = 0  # of the whole pool
    host_kv_bytes: UInt = 0  # host memory held for evicted prefixes
    swap_bytes: UInt = 0  # host memory held for preempted requests
    weight_bytes: UInt = 0  # of the embedding and the linear layers, in all forms that are held
    weight_dtype: Annotated[str, Meta(max_length=64)] = ""  # their precision, such as "int4 awq, head kept"
    original_bytes: UInt = 0  # memory held only to convert weights from: originals and codes of AWQ
    draft_weight_bytes: UInt = 0  # held to draft with, beside the model's own
    draft_kv_bytes: UInt = 0  # keys and values of the model that drafts
    step_bytes: UInt = 0  # of a card, kept free for the largest step, as measured; 0: not known
    graph_budget_bytes: UInt = 0  # of a card, kept free for CUDA graphs
    result_n: UInt = 0  # answers in the result cache
    result_bytes: UInt = 0
    result_hits: UInt = 0  # requests answered from it since start
    graphs: GraphUse | None = None  # None while CUDA graphs are switched off
    speculation: Text = ""  # why no drafts are made though speculation is on, "" while they are
    ended: UInt = 0  # requests since start, whatever ended them
    prefill_tok: UInt = 0  # tokens computed since start, so that totals survive a gap in the step rows
    decode_tok: UInt = 0
    model: ModelInfo | None = None
    device: DeviceInfo | None = None


class Heartbeat(_Struct, tag="hb", frozen=True, kw_only=True):
    """Four a second from the I/O thread. ``last_step_age_us`` shows a stalled loop behind a live socket:
    the time since the running step began, or since the loop last ended a step or a change.

    ``seq`` is the last number published under each other topic: without it, the loss of a topic's newest
    message would show only when another one follows.
    """

    mono_ns: Ns
    step: UInt
    busy: Literal["idle", "step", "load", "apply"]
    last_step_age_us: UInt
    rss_bytes: UInt
    device_bytes: UInt = 0
    cpu_percent: UFloat | None = None
    dropped: Counts = {}  # per queue, since start
    bad_frames: UInt = 0
    seq: Counts = {}


class StepRow(_Struct, array_like=True, frozen=True, kw_only=True):
    """One scheduler step. Positional on the wire, so the order of fields is part of the protocol.

    ``dur_us`` is the time that the step took out of the engine: from its own begin, or from the end of the
    step before it where that came later. ``plan_us`` to ``sample_us`` are of this step. Text and sockets are
    other threads' work, which no step waits for: ``tokenize_us``, ``detokenize_us`` and ``send_us`` are what
    they did since the row before. ``overlap_us`` is the part of planning, preparing and publishing that
    was done while a forward pass ran, so it took nothing out of the engine.

    A request with a draft brings up to one token more than its draft has, so tokens that came out are counted
    apart (``output_tok``) from known ones that were computed (``decode_tok``) and from drafted ones.
    """

    v: Annotated[int, Meta(ge=3, le=3)]
    step: UInt
    t_ns: Ns  # its start
    dur_us: UInt
    tokenize_us: UInt
    plan_us: UInt
    draft_us: UInt  # looking for drafts
    prepare_us: UInt
    copy_us: UInt  # blocks copied to and from host memory
    forward_us: UInt
    attention_us: UInt | None  # parts of forward_us, None unless forward_timing is on
    linear_us: UInt | None
    head_us: UInt | None
    sample_us: UInt
    detokenize_us: UInt
    send_us: UInt
    publish_us: UInt  # of the step before
    overlap_us: UInt
    prefill_reqs: UInt
    decode_reqs: UInt
    prefill_tok: UInt
    decode_tok: UInt  # newest tokens of answers that were computed, one for each such request
    output_tok: UInt  # tokens that came out and that requests took, first tokens among them
    running: UInt
    waiting: UInt
    preempted: UInt  # in this step
    recompute_tok: UInt  # of prefill_tok, those computed once already
    recompute_us: UInt  # the share of forward_us that recompute_tok had by their number
    draft_reqs: UInt  # requests with a draft
    drafted_tok: UInt  # drafted tokens that were computed, no part of decode_tok
    accepted_tok: UInt  # of them, those that the model agreed with
    drafted_at: Annotated[list[UInt], Meta(max_length=16)]  # by place in the draft
    accepted_at: Annotated[list[UInt], Meta(max_length=16)]
    verify_us: UInt  # the share of forward_us that drafted_tok had by their number
    used_blk: UInt  # referenced by a live request
    cached_blk: UInt  # unreferenced, content kept for reuse
    free_blk: UInt
    used_tok: UInt  # tokens held in used blocks; waste = used_blk * block_size - used_tok
    host_blk: UInt  # blocks of host memory that hold evicted prefixes
    swapped_blk: UInt  # blocks of host memory that hold preempted requests
    copied_blk: UInt  # blocks copied to or from host memory in this step
    query_tok: UInt  # prefix cache: tokens looked up at admission in this step
    hit_tok: UInt  # of them found, on the device or in host memory
    host_hit_tok: UInt  # of hit_tok, those that came from host memory
    weight_bytes: UInt  # modelled traffic of the step
    kv_bytes: UInt
    flops: UInt
    attention: Name  # the backend that really ran
    kernels: Annotated[str, Meta(max_length=256)]  # further implementations that ran, comma separated
    cfg_rev: UInt


class StepRows(_Struct, tag="steps", frozen=True, kw_only=True):
    rows: Annotated[list[StepRow], Meta(max_length=1024)]


class RequestRow(_Struct, frozen=True, kw_only=True):
    """One request, on each change of state and at its end. Times are None until they happened."""

    rid: Id
    tag: Annotated[str, Meta(max_length=64)]
    state: RequestState
    arrive_ns: Ns
    prompt_tok: UInt
    cached_tok: UInt = 0  # prefix hits at first admission, host memory included
    host_hit_tok: UInt = 0  # of cached_tok, those that came from host memory
    result_cached: bool = False  # answered from the result cache, nothing was computed
    computed_tok: UInt = 0
    output_tok: UInt = 0
    max_tokens: UInt = 0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    sched_ns: Ns | None = None  # first time scheduled; a preemption does not change it
    first_ns: Ns | None = None
    last_ns: Ns | None = None
    end_ns: Ns | None = None
    preempt_n: UInt = 0
    preempted_us: UInt = 0
    preempt_reason: Annotated[str, Meta(max_length=64)] = ""  # of the last preemption
    lost_tok: UInt = 0  # computed tokens whose keys and values preemptions gave up
    recompute_tok: UInt = 0
    recompute_us: UInt = 0  # its share, by tokens, of the forward passes that computed them again
    resume_hit_tok: UInt = 0  # prefix hits after a preemption, kept apart
    swap_n: UInt = 0  # preemptions that kept its blocks in host memory
    swap_in_tok: UInt = 0  # tokens that came back from there instead of being computed again
    miss_reason: Annotated[str, Meta(max_length=64)] = ""
    # Where its time went. The first and the last two are its own; the others are what the engine spent on
    # steps while it ran, whether or not a step had tokens of it; planning includes looking for drafts.
    tokenize_us: UInt = 0
    plan_us: UInt = 0
    prepare_us: UInt = 0
    copy_us: UInt = 0
    forward_us: UInt = 0
    sample_us: UInt = 0
    detokenize_us: UInt = 0
    send_us: UInt = 0
    drafts_n: UInt = 0  # steps with a draft; each brought one token more than accepted, or ended the request
    drafted_tok: UInt = 0
    accepted_tok: UInt = 0
    draft_us: UInt = 0  # its share, by drafted tokens, of making them and of the forward passes
    verify_us: UInt = 0
    itl_us: Annotated[list[UInt], Meta(max_length=8192)] = []  # at the end only: gaps between tokens
    finish: Finish | None = None
    code: ErrorCode | None = None
    message: Text = ""
    rev_first: UInt = 0
    rev_last: UInt = 0


class RequestRows(_Struct, tag="reqs", frozen=True, kw_only=True):
    rows: Annotated[list[RequestRow], Meta(max_length=4096)]


class Refusal(_Struct, frozen=True, kw_only=True):
    """A request that was refused: it never had a number, and whoever sent it was told the same."""

    t_ns: Ns
    client: Annotated[str, Meta(max_length=64)]
    tag: Annotated[str, Meta(max_length=64)]
    code: ErrorCode
    message: Reason
    prompt_tok: UInt | None = None  # None where it was refused before its text became tokens


class Refusals(_Struct, tag="refused", frozen=True, kw_only=True):
    """Requests that were refused since the last such message, oldest first.

    Of very many only the newest are told of; ``total`` counts all since the engine's start.
    """

    rows: Annotated[list[Refusal], Meta(max_length=256)]
    total: UInt


# Block states of the map, one byte a block.
BLOCK_FREE, BLOCK_CACHED, BLOCK_USED, BLOCK_SHARED, BLOCK_RESERVED, BLOCK_HOST, BLOCK_SWAPPED = range(7)


class BlockKeyframe(_Struct, tag="blk.key", frozen=True, kw_only=True):
    """The whole block map. ``state`` is u8, ``fill`` u16 and ``owner`` u32 little endian, one a block.

    ``fill`` counts the tokens held in the block, ``owner`` is the id of one owning request modulo 2^32
    (0: none). The last ``num_host`` of the ``num_blocks`` entries are blocks of host memory: free, host (an
    evicted prefix) or swapped (``owner`` is the preempted request). ``frame`` numbers keyframes and deltas in
    one sequence.
    """

    frame: UInt
    t_ns: Ns
    num_blocks: UInt
    num_host: UInt = 0
    block_size: UInt
    state: Annotated[bytes, Meta(max_length=MAX_BLOCKS)]
    fill: Annotated[bytes, Meta(max_length=2 * MAX_BLOCKS)]
    owner: Annotated[bytes, Meta(max_length=4 * MAX_BLOCKS)]


class BlockDelta(_Struct, tag="blk.delta", frozen=True, kw_only=True):
    """What changed since frame ``frame - 1``: ``index`` is u32 little endian, the rest as in the keyframe."""

    frame: UInt
    t_ns: Ns
    index: Annotated[bytes, Meta(max_length=4 * MAX_BLOCKS)]
    state: Annotated[bytes, Meta(max_length=MAX_BLOCKS)]
    fill: Annotated[bytes, Meta(max_length=2 * MAX_BLOCKS)]
    owner: Annotated[bytes, Meta(max_length=4 * MAX_BLOCKS)]


CANCELLED = "it was cancelled"
"""Why a change was rolled back that a client cancelled."""


class ApplyEvent(_Struct, tag="apply", frozen=True, kw_only=True):
    """How a configuration change ended. ``at_step`` is the first step that ran under ``to_rev``."""

    apply_id: UInt
    from_rev: UInt
    to_rev: UInt
    result: Literal["ok", "rolled_back"]
    t_ns: Ns
    at_step: UInt
    took_us: UInt
    mode: ApplyMode
    patch: KnobValues
    preempted: UInt = 0
    why: Text = ""


class Preempted(_Struct, tag="preempt", frozen=True, kw_only=True):
    """A running request lost its place. What its recompute costs is told by its row and the step rows.

    ``reason``: no blocks were left (``by`` is the request that needed them, perhaps the victim itself), a
    request of strictly lower number of priority came (``by``), or the pool was rebuilt (``by`` is 0).
    ``mode`` is what really happened to its blocks, ``why`` says why it is not what ``preemption`` asks for.
    """

    t_ns: Ns
    rid: Id
    by: UInt
    reason: Literal["blocks", "priority", "rebuild"]
    mode: Literal["recompute", "swap"]
    lost_tok: UInt  # computed tokens to be computed again, unless the prefix cache still has them
    swapped_blk: UInt = 0
    why: Annotated[str, Meta(max_length=256)] = ""
    cfg_rev: UInt = 0


class LogLine(_Struct, tag="log", frozen=True, kw_only=True):
    n: UInt
    level: Literal["debug", "info", "warning", "error"]
    unix_ms: UInt
    source: Name
    message: Text


class GpuRow(_Struct, tag="gpu", frozen=True, kw_only=True):
    """NVML readings of one card, each unknown (None) on its own."""

    t_ns: Ns
    uuid: Annotated[str, Meta(max_length=96)]
    name: Text
    utilization_percent: UFloat | None = None
    memory_used_bytes: UInt | None = None
    memory_total_bytes: UInt | None = None
    power_w: UFloat | None = None
    temperature_c: UFloat | None = None
    sm_clock_mhz: UFloat | None = None
    memory_clock_mhz: UFloat | None = None
    dram_read_write_percent: UFloat | None = None  # GPM, of the theoretical peak
    sm_active_percent: UFloat | None = None  # GPM
    tensor_active_percent: UFloat | None = None  # GPM
    pcie_rx_bytes_per_s: UFloat | None = None  # to the card
    pcie_tx_bytes_per_s: UFloat | None = None
    nvlink_rx_bytes_per_s: UFloat | None = None  # over all links
    nvlink_tx_bytes_per_s: UFloat | None = None
    ecc_corrected: UInt | None = None  # memory errors since the driver was loaded
    ecc_uncorrected: UInt | None = None
    throttle: Text = ""
    fault: Text = ""  # the newest error that the driver reported of the card (Xid)
    error: Text = ""
    unknown: Annotated[dict[Name, Reason], Meta(max_length=32)] = {}  # readings that are not there, and why


Telemetry = (
    EngineState | Heartbeat | StepRows | RequestRows | Refusals | BlockKeyframe | BlockDelta | ApplyEvent
    | Preempted | LogLine | GpuRow
)  # fmt: skip

Topic = Literal["state", "hb", "step", "req", "blk", "event", "log", "gpu"]
TOPICS: tuple[Topic, ...] = ("state", "hb", "step", "req", "blk", "event", "log", "gpu")
