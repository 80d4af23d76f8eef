"""The oracle: greedy ids in float32 equal those of transformers, whatever the engine does meanwhile.

For each model the reference ids come from transformers' ``generate`` on the same weights (see
`tests.engine.oracle`). Feature pairs are where engines break, so the combinations form a covering array: each
value of each feature meets each value of every other.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine import running_model
from engine.knobs import KNOBS
from engine.native import unavailable
from engine.ops.choice import COMPILE, FUSED
from engine.ops.compiled_ops import CompiledParts
from engine.ops.native_stack import Stacks
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, cannot_run
from tests.engine.native_forms import only_native_forms
from tests.engine.oracle import MODELS, NEW_TOKENS, Expected, demo, draft_model, tiny, told

# --- combinations --------------------------------------------------------------------------------

NATIVE = not unavailable()
SWITCH = (False, True) if NATIVE else (False,)
FEATURES: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "attention": ("naive", "sdpa", "paged") if NATIVE else ("naive", "sdpa"),
    **dict.fromkeys(FUSED, SWITCH),
    "chunk": (1, 7, 64, None),
    "block_size": (1, 16, 128),
    "cache": ("off", "cold", "warm"),
    "host": (False, True),
    "together": (True, False),
    "preempt": ("no", "for blocks", "thrice each"),
    "preemption": ("recompute", "swap"),
    "stream": (True, False),
    "kv_allocation": ("paged", "contiguous"),
    "batching": ("continuous", "static"),
    "batch_wait_ms": (0.0, 3.0),
    "policy": ("fcfs", "priority"),
    "overlap": (False, True),
    "speculation": ("off", "fixed", "adaptive", "draft", "self"),
    "batched_detokenize": (False, True),
    "result_cache": (False, True),
    "disturb": ("nothing", "cancels", "stop strings"),
}


def covering_array(seed: int = 9) -> Iterator[dict[str, Any]]:
    """Rows such that every pair of values of two features is in one of them."""
    rng = random.Random(seed)
    names = list(FEATURES)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in FEATURES[a] for y in FEATURES[b]
    }

    def pairs(row: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    while missing:
        a, x, b, y = min(missing, key=repr)
        rows = [{n: rng.choice(FEATURES[n]) for n in names} | {a: x, b: y} for _ in range(60)]
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best


ROWS = list(covering_array())


def engine_for(expected: Expected, row: dict[str, Any], **knobs: Any) -> Engine:
    """An engine with the features of a row; its pool is so small that blocks run out where that is wanted."""
    longest = max(len(p) + len(i) for p, i in zip(expected.prompts, expected.ids, strict=True))
    blocks = -(-longest // row["block_size"]) + 1
    plain = (
        "attention",
        *FUSED,
        "block_size",
        "kv_allocation",
        "batching",
        "batch_wait_ms",
        "policy",
        "overlap",
    )
    return Engine(
        expected.loaded,
        pool_tokens=blocks * row["block_size"] if row["preempt"] == "for blocks" or row["host"] else 1024,
        chunked_prefill=row["chunk"] is not None,
        prefill_chunk_tokens=row["chunk"] or 512,
        prefix_cache=row["cache"] != "off",
        kv_host_gib=0.002 if row["host"] else 0.0,
        preemption=row["preemption"],
        swap_space_gib=0.002,
        batched_detokenize=row["batched_detokenize"],
        result_cache=row["result_cache"],
        drafter=told(expected),
        draft_model=draft_model(row["model"]) if row["speculation"] == "draft" else None,
        speculation={"fixed": "ngram", "adaptive": "ngram"}.get(row["speculation"], row["speculation"]),
        spec_self_dtype="int8",
        spec_adaptive=row["speculation"] == "adaptive",
        **{name: row[name] for name in plain if name in row},
        **knobs,
    )


def combination(expected: Expected, row: dict[str, Any], **knobs: Any) -> None:
    """Run a combination, with further knobs, over the expected prompts and compare."""
    engine = engine_for(expected, row, **knobs)
    sampling = Sampling(max_tokens=len(expected.ids[0]), ignore_eos=True)
    others: list[int] = []
    rounds = 2 if row["cache"] == "warm" else 1
    for _ in range(rounds):
        rids: list[int] = []
        for index, prompt in enumerate(expected.prompts):
            rids.append(engine.submit(prompt, sampling, stream=row["stream"], priority=index % 3))
            if row["disturb"] != "nothing":
                stop = ["a", "e", "t"] if row["disturb"] == "stop strings" else []
                more = Sampling(max_tokens=20, ignore_eos=True, stop=stop)
                others.append(engine.submit([*prompt[:30], 9 + index], more, priority=1))
            if not row["together"]:
                drive(engine, row, others)
        drive(engine, row, others)
        expected.compare([engine.ids(rid) for rid in rids])
    happened(engine, row, rids, others)


def happened(engine: Engine, row: dict[str, Any], last: Sequence[int], others: Sequence[int]) -> None:
    """That each feature of a row did what it is there for, where it can."""
    ends = [done.row for done in engine.heard.done.values()]
    steps = engine.heard.steps
    computed_twice = row["cache"] == "warm" and not row["result_cache"]
    if row["preempt"] == "thrice each":
        assert sum(end.preempt_n for end in ends) > 3
        assert (sum(end.swap_n for end in ends) > 0) == (row["preemption"] == "swap")
        assert {event.reason for event in engine.heard.preemptions} <= {"blocks", "priority"}
    if computed_twice and row["preempt"] == "no" and row["block_size"] < 128:
        assert sum(step.hit_tok for step in steps) > 0
    if computed_twice and row["host"] and row["block_size"] < 128:
        assert sum(step.host_hit_tok for step in steps) > 0
        assert sum(end.host_hit_tok for end in ends) == sum(step.host_hit_tok for step in steps)
    if row["speculation"] in ("fixed", "draft", "self"):
        drafted, accepted = (
            sum(getattr(step, f"{kind}_tok") for step in steps) for kind in ("drafted", "accepted")
        )
        assert 0 < accepted <= drafted
        assert accepted < drafted or row["speculation"] == "draft"
    elif row["speculation"] == "off":
        assert {(step.draft_us, step.drafted_tok) for step in steps} == {(0, 0)}
    if row["overlap"] and row["speculation"] != "off":
        assert all(step.overlap_us <= step.publish_us + 3 for step in steps if step.drafted_tok)
    elif row["overlap"]:
        assert sum(step.overlap_us for step in steps) > 0
    else:
        assert {step.overlap_us for step in steps} == {0}
    if row["batching"] == "static":
        first = engine.heard.done[1].row
        assert first.sched_ns is not None
        assert first.sched_ns - first.arrive_ns >= row["batch_wait_ms"] * 1e6
    if row["cache"] == "warm" and row["result_cache"]:
        assert all(engine.heard.done[rid].row.result_cached for rid in last)
    if row["disturb"] != "nothing":
        wanted = {"cancels": "cancelled", "stop strings": "stop"}[row["disturb"]]
        assert wanted in {engine.heard.done[rid].finish for rid in others}
    assert {step.attention for step in steps} == {row["attention"]}
    fused = {"fused_norm": "norm", "fused_rope_kv": "rope_kv", "fused_mlp": "mlp"}
    for step in steps:
        assert {knob for knob, part in fused.items() if f",{part}=native" in step.kernels} == {
            knob for knob in fused if row.get(knob)
        }


def drive(engine: Engine, row: dict[str, Any], others: Sequence[int]) -> None:
    """Step until nothing is live, with preemptions and cancels where the row wants them."""
    core = engine.core
    for step in itertools.count(1):
        if not core.step() and not core.answers.live:
            return
        if row["preempt"] == "thrice each" and step % 3 == 0:
            for request in [r for r in core.scheduler.running if r.preempt_count < 3]:
                core.answers.note_preempted([core.scheduler.preempt(request, core.clock_ns())])
        if row["disturb"] == "cancels" and step % 2 == 0:
            core.cancel([rid for rid in others if rid in core.answers.live][:1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(v) for v in row.values()))
def test_combinations(row: dict[str, Any]) -> None:
    """A01, A03, A08, A11, A38: cache and host memory, batch and its wait, chunks, blocks, preemption by
    recompute or swap, overlap, kernel, text, streaming, cancels and stop strings leave ids alone."""
    combination(tiny(row["model"]), row)


def test_every_pair_is_covered() -> None:
    for a, b in itertools.combinations(FEATURES, 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(FEATURES[a], FEATURES[b]))


def test_rows_are_there_that_must_show_what_a_feature_does() -> None:
    """The conditions under which a combination is held to have swapped, hit and waited do occur."""
    warm = [row for row in ROWS if row["cache"] == "warm" and not row["result_cache"]]
    assert any(row["host"] and row["block_size"] < 128 and row["overlap"] for row in warm)
    assert any(row["preempt"] == "no" and row["block_size"] < 128 for row in warm)
    forced = [row for row in ROWS if row["preempt"] == "thrice each"]
    assert {(row["preemption"], row["overlap"]) for row in forced} == set(
        itertools.product(("recompute", "swap"), (False, True))
    )
    assert any(row["batching"] == "static" and row["batch_wait_ms"] for row in ROWS)


PLAIN: dict[str, Any] = {
    "attention": "sdpa", "chunk": 64, "block_size": 16, "cache": "cold", "host": False, "together": True,
    "preempt": "no", "preemption": "recompute", "stream": True, "kv_allocation": "paged",
    "batching": "continuous", "batch_wait_ms": 0.0, "policy": "fcfs", "overlap": False, "speculation": "off",
    "batched_detokenize": False, "result_cache": False, "disturb": "nothing",
}  # fmt: skip


@pytest.mark.demo_model
@pytest.mark.parametrize("changes", [
    {}, {"attention": "naive", "block_size": 1, "chunk": 7}, {"preempt": "for blocks", "cache": "warm"},
    {"kv_allocation": "contiguous", "batching": "static", "block_size": 128, "chunk": None},
    {"preempt": "thrice each", "preemption": "swap", "overlap": True}, {"speculation": "fixed"},
], ids=["plain", "naive", "preempted", "static", "swapped", "speculating"])  # fmt: skip
def test_demo_model(changes: dict[str, Any]) -> None:
    """The same on the demo model, whose head count is odd and whose head is tied."""
    combination(demo(), PLAIN | changes)


# --- flips ---------------------------------------------------------------------------------------

FLIPS: list[tuple[str, KnobValue, KnobValue]] = [
    ("batching", "continuous", "static"),
    ("batch_wait_ms", 0.0, 3.0),
    ("max_num_seqs", 8, 1),
    ("max_num_batched_tokens", 512, 9),
    ("chunked_prefill", True, False),
    ("prefill_chunk_tokens", 64, 3),
    ("preemption", "recompute", "swap"),
    ("swap_space_gib", 0.002, 0.001),
    ("overlap", False, True),
    ("prefix_cache", True, False),
    ("block_size", 16, 1),
    ("kv_allocation", "paged", "contiguous"),
    ("kv_pool_gib", 0.0, 0.0001),
    ("kv_host_gib", 0.0, 0.001),
    ("attention", "sdpa", "naive"),
    ("speculation", "off", "ngram"),
    ("spec_tokens", 4, 1),
    ("spec_adaptive", False, True),
    ("spec_self_dtype", "int8", "int4"),
    ("policy", "fcfs", "priority"),
    ("priority_ageing_s", 2.0, 0.01),
    ("max_num_queued", 4096, 100),
    ("batched_tokenize", False, True),
    ("batched_detokenize", False, True),
    ("result_cache", False, True),
    ("forward_timing", False, True),
    *((knob, False, True) for knob in (*FUSED, COMPILE, "cuda_graphs")),
]
GREEDY_FLIPS: list[tuple[str, KnobValue, KnobValue]] = [("fused_sampling", False, True)]
"""Knobs that leave greedy text alone, though not what is drawn."""
BESIDE: dict[str, dict[str, KnobValue]] = {
    "batch_wait_ms": {"batching": "static"},
    "swap_space_gib": {"preemption": "swap"},
    "kv_host_gib": {"kv_pool_gib": 0.00006},  # so few blocks that prefixes are evicted
    "speculation": {"spec_adaptive": False},
    "spec_tokens": {"speculation": "ngram", "spec_adaptive": False},
    "spec_adaptive": {"speculation": "ngram"},
    "spec_self_dtype": {"speculation": "self", "spec_adaptive": False},
}


EFFECTS: dict[str, Callable[[Engine], set[bool]]] = {
    "preemption": lambda engine: {event.mode == "swap" for event in engine.heard.preemptions},
    "overlap": lambda engine: {step.overlap_us > 0 for step in engine.heard.steps},
    "kv_host_gib": lambda engine: {step.host_blk > 0 for step in engine.heard.steps},
    "speculation": lambda engine: {step.accepted_tok > 0 for step in engine.heard.steps},
    "spec_tokens": lambda engine: {
        len(step.drafted_at) > 1 for step in engine.heard.steps if step.draft_reqs
    },
    "forward_timing": lambda engine: {step.attention_us is not None for step in engine.heard.steps},
    "compile": lambda engine: {"norm=compile" in step.kernels for step in engine.heard.steps},
    "fused_sampling": lambda engine: {"sample=native" in step.kernels for step in engine.heard.steps},
}
"""Flips whose effect shows in what is told of the run: both ways of it must be there."""


def flip(engine: Engine, knob: str, first: KnobValue, second: KnobValue) -> None:
    engine.set(**{knob: second if engine.core.knobs[knob] == first else first})


def test_each_lossless_knob_is_flipped() -> None:
    lossless = {knob.id for knob in KNOBS if knob.apply in ("step", "rebuild_kv") and not knob.lossy}
    assert lossless == {knob for knob, _, _ in FLIPS}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("knob", "first", "second"),
    [*FLIPS, *GREEDY_FLIPS],
    ids=[each[0] for each in (*FLIPS, *GREEDY_FLIPS)],
)
def test_flipped_while_running(
    architecture: str, knob: str, first: KnobValue, second: KnobValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each knob goes there and back while prompts and decodes are in flight, others are cancelled or end at
    stop strings, and a running request is preempted now and then."""
    # To make code of what torch recorded takes long, and is tested beside the parts themselves.
    monkeypatch.setattr(running_model, "CompiledParts", functools.partial(CompiledParts, backend="aot_eager"))
    expected = tiny(architecture)
    if reason := cannot_run(expected.loaded).get(knob):
        pytest.skip(reason)
    knobs: dict[str, Any] = {"prefill_chunk_tokens": 16, **BESIDE.get(knob, {}), knob: first}
    engine = Engine(expected.loaded, drafter=told(expected), **knobs)
    core, rng = engine.core, random.Random(knob)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    rids = [engine.submit(prompt, sampling) for prompt in expected.prompts]
    cancelled = engine.submit(expected.prompts[1], sampling)
    stopping = Sampling(max_tokens=40, ignore_eos=True, stop=["a", "e", "t"])
    stopped = engine.submit(expected.prompts[4], stopping)
    for step in itertools.count(1):
        while core.knobs.pending is not None and not core._inbox:  # its weights are being loaded
            time.sleep(1e-3)
        if not core.step() and not core.answers.live:
            break
        if step % 4 == 0 and step <= 32 and core.answers.live and core.knobs.pending is None:
            flip(engine, knob, first, second)
        if step % 5 == 0 and core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            if victim.preempt_count < 3:
                core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        if step == 9:
            core.cancel([cancelled])
    expected.compare([engine.ids(rid) for rid in rids])
    assert len(engine.heard.applies) > 2
    assert {apply.result for apply in engine.heard.applies} == {"ok"}
    assert len({step.cfg_rev for step in engine.heard.steps}) > 2
    assert engine.heard.done[cancelled].finish == "cancelled"
    assert engine.heard.done[stopped].finish == "stop"
    if knob in EFFECTS:
        assert EFFECTS[knob](engine) == {False, True}


@pytest.mark.parametrize("architecture", MODELS)
def test_layers_in_one_call(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is one call where all parts are in C++. Each flip ends that, brings it back, or changes what is
    given to it."""
    if reason := unavailable():
        pytest.skip(reason)
    only_native_forms(monkeypatch)
    served, real = Counter[bool](), Stacks.of

    def of(*given: Any) -> Any:
        found = real(*given)
        served[found is not None] += 1
        return found

    monkeypatch.setattr(Stacks, "of", of)
    expected = tiny(architecture)
    on = dict.fromkeys(FUSED, True)
    engine = Engine(
        expected.loaded, drafter=told(expected), prefill_chunk_tokens=16, spec_adaptive=False, **on
    )
    core = engine.core
    flips: list[tuple[str, KnobValue, KnobValue]] = [
        *((knob, True, False) for knob in FUSED),
        ("attention", "auto", "sdpa"), ("forward_timing", False, True), ("block_size", 16, 1),
        ("overlap", False, True), ("speculation", "off", "ngram"),
    ]  # fmt: skip
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    rids = [engine.submit(prompt, sampling) for prompt in expected.prompts]
    for step in itertools.count(1):
        if not core.step() and not core.answers.live:
            break
        if core.answers.live:
            flip(engine, *flips[(step - 1) // 2 % len(flips)])  # there, and with the next step back
    expected.compare([engine.ids(rid) for rid in rids])
    assert {apply.result for apply in engine.heard.applies} == {"ok"}
    assert served[True] > 9
    assert served[False] > 4


LOSSY: list[tuple[str, KnobValue, KnobValue]] = [
    ("kv_dtype", "model", "int8"),
    ("kv_dtype", "model", "fp8_e4m3"),
    ("sliding_window", 0, 8),
    ("weight_dtype", "model", "fp8"),
    ("weight_dtype", "model", "int8"),
    ("weight_dtype", "model", "int4"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("knob", "first", "second"), LOSSY, ids=[f"{each[0]}-{each[2]}" for each in LOSSY])
def test_a_lossy_flip_loses_no_request(knob: str, first: KnobValue, second: KnobValue, overlap: bool) -> None:
    """Running requests go on by recompute: every stream is whole and as long as asked for. Once it is
    flipped back, new requests get the oracle's ids, so nothing of what was lossy is found again."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, prefill_chunk_tokens=16, overlap=overlap)
    core = engine.core
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    expected.compare(engine.generate(expected.prompts, sampling))
    for value in (second, first):
        rids = [engine.submit(prompt, sampling) for prompt in expected.prompts]
        for _ in range(9):
            core.step()
        flip(engine, knob, first, second)
        engine.run()
        assert core.knobs[knob] == value
        ends = [engine.heard.done[rid] for rid in rids]
        assert {done.finish for done in ends} == {"length"}
        assert all(len(engine.ids(rid)) == NEW_TOKENS for rid in rids)
        assert sum(done.row.recompute_tok for done in ends) > 0
    assert engine.generate(expected.prompts, sampling) == expected.ids
    assert {apply.result for apply in engine.heard.applies} == {"ok"}
    assert [apply.preempted > 0 for apply in engine.heard.applies] == [True, True]
    assert {event.reason for event in engine.heard.preemptions} == {"rebuild"}


# --- what ran before -----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_ids_do_not_depend_on_what_ran_before(end: str) -> None:
    """A01: batches that end on stop strings or are cancelled inside a block leave nothing behind."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, block_size=8)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    expected.compare(engine.generate(expected.prompts, sampling))
    before = Sampling(max_tokens=40, ignore_eos=True, stop=["a", "e", "t"] if end == "stop" else [])
    rids = [engine.submit(expected.prompts[0][: 30 + n], before) for n in range(8)]
    if end == "cancel":
        for _ in range(5):
            engine.core.step()
        engine.core.cancel(rids)
    engine.run()
    assert {engine.heard.done[rid].finish for rid in rids} == {"stop" if end == "stop" else "cancelled"}
    expected.compare(engine.generate(expected.prompts, sampling))


@pytest.mark.parametrize("chunk", [1, 7, 16, 99, 100, 512])
def test_chunk_edges(chunk: int) -> None:
    """A38: a prompt of 100 tokens in chunks with edges inside a block, on it and inside the cached prefix."""
    expected = tiny("mistral")
    engine = Engine(expected.loaded, prefill_chunk_tokens=chunk)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(2):
        expected.compare(engine.generate([expected.prompts[4]], sampling), which=[4])
    assert engine.heard.done[2].row.cached_tok == 96


def test_a_prompt_that_ended_inside_a_block() -> None:
    """A05: decoding fills a block; a prompt equal up to the old border with a new tail hits nothing stale."""
    expected = tiny("qwen2")
    engine = Engine(expected.loaded, block_size=16)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    engine.generate([expected.prompts[0][:39]], Sampling(max_tokens=30, ignore_eos=True))
    expected.compare(engine.generate(expected.prompts, sampling))


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_prompt_of_whole_blocks_twice(length: int) -> None:
    """A03: a prompt whose blocks are all cached still computes a token: of 16, 32, 33 it hits 0, 16, 32."""
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    prompt = expected.prompts[4][:length]
    first, second = (engine.generate([prompt], Sampling(max_tokens=1)) for _ in range(2))
    assert first == second
    assert engine.heard.done[2].row.cached_tok == (length - 1) // 16 * 16
