"""The kernels in the place of torch's operations, in whole engines: the text is that of the reference."""

from __future__ import annotations

import pytest
import torch

from engine.ops import choice, triton_ops
from engine.ops.plain import PLAIN
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import CPU, prompt
from tests.engine.kernels.support import interpreted_only
from tests.engine.oracle import tiny

pytestmark = interpreted_only

COUNT = 6
NAMES = {"fused_norm": "norm=triton", "fused_rope_kv": "rope_kv=triton", "fused_mlp": "mlp=triton"}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's fused parts are these kernels here."""
    monkeypatch.setattr(choice, "sources", lambda device: (triton_ops,))


def kernels(engine: Engine) -> set[str]:
    """What ran beside the linear layers, over all steps."""
    parts = (part for step in engine.heard.steps for part in step.kernels.split(","))
    return {part for part in parts if part.endswith("=triton")}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("knob", choice.FUSED)
def test_each_is_switched_while_requests_run(knob: str, architecture: str) -> None:
    """A01: on, off and on again between steps; ids are those of transformers, and rows say what ran."""
    expected = tiny(architecture)
    engine = Engine(expected.loaded, **{knob: True})
    rids = [
        engine.submit(expected.prompts[which], Sampling(max_tokens=COUNT, ignore_eos=True))
        for which in (2, 3)
    ]
    for step in range(3):
        engine.core.step()
        engine.set(**{knob: step % 2 == 1})
        engine.core.step()
    engine.run()
    for rid, which in zip(rids, (2, 3), strict=True):
        assert engine.ids(rid) == expected.ids[which][:COUNT]
    assert kernels(engine) == {NAMES[knob]}
    assert {NAMES[knob] in step.kernels for step in engine.heard.steps} == {True, False}
    assert engine.core.runner.ops.norm is PLAIN.norm or knob == "fused_norm"


@pytest.mark.parametrize("kv_dtype", ["model", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_all_together_over_any_pool(kv_dtype: str, attention: str) -> None:
    """A31: with norms of heads, chunks, and keys and values in 8 bits, the same ids as without."""
    knobs: dict[str, KnobValue] = {
        "kv_dtype": kv_dtype, "attention": attention, "prefill_chunk_tokens": 16, "forward_timing": True,
    }  # fmt: skip
    answers = []
    for on in (False, True):
        engine = Engine(load(tiny_folder("qwen3")), **knobs)
        engine.set(**dict.fromkeys(choice.FUSED, on))  # now that a long text was read for the scales
        rid = engine.submit(prompt(21), Sampling(max_tokens=COUNT, ignore_eos=True))
        engine.run()
        answers.append(engine.ids(rid))
    assert answers[0] == answers[1]
    assert kernels(engine) == set(NAMES.values())
    assert engine.heard.steps[-1].attention_us is not None


def test_drafts_of_the_model_itself_are_fused_too() -> None:
    """The copy that drafts follows the switch, before and after it was made."""
    expected = tiny("llama")
    engine = Engine(expected.loaded, speculation="self", spec_adaptive=False, fused_norm=True)
    rid = engine.submit(expected.prompts[3], Sampling(max_tokens=COUNT, ignore_eos=True))
    engine.run()
    drafter = engine.core.drafts._drafter
    assert drafter is not None
    drafting = drafter()
    assert drafting is not None
    assert drafting._decoder.ops.norm.name == "triton"
    assert engine.ids(rid) == expected.ids[3][:COUNT]
    engine.set(fused_norm=False)
    engine.run()
    assert drafting._decoder.ops.norm is PLAIN.norm


def test_what_a_kernel_cannot_hold_has_a_reason() -> None:
    """Sizes and dtypes are looked at before anything is launched."""
    spec = load(tiny_folder("llama")).spec
    assert not set(choice.FUSED) & set(choice.reasons(spec, CPU, torch.float32))
    reasons = choice.reasons(spec, CPU, torch.float64)
    assert set(choice.FUSED) <= set(reasons)
    assert "not torch.float64" in reasons["fused_norm"]
    with pytest.raises(ValueError, match="fused_mlp cannot be switched on: silu_mul needs bfloat16"):
        choice.make_ops({"fused_mlp": True}, spec, CPU, torch.float64)
