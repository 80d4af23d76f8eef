"""Weights in a low precision are the same weights whatever the engine does meanwhile.

The other side is transformers in float32, given exactly the weights that our layers multiply with: what a
layer answers to the unit vectors. So greedy ids must equal its ids alone, batched, in chunks, preempted, from
a cold or a warm cache, as they do for the model's own weights.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.knob import KnobContext
from engine.knob_store import KnobStore, PatchRefused
from engine.layers.linear import LinearLayer
from engine.models.hf_folder import hf_name
from engine.models.linears import HEAD, PARTS, Place
from engine.weight_precision import WeightPrecision, quantized_bytes
from ipc.messages import KnobValue, Sampling
from tests import tiny_models
from tests.engine.core_harness import Engine, tiny_folder
from tests.engine.oracle import CHANGES, NEW_TOKENS, Expected, reference, tiny, told
from tests.engine.test_oracle import PLAIN, combination

PRECISIONS: dict[str, dict[str, Any]] = {
    "int8": {"weight_dtype": "int8"},
    "int8 with the head": {"weight_dtype": "int8", "high_precision": "none"},
    "int4 rounded": {"weight_dtype": "int4", "int4_method": "rtn"},
    "int4 awq": {"weight_dtype": "int4"},
    "int4 awq with the head": {"weight_dtype": "int4", "high_precision": "none"},
    "int4 awq but sensitive": {"weight_dtype": "int4", "high_precision": "sensitive"},
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "alone": {"together": False},
    "batched": {},
    "chunked": {"chunk": 7, "block_size": 1, "attention": "naive"},
    "one token at a time, warm": {"chunk": 1, "cache": "warm"},
    "preempted, warm": {"preempt": "for blocks", "cache": "warm"},
    "swapped, overlapping": {"preempt": "thrice each", "preemption": "swap", "overlap": True, "chunk": None},
}


def multiplied(linear: LinearLayer) -> Tensor:
    """The weight [out, in] that a layer multiplies with, bias left aside."""
    with torch.inference_mode():
        unit = linear(torch.eye(linear.shape[1]))
        return (unit - linear(torch.zeros(1, linear.shape[1]))).t().clone()


@functools.cache
def twin(architecture: str, name: str) -> Expected:
    """What transformers says with the weights of a precision."""
    plain = tiny(architecture)
    engine = Engine(plain.loaded, **PRECISIONS[name])
    model = tiny_models.reference(tiny_folder(architecture, **CHANGES.get(architecture, {})))
    parameters, shapes = dict(model.named_parameters()), plain.loaded.spec.weight_shapes()
    changed = 0
    for place, linear in engine.core.runner.decoder.linears.items():
        names = ["head"] if place == HEAD else [f"layers.{place.layer}.{p}.weight" for p in PARTS[place.part]]
        parts = multiplied(linear).split([shapes[each][0] for each in names])
        for each, part in zip(names, parts, strict=True):
            parameter = parameters[hf_name(each)]
            changed += int(not torch.allclose(parameter, part, rtol=1e-3, atol=1e-4))
            with torch.no_grad():
                parameter.copy_(part)
    assert changed >= 7, "the weights are those of the model"
    expected = reference(plain.loaded, model, plain.prompts, NEW_TOKENS)
    assert expected.ids != plain.ids
    return expected


@pytest.mark.parametrize("changes", COMBINATIONS.values(), ids=COMBINATIONS.keys())
@pytest.mark.parametrize("name", PRECISIONS)
def test_ids_are_those_of_the_converted_weights(name: str, changes: dict[str, Any]) -> None:
    """A31: each precision computes with its own weights exactly, whatever shares the step."""
    combination(twin("llama", name), PLAIN | changes, **PRECISIONS[name])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "speculation"), [
    ("int8", "ngram"), ("int8", "self"), ("int8 with the head", "self"), ("int4 rounded", "ngram"),
    ("int4 awq", "ngram"),
])  # fmt: skip
def test_drafts_leave_the_text_of_low_weights_alone(name: str, speculation: str, overlap: bool) -> None:
    """A15, A41: with speculation on and off the ids are those of the converted weights, cold and warm; a
    copy in 4 bits drafts for weights in 8."""
    expected = twin("llama", name)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = Engine(
        expected.loaded,
        drafter=told(expected),  # for ngram; it is right about two tokens of three
        speculation=speculation,
        spec_self_dtype="int4",
        spec_adaptive=False,
        overlap=overlap,
        **PRECISIONS[name],
    )
    for _ in range(2):
        expected.compare(engine.generate(expected.prompts, sampling))
    steps = engine.heard.steps
    assert 0 < sum(step.accepted_tok for step in steps) < sum(step.drafted_tok for step in steps)
    engine.set(speculation="off")
    expected.compare(engine.generate(expected.prompts, sampling))
    assert engine.heard.steps[-1].drafted_tok == 0


def test_weights_in_4_bits_have_no_lighter_copy_to_draft_with() -> None:
    """A41: the pair of int4 and ``self`` is refused by name, at start and while running."""
    plain = tiny("llama")
    for lighter in ("int4", "int8"):
        with pytest.raises(PatchRefused, match="choose fewer bits for the draft or more for the model"):
            Engine(plain.loaded, weight_dtype="int4", speculation="self", spec_self_dtype=lighter)
        engine = Engine(plain.loaded, weight_dtype="int4", int4_method="rtn", spec_self_dtype=lighter)
        engine.set(speculation="self")
        engine.run()
        assert engine.heard.applies[-1].result == "rolled_back"
        assert f"speculation=self in {lighter} needs weights" in engine.heard.applies[-1].why


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ["int8", "int4 awq"])
def test_ids_of_other_architectures(architecture: str, name: str) -> None:
    """With biases on fused layers, norms of heads, and windows."""
    combination(twin(architecture, name), PLAIN | {"chunk": 7}, **PRECISIONS[name])


@pytest.mark.parametrize("changes", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_fp8_rounds_each_tokens_activations_by_itself(changes: dict[str, Any]) -> None:
    """Weights and activations are in fp8, which transformers does not compute; so the ids of requests that
    ran alone are what others are held against. A sum that differs in its last bit may round an activation
    the other way, 1/16 of it; none of these prompts is so near a tie."""
    plain = tiny("llama")
    engine = Engine(plain.loaded, weight_dtype="fp8")
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    alone = [engine.generate([prompt], sampling)[0] for prompt in plain.prompts]
    assert alone != plain.ids
    clear = [[1.0] * NEW_TOKENS for _ in alone]
    combination(Expected(plain.loaded, plain.prompts, alone, clear), PLAIN | changes, weight_dtype="fp8")


def test_knobs_without_effect_leave_no_trace() -> None:
    values = dict(KnobStore(KnobContext()).values)

    def of(**changes: KnobValue) -> WeightPrecision:
        return WeightPrecision.of({**values, **changes})

    assert of() == of(int4_method="rtn", high_precision="ends") == WeightPrecision()
    assert of(weight_dtype="int8") == of(weight_dtype="int8", int4_method="rtn")
    assert of(weight_dtype="int4") != of(weight_dtype="int4", int4_method="rtn")
    assert of(weight_dtype="int8") != of(weight_dtype="int8", high_precision="ends")
    names = {of(weight_dtype=kind, high_precision=high).name for kind in ("fp8", "int8", "int4")
             for high in ("none", "head", "ends", "sensitive")}  # fmt: skip
    assert len(names) == 12
    assert of(weight_dtype="int4").name == "int4 awq, head kept"


def test_which_layers_keep_their_precision() -> None:
    def kept(high: Any, errors: list[float] | None = None) -> set[str]:
        precision = WeightPrecision("int8", "", high)
        places = [Place(i, "qkv") for i in range(16)] + [HEAD]
        return {place.name for place in places if precision.keeps(place, 16, errors)}

    assert kept("none") == set()
    assert kept("head") == {"head"}
    assert kept("ends") == {"head", "layers.0.qkv", "layers.15.qkv"}
    errors = [0.1] * 16
    errors[3], errors[9], errors[4] = 0.9, 0.8, 0.7
    assert kept("sensitive", errors) == {"head", "layers.3.qkv", "layers.9.qkv"}
    assert kept("sensitive") == {"head"}  # before they were measured
    assert WeightPrecision().keeps(HEAD, 16)


def test_estimates_are_never_less_than_what_a_weight_takes() -> None:
    assert quantized_bytes("int8", 512, 256) == 512 * 256 + 4 * 512
    assert quantized_bytes("int4", 512, 256) == 512 * 128 + 5 * 512 * 2 + 4 * 256
    assert quantized_bytes("int4", 500, 96) == 512 * 48 + 4 * 512 * 3 + 4 * 96
