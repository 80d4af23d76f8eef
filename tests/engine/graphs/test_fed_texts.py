"""Whatever happens, a pipeline that feeds tokens on the device says what one says that waits for each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.graphs import switch
from ipc.messages import Sampling, TokenLogprob
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import FakeDriver, TorchSampling, agree
from tests.engine.graphs.test_feeding import ahead, feeding
from tests.engine.oracle import tiny

MOST = 12
STOPS = tiny("llama").ids[1][4], tiny("llama").ids[2][6]
SETTINGS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 1.0, "seed": 3},
    {"stop_token_ids": list(STOPS)},
    {"stop": ["a", "e", "t"], "ignore_eos": True},
    {"temperature": 0.8, "seed": 4, "min_tokens": 6, "stop_token_ids": list(range(4, 14))},
    {"ignore_eos": True, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"ignore_eos": True, "logprobs": 1},
    {"ignore_eos": True, "max_tokens": 2},
]
PENALIZED, WITH_LOGPROBS = 5, 6  # of them


@contextmanager
def graphs() -> Iterator[FakeDriver]:
    """Graphs can be captured, and what is launched is only done when somebody waits for it."""
    made = FakeDriver(lazy=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "probe", lambda device: None)
        patch.setattr(switch, "make_driver", lambda device: made)
        yield made
    assert not made.pending, "launched, and nobody waited for it"


def sampling(which: int) -> Sampling:
    return Sampling(**{"max_tokens": MOST, **SETTINGS[which]})


@functools.cache
def alone(prompt: int, which: int) -> tuple[list[int], str, str, list[TokenLogprob]]:
    """What a request gets by itself, step by step, without graphs: ids, text, how it ends, and
    log-probabilities."""
    with graphs() as driver:
        driver.lazy = False
        engine = feeding(TorchSampling, overlap=False)
        type(engine.core.runner.graphs).switch(engine.core.runner.graphs, False)
        rid = engine.submit(tiny("llama").prompts[prompt], sampling(which))
        engine.run()
        finish = engine.heard.done[rid].finish
        assert finish is not None
        return engine.ids(rid), engine.text(rid), finish, engine.logprobs(rid)


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
    st.sampled_from([8, 32, 256]),
)
def test_no_token_is_wrong_lost_or_doubled(
    happens: list[tuple[str, int, int]], preemption: str, prefix_cache: bool, chunk: int
) -> None:
    """A01, A08, A11: requests of all kinds over a pool too small for them, cancels, forced preemptions, stop
    ids and strings, log-probabilities and penalties: each ends once, with the text that it has alone as far
    as it came, and the ledger is clean. How far strings were looked for depends on the time, never what was
    said before."""
    with graphs() as driver:
        engine = feeding(
            TorchSampling, pool_tokens=288, swap_space_gib=0.001, preemption=preemption,
            prefix_cache=prefix_cache, prefill_chunk_tokens=chunk, max_num_batched_tokens=max(chunk, 64),
        )  # fmt: skip
        try:
            check(engine, happens)
        finally:
            engine.core.pipeline.stop()
        assert driver.most_awaited <= 2


def check(engine: Engine, happens: list[tuple[str, int, int]], within: float = 1e-5) -> None:
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
    for rid, (prompt, which) in sent.items():
        want, text, finish, logprobs = alone(prompt, which)
        found = engine.ids(rid)
        agree(engine.logprobs(rid), logprobs[: len(found)], within)
        if rid in gone:
            assert found == want[: len(found)]
        else:
            assert (found, engine.text(rid), engine.heard.done[rid].finish) == (want, text, finish)
    core.scheduler.check()
    assert core.scheduler.pool.num_used == core.scheduler.swap_blocks_used == 0
    assert not core.pipeline.in_flight


def test_most_steps_of_such_a_run_are_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the property above would say little."""
    with graphs():
        engine = feeding(TorchSampling)
        found = ahead(engine, monkeypatch)
        for i, which in enumerate((0, 1, 2, 4, 5, 6)):
            engine.submit(tiny("llama").prompts[i % 5], sampling(which))
        engine.run()
        engine.core.pipeline.stop()
    assert len(found) == len(engine.heard.steps) - 1
