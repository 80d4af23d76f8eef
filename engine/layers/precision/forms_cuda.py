"""Products with quantized weights on a GPU. See `engine.layers.precision.forms`.

Only torch's own kernels; each is offered after it was tried on the card at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.precision.codes import unpack_nibbles
from engine.layers.precision.forms_cpu import (
    int8pack,
    needs_row_scales,
    refuses_int8pack,
    scaled_mm,
)
from engine.layers.precision.int4pack import kernel_group, scales_and_offsets
from engine.layers.precision.int4pack import refuses as refuses_int4
from engine.layers.precision.product import (
    Multiply,
    Offer,
    tensors_of,
    without_inputs,
)
from engine.layers.precision.weights import Int4Weight, Kind, QuantizedWeight

_INNER_K_TILES = 8  # of tinygemm's layout; it then needs multiples of 128 input and 8 output channels


def expanded_bf16(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """Expand the whole weight to bfloat16 at each call, multiply in bfloat16."""
    plain = without_inputs(weight)

    def apply(x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), plain().to(torch.bfloat16))

    return Multiply(apply, tensors_of(weight))


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


_EXPANDED = Offer("dequant-bf16gemm", "bfloat16", "plain", expanded_bf16)

OFFERED: dict[Kind, tuple[Offer, ...]] = {
    "int8": (
        _EXPANDED,
        Offer("int8pack", "bfloat16", "plain", int8pack, refuses_int8pack),
    ),
    "int4": (_EXPANDED, Offer("int4pack", "bfloat16", "int4pack", tinygemm, _refuses_tinygemm)),
    "fp8": (_EXPANDED, Offer("scaled_mm", "fp8", "plain", scaled_mm, needs_row_scales)),
}
