"""Every form of a product agrees with the expanded weight, for every kind of weight that it takes."""

from __future__ import annotations

import functools
import gc
import logging
from dataclasses import replace

import pytest
import torch

from engine.layers.precision import (
    KINDS,
    Fp8BlockWeight,
    Int4Weight,
    Int8Weight,
    Kind,
    QuantizedWeight,
    forms,
    int4pack,
    precision_forms,
    quantize,
    quantize_int4,
    refused_forms,
)
from engine.layers.precision.codes import pack_nibbles
from engine.layers.precision.forms import error_of, probe
from engine.layers.precision.forms_cpu import expanded_bf16
from engine.layers.precision.product import Multiply, held_bytes

CPU = torch.device("cpu")


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=random(seed))


def grouped_int8(out: int, cols: int, group: int) -> Int8Weight:
    groups = -(-cols // group)
    return Int8Weight(
        torch.randint(-128, 128, (out, cols), generator=random(1), dtype=torch.int8),
        torch.rand(groups, out, generator=random(2)) + 0.01,
        group,
        zeros=torch.randint(-128, 129, (groups, out), generator=random(3), dtype=torch.int16),
        order=torch.randperm(cols, generator=random(4)),
    )


def grouped_int4(out: int, cols: int, group: int, *, zeros: bool = True) -> Int4Weight:
    groups = -(-cols // group)
    return Int4Weight(
        pack_nibbles(torch.randint(0, 16, (out, cols), generator=random(1))),
        torch.rand(groups, out, generator=random(2)) + 0.01,
        group,
        zeros=torch.randint(0, 17, (groups, out), generator=random(3)).to(torch.uint8) if zeros else None,
        order=torch.randperm(cols, generator=random(4)),
        input_scale=torch.rand(cols, generator=random(5)) + 0.5,
    )


def weights(kind: Kind) -> list[QuantizedWeight]:
    """Odd shapes, groups that do not divide, orders, blocks, and more rows than are expanded at once."""
    plain = [quantize(normal(*shape) * 0.1, kind) for shape in ((48, 64), (50, 36), (2000, 576), (7, 2))]
    if kind == "fp8":
        codes = normal(50, 36).to(torch.float8_e4m3fn)
        scales = torch.rand(4, 3, generator=random(1)) + 0.1
        return [
            *plain,
            Fp8BlockWeight(codes, scales, (16, 12)),
            Fp8BlockWeight(codes, scales[:, :2], (16, 20)),
        ]
    if kind == "int8":
        return [*plain, grouped_int8(50, 36, 16), grouped_int8(16, 64, 64), grouped_int8(16, 64, 100)]
    scaled = quantize_int4(normal(48, 64), 32, importance=torch.rand(64, generator=random(6)) ** 4)
    return [
        *plain,
        scaled,
        grouped_int4(50, 64, 32),
        grouped_int4(50, 36, 16),
        grouped_int4(16, 96, 64),
        grouped_int4(100, 64, 64, zeros=False),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_computes_the_product_within_its_stated_error(kind: Kind) -> None:
    served = set()
    for weight in weights(kind):
        for form in precision_forms(kind, CPU):
            if form.refuses(weight) is not None:
                with pytest.raises(ValueError, match=f"{form.name} cannot serve this {kind} weight"):
                    form.build(weight, None, torch.float32)
                continue
            served.add(form.name)
            for rows in (1, 2, 33):
                x = normal(rows, weight.shape[1], seed=rows)
                assert error_of(form, weight, x) <= form.error, (form.name, weight.shape)
    assert served == {form.name for form in precision_forms(kind, CPU)}


@pytest.mark.parametrize("kind", KINDS)
def test_bias_dtypes_and_no_rows(kind: Kind) -> None:
    weight = quantize(normal(48, 64), kind)
    bias = normal(48, seed=2)
    x = normal(5, 64, seed=3)
    want = x @ weight.dequantize().t() + bias
    for form in precision_forms(kind, CPU):
        for dtype in (torch.float32, torch.bfloat16):
            product = form.build(weight, bias.to(dtype), dtype)
            got = product(x.to(dtype))
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), want, rtol=0.05, atol=1.5)
            assert product(x[:0].to(dtype)).shape == (0, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_new_tensors_that_a_later_call_does_not_change(kind: Kind) -> None:
    weight = quantize(normal(48, 64), kind)
    for form in precision_forms(kind, CPU):
        product = form.build(weight, None, torch.float32)
        first = product(normal(5, 64))
        kept = first.clone()
        product(normal(5, 64, seed=1))
        assert torch.equal(first, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_products_work_in_and_out_of_inference_mode(kind: Kind) -> None:
    """In any order: the memory that they reuse must not be bound to the mode it was made in."""
    x = normal(3, 640)
    for form in precision_forms(kind, CPU):
        with torch.inference_mode():
            product = form.build(quantize(normal(1024, 640), kind), None, torch.float32)
            inside = product(x)
        assert torch.equal(inside, product(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_others_of_its_batch(kind: Kind) -> None:
    """Activations are quantized token by token, so that no batch mate can change a text."""
    weight = quantize(normal(48, 64), kind)
    x = normal(20, 64)
    louder = torch.cat((x[:10], x[10:] * 1000))
    for form in precision_forms(kind, CPU):
        product = form.build(weight, None, torch.float32)
        assert torch.equal(product(x)[:10], product(louder)[:10]), form.name


def test_a_form_that_computes_wrongly_here_is_found_out() -> None:
    right = precision_forms("int8", CPU)[1]

    def saturating(weight: QuantizedWeight, _: dict[str, torch.Tensor]) -> Multiply:
        whole = weight.dequantize()
        return Multiply(lambda x: (x @ whole.t()).clamp(-100, 100), ())

    def failing(weight: QuantizedWeight, _: dict[str, torch.Tensor]) -> Multiply:
        raise NotImplementedError("no such kernel\nmore about it")

    assert probe(right, CPU) is None
    why = probe(replace(right, builder=saturating), CPU)
    assert why is not None
    assert "off by" in why
    assert probe(replace(right, builder=failing), CPU) == "it does not run here: no such kernel"
    nan = replace(
        right, builder=lambda w, _: Multiply(lambda x: x.new_full((len(x), w.shape[0]), torch.nan), ())
    )
    assert probe(nan, CPU) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_forms_say_what_they_are(kind: Kind) -> None:
    forms = precision_forms(kind, CPU)
    assert forms[0].name == "reference"
    names = [form.name for form in forms]
    assert len(set(names)) == len(names)
    assert not set(names) & set(refused_forms(kind, CPU))
    assert all(form.kind == kind for form in forms)


def test_rows_that_the_int8_kernel_would_read_beyond_are_refused() -> None:
    """It loads whole vectors: 36 input channels end in a segmentation fault, or in NaN."""
    form = next(form for form in precision_forms("int8", CPU) if form.name == "int8pack")
    why = form.refuses(quantize(normal(48, 36), "int8"))
    assert why == "it needs a multiple of 32 input channels, not 36"
    assert form.refuses(quantize(normal(7, 96), "int8")) is None


def test_the_kernels_of_this_torch_are_there() -> None:
    """Those that issue from torch itself on every x86 CPU; others depend on the machine."""
    assert "int8pack" in {form.name for form in precision_forms("int8", CPU)}
    assert "int4pack" in {form.name for form in precision_forms("int4", CPU)}
    assert "scaled_mm" in {form.name for form in precision_forms("fp8", CPU)}


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_products_of_expanded_weights(kind: Kind) -> None:
    """Right on every CPU, though only offered where bfloat16 arithmetic is fast."""
    form = replace(precision_forms(kind, CPU)[0], builder=expanded_bf16, name="bf16")
    assert error_of(form, quantize(normal(50, 36), kind), normal(9, 36)) <= 2**-7


@pytest.mark.parametrize("kind", KINDS)
def test_what_forms_hold(kind: Kind) -> None:
    """1 byte a weight; int4 half a byte and 3 bytes a group, the kernels 4 for 64 channels or 5 for 128."""
    weight = quantize(normal(256, 576), kind)
    each = {"plain": 0.5 + 3 * 5 / 576 if kind == "int4" else 1.0, "int4pack": 0.5 + 4 / 64}
    each["native"] = 0.5 + 5 * 5 / 576 if kind == "int4" else 1.0
    for form in precision_forms(kind, CPU):
        held = held_bytes((form.build(weight, None, torch.float32),))
        assert held == pytest.approx(256 * 576 * each[form.layout], rel=0.02), form.name


def test_expanding_a_weight_keeps_no_more_than_is_told() -> None:
    """A scale a block, not one a row; no zeros where all are alike."""
    blocks = Fp8BlockWeight(normal(2048, 576).to(torch.float8_e4m3fn), torch.rand(16, 5) + 0.1, (128, 128))
    plain = grouped_int8(512, 256, 32)
    for weight, limit in ((blocks, 16 * 5 * 4 + 999), (replace(plain, zeros=None, order=None), 999)):
        gc.collect()
        before = {id(each) for each in gc.get_objects()}
        for form in precision_forms(weight.kind, CPU):
            if form.name != "dequant-fp32gemm":
                continue
            product = form.build(weight, None, torch.float32)
            held = (
                each for each in gc.get_objects() if type(each) is torch.Tensor and id(each) not in before
            )
            kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
            told = {part.untyped_storage().data_ptr() for part in product.held}
            mine = {part.untyped_storage().data_ptr() for part in (weight.codes, weight.scales)}
            assert sum(size for at, size in kept.items() if at not in told | mine) < limit
            assert error_of(form, weight, normal(9, weight.shape[1])) <= form.error


def test_the_layout_of_the_int4_kernel_is_known_here() -> None:
    """Otherwise products of many rows would need a second copy of the codes."""
    assert int4pack.block_size() in (32, 64)
    weight = quantize_int4(normal(64, 128))
    shared: dict[str, torch.Tensor] = {}
    forms = [form for form in precision_forms("int4", CPU) if form.layout == "int4pack"]
    built = tuple(form.build(weight, None, torch.float32, shared) for form in forms)
    assert len(built) == 2
    assert held_bytes(built) == held_bytes(built[:1])


def test_the_log_names_the_forms_that_are_refused_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A form that is wrong here is a warning, though others serve; what the machine lacks is none. Both are
    told once, however many models are measured."""

    def wrong(weight: QuantizedWeight, _: dict[str, torch.Tensor]) -> Multiply:
        whole = weight.dequantize()
        return Multiply(lambda x: 2 * (x @ whole.t()), ())

    right = precision_forms("int8", CPU)[0]
    broken = replace(right, name="broken", builder=wrong)
    lacking = replace(right, name="lacking", refuses=lambda _: "it needs a card of another kind")
    monkeypatch.setattr(forms, "_all_forms", lambda *_: [right, broken, lacking])
    monkeypatch.setattr(forms, "_probed", functools.cache(forms._probed.__wrapped__))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert precision_forms("int8", CPU) == [right]
            assert set(refused_forms("int8", CPU)) == {"broken", "lacking"}
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert told[0][1].startswith(
        "int8 weights are not multiplied with by broken on cpu: its products are off"
    )
    assert told[1][1] == (
        "int8 weights are not multiplied with by lacking on cpu: it needs a card of another kind"
    )
