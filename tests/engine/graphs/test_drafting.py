"""Rounds of draft models replayed: they feed each other and the verification, and nobody waits in between.

The driver does what was launched when somebody waits for it, so what is read or changed too early shows.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.graphs import switch
from engine.graphs.drafting import GraphedRounds
from engine.graphs.forward import GraphedForward
from engine.graphs.newest import NOBODY, Newest, awaited, cell_of, of_slot
from engine.graphs.shapes import ROWS
from engine.request import Request
from engine.speculation import MAX_DRAFT
from engine.speculation.adaptive import Choice
from engine.speculation.launched import LaunchedDrafts
from engine.speculation.model_drafter import NEAR
from engine.speculation.rounds import RoundDrafter
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import CPU, Engine, tiny_folder
from tests.engine.graphs.fakes import GRAPH_BYTES, FakeDriver, FakeLane, put_kernels
from tests.engine.graphs.test_fed_texts import SETTINGS as TEXTS
from tests.engine.graphs.test_fed_texts import acts, alone, check, sampling
from tests.engine.oracle import tiny

COUNT = 20
GREEDY = Sampling(max_tokens=COUNT, ignore_eos=True)
ON: dict[str, KnobValue] = dict.fromkeys(
    ("fused_norm", "fused_rope_kv", "fused_mlp", "fused_sampling", "cuda_graphs", "overlap"), True
)
NEARLY = {"rms_norm_eps": 0.3}  # a model that often says what the tiny one says, and often not
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "same": ("draft", {}), "nearly": ("draft", NEARLY), "self": ("self", {}),
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    put_kernels(monkeypatch, made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


@contextmanager
def kernels() -> Iterator[FakeDriver]:
    with pytest.MonkeyPatch.context() as patch:
        made = FakeDriver(lazy=True)
        put_kernels(patch, made)
        yield made
        assert not made.pending, "launched, and nobody waited for it"


def drafting(kind: str, driver: FakeDriver, **options: Any) -> Engine:
    """An engine whose drafts are made as this kind says, all that can be in graphs."""
    speculation, changes = KINDS[kind]
    values = {"attention": "paged", "speculation": speculation, "spec_adaptive": False, **ON, **options}
    engine = Engine(tiny("llama").loaded, draft_model=tiny_folder("llama", **changes), **values)
    host = engine.core.runner._host
    host._lane, host.check = FakeLane(driver), False  # checksums wait for each copy
    return engine


def finish(engine: Engine) -> None:
    engine.run()
    engine.core.pipeline.stop()
    engine.core.scheduler.check()
    assert engine.core.scheduler.pool.num_used == 0


def total(engine: Engine, field: str) -> int:
    return sum(getattr(step, field) for step in engine.heard.steps)


def drafter_of(engine: Engine) -> RoundDrafter:
    found = engine.core.speculator._drafter
    assert isinstance(found, RoundDrafter)
    return found


# --- the text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_reference(kind: str, k: int, overlap: bool, driver: FakeDriver) -> None:
    """A01, A15, A16: as many drafted tokens hold as where the host reads each round, in as many steps. Where
    the next step is launched before it is known how many do, only the last drafts are shorter."""
    expected, which = tiny("llama"), (1, 2, 3)
    counts: list[Any] = []
    for graphs in (True, False):
        driver.lazy = graphs
        engine = drafting(kind, driver, spec_tokens=k, overlap=overlap, cuda_graphs=graphs)
        rids = [
            engine.submit(expected.prompts[i], Sampling(max_tokens=COUNT - 4 * n, ignore_eos=True))
            for n, i in enumerate(which)
        ]
        finish(engine)
        for n, (rid, i) in enumerate(zip(rids, which, strict=True)):
            assert engine.ids(rid) == expected.ids[i][: COUNT - 4 * n]
        rows = [(step.drafted_at, step.accepted_at) for step in engine.heard.steps]
        counts.append((len(rows), total(engine, "drafted_tok"), total(engine, "accepted_tok"), rows))
        found = engine.core.runner.graphs.counts
        if graphs:
            assert found.drafted == sum(step.drafted_tok > 0 for step in engine.heard.steps) > 1
            assert not found.drafts_missed
    (_, drafted, accepted, rows), (*_, others) = counts
    if overlap:
        sure = 1 + (COUNT - 4 * 2 - 1) // (k + 1)  # steps until the first may end, if all drafts hold
        assert rows[:sure] == others[:sure]
    else:
        assert counts[0] == counts[1]
    assert 0 < accepted <= drafted
    assert kind != "nearly" or k < 5 or accepted < drafted


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_between_the_rounds_and_their_verification(
    kind: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A01: nor before them. What is launched: for each round its inputs and the graph, what comes to the host
    of all, then the verification's inputs, its graph, and what comes of it."""
    expected, k = tiny("llama"), 4
    engine = drafting(kind, driver, spec_tokens=k)
    runner, seen, acts = engine.core.runner, list[int](), [0]
    launch, put = runner.launch, driver.launch

    def watched(prepared: Any, *rest: Any) -> Any:
        longest = max(map(len, prepared.batch.drafts), default=0)
        flight = launch(prepared, *rest)
        if flight is not None and longest:
            assert prepared.batch.awaits_drafts
            seen.append(acts[0] - (2 * longest + 2 + 4))
        acts[0] = 0
        return flight

    def counted(act: Any) -> None:
        acts[0] += 1
        put(act)

    monkeypatch.setattr(runner, "launch", watched)
    monkeypatch.setattr(driver, "launch", counted)
    rids = [engine.submit(expected.prompts[i], GREEDY) for i in (1, 2)]
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    assert len(seen) > 2
    assert seen[0] == (kind != "self")  # a model has to catch up with the prompts
    assert not any(seen[1:])
    assert driver.most_awaited == 4  # drafts and what the step chose, and those of the step behind it
    assert engine.core.runner.graphs.counts.ahead == len(engine.heard.steps) - 1
    assert not engine.core.runner.graphs.counts.drafts_waited


@pytest.mark.parametrize("which", range(len(TEXTS)))
def test_every_setting_says_what_it_says_alone(which: int, driver: FakeDriver) -> None:
    """A10, A13, A15: seeds, stop ids inside a draft, stop strings, log-probabilities, few tokens. Penalties
    and ends that must not be chosen yet leave the rounds of the step to the host, and that is counted."""
    engine = drafting("same", driver, spec_tokens=5)
    rids = [engine.submit(tiny("llama").prompts[i], sampling(which)) for i in range(5)]
    finish(engine)
    for i, rid in enumerate(rids):
        ids, text, end, _ = alone(i, which)
        assert (engine.ids(rid), engine.text(rid), engine.heard.done[rid].finish) == (ids, text, end)
    missed = engine.core.runner.graphs.counts.drafts_missed
    asked = TEXTS[which]
    assert set(missed) == (
        {"penalties"} if "presence_penalty" in asked else {"min_tokens"} if "min_tokens" in asked else set()
    )
    use = engine.core.state().graphs
    assert use is not None
    assert use.drafts_missed_n == missed
    drafted, accepted = total(engine, "drafted_tok"), total(engine, "accepted_tok")
    assert accepted == drafted  # a model that is like the target says the same, by chance too
    assert (drafted > 0) == (asked.get("max_tokens") != 2)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(acts, min_size=4, max_size=20),
    st.sampled_from(["recompute", "swap"]),
    st.booleans(),
    st.sampled_from([8, 32, 256]),
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 8),
    st.booleans(),
)
def test_no_token_is_wrong_lost_or_doubled(
    happens: list[tuple[str, int, int]],
    preemption: str,
    prefix_cache: bool,
    chunk: int,
    kind: str,
    k: int,
    adaptive: bool,
) -> None:
    """A01, A08, A11, A18: requests of all kinds over a pool too small for them, cancels, forced preemptions,
    ends inside drafts: each ends once, with the text that it has alone, and the ledger is clean."""
    with kernels() as driver:
        engine = drafting(
            kind, driver, spec_tokens=k, spec_adaptive=adaptive, pool_tokens=288, swap_space_gib=0.001,
            preemption=preemption, prefix_cache=prefix_cache, prefill_chunk_tokens=chunk,
            max_num_batched_tokens=max(chunk, 64),
        )  # fmt: skip
        try:
            check(engine, happens)
        finally:
            engine.core.pipeline.stop()


def test_requests_far_behind_are_brought_up_before_the_rounds(driver: FakeDriver) -> None:
    """A41: by a few tokens, as after a short prompt, with the step's own rounds; by many over several steps,
    while others draft. The model that drafts is the same, so all that it says holds."""
    expected = tiny("llama")
    texts = [expected.prompts[3] * n for n in (2, NEAR - 2, NEAR - 1, NEAR + 3, 300)]
    wants = Engine(expected.loaded).generate(texts, GREEDY)
    engine = drafting("same", driver, spec_tokens=3)
    rids = [engine.submit(text, GREEDY) for text in texts]
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == wants
    assert total(engine, "accepted_tok") == total(engine, "drafted_tok") > 0
    assert engine.core.runner.graphs.counts.drafted > 3


def test_what_brings_requests_up_counts_as_no_round(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little that is: the time of a round would be learned with it."""
    init, told = LaunchedDrafts.__init__, list[bool]()

    def watched(self: LaunchedDrafts, *given: Any, caught_up: bool) -> None:
        told.append(caught_up)
        init(self, *given, caught_up=caught_up)

    monkeypatch.setattr(LaunchedDrafts, "__init__", watched)
    engine = drafting("same", driver, spec_tokens=3)
    engine.generate([tiny("llama").prompts[2][: NEAR - 2]], GREEDY)
    finish(engine)
    assert told[0]
    assert not any(told[1:])


def test_prompts_beside_drafts_have_these_read_first(driver: FakeDriver) -> None:
    """A step with prompts is not replayed: the host waits for the drafts of its other requests, and counts
    it; the rounds are replayed all the same."""
    expected = tiny("llama")
    engine = drafting("nearly", driver, spec_tokens=3, prefill_chunk_tokens=8, prefix_cache=False)
    rids = [engine.submit(expected.prompts[2], GREEDY)]
    for _ in range(6):
        engine.core.step()
    rids.append(engine.submit(expected.prompts[4], GREEDY))
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (2, 4)]
    mixed = sum(step.prefill_reqs > 0 and step.drafted_tok > 0 for step in engine.heard.steps)
    use = engine.core.state().graphs
    assert use is not None
    assert use.drafts_read_n == mixed > 2
    assert use.drafted_n > mixed


def test_a_stop_id_inside_a_draft_ends_exactly_there(driver: FakeDriver) -> None:
    """A16: nobody cuts a draft that nobody knows; what was verified behind the end is dropped."""
    expected = tiny("llama")
    engine = drafting("same", driver, spec_tokens=8)
    stop = expected.ids[2][11]
    at = expected.ids[2].index(stop)
    rid = engine.submit(
        expected.prompts[2], Sampling(max_tokens=COUNT, ignore_eos=True, stop_token_ids=[stop])
    )
    finish(engine)
    assert engine.ids(rid) == expected.ids[2][: at + 1]
    assert engine.heard.done[rid].finish == "stop"
    drafted, accepted = total(engine, "drafted_tok"), total(engine, "accepted_tok")
    assert accepted == drafted > total(engine, "output_tok") - len(engine.heard.steps)


# --- what can go wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("kind", ["same", "self"])
def test_a_round_that_is_not_finite_ends_drafts_and_no_request(
    kind: str,
    place: int,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A25: the step is fine, its tokens are taken, and nothing that is not finite stays in the target's
    blocks. The reason is told, and switching speculation off and on tries again."""
    expected = tiny("llama")
    engine = drafting(kind, driver, spec_tokens=4)
    decoder, kv = drafter_of(engine)._decoder, engine.core.runner.kv
    assert kv is not None
    forward, computed = decoder.forward, [0]

    def poisoned(ids: Tensor, *rest: Any) -> Tensor:
        logits = forward(ids, *rest)
        if len(logits) and not capturing[0]:
            computed[0] += 1
            if computed[0] == 4 + place:  # of the second step
                logits[0] = math.nan
        return logits

    capturing, capture = [False], driver.capture

    def marked(body: Any) -> Any:
        driver.drain()
        capturing[0] = True
        try:
            return capture(body)
        finally:
            capturing[0] = False

    monkeypatch.setattr(driver, "capture", marked)
    monkeypatch.setattr(decoder, "forward", poisoned)
    rids = [engine.submit(expected.prompts[i], GREEDY) for i in (1, 2)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    reason = engine.core.state().speculation
    speculation = KINDS[kind][0]
    assert reason.startswith(f"speculation={speculation} was given up because drafting failed: ")
    assert "are not finite" in reason
    assert reason in caplog.text
    drafted = [step for step in engine.heard.steps if step.drafted_tok]
    assert len(drafted) == 3  # the last was launched before anybody knew
    assert drafted[1].drafted_tok == 8
    assert drafted[1].accepted_tok <= 4 + place - 1
    assert kind != "same" or drafted[1].accepted_tok == 4 + place - 1
    assert all(bool(paged.isfinite().all()) for paged in kv.paged)
    assert engine.core.drafts.kv_bytes == 0
    monkeypatch.undo()
    put_kernels(monkeypatch, driver)
    for value in ("off", speculation):
        engine.set(speculation=value)
        engine.run()
    again = engine.submit(expected.prompts[3], GREEDY)
    finish(engine)
    assert engine.ids(again) == expected.ids[3][:COUNT]
    assert engine.core.state().speculation == ""
    assert total(engine, "drafted_tok") > sum(step.drafted_tok for step in drafted)


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_fails_behind_launched_drafts_leaves_nothing(
    bad: bool, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: its requests end with the error; what their drafts wrote, or would have told, goes with them."""
    expected = tiny("llama")
    engine = drafting("self", driver, spec_tokens=4, prefix_cache=False)
    runner, drafter = engine.core.runner, drafter_of(engine)
    prepare, decoder, failed = runner.prepare, drafter._decoder, list[bool]()
    forward = decoder.forward

    def failing(scheduled: Any) -> Any:
        if failed or not any(row.draft for row in scheduled):
            return prepare(scheduled)
        failed.append(True)
        raise RuntimeError("a kernel failed")

    def poisoned(ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> Tensor:
        logits = forward(ids, positions, slots, *rest)
        there = slots[slots >= 0]
        if bad and len(there) and len(failed) == 1 and runner.kv is not None:
            runner.kv.paged[0][there // runner.kv.block_size] = math.nan
            logits[:] = math.nan
        return logits

    monkeypatch.setattr(runner, "prepare", failing)
    monkeypatch.setattr(decoder, "forward", poisoned)
    rid = engine.submit(expected.prompts[2], GREEDY)
    engine.run()
    assert engine.heard.done[rid].finish == "error"
    assert failed == [True]
    assert not driver.pending
    assert runner.kv is not None
    assert all(bool(paged.isfinite().all()) for paged in runner.kv.paged)
    assert ("are not finite" in engine.core.state().speculation) == bad
    failed.append(False)
    again = engine.submit(expected.prompts[1], GREEDY)
    finish(engine)
    assert engine.ids(again) == expected.ids[1][:COUNT]


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        (GraphedRounds, RuntimeError("operation not permitted when stream is capturing"), "failed"),
        (GraphedRounds, torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (GraphedForward, RuntimeError("operation not permitted when stream is capturing"), "failed"),
        (GraphedForward, torch.OutOfMemoryError("CUDA out of memory."), "memory"),
    ],
)
def test_what_cannot_be_captured_is_made_with_waits(
    what: type, error: RuntimeError, reason: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: the text is right all the same. Rounds that cannot be captured are read one by one; where the
    verification cannot, what they said is read before it. Each is counted by its reason."""
    expected = tiny("llama")

    def failing(*_: Any) -> Any:
        raise error

    name = "_captured" if what is GraphedRounds else "_body"
    monkeypatch.setattr(what, name, failing)
    engine = drafting("same", driver, spec_tokens=4)
    rids = [engine.submit(expected.prompts[i], GREEDY) for i in (1, 2)]
    finish(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    steps = sum(step.drafted_tok > 0 for step in engine.heard.steps)
    found = engine.core.runner.graphs.counts
    if what is GraphedForward and reason == "failed":
        assert (found.drafted, found.drafts_read, dict(found.drafts_missed)) == (steps, steps, {})
        assert found.misses["failed"] >= steps
    elif what is GraphedForward:  # with no memory for one thing nothing else is tried
        assert found.drafts_missed["memory"] + found.drafted == steps
        assert found.drafts_read == found.drafted > 0
    else:
        assert (found.drafted, found.drafts_read, dict(found.drafts_missed)) == (0, 0, {reason: steps})


def test_more_requests_than_any_graph_holds_are_the_hosts(driver: FakeDriver) -> None:
    """No shape has rows for them."""
    engine = drafting("self", driver)
    drafter, request = drafter_of(engine), Request(1, [5, 6], Sampling())
    assert drafter._outside([request] * ROWS[-1]) == ""
    assert drafter._outside([request] * (ROWS[-1] + 1)) == "large"
    finish(engine)


def test_what_one_drafter_could_not_have_captured_another_one_may(driver: FakeDriver) -> None:
    """Its decoder is another, with kernels of its own."""
    expected = tiny("llama")
    engine = drafting("self", driver, spec_tokens=2)

    def failing(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedRounds, "_captured", failing)
        engine.generate([expected.prompts[2]], GREEDY)
    counts = engine.core.runner.graphs.counts
    assert counts.drafted == 0
    assert counts.drafts_missed["failed"] > 0
    for kind in ("off", "draft"):
        engine.set(speculation=kind)
        engine.run()
    engine.generate([expected.prompts[2]], GREEDY)
    finish(engine)
    assert counts.drafted > 0


def test_rounds_share_the_budget_of_all_graphs(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: what would pass it is not captured, and counted; what was captured is told with the other graphs,
    and its static memory goes when drafts are switched off."""
    expected = tiny("llama")
    monkeypatch.setattr(switch, "BUDGET_BYTES", 1)
    engine = drafting("same", driver)
    rid = engine.submit(expected.prompts[2], GREEDY)
    finish(engine)
    assert engine.ids(rid) == expected.ids[2][:COUNT]
    assert set(engine.core.runner.graphs.counts.drafts_missed) == {"budget"}
    assert driver.captures == 0
    monkeypatch.setattr(switch, "BUDGET_BYTES", 1 << 30)
    engine = drafting("same", driver)
    rid = engine.submit(expected.prompts[2], GREEDY)
    engine.run()
    forward = engine.core.runner.graphs._forward
    assert forward is not None
    assert forward.rounds is not None
    steps = sum(each.device.nbytes + each.chosen.nbytes for each in forward._entries.values())
    rounds = sum(each.device.nbytes for each in forward.rounds._entries.values())
    assert {(shape.rows, shape.queries) for shape in forward.rounds._entries} <= {(1, 1), (1, 2)}
    use = engine.core.state().graphs
    assert use is not None
    assert use.graphs_n == driver.captures > len(forward._entries)
    assert use.graph_bytes == use.graphs_n * GRAPH_BYTES + steps + rounds
    engine.set(speculation="off")
    engine.run()
    after = engine.core.state().graphs
    assert after is not None
    assert after.graphs_n == len(forward._entries)
    assert after.graph_bytes == use.graph_bytes - rounds
    finish(engine)


@pytest.mark.parametrize("patch", [
    {"speculation": "off"}, {"speculation": "self"}, {"cuda_graphs": False}, {"block_size": 8},
])  # fmt: skip
def test_graphs_of_rounds_hold_no_pool_that_is_gone(patch: dict[str, KnobValue], driver: FakeDriver) -> None:
    """A12: the draft model's keys and values are given back with its graphs, whichever knob takes them."""
    engine = drafting("same", driver)
    expected = tiny("llama")
    engine.generate([expected.prompts[2]], GREEDY)
    held = weakref.ref(drafter_of(engine)._kv.k[0])
    rounds = engine.core.runner.graphs._forward
    assert rounds is not None
    graphs = weakref.ref(rounds.rounds)  # type: ignore[arg-type]
    del rounds
    engine.set(**patch)
    engine.run()
    gc.collect()
    assert (held() is None) == ("cuda_graphs" not in patch)
    assert graphs() is None
    assert engine.generate([expected.prompts[1]], GREEDY) == [expected.ids[1][:COUNT]]
    finish(engine)


def test_a_change_that_leaves_parts_as_they_are_leaves_graphs(driver: FakeDriver) -> None:
    """Capturing anew at every change would hold up requests."""
    expected = tiny("llama")
    engine = drafting("nearly", driver, spec_tokens=3)
    engine.generate([expected.prompts[2]], GREEDY)
    captures = driver.captures
    engine.set(spec_tokens=2)
    engine.run()
    engine.generate([expected.prompts[2]], GREEDY)
    assert driver.captures - captures <= 1  # the verification of fewer tokens
    finish(engine)


# --- what is told ---------------------------------------------------------------------------------------


def test_what_the_device_drafted_for_is_the_drafts(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C03: the time of the rounds is that of the device. What it took beyond launching them is told as the
    drafts', and what the host prepared meanwhile as hidden; the adaptive choice learns of it."""
    expected = tiny("llama")
    monkeypatch.setattr(LaunchedDrafts, "seconds", property(lambda _: 0.25))
    engine = drafting("same", driver, spec_adaptive=True)
    adaptive, learned = engine.core.speculator._adaptive, list[tuple[int, float]]()
    monkeypatch.setattr(adaptive, "observe_drafting", lambda *seen: learned.append(seen))
    monkeypatch.setattr(adaptive, "choose", lambda rids, rooms, _: Choice(list(rooms), 1.0, 1.0))
    for i in (1, 2):
        engine.submit(expected.prompts[i], GREEDY)
    finish(engine)
    drafted = [step for step in engine.heard.steps if step.drafted_tok]
    assert len(drafted) > 1
    for step in drafted:
        assert step.draft_us >= 250_000
        assert step.overlap_us >= min(step.prepare_us, 250_000) - 1
    assert {seconds for _, seconds in learned} == {0.25}
    assert sum(done.row.draft_us for done in engine.heard.done.values()) > 0


# --- the table ------------------------------------------------------------------------------------------


def test_places_of_a_slot_lie_apart() -> None:
    """All of the first and the last slot, and nobody's; no token is read as one that can be computed."""
    table = Newest(CPU)
    slots, places = (0, NOBODY - 1), range(MAX_DRAFT + 1)
    cells = [cell_of(slot, place) for slot in slots for place in places]
    assert len({*cells, NOBODY}) == len(cells) + 1
    table.put(torch.tensor(cells), torch.arange(len(cells)) + 10)
    table.put(torch.tensor([NOBODY]), torch.tensor([-1]))
    asked = torch.tensor([[awaited(slot, place) for place in places] for slot in slots])
    assert table.known(asked).view(-1).tolist() == [n + 10 for n in range(len(cells))]
    assert table.known(torch.tensor([7, awaited(NOBODY)])).tolist() == [7, 0]
    drafted = table.drafted(MAX_DRAFT)
    for i, slot in enumerate(slots):
        first = i * len(places) + 11
        assert of_slot(drafted, slot, 3) == [first, first + 1, first + 2]
