"""Quantized weights: the error of each stays within its step, and what is held takes the bytes it should."""

from __future__ import annotations

import pytest
import torch

from engine.layers.precision import (
    KINDS,
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Kind,
    QuantizedWeight,
    quantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from engine.layers.precision.codes import HALF_BIAS, e4m3_as_half, pack_nibbles, unpack_nibbles


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_int8_is_within_half_a_step() -> None:
    weight = normal(50, 36)
    got = quantize_int8(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((got.dequantize() - weight).abs() <= step * 0.5001).all())
    assert got.per_channel


def test_fp8_is_within_half_a_unit_in_the_last_place() -> None:
    weight = normal(50, 36)
    difference = (quantize_fp8(weight).dequantize() - weight).abs()
    scale = weight.abs().amax(1, keepdim=True) / 448
    # Three bits of mantissa: 2^-4 of the value; below the least normal code (2^-6) half of 2^-9.
    assert bool((difference <= torch.maximum(weight.abs() * 2**-4, scale * 2**-10) * 1.0001).all())


@pytest.mark.parametrize("cols", [256, 192, 100])
@pytest.mark.parametrize("group", [128, 32])
def test_int4_is_within_half_a_step_of_its_group(cols: int, group: int) -> None:
    """Also where the group does not divide the channels."""
    weight = normal(40, cols)
    got = quantize_int4(weight, group)
    steps = got.scales.float().t().repeat_interleave(group, 1)[:, :cols]
    difference = (got.dequantize() - weight).abs()
    # A zero is rounded too, and may clip the ends of the range by as much again.
    assert bool((difference <= steps * 1.01).all())
    assert float((difference <= steps * 0.505).float().mean()) > 0.95
    assert got.scales.shape == (-(-cols // group), 40)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_exactly_zero_and_large_and_tiny_values_survive(kind: Kind) -> None:
    weight = normal(8, 128)
    weight[0] = 0.0
    weight[1] *= 1e30
    weight[2] *= 1e-30
    weight[3, ::2] = 0.0
    weight[4] = 3.0
    got = quantize(weight, kind).dequantize().double()
    weight = weight.double()
    assert bool((got[0] == 0).all())
    assert bool((got[3, ::2] == 0).all())
    assert bool(torch.isfinite(got).all())
    for row in (1, 2, 3):
        assert float((got[row] - weight[row]).norm() / weight[row].norm()) < 0.15
    torch.testing.assert_close(got[4], weight[4], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(kind: Kind, bad: float) -> None:
    weight = normal(8, 128)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, kind)


def test_bytes_follow_the_arithmetic() -> None:
    """Within three in a hundred of: 1 byte a weight, or half a byte and 3 bytes a group (scale and zero)."""
    weight = normal(512, 1024)
    for kind, each in (("fp8", 1.0), ("int8", 1.0), ("int4", 0.5 + 3 / 128)):
        got = quantize(weight, kind)  # type: ignore[arg-type]
        assert got.nbytes == pytest.approx(weight.numel() * each, rel=0.03)
        assert isinstance(got, QuantizedWeight)
        assert got.kind == kind
        assert got.shape == (512, 1024)


@pytest.mark.parametrize("kind", KINDS)
def test_moving_to_a_device_keeps_every_part(kind: Kind) -> None:
    weight = quantize(normal(16, 128), kind)
    moved = weight.to(torch.device("cpu"))
    assert torch.equal(moved.dequantize(), weight.dequantize())
    assert moved.nbytes == weight.nbytes


def test_nibbles_come_back() -> None:
    codes = torch.randint(0, 16, (7, 10), generator=torch.Generator().manual_seed(0))
    packed = pack_nibbles(codes)
    assert packed.shape == (7, 5)
    assert torch.equal(unpack_nibbles(packed).long(), codes)


def test_every_float8_value_is_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    half = e4m3_as_half(codes, torch.empty(codes.shape, dtype=torch.int16))
    assert torch.equal(half.float() * HALF_BIAS, codes.float())


def test_order_and_input_scale_are_part_of_the_weight() -> None:
    codes = torch.randint(-100, 100, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    factors = torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.5
    weight = Int8Weight(codes, torch.ones(2, 6), 4, order=order, input_scale=factors)
    x = normal(3, 8)
    want = (x[:, order] * factors) @ codes.float().t()
    torch.testing.assert_close(x @ weight.dequantize().t(), want)


def test_parts_that_do_not_fit_are_refused() -> None:
    fp8 = torch.ones(4, 8).to(torch.float8_e4m3fn)
    int8 = torch.ones(4, 8, dtype=torch.int8)
    int4 = torch.zeros(4, 4, dtype=torch.uint8)
    ones = torch.ones(1, 4)
    cases = [
        (lambda: Fp8Weight(fp8.float(), torch.ones(4)), "float8_e4m3fn"),
        (lambda: Fp8Weight(fp8, torch.ones(8)), r"scales are .*\[8\], floating point \[4\]"),
        (lambda: Fp8Weight(fp8, torch.zeros(4)), "4 values that are 0 or not finite"),
        (lambda: Fp8BlockWeight(fp8, torch.ones(2, 2), (4, 4)), r"\[1, 2\]"),
        (lambda: Fp8BlockWeight(fp8, torch.ones(2, 2), (0, 4)), "at least 1"),
        (lambda: Int8Weight(int8.float(), ones, 8), "int8"),
        (lambda: Int8Weight(int8, ones, 0), "at least 1"),
        (lambda: Int8Weight(int8, ones, 4), r"\[2, 4\]"),
        (lambda: Int8Weight(int8, ones, 8, zeros=torch.full((1, 4), 129)), r"outside -128..128"),
        (lambda: Int8Weight(int8, ones, 8, zeros=torch.zeros(4)), "zeros"),
        (lambda: Int8Weight(int8, ones, 8, order=torch.zeros(8, dtype=torch.int64)), "once"),
        (lambda: Int4Weight(int4, ones, 8, zeros=torch.full((1, 4), 17)), r"outside 0..16"),
        (lambda: Int4Weight(int4, ones, 8, input_scale=torch.zeros(8)), "input_scale"),
        (lambda: quantize_int4(torch.ones(4, 7)), "even numbers"),
        (lambda: quantize_int4(torch.ones(4, 8), 3), "even numbers"),
        (lambda: quantize_int8(torch.ones(4)), r"\[out, in\]"),
        (lambda: quantize_int4(torch.ones(4, 8), inputs=torch.ones(2, 8)), "importance"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
