"""Steps replayed from graphs: which, in which shapes, within which budget, and what comes of it.

Faked at the driver's edge alone: everything that a GPU does not do itself runs as it would there.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.graphs import driver as edge
from engine.graphs import switch
from engine.graphs.capturing import RETRY_S
from engine.graphs.memory import SharedRows
from engine.graphs.shapes import QUERIES, ROWS, GraphShape, shape_of
from engine.ops.plain import PLAIN
from engine.runner import ModelRunner
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.driving import CPU, Driver, prompt, tiny
from tests.engine.graphs.fakes import CAPTURABLE, GRAPH_BYTES, FakeDriver, GreedySampling, StaticAttention
from tests.engine.oracle import tiny as expected_of
from tests.engine.oracle import told

COUNT = 10


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver that graphs are captured with."""
    made = FakeDriver()
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    return made


def capturable(runner: ModelRunner) -> ModelRunner:
    """The runner, its parts replaced by those that can be captured, with graphs switched on."""
    runner._attention = StaticAttention()
    runner.decoder.ops = CAPTURABLE
    runner.graphs.switch(True)
    return runner


def engine_with_graphs(**options: Any) -> Engine:
    made = Engine(expected_of("llama").loaded, **options)
    capturable(made.core.runner)
    return made


def graphs(engine: Engine) -> list[str]:
    """What each step was replayed from."""
    return [step.kernels.rpartition("graph=")[2] for step in engine.heard.steps]


def static_bytes(engine: Engine) -> int:
    """Of what steps are sent to, and of what comes out of them."""
    forward = engine.core.runner.graphs._forward
    assert forward is not None
    return sum(each.device.nbytes + each.chosen.nbytes for each in forward._entries.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_ids_are_those_of_the_reference(fake: FakeDriver, overlap: bool) -> None:
    """A01: three requests decode in the bucket of four, then in smaller ones as they end; prompts run by
    themselves. Rows say which, and each shape is captured once."""
    expected = expected_of("llama")
    engine = engine_with_graphs(overlap=overlap)
    counts = [4, 7, COUNT]
    rids = [
        engine.submit(expected.prompts[i], Sampling(max_tokens=n, ignore_eos=True))
        for i, n in zip((1, 2, 3), counts, strict=True)
    ]
    engine.run()
    engine.core.pipeline.stop()  # the thread, if steps overlap
    for rid, i, n in zip(rids, (1, 2, 3), counts, strict=True):
        assert engine.ids(rid) == expected.ids[i][:n]
    seen = graphs(engine)
    assert seen[0] == "none"
    assert {"4x1", "2x1", "1x1"} <= set(seen)
    found = engine.core.runner.graphs.counts
    assert fake.captures == len(set(seen) - {"none"})
    assert found.hits == sum(each != "none" for each in seen)
    assert found.misses["prefill"] == seen.count("none")
    assert found.padded_tokens == seen.count("4x1")  # one row of four was nobody's
    use = engine.core.state().graphs
    assert use is not None
    assert (use.replayed_n, use.missed_n) == (found.hits, {"prefill": seen.count("none")})
    assert use.padded_tok == found.padded_tokens
    assert use.replayed_tok == sum(int(each.partition("x")[0]) for each in seen if each != "none")
    assert use.graphs_n == fake.captures
    logits = 4 * 4 * expected.loaded.spec.vocab_size  # of the largest shape, which all share
    assert use.graph_bytes == fake.captures * GRAPH_BYTES + logits + static_bytes(engine)
    engine.core.runner.graphs.switch(False)
    assert engine.core.state().graphs is None


def test_drafts_are_verified_in_graphs_too(fake: FakeDriver) -> None:
    """A03: drafts of several lengths share a shape, with tokens that fill it up."""
    expected = expected_of("llama")
    engine = engine_with_graphs(drafter=told(expected), speculation="ngram", spec_adaptive=False)
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    rids = [engine.submit(expected.prompts[i], sampling) for i in (2, 3)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[i][:COUNT] for i in (2, 3)]
    assert any(each.endswith("x5") for each in graphs(engine))
    assert sum(step.accepted_tok for step in engine.heard.steps) > 0


def test_a_pool_that_is_replaced_is_not_held_by_graphs(fake: FakeDriver) -> None:
    """Graphs hold addresses of the pool: they go with it, and steps over the new one are captured anew."""
    driver = Driver(tiny("llama")[0])
    runner = capturable(driver.runner)
    driver.generate(prompt(9), 3)
    assert fake.captures == 1
    old = runner.kv
    assert old is not None
    held = weakref.ref(old.k[0])
    del old
    runner.allocate_kv(32, 16)
    gc.collect()
    assert held() is None
    driver.free = list(range(32))
    runner.graphs.counts.hits = 0
    driver.generate(prompt(9), 3)
    assert fake.captures == 2
    assert runner.graphs.counts.hits == 2


def test_no_more_is_captured_than_the_budget_allows(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was captured keeps its use; other shapes run without, and are counted."""
    expected = expected_of("llama")
    monkeypatch.setattr(switch, "BUDGET_BYTES", GRAPH_BYTES)
    engine = engine_with_graphs()
    rids = [
        engine.submit(expected.prompts[i], Sampling(max_tokens=n, ignore_eos=True))
        for i, n in ((2, 4), (3, 8))
    ]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[2][:4], expected.ids[3][:8]]
    assert fake.captures == 1
    found = engine.core.runner.graphs.counts
    assert found.hits == graphs(engine).count("2x1") > 0
    assert found.misses["budget"] > 0
    assert "1x1" not in graphs(engine)


def capture_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error {code}: operation not permitted when stream is capturing")
    error.error_code = code  # as torch sets it
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        capture_error(900),
        capture_error(908),
    ],
)
def test_a_shape_that_cannot_be_captured_runs_without(
    error: RuntimeError, fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is right all the same; the log says it once with the reason, each such step is counted."""
    fake.fails = error
    expected = expected_of("llama")
    engine = engine_with_graphs()
    rid = engine.submit(expected.prompts[3], Sampling(max_tokens=6, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[3][:6]
    assert set(graphs(engine)) == {"none"}
    assert engine.core.runner.graphs.counts.misses["failed"] == 6  # the prompt is one token
    said = [record for record in caplog.records if "cannot be captured" in record.message]
    assert len(said) == 1
    assert "not permitted when stream is capturing" in str(said[0].exc_info)


def warmed(engine: Engine, max_rows: int) -> list[tuple[int, int]]:
    """What was told while kernels were run that graphs will hold."""
    told: list[tuple[int, int]] = []
    engine.core.runner.warm_up(max_rows, lambda done, total: told.append((done, total)))
    return told


@pytest.mark.parametrize("sampling", [False, True])
def test_kernels_run_before_anybody_comes(
    sampling: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest shape first, up to one with room for all who may run; the pool stays as it is, nothing is
    captured, and texts are right afterwards. Without graphs nothing is run."""
    expected = expected_of("llama")
    engine = engine_with_graphs()
    runner = engine.core.runner
    runner.sampler.fused = GreedySampling() if sampling else None
    assert runner.kv is not None
    before = [paged.clone() for paged in runner.kv.paged]
    tokens: list[int] = []
    forward = runner.decoder.forward
    monkeypatch.setattr(
        runner.decoder, "forward", lambda ids, *rest: tokens.append(len(ids)) or forward(ids, *rest)
    )
    assert warmed(engine, 5) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert tokens == [8, 4, 2, 1]
    assert fake.captures == 0
    assert all(torch.equal(then, now) for then, now in zip(before, runner.kv.paged, strict=True))
    rid = engine.submit(expected.prompts[2], Sampling(max_tokens=4, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[2][:4]
    runner.graphs.switch(False)
    assert warmed(engine, 5) == []


def test_what_fails_before_it_is_captured_fails_nobody(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it with the reason, the other shapes are run; but a lost device is the engine's end."""
    engine = engine_with_graphs()
    decoder = engine.core.runner.decoder
    forward = decoder.forward
    error: list[RuntimeError] = [torch.OutOfMemoryError("no room for 8 tokens")]

    def failing(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(ids) == 8:
            raise error[0]
        return forward(ids, *rest)

    monkeypatch.setattr(decoder, "forward", failing)
    assert len(warmed(engine, 8)) == 4
    [said] = [record for record in caplog.records if "before they are captured" in record.message]
    assert "steps of 8x1" in said.message
    assert "no room for 8 tokens" in str(said.exc_info)
    error[0] = capture_error(700)
    with pytest.raises(torch.AcceleratorError):
        warmed(engine, 8)


def test_a_device_that_is_lost_while_capturing_is_no_shape_that_cannot_be_captured(fake: FakeDriver) -> None:
    """An illegal address (700) has ended the context: no later step can be right."""
    fake.fails = capture_error(700)
    driver = Driver(tiny("llama")[0])
    capturable(driver.runner)
    with pytest.raises(torch.AcceleratorError, match="CUDA error 700"):
        driver.generate(prompt(5), 2)


def test_logits_that_would_pass_the_budget_are_not_captured(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape whose logits alone are more than what is left is not tried; graphs share what logits lie in."""
    expected = expected_of("llama")
    vocab_size = expected.loaded.spec.vocab_size
    monkeypatch.setattr(switch, "BUDGET_BYTES", 4 * (6 + 4) * vocab_size)
    engine = engine_with_graphs()
    for i in range(4):
        engine.submit(expected.prompts[i], Sampling(max_tokens=3 + i, ignore_eos=True))
    engine.run()
    assert fake.captures == 1
    found = engine.core.runner.graphs.counts
    assert found.misses["budget"] > 0
    monkeypatch.setattr(switch, "BUDGET_BYTES", 1 << 30)
    engine = engine_with_graphs()
    for i in range(4):
        engine.submit(expected.prompts[i], Sampling(max_tokens=3 + i, ignore_eos=True))
    engine.run()
    use = engine.core.state().graphs
    assert use is not None
    assert use.graphs_n == fake.captures - 1 > 1
    assert use.graph_bytes == use.graphs_n * GRAPH_BYTES + 4 * 4 * vocab_size + static_bytes(engine)


def test_parts_that_cannot_be_captured_are_named(fake: FakeDriver) -> None:
    """Whatever stands in the way is counted under its name, and nothing is captured."""
    driver = Driver(tiny("llama")[0])
    runner = capturable(driver.runner)
    runner.set_forward_timing(True)
    driver.generate(prompt(5), 2)
    runner.set_forward_timing(False)
    runner.decoder.ops = PLAIN
    driver.generate(prompt(5), 2)
    runner.set_attention("sdpa")
    driver.generate(prompt(5), 2)
    assert set(runner.graphs.counts.misses) == {"forward_timing", "rope_kv", "attention"}
    assert fake.captures == 0


def test_the_switch_says_why_it_stays_off() -> None:
    reason = edge.probe(CPU)
    assert reason == "CUDA graphs need an NVIDIA GPU, not cpu"
    runner = Driver(tiny("llama")[0]).runner
    with pytest.raises(ValueError, match="cuda_graphs cannot be switched on: CUDA graphs need"):
        runner.graphs.switch(True)
    assert not runner.graphs.on


@pytest.mark.parametrize(("rows", "queries", "shape"), [
    (1, 1, "1x1"), (3, 1, "4x1"), (5, 2, "8x2"), (8, 4, "8x5"), (249, 1, "256x1"), (256, 17, "256x17"),
    (257, 1, "large"), (2, 18, "large"),
])  # fmt: skip
def test_the_smallest_shape_that_fits(rows: int, queries: int, shape: str) -> None:
    assert str(shape_of(Steps(rows, queries), 8)) == shape  # type: ignore[arg-type]


def test_shapes_cover_each_other() -> None:
    """Steps that do not fit say in a word why; sizes ascend, and end where drafts end."""
    assert shape_of(Steps(2, 1, wanted=1), 8) == "prefill"  # type: ignore[arg-type]
    assert shape_of(Steps(2, 1, width=9), 8) == "long"  # type: ignore[arg-type]
    assert list(ROWS) == sorted(set(ROWS))
    assert list(QUERIES) == sorted(set(QUERIES))
    assert GraphShape(8, 5).tokens == 40


class Steps:
    """As much of a batch as its shape is read from: the first row has ``queries`` tokens, others one."""

    def __init__(self, rows: int, queries: int, *, wanted: int | None = None, width: int = 8) -> None:
        tokens = rows + queries - 1
        self.ids = range(tokens)
        self.logit_tokens = range(tokens if wanted is None else wanted)
        self.rows = self
        self.num_new = torch.ones(rows, dtype=torch.int64).numpy()
        self.num_new[0] = queries
        self.tables = torch.zeros(rows, width).numpy()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), capture_error(2)])
def test_where_memory_runs_out_it_is_tried_again_later(
    error: RuntimeError, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: the steps themselves run, are counted by that reason, and nothing is tried at each of them."""
    now = [100.0]
    monkeypatch.setattr("engine.graphs.capturing.time.monotonic", lambda: now[0])
    fake.fails = error
    expected = expected_of("llama")
    engine = engine_with_graphs()
    rid = engine.submit(expected.prompts[3], Sampling(max_tokens=6, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[3][:6]
    counts = engine.core.runner.graphs.counts
    assert counts.misses["memory"] == 6
    assert fake.tried == 1
    fake.fails = None
    now[0] += RETRY_S
    rid = engine.submit(expected.prompts[3], Sampling(max_tokens=6, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[3][:6]
    assert counts.hits > 0


@pytest.mark.parametrize("shared", ["_logits", "_proposals"])
def test_memory_that_could_not_be_had_is_not_counted(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    """A12: else trying again and again would use up the budget, with nothing captured."""
    monkeypatch.setattr("engine.graphs.capturing.RETRY_S", 0.0)
    expected, scarce = expected_of("llama"), [True]
    first = SharedRows.first

    def failing(self: SharedRows, rows: int) -> Tensor:
        if scarce[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return first(self, rows)

    monkeypatch.setattr(SharedRows, "first", failing)
    engine = engine_with_graphs()
    engine.generate([expected.prompts[3]], Sampling(max_tokens=4, ignore_eos=True))
    forward = engine.core.runner.graphs._forward
    assert forward is not None
    assert engine.core.runner.graphs.counts.misses["memory"] > 1
    rows: SharedRows = getattr(forward, shared)
    with pytest.raises(torch.OutOfMemoryError):
        forward._take(rows, 4)
    assert forward.nbytes == 0
    scarce[0] = False
    forward._take(rows, 3)
    forward._take(rows, 4)
    assert forward.nbytes == 4 * 4 * expected.loaded.spec.vocab_size


def test_no_pinned_memory_for_a_shape_is_no_end_of_its_requests(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host(words: int) -> Tensor:
        raise capture_error(2)

    monkeypatch.setattr(fake, "host", host)
    expected = expected_of("llama")
    engine = engine_with_graphs()
    rid = engine.submit(expected.prompts[3], Sampling(max_tokens=6, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[3][:6]
    assert engine.core.runner.graphs.counts.misses["memory"] == 6
