"""Products with weights in low precisions against their dequantized weights in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import weight_only_gemm
from engine.kernels.linear import product, product_expanded, product_fp8
from engine.kernels.quantize import quantize as quantize_rows
from engine.kernels.weight_only_gemm import dequantize, gemm, pack, probe, reference_product, splits_for
from engine.layers.precision.quantize import quantize_fp8, quantize_int4, quantize_int8
from engine.layers.precision.weights import Int4Weight, Int8Weight
from tests.engine.kernels.support import DEVICE, assert_close, poisoned, randn


def int8_weight(out: int, cols: int, group: int | None = None, zeros: bool = False) -> Int8Weight:
    generator = torch.Generator().manual_seed(5)
    group = group or cols
    shape = (-(-cols // group), out)
    return Int8Weight(
        torch.randint(-128, 128, (out, cols), generator=generator).to(torch.int8),
        torch.rand(shape, generator=generator) * 0.01 + 1e-3,
        group,
        zeros=torch.randint(-128, 129, shape, generator=generator).to(torch.int16) if zeros else None,
    ).to(DEVICE)


def int4_weight(out: int, cols: int, group: int = 128, zeros: bool = True) -> Int4Weight:
    generator = torch.Generator().manual_seed(6)
    shape = (-(-cols // group), out)
    return Int4Weight(
        torch.randint(0, 256, (out, cols // 2), generator=generator).to(torch.uint8),
        (torch.rand(shape, generator=generator) * 0.1 + 1e-2).to(torch.bfloat16),
        group,
        zeros=torch.randint(0, 17, shape, generator=generator).to(torch.uint8) if zeros else None,
    ).to(DEVICE)


WEIGHTS = {
    "int8 a channel": int8_weight(80, 256),
    "int8 grouped": int8_weight(48, 384, 128, zeros=True),
    "int8 small groups": int8_weight(48, 192, 32),
    "int4": int4_weight(80, 512),
    "int4 symmetric": int4_weight(64, 256, zeros=False),
    "int4 small groups": int4_weight(64, 192, 64),
}


def assert_product(
    y: Tensor, x: Tensor, weight: Int8Weight | Int4Weight, bias: Tensor | None, tolerance: float
) -> None:
    """Within ``tolerance`` of |x| |w|, as the forms of `engine.layers.precision` state their errors."""
    norms = x.double().norm(dim=1, keepdim=True) * weight.dequantize().double().norm(dim=1)
    assert float(((y.double() - reference_product(x, weight, bias)).abs() / norms).max()) < tolerance


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("splits", [1, 2])
def test_few_rows(name: str, splits: int) -> None:
    weight = WEIGHTS[name]
    packed, (out, cols) = pack(weight), weight.shape
    assert probe(weight, torch.float32) is None
    for rows in (1, 3, 17):
        x, bias = randn(rows, cols + 4)[:, :cols], randn(out, seed=2)
        y = poisoned(rows, out, dtype=torch.float32)
        sums = None if splits == 1 else poisoned(splits, rows, out, dtype=torch.float32)
        for launch in gemm(x, packed, y, bias=bias, sums=sums):
            launch.run()
        assert_product(y, x, weight, bias, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8 grouped", "int4"])
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    """Codes minus zeros are exact in 16 bits, so only the result is rounded."""
    weight = WEIGHTS[name]
    x = randn(5, weight.shape[1], dtype=dtype)
    y = product(x, pack(weight))
    assert y.dtype == dtype
    assert_product(y, x, weight, None, 4e-3 if dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_expanded_weight_is_its_definition(name: str) -> None:
    weight = WEIGHTS[name]
    wide = poisoned(*weight.shape, dtype=torch.float32)
    dequantize(pack(weight), wide).run()
    torch.testing.assert_close(wide, weight.dequantize(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("multiply", [product, product_expanded])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_both_ways_to_multiply_serve_any_number_of_rows(multiply: Callable[..., Tensor], rows: int) -> None:
    weight = WEIGHTS["int4 symmetric"]
    x, bias = randn(rows, weight.shape[1]), randn(weight.shape[0], seed=2)
    y = multiply(x, pack(weight), bias)
    assert y.shape == (rows, weight.shape[0])
    if rows:
        assert_product(y, x, weight, bias, 1e-6)


def test_what_the_engine_quantizes_is_served() -> None:
    weight = randn(64, 256, seed=8)
    x = randn(2, 256, seed=9)
    for quantized in (quantize_int8(weight), quantize_int4(weight)):
        assert probe(quantized, torch.bfloat16) is None
        assert_product(product(x, pack(quantized)), x, quantized, None, 1e-6)


def test_fp8_rows_times_fp8_weights() -> None:
    weight = quantize_fp8(randn(48, 128, seed=1).cpu())
    x = randn(7, 128, seed=2, dtype=torch.bfloat16)
    codes, scale = poisoned(7, 128, dtype=torch.uint8), poisoned(7, dtype=torch.float32)
    quantize_rows(x, codes, scale).run()
    y = product_fp8(codes, scale, weight.codes.to(DEVICE), weight.scales.to(DEVICE), torch.bfloat16)
    rows = codes.view(torch.float8_e4m3fn).double() * scale.double().unsqueeze(1)
    assert_close(y, rows @ weight.dequantize().double().to(DEVICE).t(), torch.bfloat16, factor=2.0)


def test_input_channels_are_shared_where_tiles_are_few() -> None:
    llama = replace(pack(int4_weight(64, 256)), shape=(4096, 14336))
    assert {splits_for(rows, llama) for rows in (1, 5, 17, 64)} == {4}, "the same for few rows, however many"
    assert splits_for(64, replace(llama, shape=(28672, 4096))) == 1
    assert splits_for(1, replace(llama, shape=(64, 256))) == 1


def test_float32_is_refused_where_it_would_not_be_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only_gemm, "INTERPRETED", False)
    assert "activations are in float32" in str(probe(int8_weight(64, 256), torch.float32))
    assert probe(int8_weight(64, 256), torch.float16) is None


def test_what_cannot_be_served_is_told() -> None:
    bf16 = torch.bfloat16
    assert "multiple of 32 input channels" in str(probe(int4_weight(64, 48, 16), bf16))
    assert "multiple of 32 input channels" in str(probe(int8_weight(64, 260), bf16))
    assert "multiple of 16 output channels" in str(probe(int8_weight(60, 256), bf16))
    assert "float64" in str(probe(int8_weight(64, 256), torch.float64))
