"""Products with weights in a low precision, each by the kernel that suits the number of rows.

Weights of 8 and 4 bits: up to `MAX_GEMM_ROWS` rows the product reads them as they are
(`engine.kernels.weight_only_gemm`), for it is bound by reading them. With more rows it is bound by
arithmetic; then the weight is expanded once a product, and torch multiplies in 16 bits. fp8: rows in 8 bits
with a scale each, through ``torch._scaled_mm``, which multiplies in fp8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.weight_only_gemm import PackedWeight, dequantize, gemm, splits_for

MAX_GEMM_ROWS = 64
"""Rows up to which weights are widened inside the product. To be measured on each card."""


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in x's dtype: x [rows, in], bias [out] -> [rows, out].

    Which kernel serves depends on the number of rows alone, so that a graph can be captured for each.
    """
    rows, (out, cols) = x.shape[0], weight.shape
    if rows > MAX_GEMM_ROWS:
        wide = torch.empty(out, cols, dtype=x.dtype, device=x.device)
        dequantize(weight, wide).run()
        return F.linear(x, wide, bias)
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    splits = splits_for(rows, weight) if rows else 1
    sums = None if splits == 1 else torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    for launch in gemm(x, weight, y, bias=bias, sums=sums):
        launch.run()
    return y


def product_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """``(codes * scale) @ (weight * weight_scales).T`` in ``dtype`` (bfloat16 or float32).

    codes: [rows, in], e4m3 or its bytes, with float32 scale [rows], as `engine.kernels.quantize` and the
    kernels that quantize give them. weight: e4m3 [out, in], contiguous; weight_scales: float32 [out]. in and
    out are multiples of 16.
    """
    rows = codes.view(torch.float8_e4m3fn)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=scale.unsqueeze(1), scale_b=weight_scales.unsqueeze(0), out_dtype=dtype
    )
