"""Graphs over the kernels themselves: a replay sees nothing but static memory, faked at the driver alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention import paged, paged_triton
from engine.graphs import switch
from engine.kernels import attention_rows
from engine.ops import choice, triton_ops
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import FakeDriver
from tests.engine.kernels.support import interpreted_only
from tests.engine.oracle import tiny, told

pytestmark = interpreted_only

COUNT = 3


def graphed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, FakeDriver]:
    """An engine whose steps are replayed, faked at the driver alone."""
    monkeypatch.setattr(paged, "source", lambda device: paged_triton)
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))
    monkeypatch.setattr(attention_rows, "GRID", 24)  # programs without work take the interpreter's time too
    monkeypatch.setattr(switch, "probe", lambda device: None)
    driver = FakeDriver()
    monkeypatch.setattr(switch, "make_driver", lambda device: driver)
    expected = tiny("llama")
    engine = Engine(expected.loaded, attention="paged", fused_rope_kv=True, max_model_len=64, **options)
    engine.core.runner.graphs.switch(True)
    return engine, driver


def test_tokens_that_fill_a_shape_up_change_no_byte_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests in a shape of four: keys and values of their new tokens are written, no others."""
    engine, _ = graphed(monkeypatch)
    expected = tiny("llama")
    for _ in range(3):
        engine.submit(expected.prompts[3], Sampling(max_tokens=2, ignore_eos=True))
    kv = engine.core.runner.kv
    assert kv is not None
    engine.core.step()
    while engine.core.answers.live:
        before = [held.clone() for held in (*kv.k, *kv.v)]
        slots = {
            r.block_table[r.num_computed // kv.block_size] * kv.block_size + r.num_computed % kv.block_size
            for r in engine.core.scheduler.running
        }
        engine.core.step()
        for then, now in zip(before, (*kv.k, *kv.v), strict=True):
            changed = (then.view(torch.int32) != now.view(torch.int32)).flatten(1).any(dim=1)
            assert set(changed.nonzero().flatten().tolist()) == slots
    assert engine.heard.steps[-1].kernels.endswith("graph=4x1")
    assert engine.core.runner.graphs.counts.padded_tokens > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_replayed_steps_give_the_text(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01: rows that fill a shape up have no tokens, and their tokens no slots; what is there is computed as
    without a graph. Captured while nobody is there."""
    expected = tiny("llama")
    engine, driver = graphed(
        monkeypatch, drafter=told(expected), spec_adaptive=False, speculation="ngram" if drafts else "off"
    )
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    rids = [engine.submit(expected.prompts[3], sampling) for _ in range(3)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[3][:COUNT]] * 3
    counts = engine.core.runner.graphs.counts
    assert counts.hits > 0
    assert counts.padded_tokens > 0
    kernels = {step.kernels for step in engine.heard.steps}
    assert driver.captures == sum("graph=none" not in each for each in kernels)
