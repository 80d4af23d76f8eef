"""Rounds launched behind a verification that nobody has read: they are moved on the device, as that is which
they draft for.

The driver does what was launched when somebody waits for it, so what is read or changed too early shows.
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
from engine.graphs.shapes import ROWS
from engine.request import Request
from engine.speculation.model_drafter import ModelDrafter
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import FakeDriver, put_kernels
from tests.engine.graphs.test_drafting import KINDS, drafter_of, drafting, finish, kernels, total
from tests.engine.graphs.test_fed_texts import acts, check
from tests.engine.oracle import NEW_TOKENS, tiny

WHOLE = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    put_kernels(monkeypatch, made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


def watch(engine: Engine) -> list[tuple[int, int]]:
    """Drafted tokens of each step that was launched behind drafts, and of the one before it."""
    pipeline, behind = engine.core.pipeline, list[tuple[int, int]]()
    launch_ahead = pipeline.launch_ahead

    def launching_ahead(step: Any) -> None:
        before = pipeline._flight
        launch_ahead(step)
        if step.flight is not None and before is not None and before.plan.draft_tokens:
            behind.append((step.plan.draft_tokens, before.plan.draft_tokens))

    pipeline.launch_ahead = launching_ahead  # type: ignore[method-assign]
    return behind


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_launched_before_the_one_before_is_read(
    kind: str, block_size: int, driver: FakeDriver
) -> None:
    """A01, A15: a model that is like the target is right about all that it drafts, so it lacks nothing, and
    has everything where it belongs; any other says what it says where each step is read."""
    expected, found = tiny("llama"), list[Any]()
    for overlap in (True, False):
        engine = drafting(kind, driver, spec_tokens=4, block_size=block_size, overlap=overlap)
        behind = watch(engine)
        rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2, 3)]
        finish(engine)
        assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
        drafted, accepted = total(engine, "drafted_tok"), total(engine, "accepted_tok")
        assert (accepted == drafted) or kind != "same"
        counts = engine.core.runner.graphs.counts
        if overlap:
            assert counts.ahead == len(engine.heard.steps) - 1
            assert len(behind) > 2
            assert all(one[0] for one in behind[:3])
        assert not counts.drafts_waited
        assert not counts.drafts_read
        for done in engine.heard.done.values():
            row = done.row
            refused = row.drafted_tok - row.accepted_tok
            assert row.computed_tok == row.prompt_tok + row.output_tok - 1 + refused
        found.append([(step.drafted_at, step.accepted_at, step.kv_bytes) for step in engine.heard.steps])
    sure = 1 + (NEW_TOKENS - 1) // 5  # steps until one may end, if all drafts hold
    assert found[0][:sure] == found[1][:sure]


def held(engine: Engine, rid: int, count: int) -> list[Tensor]:
    """What the draft model has of a request that runs: keys and values of its first tokens, of each layer."""
    kv, request = drafter_of(engine)._kv, engine.core.answers.live[rid]
    positions, table = torch.arange(count), torch.tensor(request.block_table)
    slots = table[positions // kv.block_size] * kv.block_size + positions % kv.block_size
    return [layer[slots] for layer in (*kv.k, *kv.v)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_draft_model_has_what_it_would_have(block_size: int, driver: FakeDriver) -> None:
    """A15: by position, as where each step is read before the next is made."""
    expected, count = tiny("llama"), 18
    found: list[list[list[Tensor]]] = []
    for overlap in (True, False):
        engine = drafting("nearly", driver, spec_tokens=3, block_size=block_size, overlap=overlap)
        rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2, 3)]
        live = engine.core.answers.live
        while not all(rid in live and live[rid].num_output >= count for rid in rids):
            engine.core.step()
        driver.drain()
        lengths = [len(expected.prompts[i]) + count - 2 for i in (1, 2, 3)]
        found.append([held(engine, rid, n) for rid, n in zip(rids, lengths, strict=True)])
        engine.core.cancel(rids)
        finish(engine)
    for one, other in zip(*found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("asked", "why", "options"), [
    ({"presence_penalty": 1.0}, "penalties", {}),
    ({"min_tokens": 12, "stop_token_ids": [5]}, "min_tokens", {}),
    ({}, "off", {"cuda_graphs": False}),
    ({}, "room", {"pool_tokens": 64, "block_size": 1}),
])  # fmt: skip
def test_what_needs_the_host_waits_for_it(
    asked: dict[str, Any], why: str, options: dict[str, Any], driver: FakeDriver
) -> None:
    """A12: and it is counted why. One such request suffices; when it has ended the others go on without
    waits."""
    expected = tiny("llama")
    driver.lazy = "cuda_graphs" not in options
    engine = drafting("same", driver, spec_tokens=4, prefix_cache=False, **options)
    behind = watch(engine)
    rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2)]
    engine.submit(expected.prompts[3], Sampling(max_tokens=12, ignore_eos=True, **asked))
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2)]
    waited = engine.core.runner.graphs.counts.drafts_waited
    if why == "off":  # nothing is counted where there are no graphs: all is computed on the other thread
        assert not behind
        return
    assert waited[why] > 0
    use = engine.core.state().graphs
    assert use is not None
    assert use.drafts_waited_n == waited
    assert any(one for one, _ in behind)


def test_drafts_that_are_drawn_wait_for_the_host(driver: FakeDriver) -> None:
    """A15: with the probabilities that they are drawn from, which no round keeps."""
    drafter = drafter_of(drafting("same", driver))
    greedy, drawing = (Request(n, [1, 2], Sampling(temperature=n, seed=n)) for n in (0, 1))
    assert drafter.why_waits([greedy, drawing]) == ""
    drafter.drawn = True
    assert drafter.why_waits([greedy]) == ""
    assert drafter.why_waits([greedy, drawing]) == "rejection"
    assert drafter.why_waits([Request(n, [1], Sampling()) for n in range(ROWS[-1] + 1)]) == "large"


def test_who_waits_for_a_seat_is_let_in(driver: FakeDriver) -> None:
    """A11: nobody is planned for behind drafts while somebody could start, so he starts when he would."""
    expected = tiny("llama")
    engine = drafting("same", driver, spec_tokens=2)
    behind = watch(engine)
    first = engine.submit(expected.prompts[1], WHOLE)
    for _ in range(4):
        engine.core.step()
    seen = len(behind)
    assert seen
    later = engine.submit(expected.prompts[2], WHOLE)
    for _ in range(2):
        engine.core.step()
    assert {each.rid for each in engine.core.scheduler.running} == {first, later}
    finish(engine)
    assert [engine.ids(rid) for rid in (first, later)] == [expected.ids[i] for i in (1, 2)]
    assert engine.core.runner.graphs.counts.drafts_waited["room"] == 1


@pytest.mark.parametrize("how", ["budget", "failed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_verification_that_cannot_be_moved_is_prepared_again(
    kind: str, how: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts were made behind the step before all the same: they wait on the device until it is known
    where they lie."""
    expected = tiny("llama")
    engine = drafting(kind, driver, spec_tokens=4)
    behind, working, body = watch(engine), GraphedForward._working_bytes, GraphedForward._body

    def working_bytes(self: GraphedForward, shape: Any) -> int:
        return switch.BUDGET_BYTES if shape.moved and how == "budget" else working(self, shape)

    def failing(self: GraphedForward, entry: Any, rows: Any) -> Any:
        if entry.shape.moved:
            raise RuntimeError("cannot be captured")
        return body(self, entry, rows)

    monkeypatch.setattr(GraphedForward, "_working_bytes", working_bytes)
    if how == "failed":
        monkeypatch.setattr(GraphedForward, "_body", failing)
    rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2, 3)]
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
    assert behind == []
    counts = engine.core.runner.graphs.counts
    assert set(counts.misses) == {"prefill"}
    assert counts.drafted == sum(step.drafted_tok > 0 for step in engine.heard.steps)
    assert not counts.drafts_read
    assert kind != "same" or total(engine, "accepted_tok") == total(engine, "drafted_tok")


@pytest.mark.parametrize("where", ["step", "behind"])
@pytest.mark.parametrize("kind", ["same", "self"])
def test_what_is_not_finite_takes_what_is_behind_with_it(
    kind: str, where: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: a verification whose logits are not finite at a place of a draft, behind another one or not: who
    had it starts over without drafts, nobody fails, and what the others drafted behind it is dropped."""
    expected = tiny("llama")
    engine = drafting(kind, driver, spec_tokens=4, prefix_cache=False)
    behind, runner = watch(engine), engine.core.runner
    forward, seen, which = runner.decoder.forward, [0], 1 if where == "step" else 2

    def poisoned(ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        logits = forward(ids, positions, slots, *rest)
        if len(ids) == 20 and bool((slots >= 0).any()):  # four rows of up to five tokens, captures aside
            seen[0] += 1
            if seen[0] == which:
                logits[0] = math.nan
        return logits

    monkeypatch.setattr(runner.decoder, "forward", poisoned)
    rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2, 3)]
    finish(engine)
    assert seen[0] >= which
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
    assert [event.reason for event in engine.heard.preemptions] == ["rebuild"]
    assert behind
    assert engine.core.speculator.reason == ""
    assert kind != "same" or total(engine, "accepted_tok") >= total(engine, "drafted_tok") - 4


def test_keys_of_one_that_are_not_finite_cost_nobody_the_drafts(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: what the target writes for one request the rounds behind it read before it is judged. That these
    say nothing then is not the drafter's fault."""
    expected = tiny("llama")
    engine = drafting("self", driver, spec_tokens=4, prefix_cache=False)
    behind, runner = watch(engine), engine.core.runner
    forward, done = runner.decoder.forward, list[int]()

    def poisoned(ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        logits = forward(ids, positions, slots, *rest)
        if len(ids) == 20 and bool((slots[:5] >= 0).all()) and not done:  # a verification, captures aside
            assert runner.kv is not None
            logits[0] = math.nan
            runner.kv.paged[0][slots[:5] // runner.kv.block_size] = math.nan
            done.append(len(behind))
        return logits

    monkeypatch.setattr(runner.decoder, "forward", poisoned)
    rids = [engine.submit(expected.prompts[i], WHOLE) for i in (1, 2, 3)]
    finish(engine)
    assert done
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i] for i in (1, 2, 3)]
    assert len(behind) > done[0] + 1  # and drafts go on
    assert engine.core.speculator.kind == "self"


def test_blocks_that_left_the_window_are_looked_at_by_nobody(driver: FakeDriver) -> None:
    """A15, A18: neither by a draft model, which has the token before the newest one computed again."""
    expected = tiny("llama")
    found: list[list[list[int]]] = []
    for overlap in (True, False):
        engine = drafting(
            "same", driver, spec_tokens=3, block_size=4, sliding_window=8, overlap=overlap, max_num_seqs=3,
            prefill_chunk_tokens=16,
        )  # fmt: skip
        behind = watch(engine)
        rids = [engine.submit(expected.prompts[i % 4], WHOLE) for i in range(5)]
        finish(engine)
        found.append([engine.ids(rid) for rid in rids])
        assert any(one for one, _ in behind) == overlap
        assert total(engine, "accepted_tok") > 0
    assert found[0] == found[1]


def test_a_draft_model_with_a_short_context_stops_in_time(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A15: whether or not it is known how long the text is, it computes nothing beyond its context."""
    expected = tiny("llama")
    engine = drafting("same", driver, spec_tokens=4)
    drafter = drafter_of(engine)
    assert isinstance(drafter, ModelDrafter)
    most, seen, forward = len(expected.prompts[2]) + 20, list[int](), drafter._decoder.forward
    monkeypatch.setattr(drafter, "_max_len", most)

    def watched(ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        seen.extend(positions[slots >= 0].tolist())
        return forward(ids, positions, slots, *rest)

    monkeypatch.setattr(drafter._decoder, "forward", watched)
    behind = watch(engine)
    rid = engine.submit(expected.prompts[2], WHOLE)
    finish(engine)
    assert engine.ids(rid) == expected.ids[2]
    assert most - 9 < max(seen) < most
    assert behind


@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen_behind_drafts(seed: int, driver: FakeDriver) -> None:
    """A08, A11, A15: requests, cancels, stop strings and forced preemptions over a small pool."""
    expected, rng = tiny("llama"), random.Random(seed)
    engine = drafting(
        ("nearly", "self", "same", "nearly")[seed], driver, spec_tokens=(3, 5, 8, 1)[seed], pool_tokens=320,
        swap_space_gib=0.001, block_size=(16, 4, 1, 8)[seed],
        preemption="swap" if seed % 2 else "recompute",
    )  # fmt: skip
    core, behind = engine.core, watch(engine)
    sent: dict[int, int] = {}
    gone: set[int] = set()
    stopping = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop=["a", "e", "t"])
    for _ in range(100):
        if rng.random() < 0.2:
            which = rng.randrange(5)
            sent[engine.submit(expected.prompts[which], rng.choice([WHOLE, stopping]))] = which
        if rng.random() < 0.05 and core.answers.live:
            rid = rng.choice(list(core.answers.live))
            gone.add(rid)
            core.cancel([rid])
        if rng.random() < 0.08 and core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
        core.step()
    finish(engine)
    for rid, which in sent.items():
        found = engine.ids(rid)
        assert found == expected.ids[which][: len(found)]
        ended_by_itself = rid not in gone and engine.heard.done[rid].finish == "length"
        assert len(found) == NEW_TOKENS or not ended_by_itself
    assert sum(1 for one, _ in behind if one) > 5


@settings(max_examples=12, deadline=None)
@given(
    st.lists(acts, min_size=4, max_size=20),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 16),
    st.booleans(),
)
def test_no_token_is_wrong_lost_or_doubled(
    happens: list[tuple[str, int, int]],
    preemption: str,
    prefix_cache: bool,
    block_size: int,
    kind: str,
    k: int,
    adaptive: bool,
) -> None:
    """A01, A08, A11, A15: as where nothing is launched behind what nobody has judged, whatever the size of
    blocks."""
    with kernels() as driver:
        engine = drafting(
            kind, driver, spec_tokens=k, spec_adaptive=adaptive, pool_tokens=288, swap_space_gib=0.001,
            preemption=preemption, prefix_cache=prefix_cache, block_size=block_size,
        )  # fmt: skip
        try:
            # What rows are computed with differs more than where nothing is drafted, and so does rounding.
            check(engine, happens, within=1e-4)
        finally:
            engine.core.pipeline.stop()
