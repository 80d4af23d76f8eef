"""Speculation in a running engine: the text is that without, and drafts cost nobody else anything."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.models.loader import LoadedModel
from engine.speculation.base import Drafter
from engine.speculation.costs import StepCost
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculator import NO_BUDGET, NOTHING_REPEATS, SAYS_OFF, Speculator
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.oracle import NEW_TOKENS, tiny, told
from tests.engine.speculation.told import Always, Told
from tests.quality import score

GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
SETTINGS = [
    GREEDY,
    Sampling(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True),
    Sampling(max_tokens=30, temperature=1.0, top_p=0.9, seed=6, logprobs=3, ignore_eos=True),
    Sampling(max_tokens=30, temperature=0.7, min_p=0.05, top_k=50, seed=7, ignore_eos=True),
    Sampling(max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=0),
    Sampling(max_tokens=30, temperature=1.2, repetition_penalty=1.2, min_tokens=12, seed=8),
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompts(count: int = 5, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.randrange(5, 60))] for _ in range(count)]


def speculating(model: LoadedModel, drafter: Drafter, **knobs: Any) -> Engine:
    """An engine that verifies whatever the drafter proposes."""
    return Engine(model, drafter=drafter, **{"speculation": "ngram", "spec_adaptive": False, **knobs})


def knowing(
    model: LoadedModel, texts: Sequence[Sequence[int]], sampling: Sampling, mistakes: float = 0.3
) -> tuple[list[list[int]], Told]:
    """What prompts come to without speculation, and a drafter that was told, with mistakes."""
    ids = Engine(model).generate(texts, sampling)
    answers = [[*text, *answer] for text, answer in zip(texts, ids, strict=True)]
    return ids, Told(answers, model.spec.vocab_size, mistakes=mistakes)


def total(engine: Engine, field: str) -> int:
    return sum(getattr(step, field) for step in engine.heard.steps)


# --- the text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
def test_the_text_is_that_without_for_greedy_and_for_seeded_sampling(
    model: LoadedModel, sampling: Sampling, overlap: bool
) -> None:
    """A10, A13, A15: ids, log-probabilities and ends are the same, whatever seeds and penalties a request
    has, though drafts of different lengths share a step."""
    plain = Engine(model)
    texts = prompts()
    rids = [plain.submit(text, sampling, stream=False) for text in texts]
    plain.run()
    wants = [plain.heard.done[rid] for rid in rids]
    answers = [[*text, *(want.ids or [])] for text, want in zip(texts, wants, strict=True)]
    drafter = Told(answers, model.spec.vocab_size, mistakes=0.2, shorter=0.5)
    engine = speculating(model, drafter, overlap=overlap, spec_tokens=5)
    rids = [engine.submit(text, sampling, stream=False) for text in texts]
    engine.run()
    for rid, want in zip(rids, wants, strict=True):
        got = engine.heard.done[rid]
        assert (got.ids, got.finish, got.stop_reason) == (want.ids, want.finish, want.stop_reason)
        for mine, other in zip(got.logprobs or [], want.logprobs or [], strict=True):
            assert mine.token == other.token
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert total(engine, "accepted_tok") > 20
    assert any(0 < step.drafted_at[-1] < step.drafted_at[0] for step in engine.heard.steps if step.drafted_at)


def test_in_16_bits_drafts_decide_nothing_but_near_ties() -> None:
    """Rows that are computed together round otherwise than alone, so a text may take another turn where two
    tokens are all but equally likely: with drafts as with other requests, and nowhere else."""
    model, sampling = load(tiny_folder("llama"), torch.bfloat16), Sampling(max_tokens=48, ignore_eos=True)
    texts, lonely = prompts(8, seed=9), Engine(model)
    alone = [lonely.generate([text], sampling)[0] for text in texts]
    answers = [[*text, *ids] for text, ids in zip(texts, alone, strict=True)]
    drafts = speculating(model, Told(answers, model.spec.vocab_size, mistakes=0.1))
    for engine in (drafts, Engine(model)):
        for text, want, got in zip(texts, alone, engine.generate(texts, sampling), strict=True):
            place = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
            if place is None:
                continue
            logits = torch.cat(list(score(drafts.core.runner, [*text, *want[:place]])))[-1]
            gap = float(logits[want[place]] - logits[got[place]]) / float(logits.abs().max())
            assert abs(gap) < 4 * torch.finfo(torch.bfloat16).eps
            assert min(logits[want[place]], logits[got[place]]) >= logits.topk(3).values[-1]
    assert total(drafts, "accepted_tok") > 100


@pytest.mark.parametrize("knobs", [
    {"kv_dtype": "int8"}, {"kv_dtype": "fp8_e4m3"}, {"sliding_window": 8, "block_size": 4},
    {"sliding_window": 8, "block_size": 1, "preemption": "swap"}, {"kv_allocation": "contiguous"},
    {"prefill_chunk_tokens": 5}, {"max_num_batched_tokens": 9}, {"batching": "static"},
    {"kv_dtype": "int8", "overlap": True, "sliding_window": 16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rounds", [1, 2])
def test_pairs_of_features_leave_the_text_alone(knobs: dict[str, Any], rounds: int) -> None:
    """A41: rejected drafts stay in the pool until they are written over, whatever else is switched on, and
    nothing is ever read of them; the second round finds the first one's blocks in the prefix cache."""
    expected = tiny("qwen3")
    wants = Engine(expected.loaded, **knobs).generate(expected.prompts, GREEDY)
    answers = [[*p, *ids] for p, ids in zip(expected.prompts, wants, strict=True)]
    engine = speculating(
        expected.loaded, Told(answers, expected.loaded.spec.vocab_size, mistakes=0.3), **knobs
    )
    for _ in range(rounds):
        assert engine.generate(expected.prompts, GREEDY) == wants
    assert 0 < total(engine, "accepted_tok") < total(engine, "drafted_tok")
    assert rounds == 1 or total(engine, "hit_tok") > 0


def test_ngram_speculates_by_itself_where_text_repeats() -> None:
    """The product's own drafter, its adaptive choice included, on prompts that repeat."""
    model = load(tiny_folder("qwen3"))
    rng = random.Random(4)
    texts = [[rng.randrange(4, 300) for _ in range(n)] * 6 for n in (3, 7, 2, 12)]
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    wants = Engine(model).generate(texts, sampling)
    for adaptive in (False, True):
        engine = Engine(model, speculation="ngram", spec_adaptive=adaptive)
        assert engine.generate(texts, sampling) == wants
    fixed = Engine(model, speculation="ngram", spec_adaptive=False)
    fixed.generate(texts, sampling)
    assert total(fixed, "accepted_tok") > 0


@pytest.mark.demo_model
def test_a_repetitive_answer_takes_far_fewer_steps() -> None:
    """Copying a text: equal greedy ids in at most 1 / 1.6 of the steps."""
    from tests import demo_model

    demo = load(demo_model.path())
    text = "def area(w, h):\n    return w * h\n\n\ndef perimeter(w, h):\n    return 2 * (w + h)\n\n\n"
    ids = demo.tokenizer.encode(text * 2 + text[:40], add_special=True)
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    plain, engine = (
        Engine(demo, speculation=kind, spec_adaptive=False, prefix_cache=False) for kind in ("off", "ngram")
    )
    assert engine.generate([ids], sampling) == plain.generate([ids], sampling)
    assert len(engine.heard.steps) * 1.6 <= len(plain.heard.steps)


# --- what a draft must not do ---------------------------------------------------------------------------


def test_wrong_drafts_are_never_taken(model: LoadedModel) -> None:
    """A15: acceptance is 0 and the ids are those of plain greedy decoding, from the first token on."""
    texts = [*prompts(), [7, 9] * 3]
    wants = Engine(model).generate(texts, GREEDY)
    assert not any(299 in ids for ids in wants)
    engine = speculating(model, Always([299] * 16), spec_tokens=16)
    assert engine.generate(texts, GREEDY) == wants
    assert total(engine, "drafted_tok") > 1000
    assert total(engine, "accepted_tok") == 0


@pytest.mark.parametrize("end", ["eos", "stop id"])
def test_a_drafted_end_ends_nothing(model: LoadedModel, end: str) -> None:
    """A16: only the target's own choice ends a request. A drafter that proposes ends shortens no answer."""
    stop = next(iter(model.eos_token_ids)) if end == "eos" else 298
    sampling = Sampling(max_tokens=NEW_TOKENS, stop_token_ids=[] if end == "eos" else [298])
    wants, _ = knowing(model, prompts(), sampling)
    engine = speculating(model, Always([stop, 7, 8]))
    assert engine.generate(prompts(), sampling) == wants
    assert total(engine, "drafted_tok") > 0
    # Nothing behind an end is worth computing.
    assert {len(step.drafted_at) for step in engine.heard.steps} <= {0, 1}


def test_greedy_requests_with_drafts_touch_no_random_numbers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16: neither those of positions nor a device's generator."""
    wants, drafter = knowing(model, prompts(), GREEDY)

    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("a random number was drawn")

    for name in (
        "engine.draw.uniform",
        "engine.speculation.verify.uniform",
        "torch.rand",
        "torch.multinomial",
    ):
        monkeypatch.setattr(name, never)
    engine = speculating(model, drafter)
    assert engine.generate(prompts(), GREEDY) == wants
    assert total(engine, "accepted_tok") > 0


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_a_stop_id_inside_an_accepted_draft_ends_exactly_there(
    model: LoadedModel, place: int, min_tokens: int
) -> None:
    """A16: the ids behind it, verified already, are dropped; below min_tokens it does not count."""
    text = prompts(1)[0]
    free, drafter = knowing(model, [text], GREEDY, mistakes=0.0)
    stop = free[0][place]
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=[stop], min_tokens=min_tokens)
    want = Engine(model)
    want.generate([text], sampling)
    engine = speculating(model, drafter, spec_tokens=16)
    engine.generate([text], sampling)
    assert engine.ids(1) == want.ids(1)
    for name in ("finish", "stop_reason", "text"):
        assert getattr(engine.heard.done[1], name) == getattr(want.heard.done[1], name)
    assert engine.heard.done[1].row.output_tok == len(want.ids(1)) == total(engine, "output_tok")


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_an_answer_is_never_longer_than_asked_for(model: LoadedModel, max_tokens: int) -> None:
    text = prompts(1)[0]
    free, drafter = knowing(model, [text], GREEDY, mistakes=0.0)
    engine = speculating(model, drafter, spec_tokens=16)
    assert engine.generate([text], Sampling(max_tokens=max_tokens, ignore_eos=True)) == [free[0][:max_tokens]]
    assert engine.heard.done[1].finish == "length"
    # Nothing is drafted that there is no room for: the last token is the model's own.
    row = engine.heard.done[1].row
    assert row.drafted_tok <= max(0, max_tokens - 2)


def test_drafts_end_where_the_context_ends(model: LoadedModel) -> None:
    text = prompts(1)[0]
    room = len(text) + 9
    free = Engine(model, max_model_len=room).generate([text], Sampling(max_tokens=100, ignore_eos=True))
    drafter = Told([[*text, *free[0]]], model.spec.vocab_size)
    engine = Engine(model, max_model_len=room, drafter=drafter, speculation="ngram", spec_adaptive=False)
    assert engine.generate([text], Sampling(max_tokens=100, ignore_eos=True)) == free
    assert len(free[0]) == 9
    assert total(engine, "accepted_tok") > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_string_inside_a_draft_cuts_where_a_check_after_every_token_would(
    model: LoadedModel, stream: bool, overlap: bool
) -> None:
    """A01, A20: also across tokens and with min_tokens: text, ids and counts are those without."""
    texts = prompts(12, seed=3)
    for min_tokens in (0, 6):
        sampling = Sampling(max_tokens=40, ignore_eos=True, min_tokens=min_tokens, stop=["a", "e", "t", "is"])
        _, drafter = knowing(model, texts, Sampling(max_tokens=40, ignore_eos=True), mistakes=0.1)
        plain, engine = Engine(model), speculating(model, drafter, overlap=overlap, spec_tokens=7)
        for each in (plain, engine):
            for text in texts:
                each.submit(text, sampling, stream=stream)
            each.run()
        for rid in range(1, len(texts) + 1):
            want, got = plain.heard.done[rid], engine.heard.done[rid]
            assert engine.ids(rid) == plain.ids(rid)
            assert engine.text(rid) == plain.text(rid)
            assert (got.finish, got.stop_reason) == (want.finish, want.stop_reason)
            assert got.row.output_tok == want.row.output_tok == len(plain.ids(rid))
        assert "stop" in {done.finish for done in engine.heard.done.values()}
        assert total(engine, "accepted_tok") > 0


def test_off_is_the_plain_path(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter is asked and nothing is verified, before it was on and after."""
    wants, drafter = knowing(model, prompts(), GREEDY)
    engine = Engine(model, drafter=drafter, spec_adaptive=False)
    verified: list[int] = []
    verify = engine.core.runner.sampler.verify

    def counted(logits: Any, requests: Any, drafts: Any) -> Any:
        verified.append(len(requests))
        return verify(logits, requests, drafts)

    monkeypatch.setattr(engine.core.runner.sampler, "verify", counted)
    assert engine.generate(prompts(), GREEDY) == wants
    assert (verified, drafter.asked) == ([], 0)
    engine.set(speculation="ngram")
    assert engine.generate(prompts(), GREEDY) == wants
    assert verified
    seen, asked = len(verified), drafter.asked
    engine.set(speculation="off")
    assert engine.generate(prompts(), GREEDY) == wants
    assert (len(verified), drafter.asked) == (seen, asked)


def test_steps_in_which_nobody_has_a_draft_are_plain(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a verification of empty drafts: k = 0 costs what no speculation costs."""
    wants, _ = knowing(model, prompts(), GREEDY)
    engine = speculating(model, Always([]))
    monkeypatch.setattr(engine.core.runner.sampler, "verify", None)
    assert engine.generate(prompts(), GREEDY) == wants
    assert {step.drafted_tok for step in engine.heard.steps} == {0}


# --- blocks, cancels, preemptions -----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_cancels_at_any_step_leave_nothing_behind(overlap: bool, preemption: str) -> None:
    """A18: 200 speculating requests are cancelled at random steps, some are preempted; then the same prompts,
    with what is in the prefix cache, come to the oracle's ids. The ledger holds after every step."""
    expected, rng = tiny("mistral"), random.Random(overlap)
    engine = speculating(
        expected.loaded,
        told(expected),
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
        while sent < 200 and len(live) < 6:
            rid = engine.submit(expected.prompts[rng.randrange(5)], GREEDY)
            live[rid], sent = step + rng.randrange(1, 14), sent + 1
        core.step()
        for rid in [rid for rid, when in live.items() if when <= step]:
            core.cancel([rid])
            del live[rid]
        if core.scheduler.running and rng.random() < 0.1:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        if sent == 200 and not core.answers.live:
            break
    engine.run()
    finishes = [done.finish for done in engine.heard.done.values()]
    assert len(finishes) == 200
    assert finishes.count("cancelled") > 100
    for done in engine.heard.done.values():
        ids = engine.ids(done.rid)
        assert any(ids == answer[: len(ids)] for answer in expected.ids)
    assert total(engine, "accepted_tok") > 200
    assert core.scheduler.pool.num_used == core.scheduler.swap_blocks_used == 0
    assert core.speculator.num_remembered == 0
    expected.compare(engine.generate(expected.prompts, GREEDY))
    assert total(engine, "hit_tok") > 0


@pytest.mark.parametrize("block_size", [1, 4])
def test_drafts_change_nothing_of_who_runs_when_and_preempt_nobody(block_size: int) -> None:
    """With drafts that never hold, each step has the rows, and each preemption the victim, of a run without,
    in a pool that is too small."""
    expected = tiny("llama")

    def trace(**knobs: Any) -> tuple[list[Any], Engine]:
        engine = Engine(
            expected.loaded,
            drafter=Always([299] * 16),
            block_size=block_size,
            pool_tokens=180,
            prefix_cache=False,  # lent blocks may evict a prefix earlier than it would be
            **knobs,
        )
        plan, seen = engine.core.scheduler.plan, list[Any]()

        def traced(now_ns: int) -> Any:
            made = plan(now_ns)
            rows = [(row.request.rid, row.num_new) for row in made.scheduled]
            seen.append((rows, [(each.request.rid, each.by) for each in made.preemptions]))
            return made

        engine.core.scheduler.plan = traced  # type: ignore[method-assign]
        expected.compare(engine.generate(expected.prompts, GREEDY))
        return seen, engine

    plain, _ = trace()
    drafting, engine = trace(speculation="ngram", spec_adaptive=False, spec_tokens=16)
    assert drafting == plain
    assert any(preemptions for _, preemptions in plain)
    assert total(engine, "drafted_tok") > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_penalties_seeds_and_counts_survive_preemptions_between_drafts(
    model: LoadedModel, preemption: str
) -> None:
    """A10, A13: prompt and output stay apart, and each place of the text keeps its random numbers, whoever
    drafts beside it: requests of all settings at once, each preempted twice."""
    texts = prompts(len(SETTINGS))
    plain = Engine(model)
    rids = [plain.submit(text, s, stream=False) for text, s in zip(texts, SETTINGS, strict=True)]
    plain.run()
    wants = [plain.heard.done[rid] for rid in rids]
    answers = [[*text, *(want.ids or [])] for text, want in zip(texts, wants, strict=True)]
    drafter = Told(answers, model.spec.vocab_size, mistakes=0.2)
    engine = speculating(model, drafter, preemption=preemption, swap_space_gib=0.002)
    core, rng = engine.core, random.Random(4)
    rids = [engine.submit(text, s, stream=False) for text, s in zip(texts, SETTINGS, strict=True)]
    for _ in range(2 * len(rids)):
        core.step()
        if core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
    engine.run()
    assert len(engine.heard.preemptions) > len(rids)
    for rid, want in zip(rids, wants, strict=True):
        got = engine.heard.done[rid]
        assert (got.ids, got.finish) == (want.ids, want.finish)
        assert (got.row.prompt_tok, got.row.output_tok) == (want.row.prompt_tok, want.row.output_tok)
        for mine, other in zip(got.logprobs or [], want.logprobs or [], strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert total(engine, "accepted_tok") > 20


@pytest.mark.parametrize("overlap", [False, True])
def test_a_place_of_a_draft_that_is_not_finite_ends_no_more_than_without(
    model: LoadedModel, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: logits of the first, a later or the last place of some request's draft are NaN. What fails is that
    request alone, if the place counts; all others have their ids, and nothing non-finite stays behind."""
    wants, drafter = knowing(model, prompts(), GREEDY, mistakes=0.3)
    for place in range(5):
        engine = speculating(model, drafter, overlap=overlap)
        forward, poison = engine.core.runner.decoder.forward, [3]

        def poisoned(
            *args: Any, place: int = place, poison: list[int] = poison, forward: Any = forward
        ) -> Any:
            logits = forward(*args)
            if len(logits) > 8 and poison[0]:
                poison[0] -= 1
                logits[place] = math.nan
            return logits

        monkeypatch.setattr(engine.core.runner.decoder, "forward", poisoned)
        got = engine.generate(prompts(), GREEDY)
        monkeypatch.undo()
        assert poison == [0]
        ends = [engine.heard.done[rid] for rid in range(1, 6)]
        for ids, want, done in zip(got, wants, ends, strict=True):
            assert ids == want[: len(ids)]
            assert done.finish == "length" or "non-finite" in done.message
        assert sum(done.finish == "length" for done in ends) >= 2
        for name in ("drafted_tok", "accepted_tok"):  # those of the draft that failed too
            assert total(engine, name) == sum(getattr(done.row, name) for done in ends) > 0
        computed = total(engine, "prefill_tok") + total(engine, "decode_tok") + total(engine, "drafted_tok")
        assert sum(done.row.computed_tok for done in ends) == computed
        assert engine.generate(prompts(), GREEDY) == wants


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_that_loses_its_blocks_while_its_draft_is_verified_goes_on(
    model: LoadedModel, preemption: str
) -> None:
    """The tokens are its own all the same; what the step wrote for them is not counted on."""
    wants, drafter = knowing(model, prompts(), GREEDY, mistakes=0.1)
    engine = speculating(model, drafter, overlap=True, preemption=preemption)
    core, rng = engine.core, random.Random(1)
    rids = [engine.submit(text, GREEDY) for text in prompts()]
    caught = 0
    while core.step() or core.answers.live:
        flight = core.pipeline._flight
        drafting = [row.request for row in flight.plan.scheduled if row.draft] if flight else []
        if drafting and rng.random() < 0.4:
            caught += 1
            core.answers.note_preempted([core.scheduler.preempt(rng.choice(drafting), core.clock_ns())])
    assert [engine.ids(rid) for rid in rids] == wants
    assert caught > 3


@pytest.mark.parametrize("kv_dtype", ["model", "fp8_e4m3"])
def test_what_a_rejected_draft_made_of_nothing_fails_nobody(model: LoadedModel, kv_dtype: str) -> None:
    """A25: a token whose embedding is NaN is drafted and rejected: the request goes on, its blocks clean."""
    wants = Engine(model, kv_dtype=kv_dtype).generate(prompts(), GREEDY)
    assert not any(299 in ids for ids in [*wants, *prompts()])
    engine = speculating(model, Always([299] * 3), kv_dtype=kv_dtype)
    embed = engine.core.runner.decoder.embed
    kept = embed[299].clone()
    embed[299] = math.nan
    try:
        got = engine.generate(prompts(), GREEDY)
    finally:
        embed[299] = kept
    assert got == wants
    assert total(engine, "drafted_tok") > 0
    assert total(engine, "accepted_tok") == 0


# --- overlap --------------------------------------------------------------------------------------------


def test_nothing_is_staged_behind_a_step_with_drafts(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host chooses tokens not even if no draft is looked for in the next step, as after a try now
    and then."""
    wants, drafter = knowing(model, prompts(), GREEDY)
    engine = speculating(model, drafter, overlap=True)
    pipeline = engine.core.pipeline
    stage, behind = pipeline.stage, list[int]()

    def wants_next(_speculator: Speculator) -> bool:
        return pipeline._flight is None or not pipeline._flight.plan.draft_tokens

    monkeypatch.setattr(Speculator, "wants_next", property(wants_next))

    def seen(*without: Any) -> Any:
        flight = pipeline._flight
        step = stage(*without)
        if flight is not None:
            behind.append(flight.plan.draft_tokens)
            assert step.plan.draft_tokens == 0
        return step

    monkeypatch.setattr(pipeline, "stage", seen)
    assert engine.generate(prompts(), GREEDY) == wants
    assert total(engine, "drafted_tok") > 0
    assert set(behind) <= {0}


def test_steps_overlap_where_there_is_nothing_to_draft(model: LoadedModel) -> None:
    """After some looks in vain steps are staged ahead again, but for a look now and then."""
    nothing = Told([], model.spec.vocab_size, silent=1.0)
    engine = speculating(model, nothing, overlap=True)
    sampling = Sampling(max_tokens=90, ignore_eos=True)
    wants = Engine(model).generate(prompts(3), sampling)
    assert engine.generate(prompts(3), sampling) == wants
    overlapped = [step.overlap_us > step.publish_us + 3 for step in engine.heard.steps]
    assert sum(overlapped) > 60
    assert 4 < nothing.asked < 25


def test_who_would_look_for_drafts_in_the_next_step_says_so(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where looking costs next to nothing, at every step; else after some looks in vain only now and then."""
    engine = speculating(model, Told([], model.spec.vocab_size, silent=1.0))
    speculator, seen = engine.core.speculator, list[tuple[bool, bool, bool]]()
    draft, drafter = speculator.draft, speculator._drafter
    assert isinstance(drafter, Told)

    def watched(*args: Any) -> int:
        said, asked = [], drafter.asked
        for cost in (1e9, -1.0):
            monkeypatch.setattr("engine.speculation.speculator.CHEAP_LOOK", cost)
            said.append(speculator.would_look)
        took = draft(*args)
        if args[0].decode_requests:
            seen.append((said[0], said[1], drafter.asked > asked))
        return took

    monkeypatch.setattr(speculator, "draft", watched)
    engine.generate(prompts(1), Sampling(max_tokens=60, ignore_eos=True))
    assert all(cheap for cheap, _, _ in seen)
    assert [dear for _, dear, _ in seen] == [looked for _, _, looked in seen]
    assert 4 < sum(dear for _, dear, _ in seen) < 15
    engine.set(speculation="off")
    engine.run()
    assert not speculator.would_look


# --- what is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_and_requests_tell_the_same_of_drafts(model: LoadedModel, overlap: bool) -> None:
    wants, drafter = knowing(model, prompts(), GREEDY)
    engine = speculating(model, drafter, overlap=overlap)
    engine.generate(prompts(), GREEDY)
    rows = [done.row for done in engine.heard.done.values()]
    for name in ("drafted_tok", "accepted_tok"):
        assert total(engine, name) == sum(getattr(row, name) for row in rows) > 0
    assert total(engine, "draft_reqs") == sum(row.drafts_n for row in rows)
    assert total(engine, "output_tok") == sum(row.output_tok for row in rows) == sum(map(len, wants))
    for step in engine.heard.steps:
        assert (sum(step.drafted_at), sum(step.accepted_at)) == (step.drafted_tok, step.accepted_tok)
        assert len(step.drafted_at) == len(step.accepted_at)
        assert all(kept <= made for made, kept in zip(step.drafted_at, step.accepted_at, strict=True))
        assert (step.drafted_at[0] if step.drafted_at else 0) == step.draft_reqs
        assert step.verify_us <= step.forward_us
    # All that was computed is somebody's work.
    computed = total(engine, "prefill_tok") + total(engine, "decode_tok") + total(engine, "drafted_tok")
    assert sum(row.computed_tok for row in rows) == computed
    assert 0 < sum(row.verify_us for row in rows) <= total(engine, "verify_us") + len(engine.heard.steps)
    assert 0 < sum(row.draft_us for row in rows) <= total(engine, "draft_us") + len(engine.heard.steps)


def test_off_tells_of_no_drafts(model: LoadedModel) -> None:
    engine = Engine(model)
    engine.generate(prompts(), GREEDY)
    for name in ("draft_us", "draft_reqs", "drafted_tok", "accepted_tok", "verify_us"):
        assert total(engine, name) == 0
    assert {tuple(step.drafted_at + step.accepted_at) for step in engine.heard.steps} == {()}
    assert engine.core.state().speculation == ""


def test_the_engine_says_why_it_drafts_nothing_once(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    wants, drafter = knowing(model, prompts(1), GREEDY)
    silent = Told([], model.spec.vocab_size, silent=1.0)
    engine = speculating(model, silent)
    with caplog.at_level(logging.INFO, logger="engine.speculation.speculator"):
        for _ in range(2):
            engine.generate(prompts(1), Sampling(max_tokens=3 * SAYS_OFF, ignore_eos=True))
    assert engine.core.state().speculation == NOTHING_REPEATS
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"Speculation makes no drafts for now: {NOTHING_REPEATS}."]
    engine.core.speculator.makers["ngram"] = lambda _: drafter
    engine.set(speculation="off")
    engine.run()
    assert engine.core.state().speculation == ""
    engine.set(speculation="ngram")
    assert engine.generate(prompts(1), GREEDY) == wants
    assert engine.core.state().speculation == ""


def test_drafts_that_lose_are_given_up_and_the_reason_has_numbers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are made up, as a busy machine's may for a moment say that more tokens cost nothing."""
    observe = StepCost.observe
    monkeypatch.setattr(StepCost, "observe", lambda cost, tokens, _: observe(cost, tokens, 1.0 + tokens / 4))
    never = Always([299] * 4)
    engine = Engine(model, drafter=never, speculation="ngram")
    wants = Engine(model).generate(prompts(), Sampling(max_tokens=150, ignore_eos=True))
    assert engine.generate(prompts(), Sampling(max_tokens=150, ignore_eos=True)) == wants
    late = engine.heard.steps[len(engine.heard.steps) // 2 :]
    assert sum(step.drafted_tok for step in late) <= 0.1 * sum(step.decode_tok for step in late)
    assert "of the first draft tokens hold" in engine.core.state().speculation


def test_a_budget_without_room_for_drafts_is_told(model: LoadedModel) -> None:
    wants, drafter = knowing(model, prompts(), Sampling(max_tokens=100, ignore_eos=True))
    engine = speculating(model, drafter, max_num_batched_tokens=5)
    rids = [engine.submit(text, Sampling(max_tokens=100, ignore_eos=True)) for text in prompts()]
    told = set[str]()
    while engine.core.step():
        told.add(engine.core.state().speculation)
    assert told == {"", NO_BUDGET}
    assert [engine.ids(rid) for rid in rids] == wants
    assert max(step.decode_tok + step.prefill_tok + step.drafted_tok for step in engine.heard.steps) == 5


def test_a_drafter_forgets_slots_and_requests_that_are_gone(model: LoadedModel) -> None:
    wants, drafter = knowing(model, prompts(), GREEDY)
    for adaptive in (False, True):
        engine = Engine(model, drafter=drafter, speculation="ngram", spec_adaptive=adaptive)
        drafter.released.clear()
        assert engine.generate(prompts(), GREEDY) == wants
        assert sorted(drafter.released) == list(range(5))
        assert engine.core.speculator.num_remembered == 0
    assert NgramDrafter().num_entries == 0
