"""Norms and activations that write what products in fp8 take, against products that quantize themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.converter import _Watched
from engine.kernels.launch import Launch
from engine.kernels.quantize import quantize
from engine.kernels.warm import _nobody
from engine.layers.linear import JoinedLinear, Linear, plain_choice
from engine.layers.precision import (
    PrecisionChoice,
    PrecisionForm,
    QuantizedLinear,
    choice,
    forms_triton,
    quantize_fp8,
)
from engine.layers.precision.forms import REFERENCE, form_of
from engine.layers.quantized import QuantizedRows
from engine.ops import choice as parts
from engine.ops import triton_ops
from engine.runner import ModelRunner
from engine.weight_precision import High, WeightPrecision
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.driving import CPU, prompt
from tests.engine.kernels.support import DEVICE, interpreted_only, randn

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
LAYERS = 3
FUSED = {"fused_norm": True, "fused_mlp": True}
EXPANDED, SCALED = form_of("fp8", REFERENCE), form_of("fp8", forms_triton.OFFERED["fp8"][0])
assert SCALED.name == "triton-scaled_mm"


def layer(out: int, cols: int, seed: int, *starts: tuple[int, PrecisionForm], **more: Any) -> QuantizedLinear:
    """A layer in fp8, whose forms serve from their numbers of rows on."""
    numbers, forms = zip(*(starts or ((1, SCALED),)), strict=True)
    weight = quantize_fp8(randn(out, cols, seed=seed).cpu()).to(DEVICE)
    return QuantizedLinear(weight, randn(out, seed=9), PrecisionChoice(numbers, forms, "fp8"), **more)


def codes_of(x: Tensor) -> QuantizedRows:
    made = QuantizedRows.empty(*x.shape, x.device)
    quantize(x, made.codes, made.scales).run()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_product_is_the_same_whoever_quantized(rows: int, dtype: torch.dtype) -> None:
    """With a bias, and several layers side by side."""
    x = randn(rows, 64, dtype=dtype)
    one, other = (layer(out, 64, out, out_dtype=dtype) for out in (32, 48))
    for each in (one, JoinedLinear([one, other])):
        assert each.takes_codes(rows)
        assert torch.equal(each(codes_of(x)), each(x))


def test_only_what_multiplies_in_fp8_takes_codes() -> None:
    """By the number of rows, as forms serve; never rows that nobody computes, nor what is only looked at."""
    mixed = layer(32, 64, 1, (1, EXPANDED), (4, SCALED), (40, EXPANDED))
    assert [mixed.takes_codes(rows) for rows in (0, 1, 3, 4, 39, 40, 1000)] == [
        False, False, False, True, True, False, False,
    ]  # fmt: skip
    scaled = layer(32, 64, 1)
    assert [scaled.takes_codes(rows) for rows in (0, 1, 1000)] == [False, True, True]
    wide = Linear(randn(32, 64), None, plain_choice(torch.float32))
    assert not wide.takes_codes(4)
    assert not JoinedLinear([mixed, wide]).takes_codes(4), "one part wants the rows themselves"
    assert not _Watched(scaled, lambda x: None, multiply=True).takes_codes(4)


@pytest.fixture
def in_fp8(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU's fp8 and fused parts are those of a card; what was launched, by the names of kernels."""
    monkeypatch.setattr(parts, "sources", lambda device: (triton_ops,))
    monkeypatch.setattr(choice, "precision_forms", lambda *_: [EXPANDED, SCALED])
    launched: list[str] = []
    run = Launch.run

    def noting(launch: Launch) -> None:
        codes = "codes" in launch.arguments or launch.arguments.get("scale") is not None
        launched.append(launch.kernel.__name__ + (" e4m3" if codes else ""))
        run(launch)

    monkeypatch.setattr(Launch, "run", noting)
    return launched


def runner_in_fp8(high: High, dtype: torch.dtype) -> ModelRunner:
    loaded = load(tiny_folder("llama", head_dim=8, num_hidden_layers=LAYERS, **SIZES), dtype)
    precision = WeightPrecision("fp8", "", high)
    runner = ModelRunner(
        loaded, device=CPU, dtype=dtype, measure=False, precision=precision, calibration_ids=prompt(6)
    )
    runner.allocate_kv(4, 16)
    return runner


def logits(runner: ModelRunner, tokens: int) -> Tensor:
    assert runner.kv is not None
    rows, ids, slots = _nobody(tokens, runner.kv, 1)
    ids += torch.arange(5, 5 + tokens)
    plan = runner.attention.plan(rows, runner.kv, runner.spec, torch.from_numpy)
    with torch.inference_mode():
        return runner.decoder.forward(ids, torch.arange(tokens), slots, plan, runner.kv, None)


@interpreted_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("high", "norms", "activations"), [("none", 7, 3), ("head", 6, 3), ("ends", 2, 1)])
def test_each_part_writes_what_its_product_takes(
    in_fp8: list[str],
    monkeypatch: pytest.MonkeyPatch,
    high: High,
    norms: int,
    activations: int,
    dtype: torch.dtype,
) -> None:
    """Of three layers and the head, those in fp8 get their input so; logits are equal to the last bit."""
    runner = runner_in_fp8(high, dtype)
    runner.set_fused(FUSED)
    for tokens in (1, 4):
        in_fp8.clear()
        fused = logits(runner, tokens)
        ran = Counter(in_fp8)
        assert (ran["_add_rmsnorm e4m3"], ran["_add_rmsnorm"]) == (norms, 2 * LAYERS + 1 - norms)
        assert (ran["_silu_mul e4m3"], ran["_silu_mul"]) == (activations, LAYERS - activations)
        assert ran["_quantize e4m3"] == activations, "what attention gives is quantized by its product"
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedLinear, "takes_codes", lambda *_: False)
            in_fp8.clear()
            apart = logits(runner, tokens)
        ran = Counter(in_fp8)
        assert (ran["_add_rmsnorm"], ran["_silu_mul"]) == (2 * LAYERS + 1, LAYERS)
        assert ran["_quantize e4m3"] == norms + 2 * activations
        assert torch.equal(fused, apart)


@interpreted_only
def test_each_step_names_what_it_ran(in_fp8: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From three rows on the product is another, so that a prompt and its answer are computed differently;
    with each knob on its own, and where the ends of the model keep their precision."""
    monkeypatch.setattr(
        "engine.models.linears.choose_precision",
        lambda *_, **__: PrecisionChoice((1, 3), (EXPANDED, SCALED), "fp8"),
    )
    loaded = load(tiny_folder("llama", head_dim=8, num_hidden_layers=LAYERS, **SIZES))
    engine = Engine(loaded, weight_dtype="fp8", high_precision="head")
    answers = []
    for knobs, long, short in (
        (dict.fromkeys(FUSED, False), "", ""),
        (FUSED, "norm=triton+e4m3,mlp=triton+e4m3", "norm=triton,mlp=triton"),
        ({"fused_mlp": False}, "norm=triton+e4m3", "norm=triton"),
        ({"fused_mlp": True, "fused_norm": False}, "mlp=triton+e4m3", "mlp=triton"),
    ):  # fmt: skip
        engine.set(**knobs)
        engine.run()
        engine.heard.steps.clear()
        rid = engine.submit(prompt(4), Sampling(max_tokens=2, ignore_eos=True))
        engine.run()
        answers.append(engine.ids(rid))
        told = [step.kernels.partition(",activations=float32")[2].lstrip(",") for step in engine.heard.steps]
        assert told == [long, short]
    assert all(answer == answers[0] for answer in answers)
    engine.set(high_precision="ends", fused_norm=True)
    engine.run()
    mixed = "norm=triton|triton+e4m3,mlp=triton|triton+e4m3"
    assert engine.core.runner.kernels.endswith(mixed)


@interpreted_only
def test_weights_are_studied_while_parts_quantize(in_fp8: list[str]) -> None:
    """What looks at the inputs of layers gets them as they are; then all but the worst layer take codes."""
    runner = runner_in_fp8("none", torch.float32)
    runner.set_fused(FUSED)
    assert runner.decoder.takes_codes(1) == ((True,), (True,))
    in_fp8.clear()
    runner.set_precision(WeightPrecision("fp8", "", "sensitive"), lambda *_: None)
    assert "_add_rmsnorm" in in_fp8
    assert "_add_rmsnorm e4m3" not in in_fp8
    assert [set(taken) for taken in runner.decoder.takes_codes(1)] == [{True, False}] * 2
