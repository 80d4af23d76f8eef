"""Drafts of models in a running engine: the text is that without, whatever else happens."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from engine.models.loader import LoadedModel
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.oracle import NEW_TOKENS, tiny

GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
SETTINGS = [
    GREEDY,
    Sampling(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True),
    Sampling(max_tokens=30, temperature=1.0, top_p=0.9, seed=6, logprobs=3, ignore_eos=True),
    Sampling(max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=0),
    Sampling(max_tokens=30, temperature=1.2, repetition_penalty=1.2, min_tokens=12, seed=8),
]
KINDS: dict[str, tuple[dict[str, KnobValue], Path | None]] = {
    "the same model": ({"speculation": "draft"}, None),
    "another model": ({"speculation": "draft"}, Path("qwen3")),
    "self in int8": ({"speculation": "self", "spec_self_dtype": "int8"}, None),
    "self in int4": ({"speculation": "self", "spec_self_dtype": "int4"}, None),
}
RIGHT = ("the same model", "self in int8")  # kinds that are often right about these random weights


def drafting(model: LoadedModel, kind: str, **knobs: Any) -> Engine:
    """An engine that verifies whatever a draft model of this kind proposes."""
    values, other = KINDS[kind]
    folder = Path(model.info.path) if other is None else tiny_folder(other.name)
    return Engine(model, draft_model=folder, **{"spec_adaptive": False, **values, **knobs})


def total(engine: Engine, field: str) -> int:
    return sum(getattr(step, field) for step in engine.heard.steps)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompts(count: int = 5, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.randrange(5, 60))] for _ in range(count)]


# --- the text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_the_text_is_that_without(model: LoadedModel, sampling: Sampling, kind: str) -> None:
    """A10, A13, A15, A16: alone and in a batch of different draft lengths, greedy or with a seed; and so are
    its log-probabilities and its end."""
    plain = Engine(model)
    rids = [plain.submit(text, sampling, stream=False) for text in prompts()]
    plain.run()
    wants = [plain.heard.done[rid] for rid in rids]
    for together in (True, False):
        engine = drafting(model, kind, spec_tokens=5, overlap=together)
        for text in prompts():
            rid = engine.submit(text, sampling, stream=False)
            if not together:
                engine.run()
        engine.run()
        for rid, want in zip(rids, wants, strict=True):
            got = engine.heard.done[rid]
            assert (got.ids, got.finish, got.stop_reason) == (want.ids, want.finish, want.stop_reason)
            for mine, other in zip(got.logprobs or [], want.logprobs or [], strict=True):
                assert mine.token == other.token
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert total(engine, "drafted_tok") > 80
        assert kind not in RIGHT or total(engine, "accepted_tok") > 40
        assert total(engine, "draft_us") > 0


@pytest.mark.parametrize("knobs", [
    {"kv_dtype": "int8"}, {"kv_dtype": "fp8_e4m3"}, {"sliding_window": 8, "block_size": 4},
    {"sliding_window": 8, "block_size": 1, "preemption": "swap"}, {"kv_allocation": "contiguous"},
    {"prefill_chunk_tokens": 5}, {"max_num_batched_tokens": 9}, {"batching": "static"},
    {"kv_dtype": "int8", "overlap": True, "sliding_window": 16}, {"attention": "naive"},
    {"block_size": 2, "spec_tokens": 7},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", RIGHT)
def test_pairs_of_features_leave_the_text_alone(knobs: dict[str, Any], kind: str) -> None:
    """A31, A33, A41: the second round finds the first one's blocks in the prefix cache, which the draft model
    does not take to be its own, and is right as often."""
    expected = tiny("qwen3")
    wants = Engine(expected.loaded, **knobs).generate(expected.prompts, GREEDY)
    engine = drafting(expected.loaded, kind, **knobs)
    shares = []
    for _ in range(2):
        before = total(engine, "accepted_tok"), total(engine, "drafted_tok")
        assert engine.generate(expected.prompts, GREEDY) == wants
        now = total(engine, "accepted_tok"), total(engine, "drafted_tok")
        shares.append((now[0] - before[0]) / (now[1] - before[1]))
    assert total(engine, "hit_tok") > 0
    assert min(shares) > 0.05
    if kind == "the same model" and not {"kv_dtype", "sliding_window"} & set(knobs):
        assert shares == [1.0, 1.0]


def test_a_draft_model_that_attends_to_less_is_only_less_often_right() -> None:
    """A33: windows of the draft model, wider and narrower than the target's, whose blocks it may not miss."""
    expected = tiny("mistral")  # a window of 32
    wants = Engine(expected.loaded, block_size=4).generate(expected.prompts, GREEDY)
    shares = {}
    for window in (8, 32, 64, None):
        folder = tiny_folder("mistral", sliding_window=window)
        engine = Engine(
            expected.loaded, draft_model=folder, speculation="draft", spec_adaptive=False, block_size=4
        )
        assert engine.generate(expected.prompts, GREEDY) == wants
        shares[window] = total(engine, "accepted_tok") / total(engine, "drafted_tok")
    assert shares[8] < shares[32] == shares[64] == shares[None]  # those are all 32 beside this target
    assert 0.6 < shares[32] < 1  # not 1: what long prompts have given up was not seen


@pytest.mark.parametrize("length", [20, 400])
@pytest.mark.parametrize("window", [8, 32, 300])
def test_a_window_leaves_the_drafts_of_the_model_itself_as_good_as_they_are(
    model: LoadedModel, window: int, length: int
) -> None:
    """A33, A41: they attend to what the target has computed, with its windows, behind a long prompt whose
    blocks were given up too, from the first token of the answer on."""
    texts = [text * 30 for text in prompts(4)]
    texts = [text[:length] for text in texts]
    knobs: dict[str, Any] = {"sliding_window": window, "block_size": 4, "pool_tokens": 4096}
    wants = Engine(model, **knobs).generate(texts, GREEDY)
    engine = drafting(model, "self in int8", **knobs)
    assert engine.generate(texts, GREEDY) == wants
    assert total(engine, "accepted_tok") > 0.6 * total(engine, "drafted_tok")
    assert all(step.draft_us for step in engine.heard.steps if step.decode_reqs and not step.prefill_reqs)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_draft_model_that_followed_a_request_misses_no_block_behind_a_window(block_size: int) -> None:
    """A33: it lags behind by what a step brought, so blocks stay for it a little longer: always right."""
    expected = tiny("mistral")
    texts = [text[:20] for text in expected.prompts]
    wants = Engine(expected.loaded, block_size=block_size).generate(texts, SETTINGS[1])
    folder = tiny_folder("mistral", sliding_window=32)
    engine = Engine(
        expected.loaded, draft_model=folder, speculation="draft", spec_adaptive=False, block_size=block_size
    )
    for _ in range(2):
        assert engine.generate(texts, SETTINGS[1]) == wants
    assert total(engine, "accepted_tok") == total(engine, "drafted_tok") > 80


@pytest.mark.parametrize("overlap", [False, True])
def test_kinds_are_changed_in_the_middle_of_answers(model: LoadedModel, overlap: bool) -> None:
    """A41: from none to each and back, with a step or more of each, while requests run: whoever comes to
    drafts in the middle of an answer is caught up with, also in a pool of other blocks."""
    sampling = Sampling(max_tokens=240, ignore_eos=True)
    wants = Engine(model, pool_tokens=2048).generate(prompts(), sampling)
    rng = random.Random(overlap)
    engine = drafting(model, "the same model", speculation="off", overlap=overlap, pool_tokens=2048)
    flips = [
        {"speculation": "draft"}, {"speculation": "self"}, {"speculation": "ngram"},
        {"spec_self_dtype": "int8"}, {"speculation": "self"}, {"kv_dtype": "int8"}, {"kv_dtype": "model"},
        {"block_size": 8}, {"speculation": "draft", "spec_tokens": 7}, {"kv_allocation": "contiguous"},
        {"speculation": "off"}, {"speculation": "draft"}, {"speculation": "self", "spec_tokens": 1},
    ]  # fmt: skip
    exact = [flip for flip in flips if "kv_dtype" not in flip]
    for round_flips in (exact, flips):
        done = len(engine.heard.applies)
        rids = [engine.submit(text, sampling) for text in prompts()]
        for flip in round_flips:
            for _ in range(rng.randrange(1, 6)):
                engine.core.step()
            engine.set(**flip)
            while engine.core.knobs.pending is not None:  # requests go on while weights are loaded
                engine.core.step()
        engine.run()
        assert [event.why for event in engine.heard.applies[done:]] == [""] * len(round_flips)
        if round_flips is exact:
            assert [engine.ids(rid) for rid in rids] == wants
    assert {row.rev_last - row.rev_first for row in (d.row for d in engine.heard.done.values())} != {0}
    assert total(engine, "accepted_tok") > 40


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", RIGHT)
def test_a_stop_string_inside_a_draft_cuts_where_it_would_without(
    model: LoadedModel, kind: str, stream: bool
) -> None:
    """A20"""
    sampling = Sampling(max_tokens=40, ignore_eos=True, stop=["a", "e", "t", "is"])
    plain, engine = Engine(model), drafting(model, kind, spec_tokens=7)
    for each in (plain, engine):
        for text in prompts(12, seed=3):
            each.submit(text, sampling, stream=stream)
        each.run()
    for rid, want in plain.heard.done.items():
        got = engine.heard.done[rid]
        assert engine.ids(rid) == plain.ids(rid)
        assert engine.text(rid) == plain.text(rid)
        assert (got.finish, got.stop_reason) == (want.finish, want.stop_reason)
    assert "stop" in {done.finish for done in engine.heard.done.values()}
    assert total(engine, "accepted_tok") > 0


def test_the_adaptive_choice_leaves_the_text_alone(model: LoadedModel) -> None:
    """And it stops drafting with a model as large as the target, which cannot pay."""
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    wants = Engine(model, pool_tokens=2048).generate(prompts(), sampling)
    for kind in KINDS:
        engine = drafting(model, kind, spec_adaptive=True, pool_tokens=2048)
        assert engine.generate(prompts(), sampling) == wants
    engine = drafting(model, "another model", spec_adaptive=True, pool_tokens=2048)
    engine.generate(prompts(), sampling)
    assert total(engine, "drafted_tok") < total(engine, "output_tok")
    assert "draft" in engine.core.state().speculation


def test_a_request_longer_than_the_draft_models_context_goes_on_without(model: LoadedModel) -> None:
    """The draft model's context ends at 48 tokens, the request's does not."""
    folder = tiny_folder("llama", max_position_embeddings=48)
    text = prompts(1)[0][:20]
    wants = Engine(model).generate([text], Sampling(max_tokens=100, ignore_eos=True))
    engine = Engine(model, draft_model=folder, speculation="draft", spec_adaptive=False)
    assert engine.generate([text], Sampling(max_tokens=100, ignore_eos=True)) == wants
    assert 20 < total(engine, "drafted_tok") <= 30
    assert engine.core.state().speculation == ""


def test_catching_up_stalls_nobody(model: LoadedModel) -> None:
    """A long prompt is caught up with over several steps, each of which brings the others their tokens."""
    long = [random.Random(2).randrange(4, 300) for _ in range(480)]
    folder = Path(model.info.path)
    engine = Engine(model, draft_model=folder, speculation="draft", spec_adaptive=False, pool_tokens=2048)
    want = Engine(model, pool_tokens=2048).generate([long, long[:9]], GREEDY)
    assert engine.generate([long, long[:9]], GREEDY) == want
    first = next(i for i, step in enumerate(engine.heard.steps) if step.draft_us)
    steps = engine.heard.steps[first:]
    assert steps[0].draft_reqs == 1  # the short one drafts while the long one is caught up with
    assert steps[2].draft_reqs == 2
    assert min(step.output_tok for step in steps[:3]) >= 2


# --- blocks, cancels, preemptions -----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("architecture", "kind"), [
    ("qwen3", "the same model"), ("mistral", "the same model"), ("llama", "self in int8"),
])  # fmt: skip
def test_cancels_and_preemptions_at_any_step_leave_nothing_behind(
    overlap: bool, preemption: str, architecture: str, kind: str
) -> None:
    """A18, A41: requests are cancelled and preempted at random steps while drafts are made; then the same
    prompts, with what is in the prefix cache, come to the oracle's ids. The ledger holds after every step."""
    expected, rng = tiny(architecture), random.Random(overlap)
    engine = drafting(
        expected.loaded,
        kind,
        overlap=overlap,
        preemption=preemption,
        block_size=4,
        pool_tokens=512,
        swap_space_gib=0.002,
    )
    core = engine.core
    live: dict[int, int] = {}  # rid -> the step in which it is cancelled
    sent = 0
    for step in itertools.count():
        while sent < 100 and len(live) < 6:
            rid = engine.submit(expected.prompts[rng.randrange(5)], GREEDY)
            live[rid], sent = step + rng.randrange(1, 14), sent + 1
        core.step()
        if core.scheduler.running and not core.pipeline.in_flight and step % 5 == 0:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        for rid in [rid for rid, when in live.items() if when <= step]:
            core.cancel([rid])
            del live[rid]
        if not live and sent == 100 and not core.answers.live:
            break
    assert total(engine, "drafted_tok") > 200
    drafter = core.speculator._drafter
    assert drafter is not None
    assert getattr(drafter, "num_followed", 0) == 0
    before = total(engine, "accepted_tok"), total(engine, "drafted_tok")
    expected.compare(engine.generate(expected.prompts, GREEDY))
    accepted, drafted = total(engine, "accepted_tok") - before[0], total(engine, "drafted_tok") - before[1]
    assert accepted == drafted > 0 if architecture == "qwen3" else accepted > 0


def test_drafts_in_the_targets_own_blocks_wait_for_what_is_still_to_be_copied() -> None:
    """A11, A41: a model that drafts for itself writes to lent blocks, whose evicted prefixes are copied to
    host memory in the step that the draft is made for: what comes back from there is what was computed."""
    expected, rng = tiny("llama"), random.Random(3)
    engine = drafting(
        expected.loaded,
        "self in int8",
        pool_tokens=200,
        block_size=1,
        kv_host_gib=0.002,
        preemption="swap",
        swap_space_gib=0.002,
    )
    for _ in range(6):
        order = rng.sample(range(5), 5)
        expected.compare(engine.generate([expected.prompts[i] for i in order], GREEDY), order)
    assert total(engine, "host_hit_tok") > 100
    assert total(engine, "accepted_tok") > 100


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_that_run_out_of_blocks_draft_again_when_they_are_back(preemption: str) -> None:
    """A08: nothing of a draft is worth a preemption, and who comes back, in other blocks, is followed."""
    expected = tiny("qwen3")
    knobs: dict[str, Any] = {
        "pool_tokens": 160, "block_size": 4, "preemption": preemption, "swap_space_gib": 0.002,
        "prefix_cache": False,
    }  # fmt: skip
    plain = Engine(expected.loaded, **knobs)
    expected.compare(plain.generate(expected.prompts, GREEDY))
    engine = drafting(expected.loaded, "the same model", **knobs)
    expected.compare(engine.generate(expected.prompts, GREEDY))
    assert len(engine.heard.preemptions) > 0
    assert total(engine, "accepted_tok") == total(engine, "drafted_tok") > 0
