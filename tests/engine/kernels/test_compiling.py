"""When kernels are compiled ahead, with what, and what becomes of those that cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import compiling
from engine.attention import paged, paged_triton
from engine.kernels import warm
from engine.ops import choice, triton_ops
from engine.ops.plain import PLAIN
from engine.speculation.rounds import RoundDrafter
from ipc.messages import KnobValue, Sampling
from tests import tiny_models
from tests.engine.core_harness import Engine
from tests.engine.oracle import tiny


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels are those of a GPU here, and treated as they are there."""
    monkeypatch.setattr(compiling, "is_compiled", lambda device: True)
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))
    monkeypatch.setattr(paged, "source", lambda device: paged_triton)


def told(done: int, total: int) -> None:
    assert 0 <= done < total


def test_all_that_may_be_switched_to_is_launched_and_nothing_is_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it is left in the pool: a request's ids are those of transformers."""
    monkeypatch.setattr(warm, "PRODUCT_ROWS", (1,))
    monkeypatch.setattr(paged_triton.PagedAttention, "lengths", lambda *_: (2,))
    expected = tiny("llama")
    engine = Engine(expected.loaded, attention="naive")
    heard: list[tuple[int, int]] = []
    compiling.compile_kernels(engine.core.runner, lambda done, total: heard.append((done, total)))
    assert [done for done, _ in heard] == list(range(heard[0][1]))
    assert engine.core.runner.ops == PLAIN
    assert engine.core.runner.attention_name == "naive"
    rid = engine.submit(expected.prompts[1], Sampling(max_tokens=4, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[1][:4]


def test_it_is_done_with_each_new_pool_and_with_fused_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of other blocks is read by other kernels; a knob of the next step brings none."""
    ran: list[tuple[str, int]] = []

    def recorded(decoder: Any, attention: Any, kv: Any, *_: Any, block: int, **__: Any) -> None:
        assert attention.name == "paged"
        assert block < kv.num_blocks
        ran.append((choice.kernels(decoder.ops), kv.block_size))

    monkeypatch.setattr(compiling, "warm", recorded)
    engine = Engine(tiny("llama").loaded)
    engine.set(fused_norm=True)
    engine.run()
    assert not ran
    engine.set(block_size=4)
    engine.run()
    assert ran == [("norm=triton,rope_kv=triton,mlp=triton", 4)]
    assert engine.core.runner.ops.norm.name == "triton"
    assert engine.core.runner.ops.gate is PLAIN.gate


def test_what_drafts_is_compiled_when_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of other sizes with all that can be fused of it, over its own pool; a lighter copy of the
    model has other weights only. Neither is compiled again by what leaves it alone."""
    ran: list[tuple[str, Any]] = []

    def recorded(decoder: Any, attention: Any, kv: Any, *_: Any, **__: Any) -> None:
        ran.append((choice.kernels(decoder.ops), kv))

    monkeypatch.setattr(compiling, "warm", recorded)
    monkeypatch.setattr(compiling, "warm_products", lambda decoder: ran.append(("products", decoder)))
    draft = tiny_models.build(tmp_path / "draft", "llama", seed=1)
    engine = Engine(tiny("llama").loaded, draft_model=draft)
    drafts = engine.core.drafts

    def made(**patch: KnobValue) -> list[tuple[str, Any]]:
        ran.clear()
        engine.set(**patch)
        engine.run()
        assert engine.heard.applies[-1].result == "ok"
        return list(ran)

    def drafter() -> RoundDrafter:
        assert drafts.drafter is not None
        return drafts.drafter

    every = "norm=triton,rope_kv=triton,mlp=triton"
    assert made(speculation="draft") == [(every, drafter().runs_with[2])]
    assert choice.kernels(drafter().runs_with[0].ops) == ""
    assert not made(spec_tokens=2)
    assert made(block_size=4) == [(every, engine.core.runner.kv), (every, drafter().runs_with[2])]
    assert made(speculation="self") == [("products", drafter().runs_with[0])]
    assert not made(speculation="off")


def test_a_kernel_that_cannot_be_launched_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody may have asked for it; a device that is lost is another thing."""
    engine = Engine(tiny("llama").loaded)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("kernel _paged_attention with 16 rows needs 139520 bytes of shared memory")

    monkeypatch.setattr(compiling, "warm", fails)
    with caplog.at_level(logging.WARNING):
        compiling.compile_kernels(engine.core.runner, told)
    assert "_paged_attention with 16 rows" in caplog.text
    assert engine.core.runner.ops == PLAIN

    def lost(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(compiling, "warm", lost)
    with pytest.raises(torch.AcceleratorError):
        compiling.compile_kernels(engine.core.runner, told)
    assert engine.core.runner.ops == PLAIN
