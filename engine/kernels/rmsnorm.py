"""The residual addition and the root-mean-square norm behind it in one pass (arXiv 1910.07467).

Optionally with what it gives quantized for each token, as products in 8 bits take it. Read: x, residual;
written: residual, and y in 16 or 8 bits. In separate steps the same moves half as much again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.codes import encode, kind_of, row_scale
from engine.kernels.launch import FLOATS, Launch, native_fp8, next_power_of_2, warps_for

MAX_HIDDEN = 16384  # a program holds a whole row in registers


def probe(hidden: int, dtype: torch.dtype) -> str | None:
    """Why rows of ``hidden`` numbers of ``dtype`` cannot be served, or None."""
    if dtype not in FLOATS:
        return f"add_rmsnorm needs bfloat16, float16 or float32, not {dtype}"
    if hidden > MAX_HIDDEN:
        return f"add_rmsnorm holds at most {MAX_HIDDEN} numbers a token, the model has {hidden}"
    return None


@triton.jit
def _add_rmsnorm(
    x,
    residual,
    weight,
    y,
    scale,
    eps,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < COLS
    at = row * COLS + cols
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is kept, so that fusing changes nothing.
        kept = value.to(residual.dtype.element_ty)
        tl.store(residual + at, kept, mask=inside)
        value = kept.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / COLS + eps)
    out = value * inverse * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if KIND == "none":
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    else:
        # Rounded as it would be where it is written out, so that fusing changes nothing.
        out = out.to(residual.dtype.element_ty).to(tl.float32)
        s = row_scale(out, KIND)
        tl.store(scale + row, s)
        # How many numbers lie in a thread, and with it in which order squares are added up, shall not follow
        # from what is written: no more of them in a row than are read at once.
        to = tl.max_contiguous(y + at, 128 // residual.dtype.element_ty.primitive_bitwidth)
        tl.store(to, encode(tl.div_rn(out, s), KIND, NATIVE), mask=inside)


def add_rmsnorm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, y: Tensor, scale: Tensor | None = None
) -> Launch:
    """``residual += x``, then ``y = residual / sqrt(mean(residual^2) + eps) * weight``.

    x (None: nothing is added), residual: [tokens, hidden], contiguous. y: the same shape and dtype, or 8 bits
    (int8, or uint8 for e4m3) with ``scale`` float32 [tokens]: a code times its token's scale is the number.
    Those are, to the last bit, what `engine.kernels.quantize` makes of y in residual's dtype.
    """
    tokens, hidden = residual.shape
    block = next_power_of_2(hidden)
    return Launch(
        _add_rmsnorm,
        (tokens,),
        {"x": x, "residual": residual, "weight": weight, "y": y, "scale": scale, "eps": eps},
        {
            "COLS": hidden,
            "BLOCK": block,
            "ADD": x is not None,
            "KIND": kind_of(y.dtype),
            "NATIVE": native_fp8(y.device),
        },
        num_warps=warps_for(block),
    )


def reference_add_rmsnorm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The new residual in its dtype, and y in float64."""
    kept = residual if x is None else (residual.double() + x.double()).to(residual.dtype)
    wide = kept.double()
    return kept, wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
