"""The matrix product of two tiles on tensor cores, with float32 sums."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.launch import INTERPRETED

_WIDEN = tl.constexpr(INTERPRETED)
"""The interpreter multiplies the bits of bfloat16 numbers as if they were integers; float32 it gets right."""


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b``, acc in float32. a and b have one dtype; float32 stays float32, not TF32."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
