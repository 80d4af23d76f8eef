"""Products with quantized weights by the kernels of `engine.kernels`. See `engine.layers.precision.forms`.

Each form asks whether kernels can run where the weight lies and whether they can read its layout. ``triton``
widens 8- and 4-bit codes within the product, ``triton-dequant`` writes the weight out for torch to multiply
with: which of them serves how many rows is measured, and the name of each says which it was. Input channels
in another order or scaled (act-order, AWQ) are the affair of `Product`, which reorders and scales x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import availability
from engine.layers.precision.forms_cpu import needs_row_scales
from engine.layers.precision.product import Multiply, Offer
from engine.layers.precision.weights import Fp8Weight, Int4Weight, Int8Weight, Kind, QuantizedWeight
from engine.layers.quantized import QuantizedRows

if TYPE_CHECKING:
    from engine.kernels.weight_only_gemm import PackedWeight


def refuses(weight: QuantizedWeight) -> str | None:
    """Why the kernels cannot multiply with this weight of 8 or 4 bits, or None."""
    if not isinstance(weight, Int4Weight | Int8Weight):
        return "it needs int8 or int4 codes"
    reason = availability.probe(weight.device)
    if reason is not None:
        return reason
    from engine.kernels.weight_only_gemm import probe

    return probe(weight, torch.bfloat16)


def refuses_fp8(weight: QuantizedWeight) -> str | None:
    """Why x cannot be quantized by a kernel for this fp8 weight, or None."""
    reason = needs_row_scales(weight) or availability.probe(weight.device)
    if reason is not None:
        return reason
    from engine.kernels.quantize import probe

    return probe(weight.shape[1], torch.bfloat16)


def widening(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """Codes are widened in registers; x and y in bfloat16, float32 sums."""
    from engine.kernels.linear import product

    packed = _packed(weight, shared)
    return Multiply(lambda x: product(_rows(x), packed), _held(packed))


def expanding(weight: QuantizedWeight, shared: dict[str, Tensor]) -> Multiply:
    """The whole weight is written out in bfloat16 in one launch at each call."""
    from engine.kernels.linear import product_expanded

    packed = _packed(weight, shared)
    return Multiply(lambda x: product_expanded(_rows(x), packed), _held(packed))


def scaled_mm(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """``_scaled_mm``, scales a token and a channel; one launch quantizes x for each token.

    Unless the part before quantized it, as kernels do: to the last bit as that launch, which torch's own
    operations on a card are not, so that only this form takes what kernels quantized.
    """
    assert isinstance(weight, Fp8Weight)
    from engine.kernels.linear import product_fp8, product_quantizing

    codes, scales = weight.codes, weight.scales.float()

    def of_codes(x: QuantizedRows) -> Tensor:
        return product_fp8(x.codes, x.scales, codes, scales, torch.bfloat16)

    return Multiply(lambda x: product_quantizing(x.contiguous(), codes, scales), (codes, scales), of_codes)


def _rows(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).contiguous()


def _held(packed: PackedWeight) -> tuple[Tensor, ...]:
    parts = (packed.codes, packed.scales, packed.zeros)
    return tuple(part for part in parts if part is not None)


def _packed(weight: QuantizedWeight, shared: dict[str, Tensor]) -> PackedWeight:
    """The weight for the kernels, whose tensors all forms of it share."""
    assert isinstance(weight, Int4Weight | Int8Weight)
    from engine.kernels.weight_only_gemm import PackedWeight, pack, tile_k

    if "triton codes" not in shared:
        made = pack(weight)
        shared |= {"triton codes": made.codes, "triton scales": made.scales}
        if made.zeros is not None:
            shared["triton zeros"] = made.zeros
    return PackedWeight(
        shared["triton codes"],
        shared["triton scales"],
        shared.get("triton zeros"),
        weight.shape,
        8 if isinstance(weight, Int8Weight) else 4,
        tile_k(weight),
        min(weight.group, weight.shape[1]),
    )


def _offers(layout: str) -> tuple[Offer, ...]:
    return (
        Offer("triton", "bfloat16", layout, widening, refuses),
        Offer("triton-dequant", "bfloat16", layout, expanding, refuses),
    )


OFFERED: dict[Kind, tuple[Offer, ...]] = {
    "int8": _offers("plain"),  # the codes as they are
    "int4": _offers("triton"),
    "fp8": (Offer("triton-scaled_mm", "fp8", "plain", scaled_mm, refuses_fp8),),
}
