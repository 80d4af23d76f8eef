"""Activations in 8 bits with a scale for each token, as products in 8 bits take them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.codes import LARGEST, SCALE_FLOOR, encode, kind_of, reference_encode, row_scale
from engine.kernels.launch import FLOATS, Launch, native_fp8, next_power_of_2, warps_for

MAX_COLS = 32768  # a program holds a whole row in registers


def probe(cols: int, dtype: torch.dtype) -> str | None:
    """Why rows of ``cols`` numbers of ``dtype`` cannot be quantized, or None."""
    if dtype not in FLOATS:
        return f"quantize needs bfloat16, float16 or float32, not {dtype}"
    if cols > MAX_COLS:
        return f"quantize holds at most {MAX_COLS} numbers a token, not {cols}"
    return None


@triton.jit
def _quantize(
    x,
    codes,
    scale,
    stride,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < COLS
    value = tl.load(x + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    s = row_scale(value, KIND)
    tl.store(scale + row, s)
    tl.store(codes + row * COLS + cols, encode(tl.div_rn(value, s), KIND, NATIVE), mask=inside)


def quantize(x: Tensor, codes: Tensor, scale: Tensor) -> Launch:
    """x [tokens, n], whose rows are contiguous, as codes times scale.

    codes: contiguous [tokens, n], int8, or uint8 for e4m3. scale: float32 [tokens], the largest magnitude of
    the row divided by the largest code.
    """
    tokens, cols = x.shape
    block = next_power_of_2(cols)
    return Launch(
        _quantize,
        (tokens,),
        {"x": x, "codes": codes, "scale": scale, "stride": x.stride(0)},
        {
            "COLS": cols,
            "BLOCK": block,
            "KIND": kind_of(codes.dtype),
            "NATIVE": native_fp8(codes.device),
        },
        num_warps=warps_for(block),
    )


def reference_quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes of x [tokens, n] and float32 scales [tokens], each operation rounded in float32."""
    wide = x.float()
    # By a tensor: a number of Python's a card does not divide by, but multiplies with its inverse.
    largest = torch.full((), LARGEST[kind], device=x.device)
    scale = wide.abs().amax(-1).clamp(min=SCALE_FLOOR) / largest
    return reference_encode(wide / scale.unsqueeze(-1), kind), scale
