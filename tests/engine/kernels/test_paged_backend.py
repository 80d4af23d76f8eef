"""``attention=paged`` with the Triton kernel, in the engine: rows of every kind, windows, drafts, 8 bits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import get_backend, paged, paged_triton, probe
from engine.kernels import attention_rows
from engine.ops import choice, triton_ops
from ipc.messages import KnobValue, Sampling
from tests.engine.attention.mixed_rows import check_mixed_rows
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import CPU, prompt
from tests.engine.kernels.support import interpreted_only
from tests.engine.oracle import tiny, told

pytestmark = interpreted_only

COUNT = 4


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU has, a CPU has here."""
    monkeypatch.setattr(paged, "source", lambda device: paged_triton)
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))
    # Programs without work take the interpreter's time too.
    monkeypatch.setattr(attention_rows, "GRID", 48)
    monkeypatch.setattr(paged_triton, "INTERPRETED_PROGRAMS", 3)


@pytest.mark.parametrize(("window", "block_size"), [(None, 16), (8, 4)])
def test_mixed_rows_equal_attention_over_the_tokens_themselves(
    window: int | None, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are split and rows that are not, in one step. See `check_mixed_rows`."""
    monkeypatch.setattr(paged_triton, "INTERPRETED_PROGRAMS", 8)
    check_mixed_rows(get_backend("paged", CPU), window, block_size)


@pytest.mark.parametrize(
    ("architecture", "knobs"),
    [
        ("llama", {"fused_norm": True, "fused_rope_kv": True, "fused_mlp": True}),
        ("qwen2", {}),
        ("qwen3", {"fused_rope_kv": True, "block_size": 4}),
        ("llama", {"speculation": "ngram", "spec_adaptive": False}),
        ("mistral", {"speculation": "ngram", "spec_adaptive": False, "fused_rope_kv": True}),
    ],
)
def test_ids_are_those_of_transformers(architecture: str, knobs: dict[str, KnobValue]) -> None:
    """A01, A03: grouped heads, windows whose blocks were given up, drafts, chunks beside decoding rows, and a
    request that is preempted and computed again."""
    expected = tiny(architecture)
    chunk = 20 if architecture == "mistral" else 9
    engine = Engine(
        expected.loaded, drafter=told(expected), attention="paged", prefill_chunk_tokens=chunk, **knobs
    )
    which = (0, 3) if architecture == "mistral" else (2, 3)  # the first is longer than the window
    sampling = Sampling(max_tokens=COUNT, ignore_eos=True)
    rids = [engine.submit(expected.prompts[each], sampling) for each in which]
    engine.core.step()
    engine.core.step()
    scheduler = engine.core.scheduler
    engine.core.answers.note_preempted([scheduler.preempt(scheduler.running[0], 0)])
    engine.run()
    expected_ids = [expected.ids[each][:COUNT] for each in which]
    assert [engine.ids(rid) for rid in rids] == expected_ids
    assert {step.attention for step in engine.heard.steps} == {"paged"}


@pytest.mark.parametrize(("kv_dtype", "fused"), [("fp8_e4m3", True), ("int8", False)])
def test_keys_and_values_in_8_bits_give_what_sdpa_gives(kv_dtype: str, fused: bool) -> None:
    """A31: with the same scales, whoever writes the codes."""
    answers = []
    for attention in ("sdpa", "paged"):
        engine = Engine(load(tiny_folder("qwen3")), kv_dtype=kv_dtype)
        engine.set(attention=attention, fused_rope_kv=fused and attention == "paged")
        rids = [engine.submit(prompt(n), Sampling(max_tokens=COUNT, ignore_eos=True)) for n in (9, 2)]
        engine.run()
        answers.append([engine.ids(rid) for rid in rids])
    assert answers[0] == answers[1]


def test_what_the_kernel_cannot_hold_has_a_reason() -> None:
    spec = load(tiny_folder("llama")).spec
    assert probe("paged", spec, CPU, torch.float32) is None
    wide = replace(spec, head_dim=512)
    assert "heads of at most 256" in str(probe("paged", wide, CPU, torch.float32))


def test_memory_for_parts_only_grows_whoever_asks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is planned while a shape is captured, which must find what the run before it left."""
    scratch = paged_triton._Scratch(CPU)
    other = threading.Thread(target=scratch.parts, args=(40, 2, 16, 8))
    empty = torch.empty

    def slow(count: int, **options: Any) -> torch.Tensor:
        if not other.ident:
            other.start()
            other.join(0.1)
        return empty(count, **options)

    monkeypatch.setattr(paged_triton.torch, "empty", slow)
    parts = scratch.parts(3, 2, 16, 4)
    other.join()
    assert parts.values.shape == (3, 2, 4, 16)
    assert len(scratch._held) == 40 * 2 * 8 * 18
