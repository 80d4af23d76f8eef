"""Graphs over the kernels themselves: a replay sees nothing but static memory, faked at the driver alone."""

from __future__ import annotations

import pytest

from engine.attention import paged, paged_triton
from engine.graphs import switch
from engine.kernels import attention_rows
from engine.ops import choice, triton_ops
from ipc.messages import Sampling
from tests.engine.core_harness import Engine
from tests.engine.graphs.fakes import FakeDriver
from tests.engine.oracle import tiny, told

COUNT = 3


@pytest.mark.parametrize("drafts", [False, True])
def test_replayed_steps_give_the_text(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A01: rows that fill a shape up have no tokens, and their tokens no slots; what is there is computed as
    without a graph. Captured while nobody is there."""
    monkeypatch.setattr(paged, "source", lambda device: paged_triton)
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))
    monkeypatch.setattr(attention_rows, "GRID", 24)  # programs without work take the interpreter's time too
    monkeypatch.setattr(switch, "probe", lambda device: None)
    driver = FakeDriver()
    monkeypatch.setattr(switch, "make_driver", lambda device: driver)
    expected = tiny("llama")
    engine = Engine(
        expected.loaded, attention="paged", fused_rope_kv=True, max_model_len=64,
        drafter=told(expected), spec_adaptive=False, speculation="ngram" if drafts else "off",
    )  # fmt: skip
    engine.core.runner.graphs.switch(True)
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    rids = [engine.submit(expected.prompts[3], sampling) for _ in range(3)]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [expected.ids[3][:COUNT]] * 3
    counts = engine.core.runner.graphs.counts
    assert counts.hits > 0
    assert counts.padded_tokens > 0
    kernels = {step.kernels for step in engine.heard.steps}
    assert driver.captures == sum("graph=none" not in each for each in kernels)
