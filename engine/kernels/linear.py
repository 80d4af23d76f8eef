"""Products with weights in a low precision.

Weights of 8 and 4 bits: a product of few rows reads them as they are (`engine.kernels.weight_only_gemm`), for
it is bound by reading them. One of many rows is bound by arithmetic; there the weight is expanded once a
product, and torch multiplies in 16 bits. From how many rows on that is better is for the caller to know. fp8:
rows in 8 bits with a scale each, through ``torch._scaled_mm``, which multiplies in fp8.

All memory comes from torch's allocator and nothing waits for the device, so that graphs can be captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantize import quantize
from engine.kernels.weight_only_gemm import PackedWeight, dequantize, gemm, splits_for


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in x's dtype: x [rows, in], bias [out] -> [rows, out].

    The weight is widened in registers. How input channels are shared among programs depends on the number of
    rows alone, and their sums are added in a fixed order: a row's result does not change with the others.
    """
    rows, out = x.shape[0], weight.shape[0]
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    splits = splits_for(rows, weight) if rows else 1
    sums = None if splits == 1 else torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    for launch in gemm(x, weight, y, bias=bias, sums=sums):
        launch.run()
    return y


def product_expanded(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """As `product`, the weight being written out in x's dtype first, for torch to multiply with."""
    wide = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    dequantize(weight, wide).run()
    return F.linear(x, wide, bias)


def product_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """``(codes * scale) @ (weight * weight_scales).T`` in ``dtype``: bfloat16, not every torch gives others.

    codes: [rows, in], e4m3 or its bytes, with float32 scale [rows], as `engine.kernels.quantize` and the
    kernels that quantize give them. weight: e4m3 [out, in], contiguous; weight_scales: float32 [out]. in and
    out are multiples of 16.
    """
    rows = codes.view(torch.float8_e4m3fn)
    # Sums stay in the tensor cores, whose precision is less than float32's and far beyond that of the codes.
    # To add them up outside costs instructions in every step.
    return torch._scaled_mm(
        rows, weight.t(), scale_a=scale.unsqueeze(1), scale_b=weight_scales.unsqueeze(0), out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


def product_quantizing(x: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """``x @ (weight * weight_scales).T`` in bfloat16, each row of x in fp8. See `product_fp8`."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    quantize(x, codes, scale).run()
    return product_fp8(codes, scale, weight, weight_scales, torch.bfloat16)
