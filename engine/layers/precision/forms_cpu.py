"""Products with quantized weights on a CPU. See `engine.layers.precision.forms`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.precision import int4pack
from engine.layers.precision.codes import unpack_nibbles
from engine.layers.precision.product import ERRORS, Multiply, Offer, quantize_rows_fp8
from engine.layers.precision.tiles import tiles_of
from engine.layers.precision.weights import Fp8Weight, Int4Weight, Int8Weight, Kind, QuantizedWeight
from engine.native import kernels, panels, unavailable

INT8PACK_COLUMNS = 32


def refuses_int8pack(weight: QuantizedWeight) -> str | None:
    """torch's kernel reads past the end of rows that are no multiple of its vectors, without a check."""
    if not isinstance(weight, Int8Weight) or not weight.per_channel:
        return "it needs int8 codes with one scale a channel and no zeros"
    if weight.shape[1] % INT8PACK_COLUMNS:
        return f"it needs a multiple of {INT8PACK_COLUMNS} input channels, not {weight.shape[1]}"
    return None


def needs_row_scales(weight: QuantizedWeight) -> str | None:
    if not isinstance(weight, Fp8Weight):
        return "it needs one scale an output channel"
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        return f"it needs multiples of 16 channels, not {list(weight.shape)}"
    return None


def needs_fast_bfloat16(_: QuantizedWeight) -> str | None:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "this CPU has no bfloat16 arithmetic"


def expanded_fp32(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """Expand part by part, multiply in float32."""
    if isinstance(weight, Int4Weight) and int4pack.refuses(weight) is None:
        block = int4pack.block_size()
        if block is not None:
            packed = _packed(weight, shared)
            return Multiply(
                lambda x: packed.expand_and_multiply(x, block), (packed.codes, packed.scales_and_zeros)
            )
    tiles = tiles_of(weight)
    return Multiply(tiles.product, tiles.held)


def expanded_codes(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """As `expanded_fp32`, from the weight's own codes and scales: nothing of them is rounded."""
    tiles = tiles_of(weight)
    return Multiply(tiles.product, tiles.held)


def expanded_bf16(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """Expand part by part, multiply in bfloat16 with float32 sums."""
    tiles = tiles_of(weight)
    return Multiply(lambda x: tiles.product(x, torch.bfloat16), tiles.held)


def expanded_fp8_inputs(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """As `expanded_fp32`, x rounded to float8 for each token: what `scaled_mm` computes, in less time."""
    inner = expanded_fp32(weight, shared)

    def apply(x: Tensor) -> Tensor:
        codes, scale = quantize_rows_fp8(x)
        return inner.apply(codes.float()).mul_(scale)

    return Multiply(apply, inner.held)


def int8pack(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """``_weight_int8pack_mm``; its scales are 1 in bfloat16, the weight's own follow in float32."""
    assert isinstance(weight, Int8Weight)
    codes, scales = weight.codes, weight.scales
    row_scales = scales[0].float()
    ones = shared.setdefault("ones", torch.ones(codes.shape[0], dtype=torch.bfloat16, device=codes.device))

    def apply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), codes, ones)
        return y * row_scales

    return Multiply(apply, (codes, scales, ones))


def scaled_mm(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """``_scaled_mm``, scales a token and a channel: x quantized to float8 for each token."""
    assert isinstance(weight, Fp8Weight)
    codes, scales = weight.codes, weight.scales
    transposed, row_scales = codes.t(), scales.float().unsqueeze(0)

    def apply(x: Tensor) -> Tensor:
        quantized, scale = quantize_rows_fp8(x)
        return torch._scaled_mm(quantized, transposed, scale, row_scales, out_dtype=torch.bfloat16)

    return Multiply(apply, (codes, scales))


def int4_kernel(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """``_weight_int4pack_mm_for_cpu``."""
    assert isinstance(weight, Int4Weight)
    packed = _packed(weight, shared)
    return Multiply(packed.multiply, (packed.codes, packed.scales_and_zeros))


def _packed(weight: Int4Weight, shared: dict[str, Tensor]) -> int4pack.Packed:
    if "int4 codes" not in shared:
        made = int4pack.pack(weight)
        shared["int4 codes"], shared["int4 scales"] = made.codes, made.scales_and_zeros
    group = int4pack.kernel_group(weight)
    assert group is not None
    return int4pack.Packed(shared["int4 codes"], shared["int4 scales"], *weight.shape, group)


def refuses_native(weight: QuantizedWeight) -> str | None:
    """Four-bit weights of any group, and int8 with one scale a channel."""
    if not isinstance(weight, Int4Weight) and not (isinstance(weight, Int8Weight) and weight.per_channel):
        return "it needs int4 codes, or int8 codes with one scale a channel and no zeros"
    return unavailable() or None


def native(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """The product in C++: codes are widened in registers, nothing is rounded but float32 sums."""
    found = kernels()
    assert found is not None  # or `refuses_native` gave the reason
    if isinstance(weight, Int8Weight):
        held = panels.int8(weight.codes, weight.scales[0], found.panel_width)
    else:
        assert isinstance(weight, Int4Weight)
        zeros = torch.full(weight.scales.shape, 8) if weight.zeros is None else weight.zeros
        codes = unpack_nibbles(weight.codes)
        held = panels.int4(codes, weight.scales, zeros, weight.group, found.panel_width)
    return Multiply(lambda x: found.linear(x, held), held.held, panels=held)


_NATIVE = Offer("native", "kept", "native", native, refuses_native)
_EXPANDED = Offer("dequant-fp32gemm", "kept", "plain", expanded_fp32)
_EXPANDED_BF16 = Offer("dequant-bf16gemm", "bfloat16", "plain", expanded_bf16, needs_fast_bfloat16)

OFFERED: dict[Kind, tuple[Offer, ...]] = {
    "int8": (
        _EXPANDED,
        _EXPANDED_BF16,
        Offer("int8pack", "bfloat16", "plain", int8pack, refuses_int8pack),
        _NATIVE,
    ),
    "int4": (
        Offer("dequant-fp32gemm", "kept", "int4pack", expanded_fp32, error=ERRORS["bfloat16"]),
        Offer("int4pack", "bfloat16", "int4pack", int4_kernel, int4pack.refuses),
        Offer("codes-fp32gemm", "kept", "plain", expanded_codes, exact_only=True),
        _NATIVE,
    ),
    "fp8": (
        _EXPANDED,
        _EXPANDED_BF16,
        Offer("fp8-dequant-fp32gemm", "fp8", "plain", expanded_fp8_inputs),
        Offer("scaled_mm", "fp8", "plain", scaled_mm, needs_row_scales),
    ),
}
