"""Products with quantized weights on a GPU. See `engine.layers.precision.forms`.

torch's own kernels and ours; each is offered after it was tried on the card at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.precision import forms_triton
from engine.layers.precision.codes import unpack_nibbles
from engine.layers.precision.forms_cpu import (
    int8pack,
    needs_row_scales,
    refuses_int8pack,
    scaled_mm,
)
from engine.layers.precision.int4pack import kernel_group, scales_and_offsets
from engine.layers.precision.int4pack import refuses as refuses_int4
from engine.layers.precision.parts import Parts
from engine.layers.precision.product import Multiply, Offer, tensors_of
from engine.layers.precision.weights import Int4Weight, Kind, QuantizedWeight

_INNER_K_TILES = 8  # of tinygemm's layout; it then needs multiples of 128 input and 8 output channels


def expanded_bf16(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """Expand part by part, multiply in bfloat16."""
    parts = Parts(weight)
    return Multiply(lambda x: parts.product(x, torch.bfloat16), tensors_of(weight))


def expanded_fp32(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """Expand part by part, multiply in float32."""
    parts = Parts(weight)
    return Multiply(lambda x: parts.product(x, torch.float32), tensors_of(weight))


def _refuses_tinygemm(weight: QuantizedWeight) -> str | None:
    why = refuses_int4(weight)
    if why is None and (weight.shape[0] % 8 or weight.shape[1] % (16 * _INNER_K_TILES)):
        return f"it needs multiples of 8 output and 128 input channels, not {list(weight.shape)}"
    return why


def tinygemm(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """``_weight_int4pack_mm``: four-bit weights in tinygemm's layout."""
    assert isinstance(weight, Int4Weight)
    group = kernel_group(weight)
    assert group is not None
    codes = unpack_nibbles(weight.codes)
    # Here the even column is in the upper half of the byte.
    pairs = codes.view(codes.shape[0], -1, 2)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs[..., 0] << 4 | pairs[..., 1], _INNER_K_TILES)
    both = torch.stack(scales_and_offsets(weight, group), dim=-1).to(torch.bfloat16).contiguous()

    def apply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x.to(torch.bfloat16), packed, group, both)
        return y

    return Multiply(apply, (packed, both))


_EXPANDED = (
    Offer("dequant-bf16gemm", "bfloat16", "plain", expanded_bf16),
    Offer("dequant-fp32gemm", "kept", "plain", expanded_fp32, exact_only=True),
)

OFFERED: dict[Kind, tuple[Offer, ...]] = {
    "int8": (
        *_EXPANDED,
        Offer("int8pack", "bfloat16", "plain", int8pack, refuses_int8pack),
        *forms_triton.OFFERED["int8"],
    ),
    "int4": (
        *_EXPANDED,
        Offer("int4pack", "bfloat16", "int4pack", tinygemm, _refuses_tinygemm),
        *forms_triton.OFFERED["int4"],
    ),
    "fp8": (
        *_EXPANDED,
        Offer("scaled_mm", "fp8", "plain", scaled_mm, needs_row_scales),
        *forms_triton.OFFERED["fp8"],
    ),
}
