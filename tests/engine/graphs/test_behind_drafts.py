"""Steps launched behind drafts that nobody has judged yet: their rows are moved on the device.

Each step with drafts is followed by one without, whether or not that is staged behind it, so that engines
which do so and engines which do not can be compared step by step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.graphs import switch
from engine.graphs.forward import GraphedForward
from engine.speculation.speculator import Speculator
from ipc.messages import Sampling, StepRow
from tests.engine.core_harness import Engine
from tests.engine.graphs.alternating import drafts_every_other_step, watch
from tests.engine.graphs.fakes import FakeDriver, TorchSampling, agree
from tests.engine.graphs.test_fed_texts import SETTINGS, alone, graphs, sampling
from tests.engine.graphs.test_feeding import COUNT, ENGINES, check, feeding
from tests.engine.oracle import NEW_TOKENS, tiny, told
from tests.engine.speculation.told import Told

PLAIN = Sampling(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture
def lazy() -> Iterator[FakeDriver]:
    with graphs() as driver:
        yield driver


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    with drafts_every_other_step():
        yield
    while ENGINES:
        ENGINES.pop().core.pipeline.stop()


def drafting(drafter: Told, **options: Any) -> tuple[Engine, list[int]]:
    """An engine that is told its drafts, and how many requests each step had that was launched behind any."""
    options = {"speculation": "ngram", "spec_adaptive": False, "spec_tokens": 4, **options}
    engine = feeding(TorchSampling, drafter=drafter, **options)
    return engine, watch(engine)


def test_steps_are_launched_behind_drafts(lazy: FakeDriver) -> None:
    """A18: the reference's ids, every step with drafts followed by one that was launched before anybody read
    what held of them. What a step tells of itself is what it was, wherever its rows came to lie, as told by
    an engine that reads first."""
    expected = tiny("llama")
    told_steps: list[list[StepRow]] = []
    for overlap in (True, False):
        engine, behind = drafting(told(expected), overlap=overlap)
        rids = [engine.submit(expected.prompts[i], PLAIN) for i in (1, 2, 3)]
        engine.run()
        assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2, 3)]
        steps = engine.heard.steps
        told_steps.append(steps)
        drafted = [step for step in steps if step.drafted_tok]
        assert len(behind) == (len(drafted) if overlap else 0)
        assert sum(step.accepted_tok for step in drafted) > 3
        assert sum(step.drafted_tok - step.accepted_tok for step in drafted) > 3
        assert lazy.most_awaited == 2
        lazy.most_awaited = 2 if overlap else 1
        for done in engine.heard.done.values():
            row = done.row
            refused = row.drafted_tok - row.accepted_tok
            assert row.computed_tok == row.prompt_tok + row.output_tok - 1 + refused
    moved, read = told_steps
    assert any("+moved" in step.kernels for step in moved)
    names = "decode_tok", "output_tok", "drafted_tok", "accepted_tok", "used_tok", "kv_bytes", "flops"
    for one, other in zip(moved, read, strict=False):
        if one.running < 3 and not one.prefill_reqs:
            break  # what is computed for who has ended is told only where that was done
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]


def held(engine: Engine, rid: int, count: int) -> list[Tensor]:
    """Keys and values of the first tokens of a request that runs, of each layer."""
    kv, request = engine.core.runner.kv, engine.core.answers.live[rid]
    assert kv is not None
    positions = torch.arange(count)
    table = torch.tensor(request.block_table)
    slots = table[positions // kv.block_size] * kv.block_size + positions % kv.block_size
    return [layer[slots] for layer in (*kv.k, *kv.v)]


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_keys_and_values_lie_where_they_would(lazy: FakeDriver, block_size: int) -> None:
    """A18: by position, as in an engine that reads first."""
    expected = tiny("llama")
    found: list[list[list[Tensor]]] = []
    for overlap in (True, False):
        engine, behind = drafting(told(expected), overlap=overlap, block_size=block_size)
        rids = [engine.submit(expected.prompts[i], Sampling(max_tokens=NEW_TOKENS)) for i in (1, 2, 3)]
        live = engine.core.answers.live
        while not all(rid in live and live[rid].num_output >= COUNT for rid in rids):
            engine.core.step()
        lazy.drain()
        lengths = [len(expected.prompts[i]) + COUNT - 1 for i in (1, 2, 3)]
        found.append([held(engine, rid, n) for rid, n in zip(rids, lengths, strict=True)])
        assert bool(behind) == overlap
        engine.core.cancel(rids)
        engine.run()
    for one, other in zip(*found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_that_left_the_window_are_given_back_meanwhile(lazy: FakeDriver, block_size: int) -> None:
    """A18: as soon as it is known how many tokens held, while the step behind these is computed; others take
    them, over a pool that is too small for everybody."""
    expected = tiny("llama")
    found: list[list[list[int]]] = []
    for overlap in (True, False):
        engine, behind = drafting(
            told(expected), overlap=overlap, block_size=block_size, sliding_window=8, pool_tokens=160,
            prefill_chunk_tokens=16, max_num_seqs=3,
        )  # fmt: skip
        rids = [engine.submit(expected.prompts[i % 4], PLAIN) for i in range(5)]
        engine.run()
        found.append([engine.ids(rid) for rid in rids])
        assert bool(behind) == overlap
        assert engine.core.scheduler.pool.num_used == 0
        assert sum(step.accepted_tok for step in engine.heard.steps) > 0
    assert found[0] == found[1]


def test_who_is_preempted_meanwhile_makes_the_next_step_wait(lazy: FakeDriver) -> None:
    """A11: his pending token is not his newest one, as more may come with it."""
    expected = tiny("llama")
    engine, behind = drafting(told(expected), prefix_cache=False)
    core, caught = engine.core, 0
    rids = [engine.submit(expected.prompts[i], Sampling(max_tokens=NEW_TOKENS)) for i in (1, 2, 3)]
    stage = core.pipeline.stage

    def staging(*without: Any) -> Any:
        flight = core.pipeline._flight
        if flight is not None:
            assert not any(row.draft and row.request.state == "preempted" for row in flight.plan.scheduled)
        return stage(*without)

    core.pipeline.stage = staging  # type: ignore[method-assign]
    while core.step() or core.answers.live:
        flight = core.pipeline._flight
        if flight is not None and flight.plan.draft_tokens and caught < 5:
            victim = next(row.request for row in flight.plan.scheduled if row.draft)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
            caught += 1
    assert caught == 5
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
    assert behind


@pytest.mark.parametrize("how", ["budget", "failed"])
def test_what_cannot_be_moved_is_prepared_again(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where its shape has no graph the step waits until it is known where its rows lie."""
    expected = tiny("llama")
    engine, behind = drafting(told(expected))
    working, body = GraphedForward._working_bytes, GraphedForward._body
    asked = [0]

    def working_bytes(self: GraphedForward, shape: Any) -> int:
        asked[0] += shape.moved
        return switch.BUDGET_BYTES if shape.moved and how == "budget" else working(self, shape)

    def failing(self: GraphedForward, entry: Any, rows: Any) -> Any:
        if entry.shape.moved:
            raise RuntimeError("cannot be captured")
        return body(self, entry, rows)

    monkeypatch.setattr(GraphedForward, "_working_bytes", working_bytes)
    if how == "failed":
        monkeypatch.setattr(GraphedForward, "_body", failing)
    rids = [engine.submit(expected.prompts[i], PLAIN) for i in (1, 2, 3)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2, 3)]
    assert asked[0] > 0
    assert behind == []
    counts = engine.core.runner.graphs.counts
    assert set(counts.misses) == {"prefill"}  # the steps were replayed, where their rows lay by then
    assert not counts.logits


def test_nothing_is_staged_behind_drafts_of_who_looks_at_each_step(lazy: FakeDriver) -> None:
    """What repeats in a text is found by looking at the text: that waits for the tokens."""
    expected = tiny("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculator, "would_look", property(lambda _: True))
        engine, behind = drafting(told(expected))
        rids = [engine.submit(expected.prompts[i], PLAIN) for i in (1, 2, 3)]
        engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2, 3)]
    assert behind == []
    assert sum(step.drafted_tok for step in engine.heard.steps) > 0


def test_a_request_may_end_inside_a_draft(lazy: FakeDriver) -> None:
    """A08, A18: by a stop id of it, which the device does not know of: its row behind it goes to nobody, and
    writes nowhere that counts: the cache keeps what the request computed, and gives it to the next one."""
    expected = tiny("llama")
    drafter = Told([prompt + ids for prompt, ids in zip(expected.prompts, expected.ids, strict=True)], 300)
    for place in range(1, 9):
        stop = expected.ids[3][place]
        if stop in expected.ids[3][:place]:
            continue
        engine, behind = drafting(drafter, block_size=1)
        other = engine.submit(expected.prompts[1], PLAIN)
        stopping = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=[stop])
        rid = engine.submit(expected.prompts[3], stopping)
        engine.run()
        assert engine.ids(rid) == expected.ids[3][: place + 1]
        assert engine.ids(other) == expected.ids[1][:COUNT]
        again = engine.submit(expected.prompts[3], Sampling(max_tokens=NEW_TOKENS, ignore_eos=True))
        further = expected.prompts[3] + expected.ids[3][:place]
        later = engine.submit(further, Sampling(max_tokens=NEW_TOKENS - place, ignore_eos=True))
        engine.run()
        assert engine.ids(again) == expected.ids[3]
        assert engine.ids(later) == expected.ids[3][place:]
        assert behind


def test_what_is_not_finite_takes_the_step_behind_with_it(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: a place of a draft, and then all that was launched behind it, wherever its rows were moved: who
    had the draft starts over without one, nobody fails, and the pool holds nothing that is not finite."""
    expected = tiny("llama")
    engine, behind = drafting(told(expected), block_size=1, prefix_cache=False)
    runner, pipeline = engine.core.runner, engine.core.pipeline
    forward, forgo = runner.decoder.forward, pipeline.forgo
    drafts, forgone, moved = [0], list[int](), list[int]()

    def poisoned(ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        logits = forward(ids, positions, slots, *rest)
        there = slots >= 0
        if len(ids) == 20 and there.any():  # four rows of up to five tokens, captures aside
            drafts[0] += 1
            if drafts[0] == 3:
                logits[1] = math.nan
        elif drafts[0] == 3 and len(ids) == 4 and there.any() and not moved:
            assert runner.decoder.finite is not None
            assert runner.kv is not None
            runner.decoder.finite = runner.decoder.finite & ~there
            moved.extend(slots[there].tolist())
            for paged in runner.kv.paged:
                paged[slots[there]] = math.nan  # a block holds one token
        return logits

    monkeypatch.setattr(runner.decoder, "forward", poisoned)
    monkeypatch.setattr(pipeline, "forgo", lambda step: (forgone.append(len(behind)), forgo(step))[1])
    rids = [engine.submit(expected.prompts[i], Sampling(max_tokens=NEW_TOKENS)) for i in (1, 2, 3)]
    engine.run()
    assert len(moved) == 3
    assert forgone[:1] == [3]
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
    assert [event.reason for event in engine.heard.preemptions] == ["rebuild"]
    assert runner.kv is not None
    assert all(bool(paged.isfinite().all()) for paged in runner.kv.paged)


@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen_behind_drafts(seed: int, lazy: FakeDriver) -> None:
    """A08, A11, A18: requests, cancels, stop strings and forced preemptions over a small pool."""
    expected, rng = tiny("llama"), random.Random(seed)
    engine, behind = drafting(
        told(expected), pool_tokens=320, swap_space_gib=0.001, block_size=(16, 4, 1, 8)[seed],
        preemption="swap" if seed % 2 else "recompute",
    )  # fmt: skip
    core = engine.core
    sent: dict[int, int] = {}
    gone: set[int] = set()
    whole = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    stopping = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop=["a", "e", "t"])
    for _ in range(100):
        if rng.random() < 0.2:
            which = rng.randrange(5)
            sent[engine.submit(expected.prompts[which], rng.choice([whole, stopping]))] = which
        if rng.random() < 0.05 and core.answers.live:
            rid = rng.choice(list(core.answers.live))
            gone.add(rid)
            core.cancel([rid])
        if rng.random() < 0.08 and core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        core.step()
    engine.run()
    check(engine, expected, sent, gone)
    assert behind
    assert lazy.most_awaited == 2


acts = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 4), st.integers(0, len(SETTINGS) - 1)),
    st.tuples(st.sampled_from(["cancel", "preempt"]), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(acts, min_size=4, max_size=24),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.sampled_from([1, 3, 16]),
    st.integers(1, 16),
)
def test_no_token_is_wrong_lost_or_doubled(
    happens: list[tuple[str, int, int]], preemption: str, prefix_cache: bool, block_size: int, most: int
) -> None:
    """A01, A08, A11, A18: whatever requests ask for, and whatever happens to them over a pool too small for
    all, each gets what it gets alone."""
    wants = {(a, b): alone(a, b) for act, a, b in happens if act == "submit"}
    answers = [tiny("llama").prompts[a] + want[0] for (a, _), want in wants.items()]
    with graphs():
        engine, _ = drafting(
            Told(answers, 300, mistakes=0.2, shorter=0.3, silent=0.1), spec_tokens=most, pool_tokens=288,
            swap_space_gib=0.001, preemption=preemption, prefix_cache=prefix_cache, block_size=block_size,
        )  # fmt: skip
        try:
            sent, gone = run(engine, happens)
        finally:
            engine.core.pipeline.stop()
    for rid, which in sent.items():
        want, text, finish, logprobs = wants[which]
        found = engine.ids(rid)
        # What rows are computed with differs more than where nothing is drafted, and so does rounding.
        agree(engine.logprobs(rid), logprobs[: len(found)], within=1e-4)
        assert found == want[: len(found)]
        if rid not in gone:
            assert (len(found), engine.text(rid), engine.heard.done[rid].finish) == (len(want), text, finish)
    core = engine.core
    core.scheduler.check()
    assert core.scheduler.pool.num_used == core.scheduler.swap_blocks_used == 0


def run(engine: Engine, happens: list[tuple[str, int, int]]) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Let things happen, and requests end. What each was, and who was cancelled."""
    core = engine.core
    sent: dict[int, tuple[int, int]] = {}
    gone: set[int] = set()
    for act, a, b in happens:
        match act:
            case "submit":
                sent[engine.submit(tiny("llama").prompts[a], sampling(b))] = a, b
            case "cancel" if core.answers.live:
                rid = list(core.answers.live)[a % len(core.answers.live)]
                gone.add(rid)
                core.cancel([rid])
            case "preempt" if core.scheduler.running:
                victim = core.scheduler.running[a % len(core.scheduler.running)]
                core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        for _ in range(a if act == "step" else 1):
            core.step()
    engine.run()
    assert set(engine.heard.done) == set(sent)
    return sent, gone
