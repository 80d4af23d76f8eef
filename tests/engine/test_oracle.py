"""The oracle: greedy ids in float32 equal those of transformers, whatever the engine does meanwhile.

For each model the reference ids come from transformers' ``generate`` on the same weights, together with the
gap between the two best logits at each place. A difference where that gap is below `NEAR_TIE` is rounding,
reported as a near tie; the prompts are chosen so that there is none. Feature pairs are where engines break,
so the combinations form a covering array: each value of each feature meets each value of every other.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.models.loader import LoadedModel
from ipc.messages import KnobValue, Sampling
from tests import demo_model as demo_files
from tests import tiny_models
from tests.engine.core_harness import Engine, load, tiny_folder

NEAR_TIE = 2e-4
NEW_TOKENS = 24
PROMPT_SEEDS = {"llama": 11, "mistral": 12, "qwen2": 11, "qwen3": 13}  # no near tie in 120 places
CHANGES: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 32}}
MODELS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Expected:
    """What transformers says: prompts, the ids after each, and the gap of the two best logits at each id."""

    loaded: LoadedModel
    prompts: list[list[int]]
    ids: list[list[int]]
    gaps: list[list[float]]

    def compare(self, got: Sequence[Sequence[int]], which: Sequence[int] | None = None) -> None:
        for answer, index in zip(got, which or range(len(self.prompts)), strict=True):
            want = self.ids[index]
            place = next((i for i, (a, b) in enumerate(zip(answer, want, strict=False)) if a != b), None)
            if place is None:
                assert len(answer) == len(want), f"prompt {index}: {len(answer)} ids, expected {len(want)}"
                continue
            gap = self.gaps[index][place]
            kind = "a near tie, choose other prompts" if gap < NEAR_TIE else "a fault"
            pytest.fail(
                f"prompt {index} differs at output {place}: {answer[place]} for {want[place]}; the two best "
                f"logits lie {gap:.2e} apart: {kind}"
            )


def reference(loaded: LoadedModel, model: Any, prompts: list[list[int]], count: int) -> Expected:
    ids = [tiny_models.greedy(model, prompt, count) for prompt in prompts]
    gaps = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ids, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            top = logits.topk(2, dim=-1).values
            gaps.append((top[:, 0] - top[:, 1]).tolist())
    return Expected(loaded, prompts, ids, gaps)


def tiny_prompts(seed: int) -> list[list[int]]:
    """Two that share 40 tokens, one of block lengths, one of a single token, one long."""
    rng = random.Random(seed)
    draw = [[rng.randrange(4, 300) for _ in range(n)] for n in (40, 9, 16, 1, 100)]
    return [draw[0] + draw[1], draw[0] + [17], draw[2], draw[3], draw[4]]


@functools.cache
def tiny(architecture: str) -> Expected:
    folder = tiny_folder(architecture, **CHANGES.get(architecture, {}))
    prompts = tiny_prompts(PROMPT_SEEDS[architecture])
    expected = reference(load(folder), tiny_models.reference(folder), prompts, NEW_TOKENS)
    assert min(map(min, expected.gaps)) > NEAR_TIE, "these prompts hold a near tie"
    return expected


@functools.cache
def demo() -> Expected:
    from tests.bench.peer_transformers import hf_model

    path = demo_files.path()
    loaded = load(path)
    tokenizer = loaded.tokenizer
    story = "The lighthouse stood at the end of the bay, and every evening its keeper climbed the stairs to"
    prompts = [
        tokenizer.apply_chat_template([("user", "Name three rivers in Europe.")]),
        tokenizer.encode(story, add_special=True),
        tokenizer.encode(story + " light the lamp. One night", add_special=True),
    ]
    return reference(loaded, hf_model(path, torch.float32), prompts, 12)


# --- combinations --------------------------------------------------------------------------------

FEATURES: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "attention": ("naive", "sdpa"),
    "chunk": (1, 7, 64, None),
    "block_size": (1, 16, 128),
    "cache": ("off", "cold", "warm"),
    "together": (True, False),
    "preempt": ("no", "for blocks", "thrice each"),
    "stream": (True, False),
    "kv_allocation": ("paged", "contiguous"),
    "batching": ("continuous", "static"),
    "policy": ("fcfs", "priority"),
}


def covering_array(seed: int = 5) -> Iterator[dict[str, Any]]:
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


def combination(expected: Expected, row: dict[str, Any]) -> None:
    """Run a combination over the expected prompts and compare."""
    preempt = row["preempt"]
    longest = max(len(p) + len(i) for p, i in zip(expected.prompts, expected.ids, strict=True))
    blocks = -(-longest // row["block_size"]) + 1
    engine = Engine(
        expected.loaded,
        pool_tokens=blocks * row["block_size"] if preempt == "for blocks" else 1024,
        attention=row["attention"],
        chunked_prefill=row["chunk"] is not None,
        prefill_chunk_tokens=row["chunk"] or 512,
        block_size=row["block_size"],
        prefix_cache=row["cache"] != "off",
        kv_allocation=row["kv_allocation"],
        batching=row["batching"],
        policy=row["policy"],
    )
    sampling = Sampling(max_tokens=len(expected.ids[0]), ignore_eos=True)
    rounds = 2 if row["cache"] == "warm" else 1
    for _ in range(rounds):
        rids: list[int] = []
        for index, prompt in enumerate(expected.prompts):
            rids.append(engine.submit(prompt, sampling, stream=row["stream"], priority=index % 3))
            if not row["together"]:
                drive(engine, preempt)
        drive(engine, preempt)
        expected.compare([engine.ids(rid) for rid in rids])
    if preempt == "thrice each":
        assert any(done.row.preempt_n for done in engine.heard.done.values())
    if row["cache"] == "warm" and preempt != "for blocks" and row["block_size"] < 128:
        assert sum(step.hit_tok for step in engine.heard.steps) > 0
    assert {step.attention for step in engine.heard.steps} == {row["attention"]}


def drive(engine: Engine, preempt: str) -> None:
    scheduler = engine.core.scheduler
    for step in itertools.count(1):
        if not engine.core.step() and not engine.core.answers.live:
            return
        if preempt == "thrice each" and step % 3 == 0:
            for request in [r for r in scheduler.running if r.preempt_count < 3]:
                scheduler.preempt(request, step)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(v) for v in row.values()))
def test_combinations(row: dict[str, Any]) -> None:
    """A01, A03, A08, A38: cache, batch, chunks, blocks, preemption, kernel and streaming leave ids alone."""
    combination(tiny(row["model"]), row)


def test_every_pair_is_covered() -> None:
    for a, b in itertools.combinations(FEATURES, 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(FEATURES[a], FEATURES[b]))


@pytest.mark.demo_model
@pytest.mark.parametrize("changes", [
    {}, {"attention": "naive", "block_size": 1, "chunk": 7}, {"preempt": "for blocks", "cache": "warm"},
    {"kv_allocation": "contiguous", "batching": "static", "block_size": 128, "chunk": None},
], ids=["plain", "naive", "preempted", "static"])  # fmt: skip
def test_demo_model(changes: dict[str, Any]) -> None:
    """The same on the demo model, whose head count is odd and whose head is tied."""
    plain = {"attention": "sdpa", "chunk": 64, "block_size": 16, "cache": "cold", "together": True}
    more = {
        "preempt": "no",
        "stream": True,
        "kv_allocation": "paged",
        "batching": "continuous",
        "policy": "fcfs",
    }
    combination(demo(), plain | more | changes)


# --- flips ---------------------------------------------------------------------------------------

FLIPS: list[tuple[str, KnobValue, KnobValue]] = [
    ("batching", "continuous", "static"),
    ("max_num_seqs", 8, 1),
    ("max_num_batched_tokens", 512, 9),
    ("chunked_prefill", True, False),
    ("prefill_chunk_tokens", 64, 3),
    ("prefix_cache", True, False),
    ("block_size", 16, 1),
    ("kv_allocation", "paged", "contiguous"),
    ("kv_pool_gib", 0.0, 0.0001),
    ("attention", "sdpa", "naive"),
    ("policy", "fcfs", "priority"),
    ("priority_ageing_s", 2.0, 0.01),
    ("max_num_queued", 4096, 100),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("knob", "first", "second"), FLIPS, ids=[flip[0] for flip in FLIPS])
def test_flipped_while_running(architecture: str, knob: str, first: KnobValue, second: KnobValue) -> None:
    """Each knob goes there and back four times while prompts and decodes are in flight."""
    expected = tiny(architecture)
    engine = Engine(
        expected.loaded, prefill_chunk_tokens=16, **{knob: first} if knob != "prefill_chunk_tokens" else {}
    )
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    rids = [engine.submit(prompt, sampling) for prompt in expected.prompts]
    for step in itertools.count(1):
        if not engine.core.step() and not engine.core.answers.live:
            break
        if step % 4 == 0 and step <= 32 and engine.core.answers.live:
            engine.set(**{knob: second if engine.core.knobs[knob] == first else first})
    expected.compare([engine.ids(rid) for rid in rids])
    assert len(engine.heard.applies) > 2
    assert {apply.result for apply in engine.heard.applies} == {"ok"}
    assert len({step.cfg_rev for step in engine.heard.steps}) > 2


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
