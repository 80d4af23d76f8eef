"""Tokens fed to the next step on the device: it is launched before the host has read them.

The driver does what was launched when somebody waits for it, so what is read or changed too early shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from engine.graphs import switch
from engine.graphs.choosing import GraphChooser
from engine.graphs.counting import TextCounts
from engine.runner import CopyFailed
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import (
    CAPTURABLE,
    FakeDriver,
    FakeLane,
    GreedySampling,
    StaticAttention,
    TorchSampling,
)
from tests.engine.oracle import NEW_TOKENS, Expected, told
from tests.engine.oracle import tiny as expected_of

COUNT = 10
ENGINES: list[Engine] = []  # of the test that runs
PLAIN = Sampling(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.pop().core.pipeline.stop()


def feeding(sampling: type[GreedySampling] = GreedySampling, **options: Any) -> Engine:
    """An engine whose graphs choose the tokens."""
    engine = Engine(expected_of("llama").loaded, **{"overlap": True, **options})
    ENGINES.append(engine)
    runner = engine.core.runner
    runner._attention, runner.decoder.ops = StaticAttention(), CAPTURABLE
    runner.sampler.fused = sampling()
    runner.graphs.switch(True)
    driver = runner.graphs._driver
    assert isinstance(driver, FakeDriver)
    runner._host._lane, runner._host._check = FakeLane(driver), False  # checksums wait for each copy
    # Every change sets them again, to what the knobs say.
    keep: Any = lambda _: None  # noqa: E731
    runner.set_attention = runner.set_fused = runner.graphs.switch = keep  # type: ignore[method-assign]
    return engine


def ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each step had that was launched while another was in flight."""
    pipeline, found = engine.core.pipeline, []
    launch = pipeline.launch_ahead

    def watched(step: Any) -> None:
        launch(step)
        if step.flight is not None:
            found.append(len(step.plan.scheduled))

    monkeypatch.setattr(pipeline, "launch_ahead", watched)
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_launched_before_tokens_are_read(
    lazy: FakeDriver, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A01: the reference's ids. Shapes shrink as requests end by length, which is known beforehand: the next
    step goes without them, is captured in between and gets its tokens all the same. The first step that
    decodes is launched behind the prompts' own."""
    expected = expected_of("llama")
    engine = feeding(overlap=overlap)
    found = ahead(engine, monkeypatch)
    counts = [4, 7, COUNT]
    rids = [
        engine.submit(expected.prompts[i], Sampling(max_tokens=n, ignore_eos=True))
        for i, n in zip((1, 2, 3), counts, strict=True)
    ]
    engine.run()
    for rid, i, n in zip(rids, (1, 2, 3), counts, strict=True):
        assert engine.ids(rid) == expected.ids[i][:n]
    assert lazy.most_awaited == (2 if overlap else 1)
    decoding = [s.decode_reqs for s in engine.heard.steps if "+sample" in s.kernels]
    assert found == (decoding if overlap else [])
    assert {1, 2, 3} == set(decoding)
    use = engine.core.state().graphs
    assert use is not None
    assert use.ahead_n == len(found)
    assert all(row.computed_tok == row.prompt_tok + row.output_tok - 1 for row in rows_of(engine))


def rows_of(engine: Engine) -> list[Any]:
    return [done.row for done in engine.heard.done.values()]


def test_who_ends_meanwhile_gets_nothing_more(lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A08: by a stop id, which the host learns of when the next step is launched already: its row there goes
    to nobody, the others take theirs, and the step behind waits for that one's end no more than others."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False)
    found = ahead(engine, monkeypatch)
    stop = expected.ids[2][4]
    assert stop not in expected.ids[2][:4]
    rids = [
        engine.submit(expected.prompts[i], Sampling(max_tokens=n, ignore_eos=True, stop_token_ids=stops))
        for i, n, stops in ((1, 9, []), (2, 9, [stop]), (3, 9, []))
    ]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [
        expected.ids[1][:9], expected.ids[2][:5], expected.ids[3][:9]
    ]  # fmt: skip
    assert all(row.computed_tok == row.prompt_tok + row.output_tok - 1 for row in rows_of(engine))
    replayed = [s for s in engine.heard.steps if "+sample" in s.kernels]
    assert sum(s.decode_tok for s in replayed) == sum(s.output_tok for s in replayed)
    assert len(found) == len(replayed)  # behind the prompts' too, and behind the row of nobody


def test_prompts_in_chunks_feed_and_are_fed(lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01, A05: every step but the first is launched before the one before it is read, whether it has prompts
    or only decodes: who came first decodes beside the chunks of the others."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False, prefill_chunk_tokens=16, max_num_batched_tokens=24)
    found = ahead(engine, monkeypatch)
    rids = [engine.submit(expected.prompts[i], PLAIN) for i in (1, 3, 4)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 3, 4)]
    steps = engine.heard.steps
    assert found == [step.prefill_reqs + step.decode_reqs for step in steps[1:]]
    assert sum(step.prefill_reqs > 0 and step.decode_reqs > 0 for step in steps) > 3
    assert engine.core.runner.graphs.counts.misses["prefill"] == sum(step.prefill_reqs > 0 for step in steps)


def run_with_preemption(engine: Engine, stops: Sequence[int] = ()) -> tuple[list[int], int]:
    """Preempt a request while its token is computed, so that it comes back at once, in another slot, behind
    that step. The requests, and how many steps there were until then."""
    expected, core = expected_of("llama"), engine.core
    first = engine.submit(expected.prompts[3], Sampling(max_tokens=2, ignore_eos=True))
    other = Sampling(max_tokens=COUNT, ignore_eos=True, stop_token_ids=list(stops))
    rids = [engine.submit(expected.prompts[1], PLAIN), engine.submit(expected.prompts[2], other)]
    while first not in engine.heard.done:
        core.step()
    victim = core.scheduler.running[0]
    slot = victim.slot
    assert victim.num_pending
    core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])
    steps = len(engine.heard.steps)
    core.step()
    assert victim.slot not in (slot, -1)
    engine.run()
    return rids, steps


def test_who_comes_back_in_another_slot_is_fed(lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A11: its token was put down for the slot that it had, and is taken from there."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False)
    found = ahead(engine, monkeypatch)
    rids, _ = run_with_preemption(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    assert len(found) == len(engine.heard.steps) - 1


def test_copies_are_made_between_steps_that_are_fed(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11: blocks swapped out behind the step that still writes to them, and back in ahead of the one that
    reads them, without the host waiting for either; each step tells of its own copies."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False, preemption="swap", swap_space_gib=0.001)
    found = ahead(engine, monkeypatch)
    rids, _ = run_with_preemption(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    assert len(found) == len(engine.heard.steps) - 1
    copied = [step.copied_blk for step in engine.heard.steps]
    assert sum(map(bool, copied)) == 1
    assert sum(copied) >= 4
    assert engine.core.scheduler.swap_blocks_used == 0


def test_copies_of_a_step_that_is_dropped_are_told_with_the_next(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11: they were made all the same, once. The step itself does not count as one that was fed."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False, preemption="swap", swap_space_gib=0.001)
    found = ahead(engine, monkeypatch)
    host, pipeline = engine.core.runner._host, engine.core.pipeline
    run, settle = host.run, pipeline.settle
    made: list[int] = []
    dropped: list[int] = []

    def running(copies: Any, kv: Any, timer: Any) -> int:
        monkeypatch.setattr(timer, "elapsed_s", lambda: 0.25)
        made.append(run(copies, kv, timer))
        return made[-1]

    def dropping(step: Any, landing: Any) -> Any:
        if step.flight is None or not step.has_copies or dropped:
            return settle(step, landing)
        dropped.append(len(engine.heard.steps))  # but for the one that has just landed
        return settle(step, "doubtful")

    forgotten: list[int] = []
    monkeypatch.setattr(TextCounts, "forget", lambda self: forgotten.append(len(engine.heard.steps)))
    monkeypatch.setattr(host, "run", running)
    monkeypatch.setattr(pipeline, "settle", dropping)
    rids, _ = run_with_preemption(engine)
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (1, 2)]
    assert len(dropped) == 1 <= len(made)
    told = [(step.copied_blk, step.copy_us) for step in engine.heard.steps]
    assert told[dropped[0] + 1] == (made[0], 250_000)
    assert (sum(blocks for blocks, _ in told), sum(us for _, us in told)) == (sum(made), 250_000 * len(made))
    use = engine.core.state().graphs
    assert use is not None
    assert use.ahead_n == len(found) - 1
    assert forgotten == dropped  # what it may have been fed


@pytest.mark.parametrize("count", [3, COUNT])
def test_copies_that_fail_ahead_of_a_fed_step_let_all_start_over(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """A11: the step in flight lands as it would have, nobody fails, and what follows is computed again; even
    if one ends with that very step, so that what was to follow is put together anew."""
    expected = expected_of("llama")
    stop = expected.ids[2][count - 1]
    assert stop not in expected.ids[2][: count - 1]
    engine = feeding(prefix_cache=False, preemption="swap", swap_space_gib=0.001)
    host = engine.core.runner._host
    run, failed = host.run, []

    def failing(*args: Any) -> int:
        if not failed:
            failed.append(len(engine.heard.steps))
            raise CopyFailed("the lane broke")
        return run(*args)

    monkeypatch.setattr(host, "run", failing)
    rids, steps = run_with_preemption(engine, [stop])
    assert failed == [steps]
    said = [record.getMessage() for record in caplog.records if "the lane broke" in record.getMessage()]
    assert said == ["a step or the copies ahead of it failed, and everybody starts over: the lane broke"]
    assert [engine.ids(rid) for rid in rids] == [expected.ids[1][:COUNT], expected.ids[2][:count]]
    why = [(event.reason, event.mode) for event in engine.heard.preemptions]
    assert why[0] == ("blocks", "swap")
    assert set(why[1:]) == {("rebuild", "recompute")}
    assert {event.rid for event in engine.heard.preemptions[1:]} == set(rids if count == COUNT else rids[:1])
    assert engine.core.scheduler.swap_blocks_used == 0


def test_what_nobody_gets_takes_the_step_behind_with_it_where_it_is_not_finite(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: keys that are not finite, written for a request that had ended, may lie in another's block by now:
    what was launched behind is computed again, once they are gone."""
    expected = expected_of("llama")
    engine = feeding(prefix_cache=False)
    runner, pipeline, stop = engine.core.runner, engine.core.pipeline, expected.ids[2][4]
    forward, forgo, poisoned, forgone = runner.decoder.forward, pipeline.forgo, [0], []

    def poisoning(ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *rest: Any) -> Any:
        logits = forward(ids, positions, slots, *rest)
        bad = (ids == stop) & (positions == len(expected.prompts[2]) + 4)
        if bad.any():
            assert runner.decoder.finite is not None
            assert runner.kv is not None
            poisoned[0] += 1
            runner.decoder.finite = runner.decoder.finite & ~bad
            at = slots[bad]
            runner.kv.paged[0][at // runner.kv.block_size] = math.nan
        return logits

    monkeypatch.setattr(runner.decoder, "forward", poisoning)
    monkeypatch.setattr(pipeline, "forgo", lambda step: (forgone.append(step), forgo(step))[1])
    rids = [
        engine.submit(expected.prompts[i], Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=stops))
        for i, stops in ((1, []), (2, [stop]), (3, []))
    ]
    engine.run()
    assert poisoned == [1]
    assert [len(step.plan.scheduled) for step in forgone if step.flight is not None] == [2]
    assert [engine.ids(rid) for rid in rids] == [
        expected.ids[1][:9], expected.ids[2][:5], expected.ids[3][:9]
    ]  # fmt: skip
    assert runner.kv is not None
    assert all(bool(paged.isfinite().all()) for paged in runner.kv.paged)


def test_a_miss_counts_once_however_often_its_step_is_prepared(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends by a stop id let the staged step be prepared again, without who has ended."""
    monkeypatch.setattr(switch, "BUDGET_BYTES", 0)
    expected = expected_of("llama")
    engine = feeding()
    for i in (2, 3):
        stops = [expected.ids[2][4]] if i == 2 else []
        engine.submit(expected.prompts[i], Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=stops))
    engine.run()
    counts = engine.core.runner.graphs.counts
    assert sum(counts.misses.values()) == len(engine.heard.steps)
    assert set(counts.misses) == {"prefill", "budget"}


@pytest.mark.parametrize("short", [False, True])
def test_penalties_are_the_hosts_where_there_is_no_memory_for_their_lists(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    """Neither beyond the budget for graphs nor where the card has none; nobody fails, and the steps of
    those without penalties are fed as ever."""
    monkeypatch.setattr(switch, "BUDGET_BYTES", 1 << 30 if short else 0)
    asked = [0]

    def reserve(self: TextCounts) -> torch.Tensor:
        asked[0] += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TextCounts, "reserve", reserve)
    lazy.lazy = False  # logits are read without the driver being asked
    engine = feeding(TorchSampling)
    penalized = engine.submit(
        expected_of("llama").prompts[2], Sampling(max_tokens=4, ignore_eos=True, presence_penalty=1.0)
    )
    engine.run()
    assert engine.heard.done[penalized].finish == "length"
    counts = engine.core.runner.graphs.counts
    assert asked == [int(short)]  # not again within half a minute
    assert counts.ahead == 0
    found = ahead(engine, monkeypatch)
    rid = engine.submit(expected_of("llama").prompts[2], PLAIN)
    engine.run()
    assert engine.ids(rid) == expected_of("llama").ids[2][:COUNT]
    assert len(found) == COUNT - 1
    assert engine.core.runner.graphs.counts.misses["memory" if short else "budget"] > 0


def test_choosing_is_asked_once_about_each_step(lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is replayed or launched by itself."""
    engine = feeding(TorchSampling)
    needs_of, prepare = GraphChooser.needs_of, engine.core.runner.prepare
    asked, prepared = [0], [0]

    def needing(self: GraphChooser, batch: Any) -> Any:
        asked[0] += 1
        return needs_of(self, batch)

    def preparing(scheduled: Any) -> Any:
        prepared[0] += 1
        return prepare(scheduled)

    monkeypatch.setattr(GraphChooser, "needs_of", needing)
    monkeypatch.setattr(engine.core.runner, "prepare", preparing)
    engine.submit([1, 2, 3], Sampling(max_tokens=4, ignore_eos=True, presence_penalty=1.0))
    engine.run()
    assert asked == prepared != [0]


def test_all_may_end_with_a_step_behind_them(lazy: FakeDriver) -> None:
    """The step that nobody is left in is waited for and forgotten."""
    expected = expected_of("llama")
    engine = feeding()
    sampling = Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=[expected.ids[3][3]])
    rid = engine.submit(expected.prompts[3], sampling)
    engine.run()
    assert engine.ids(rid) == expected.ids[3][: expected.ids[3].index(sampling.stop_token_ids[0]) + 1]
    assert not engine.core.pipeline.in_flight
    again = engine.submit(expected.prompts[2], PLAIN)
    engine.run()
    assert engine.ids(again) == expected.ids[2][:COUNT]


def test_a_row_that_is_not_finite_takes_the_step_behind_with_it(
    lazy: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: what was launched behind it is dropped and computed again; the pool holds nothing that is not
    finite."""
    expected = expected_of("llama")
    engine = feeding()
    runner = engine.core.runner
    forward, passes = runner.decoder.forward, [0]

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        passes[0] += len(logits) == 2
        if passes[0] == 6:  # of both requests together, captures among them
            logits[0] = math.nan
            passes[0] += 1
        return logits

    monkeypatch.setattr(runner.decoder, "forward", poisoned)
    rids = [engine.submit(expected.prompts[i], PLAIN) for i in (2, 3)]
    engine.run()
    ends = {engine.heard.done[rid].finish: engine.ids(rid) for rid in rids}
    assert set(ends) == {"error", "length"}
    lived = rids[[engine.heard.done[rid].finish for rid in rids].index("length")]
    assert ends["length"] == expected.ids[2 if lived == rids[0] else 3][:COUNT]
    assert runner.kv is not None
    assert all(bool(paged.isfinite().all()) for paged in runner.kv.paged)


@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen_behind_a_step(seed: int, lazy: FakeDriver) -> None:
    """A08, A11: requests, cancels, stop strings, drafts and forced preemptions over a small pool: each ends
    once, with the oracle's ids as far as it came, and nothing is left."""
    expected, rng = expected_of("llama"), random.Random(seed)
    engine = feeding(
        pool_tokens=320, swap_space_gib=0.001, preemption="swap" if seed % 2 else "recompute",
        drafter=told(expected), spec_adaptive=False,
    )  # fmt: skip
    core = engine.core
    sent: dict[int, int] = {}
    gone: set[int] = set()
    plain = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    stopping = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop=["a", "e", "t"])

    def submit() -> None:
        which = rng.randrange(5)
        sent[engine.submit(expected.prompts[which], rng.choice([plain, stopping]))] = which

    def cancel() -> None:
        if core.answers.live:
            rid = rng.choice(list(core.answers.live))
            gone.add(rid)
            core.cancel([rid])

    def preempt() -> None:
        if core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])

    def flip() -> None:
        if core.knobs.pending is None:
            engine.set(speculation=rng.choice(["off", "ngram"]))

    acts: list[tuple[float, Callable[[], None]]] = [
        (0.2, submit), (0.05, cancel), (0.08, preempt), (0.05 if seed >= 2 else 0.0, flip),
    ]  # fmt: skip
    for _ in range(120):
        for chance, act in acts:
            if rng.random() < chance:
                act()
        core.step()
    engine.run()
    check(engine, expected, sent, gone)
    assert lazy.most_awaited == 2


def check(engine: Engine, expected: Expected, sent: dict[int, int], gone: set[int]) -> None:
    """That all have ended as they had to, and that the ledger is empty."""
    assert set(engine.heard.done) == set(sent)
    for rid, which in sent.items():
        done, ids = engine.heard.done[rid], engine.ids(rid)
        assert ids == expected.ids[which][: len(ids)]
        assert done.finish in ("length", "stop") or rid in gone
        assert done.finish != "length" or len(ids) == NEW_TOKENS
    core = engine.core
    core.scheduler.check()
    assert core.scheduler.pool.num_used == core.scheduler.swap_blocks_used == 0
    assert not core.pipeline.in_flight
