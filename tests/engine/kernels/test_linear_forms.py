"""The kernels as forms of quantized weights: offered on a GPU, tried here through the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import availability, weight_only_gemm
from engine.kernels.launch import Launch
from engine.layers.precision import (
    Fp8BlockWeight,
    Int4Weight,
    Int8Weight,
    Kind,
    PrecisionForm,
    QuantizedLinear,
    QuantizedWeight,
    choice,
    choose_precision,
    forms_cuda,
    forms_triton,
    parts,
    quantize,
    quantize_int4,
)
from engine.layers.precision.codes import pack_nibbles
from engine.layers.precision.forms import error_of, form_of, probe
from engine.layers.precision.measuring import PROBE_ROWS
from engine.layers.precision.product import Offer, held_bytes
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.kernels.support import DEVICE, randn


def forms(kind: Kind) -> dict[str, PrecisionForm]:
    return {offer.name: form_of(kind, offer) for offer in forms_triton.OFFERED[kind]}


def ints(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int, seed: int = 2) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def permutation(cols: int) -> Tensor:
    return torch.randperm(cols, generator=torch.Generator().manual_seed(4))


def int4(out: int, cols: int, group: int, **more: Any) -> Int4Weight:
    groups = -(-cols // group)
    codes = pack_nibbles(ints(0, 16, out, cols, seed=1))
    return Int4Weight(codes, scales(groups, out), group, **more).to(DEVICE)


def int8(out: int, cols: int, group: int, **more: Any) -> Int8Weight:
    codes = ints(-128, 128, out, cols, seed=1).to(torch.int8)
    return Int8Weight(codes, scales(-(-cols // group), out), group, **more).to(DEVICE)


def weights() -> dict[str, QuantizedWeight]:
    """Zeros in their whole range, groups of 32 to 128, other orders and scales of the input channels."""
    made: dict[str, QuantizedWeight] = {
        f"int4 groups of {group}": int4(48, 384, group, zeros=ints(0, 17, 384 // group, 48, seed=3).byte())
        for group in (32, 64, 128)
    }
    made["int4 act-order"] = int4(32, 256, 128, order=permutation(256))
    made["int4 awq"] = quantize_int4(
        randn(32, 256).cpu(), importance=torch.rand(256, generator=torch.Generator().manual_seed(6)) ** 4
    ).to(DEVICE)
    made["int8 a channel"] = quantize(randn(48, 256, seed=1).cpu() * 0.1, "int8").to(DEVICE)
    made["int8 act-order"] = int8(
        32, 192, 64, zeros=ints(-128, 129, 3, 32, seed=3).short(), order=permutation(192)
    )
    made["int8 one large group"] = int8(16, 96, 1000)
    made["fp8"] = quantize(randn(48, 128, seed=1).cpu() * 0.1, "fp8").to(DEVICE)
    return made


WEIGHTS = weights()
EXPANDED = [offer for offer in forms_cuda.OFFERED["fp8"] if offer.name.startswith("dequant")]


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_the_engine_would_offer_them(kind: Kind) -> None:
    """As on a card: each is tried on small weights, ordinary and extreme ones, before it is used."""
    offered = {offer.name for offer in forms_cuda.OFFERED[kind]}
    for name, form in forms(kind).items():
        assert name in offered
        assert probe(form, DEVICE) is None


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_form_is_tried_with_input_channels_shared_too(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of programs are added by a kernel of their own, which may be wrong where no other is."""
    run = Launch.run

    def losing(launch: Launch) -> None:
        if launch.kernel is weight_only_gemm._add_splits:
            launch = replace(launch, arguments={**launch.arguments, "splits": launch.arguments["splits"] - 1})
        run(launch)

    monkeypatch.setattr(Launch, "run", losing)
    assert "off by" in str(probe(forms(kind)["triton"], DEVICE))


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_of_the_expanded_weight(name: str) -> None:
    weight = WEIGHTS[name]
    for form in forms(weight.kind).values():
        assert form.refuses(weight) is None
        for rows in (1, 19):
            x = randn(rows, weight.shape[1], seed=rows)
            assert error_of(form, weight, x) <= form.error, form.name


def test_what_does_not_fit_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Fp8BlockWeight(randn(32, 32).to(torch.float8_e4m3fn), scales(2, 2).to(DEVICE), (16, 16))
    assert "one scale an output channel" in str(forms("fp8")["triton-scaled_mm"].refuses(blocks))
    form = forms("int4")["triton"]
    assert "groups of a multiple of 32 input channels, not 16" in str(form.refuses(int4(16, 64, 16)))
    assert "groups of a multiple of 32 input channels, not 100" in str(form.refuses(int4(16, 300, 100)))
    assert "multiple of 16 output channels, not 24" in str(form.refuses(int4(24, 64, 32)))
    assert "int8 or int4 codes" in str(form.refuses(blocks))
    with pytest.raises(ValueError, match="triton cannot serve this int4 weight: it needs groups"):
        form.build(int4(16, 64, 16), None, torch.float32)
    monkeypatch.setattr(availability, "probe", lambda device: "no kernel runs here")
    assert form.refuses(int4(16, 64, 32)) == "no kernel runs here"
    assert forms("fp8")["triton-scaled_mm"].refuses(WEIGHTS["fp8"]) == "no kernel runs here"


@pytest.mark.parametrize("name", ["int4 groups of 128", "int8 a channel", "fp8"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Nor on which of two runs it is: splits are added in a fixed order, not as they come."""
    weight = WEIGHTS[name]
    x = randn(12, weight.shape[1])
    louder = torch.cat((x[:5], x[5:] * 1000))
    for form in forms(weight.kind).values():
        multiply = form.build(weight, None, torch.float32)
        first = multiply(x)
        assert torch.equal(first[:5], multiply(louder)[:5]), form.name
        assert torch.equal(first, multiply(x))


def test_few_rows_are_widened_many_expanded_and_the_name_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows from which another kernel serves is that of the measured choice, and shown."""
    few, many = forms("int4")["triton"], forms("int4")["triton-dequant"]
    monkeypatch.setattr(choice, "precision_forms", lambda *_: [few, few, many])
    monkeypatch.setattr(
        choice,
        "measure",
        lambda *_: {
            few: dict(zip(PROBE_ROWS, (1, 1, 1, 2, 9), strict=True)),
            many: dict.fromkeys(PROBE_ROWS, 3),
        },
    )
    weight = WEIGHTS["int4 awq"]
    found = choose_precision("int4", [weight], DEVICE)
    assert found.name == "int4:triton:1+triton-dequant:65"
    layer = QuantizedLinear(weight, None, found)
    assert [layer.kernel(rows) for rows in (1, 64, 65)] == [
        "int4:triton",
        "int4:triton",
        "int4:triton-dequant",
    ]
    alone = QuantizedLinear(weight, None, replace(found, from_rows=(1,), forms=(few,)))
    assert layer.nbytes == alone.nbytes, "both hold the same tensors"
    assert alone.nbytes == 32 * 256 / 2 + 2 * 32 * (2 + 1) + 256 * 4, "codes, scales, zeros, AWQ's factors"
    x = randn(70, 256)
    whole = x @ weight.dequantize().t()
    torch.testing.assert_close(layer(x), whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))


class _NothingAsked(TorchDispatchMode):
    """Fails where the host would wait for the device, or something would be copied from or to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), name
        assert "device" not in (kwargs or {}) or not name.startswith("aten::_to_copy"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_ask_the_device_nothing(name: str) -> None:
    """So that CUDA graphs can be captured: weights are checked when they are made, not at each call."""
    weight = WEIGHTS[name]
    expanded = [form_of(weight.kind, offer) for offer in EXPANDED]
    for form in (*forms(weight.kind).values(), *expanded):
        multiply = form.build(weight, None, torch.float32)
        x = randn(3, weight.shape[1])
        with _NothingAsked():
            multiply(x)


def test_int8_codes_are_not_held_again() -> None:
    weight = WEIGHTS["int8 a channel"]
    built = tuple(form.build(weight, None, torch.float32) for form in forms("int8").values())
    assert isinstance(weight, Int8Weight)
    assert held_bytes(built) == weight.codes.nbytes + weight.scales.nbytes


@pytest.mark.parametrize("offer", EXPANDED, ids=lambda offer: offer.name)
def test_weights_are_expanded_part_by_part(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a part of a weight is ever there in 16 or 32 bits: on a card a head's is gigabytes."""
    odd = Fp8BlockWeight(randn(50, 36).to(torch.float8_e4m3fn), scales(4, 3).to(DEVICE), (16, 12))
    whole = [(weight, error_of(form_of(weight.kind, offer), weight, randn(3, weight.shape[1])))
             for weight in (*WEIGHTS.values(), odd)]  # fmt: skip
    monkeypatch.setattr(parts, "PART_ELEMENTS", 20 * 36)
    largest: list[int] = []
    for cls in {type(weight) for weight, _ in whole}:
        real = cls.dequantize

        def noting(weight: Any, real: Any = real) -> Tensor:
            largest.append(weight.shape[0] * weight.shape[1])
            return real(weight)

        monkeypatch.setattr(cls, "dequantize", noting)
    for weight, error in whole:
        form = form_of(weight.kind, offer)
        multiply = form.build(weight, None, torch.float32)
        largest.clear()
        y = multiply(randn(3, weight.shape[1]))
        assert len(largest) > 1
        assert max(largest) <= 20 * 36
        assert y.shape == (3, weight.shape[0])
        assert error_of(form, weight, randn(3, weight.shape[1])) <= max(error, form.error)


def test_each_step_names_the_kernel_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights brought to int8 in a running engine: few rows are widened, a long prompt is not."""
    few, many = forms("int8").values()
    monkeypatch.setattr(choice, "precision_forms", lambda *_: [few, few, many])
    monkeypatch.setattr(
        choice,
        "measure",
        lambda *_: {
            few: dict(zip(PROBE_ROWS, (1, 1, 9, 9, 9), strict=True)),
            many: dict.fromkeys(PROBE_ROWS, 3),
        },
    )
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
    loaded = load(tiny_folder("llama", head_dim=8, **sizes), torch.bfloat16)
    engine = Engine(loaded, weight_dtype="int8")
    rid = engine.submit(list(range(5, 17)), Sampling(max_tokens=3, ignore_eos=True))
    engine.run()
    assert len(engine.ids(rid)) == 3
    ran = [step.kernels.partition(",")[0] for step in engine.heard.steps]
    assert ran == ["linear=int8:triton-dequant", "linear=int8:triton", "linear=int8:triton"]
