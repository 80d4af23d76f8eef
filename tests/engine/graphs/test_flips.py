"""Knobs changed while a step is in flight that was launched ahead: nothing is lost, and texts are the same.

Knobs do here what they do on a GPU (`put_kernels`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ipc.messages import KnobValue, Sampling, TokenLogprob
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import FakeDriver, agree, put_kernels
from tests.engine.graphs.test_fed_texts import PENALIZED, WITH_LOGPROBS, alone, sampling
from tests.engine.oracle import tiny

COUNT = 24
WHICH = (1, 2, 3)
PLAIN = Sampling(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(lazy=True)
    put_kernels(monkeypatch, made)
    yield made
    assert not made.pending, "launched, and nobody waited for it"


def started(**options: KnobValue) -> Engine:
    """Steps are replayed, their tokens chosen there and fed; all of it by knobs alone."""
    on: dict[str, Any] = dict.fromkeys(
        ("fused_norm", "fused_rope_kv", "fused_mlp", "fused_sampling", "cuda_graphs", "overlap"), True
    )
    return Engine(tiny("llama").loaded, **{**on, "attention": "paged", **options})


def launched_ahead(engine: Engine) -> bool:
    """Step once. Whether a step is in flight now that was launched before the one before it had landed."""
    pipeline, found = engine.core.pipeline, [False]
    launch = pipeline.launch_ahead

    def watched(step: Any) -> None:
        launch(step)
        found[0] = step.flight is not None

    pipeline.launch_ahead = watched  # type: ignore[method-assign]
    engine.core.step()
    del pipeline.launch_ahead
    return found[0] and pipeline.in_flight


POOL_GIB = 1024 * 384 / (1 << 30)  # for as many tokens
FLIPS: list[tuple[str, list[KnobValue]]] = [
    ("attention", ["sdpa", "paged"]),
    ("attention", ["naive", "paged"]),
    ("fused_norm", [False, True]),
    ("fused_rope_kv", [False, True]),
    ("fused_mlp", [False, True]),
    ("fused_sampling", [False, True]),
    ("cuda_graphs", [False, True]),
    ("overlap", [False, True]),
    ("forward_timing", [True, False]),
    ("kv_pool_gib", [0.5 * POOL_GIB, POOL_GIB]),
    ("block_size", [4, 16]),
]
STOP_FEEDING = {"attention", "fused_rope_kv", "fused_sampling", "cuda_graphs", "overlap", "forward_timing"}


@pytest.mark.parametrize(("knob", "values"), FLIPS)
def test_a_flip_behind_a_step_that_was_launched_ahead(
    knob: str, values: list[KnobValue], driver: FakeDriver
) -> None:
    """A09, A11: there, and back again, with requests that go on all the while and some that come meanwhile;
    each ends once with the reference's text."""
    expected = tiny("llama")
    # Logits are read without the driver being asked, where the host chooses tokens from them.
    driver.lazy = knob != "fused_sampling"
    engine = started()
    rids = {engine.submit(expected.prompts[i], PLAIN): i for i in WHICH}
    for i, value in enumerate(values):
        fed = any(launched_ahead(engine) for _ in range(4))
        assert fed == (i == 0 or knob not in STOP_FEEDING)
        which = len(rids) % 4
        rids[engine.submit(expected.prompts[which], PLAIN)] = which
        engine.set(**{knob: value})
        for _ in range(3):
            engine.core.step()
        assert engine.core.knobs.pending is None
        assert engine.core.knobs[knob] == value
        assert len(engine.core.answers.live) == len(rids)
    assert any(launched_ahead(engine) for _ in range(4))
    engine.run()
    engine.core.pipeline.stop()
    assert [(event.result, event.why) for event in engine.heard.applies] == [("ok", "")] * 2
    assert set(engine.heard.done) == set(rids)
    for rid, which in rids.items():
        assert engine.ids(rid) == expected.ids[which][:COUNT]
        assert engine.heard.done[rid].finish == "length"
    engine.core.scheduler.check()
    assert engine.core.scheduler.pool.num_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_flips_at_random(seed: int, driver: FakeDriver) -> None:
    """A09, A11: several knobs at once, whenever it comes, cancels among it. Some have penalties or ask for
    log-probabilities, and their tokens are chosen by the device at one time and by the host at another.
    """
    expected, rng = tiny("llama"), random.Random(seed)
    driver.lazy = False  # whether the host chooses tokens is up to chance
    engine = started()
    rids: dict[int, list[int]] = {}
    told: dict[int, list[TokenLogprob]] = {}
    gone: set[int] = set()
    fed = 0
    for _ in range(60):
        if rng.random() < 0.2:
            which, kind = rng.randrange(5), rng.choice([0, PENALIZED, WITH_LOGPROBS])
            rid = engine.submit(expected.prompts[which], sampling(kind) if kind else PLAIN)
            rids[rid] = alone(which, kind)[0] if kind else expected.ids[which][:COUNT]
            told[rid] = alone(which, kind)[3] if kind else []
        if rng.random() < 0.04 and engine.core.answers.live:
            gone.add(rng.choice(list(engine.core.answers.live)))
            engine.core.cancel(gone)
        if rng.random() < 0.2 and engine.core.knobs.pending is None:
            patch = {knob: values[1] for knob, values in FLIPS}  # with which steps are fed
            if rng.random() < 0.5:
                patch |= {knob: values[0] for knob, values in rng.sample(FLIPS, rng.randrange(1, 4))}
            engine.set(**patch)
        fed += launched_ahead(engine)
    engine.run()
    engine.core.pipeline.stop()
    assert fed > 0
    assert {event.result for event in engine.heard.applies} == {"ok"}
    assert set(engine.heard.done) == set(rids)
    for rid, wanted in rids.items():
        found = engine.ids(rid)
        assert found == (wanted[: len(found)] if rid in gone else wanted)
        agree(engine.logprobs(rid), told[rid][: len(found)])
    engine.core.scheduler.check()
    assert engine.core.scheduler.pool.num_used == 0
