"""Parts of a decoder that torch compiles: recorded and run here, and once made into code."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from engine import runner, running_model
from engine.native import unavailable
from engine.ops import compiled_ops
from engine.ops.compiled_ops import CompiledParts
from engine.ops.plain import PLAIN
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import CPU, prompt
from tests.engine.oracle import tiny

COUNT = 6
NAMES = "norm=compile,rope_kv=compile,mlp=compile"
pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"nothing can be compiled here: {unavailable()}")


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch recorded is run as it is: making code of it takes a quarter of a minute. Nothing is kept."""
    use(monkeypatch, "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def use(monkeypatch: pytest.MonkeyPatch, backend: object) -> None:
    monkeypatch.setattr(running_model, "CompiledParts", functools.partial(CompiledParts, backend=backend))


def graphs() -> int:
    """How many pieces of code torch has recorded."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_it_is_switched_while_requests_run(architecture: str) -> None:
    """A01, A22: ids are those of transformers, rows say what ran, and no step waits for a compiler: prompts,
    decoding and any number of rows are served by what was compiled before.
    """
    expected = tiny(architecture)
    engine = Engine(expected.loaded, prefill_chunk_tokens=16)
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    rids = [engine.submit(ids, sampling) for ids in expected.prompts]
    engine.core.step()
    engine.set(compile=True)
    engine.run()
    engine.set(compile=False)
    engine.run()
    before = graphs()
    engine.set(compile=True)
    rids += [engine.submit(ids, sampling) for ids in expected.prompts]
    engine.run()
    rids += [engine.submit(expected.prompts[0], sampling)]
    engine.run()
    assert graphs() == before > 0
    for rid, ids in zip(rids, [*expected.ids * 2, expected.ids[0]], strict=True):
        assert engine.ids(rid) == ids[:COUNT]
    assert {NAMES in step.kernels for step in engine.heard.steps} == {True, False}
    assert [event.result for event in engine.heard.applies] == ["ok"] * 3


def test_fused_parts_are_left_to_their_kernels() -> None:
    expected = tiny("llama")
    engine = Engine(expected.loaded, compile=True, fused_norm=True)
    rid = engine.submit(expected.prompts[1], Sampling(max_tokens=COUNT, ignore_eos=True))
    engine.run()
    assert engine.ids(rid) == expected.ids[1][:COUNT]
    ran = {step.kernels.split(",", 2)[2] for step in engine.heard.steps}
    assert ran == {"norm=native,rope_kv=compile,mlp=compile"}


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_over_any_pool(kv_dtype: str) -> None:
    """A31: chunks, norms of heads and keys and values in 8 bits."""
    knobs: dict[str, KnobValue] = {"kv_dtype": kv_dtype, "prefill_chunk_tokens": 16}
    answers = []
    for on in (False, True):
        engine = Engine(load(tiny_folder("qwen3")), **knobs)
        engine.set(compile=on)
        rid = engine.submit(prompt(21), Sampling(max_tokens=COUNT, ignore_eos=True))
        engine.run()
        answers.append(engine.ids(rid))
    assert answers[0] == answers[1]


def test_steps_go_on_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that runs gets all its tokens before the compiler has done its first part."""
    begun, go = threading.Event(), threading.Event()

    def slow(module: Any, inputs: Sequence[Tensor]) -> Any:
        begun.set()
        assert go.wait(60)
        return module.forward

    use(monkeypatch, slow)
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    rid = engine.submit(expected.prompts[0], Sampling(max_tokens=COUNT, ignore_eos=True))
    engine.set(compile=True)
    try:
        engine.core.step()
        assert begun.wait(60)
        while rid not in engine.heard.done:
            engine.core.step()
        assert engine.core.state().stage == compiled_ops.STAGE
        assert not engine.heard.applies
    finally:
        go.set()
    engine.run()
    assert [event.result for event in engine.heard.applies] == ["ok"]
    assert engine.ids(rid) == expected.ids[0][:COUNT]


def test_what_the_compiler_says_is_told_and_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A02: a compiler that fails, as without Python's headers."""

    def broken(module: Any, inputs: Sequence[Tensor]) -> Any:
        raise OSError("fatal error: Python.h: No such file")

    use(monkeypatch, broken)
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    engine.set(compile=True)
    rid = engine.submit(expected.prompts[0], Sampling(max_tokens=COUNT, ignore_eos=True))
    engine.run()
    (event,) = engine.heard.applies
    assert event.result == "rolled_back"
    assert "torch.compile could not compile the norm" in event.why
    assert "Python.h" in event.why
    assert engine.core.knobs["compile"] is False
    assert engine.core.runner.ops == PLAIN
    assert engine.ids(rid) == expected.ids[0][:COUNT]


@pytest.mark.slow
def test_the_code_itself() -> None:
    """What the compiler makes for this machine, against torch's own operations, for one row and for more."""
    loaded = load(tiny_folder("qwen3"))
    decoder = runner.ModelRunner(loaded, device=CPU, dtype=torch.float32, measure=False).decoder
    children = {child.pid for child in psutil.Process().children()}
    ops = CompiledParts(decoder).ops
    before = graphs()
    with torch.inference_mode():
        for rows in (1, 2, 33):
            x, delta = (torch.randn(rows, decoder.spec.hidden_size) for _ in range(2))
            for added in (None, delta):
                ours, theirs = x.clone(), x.clone()
                layer = decoder.layers[0]
                got, want = (
                    part(rows, added, layer.post_norm, 1e-6, layer.mlp.gate_up)
                    for part, rows in ((ops.norm, ours), (PLAIN.norm, theirs))
                )
                torch.testing.assert_close(got, want)
                assert torch.equal(ours, theirs)
            mlp = decoder.layers[0].mlp
            torch.testing.assert_close(ops.gate(mlp, x), PLAIN.gate(mlp, x))
    assert graphs() == before
    assert {child.pid for child in psutil.Process().children()} <= children
