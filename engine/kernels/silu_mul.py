"""The activation of a gated feed-forward layer, ``silu(gate) * up`` (SwiGLU, arXiv 2002.05202), in one pass.

Optionally quantized for each token, for a product in 8 bits behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.codes import encode, kind_of, row_scale
from engine.kernels.launch import FLOATS, Launch, native_fp8, next_power_of_2, warps_for

MAX_QUANTIZED = 32768  # a program that quantizes holds a whole row in registers
_PART = 2048  # of a row, where parts need not know of each other


def probe(intermediate: int, dtype: torch.dtype, *, quantized: bool) -> str | None:
    """Why layers of ``intermediate`` channels in ``dtype`` cannot be served, or None."""
    if dtype not in FLOATS:
        return f"silu_mul needs bfloat16, float16 or float32, not {dtype}"
    if quantized and intermediate > MAX_QUANTIZED:
        return f"silu_mul quantizes at most {MAX_QUANTIZED} channels a token, the model has {intermediate}"
    return None


@triton.jit
def _silu_mul(
    gate_up,
    y,
    scale,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < COLS
    at = gate_up + row * (2 * COLS) + cols
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + COLS, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    to = y + row * COLS + cols
    if KIND == "none":
        tl.store(to, out.to(y.dtype.element_ty), mask=inside)
    else:
        # Rounded as it would be where it is written out, so that fusing changes nothing.
        out = out.to(gate_up.dtype.element_ty).to(tl.float32)
        s = row_scale(out, KIND)
        tl.store(scale + row, s)
        tl.store(to, encode(tl.div_rn(out, s), KIND, NATIVE), mask=inside)


def silu_mul(gate_up: Tensor, y: Tensor, scale: Tensor | None = None) -> Launch:
    """``y = silu(gate) * up`` for gate_up [tokens, 2 * n], the gates first; all contiguous.

    y: [tokens, n] of the same dtype, or 8 bits (int8, or uint8 for e4m3) with ``scale`` float32 [tokens]:
    to the last bit what `engine.kernels.quantize` makes of y in gate_up's dtype.
    """
    tokens, cols = y.shape
    kind = kind_of(y.dtype)
    block = next_power_of_2(cols) if kind != "none" else min(_PART, next_power_of_2(cols))
    return Launch(
        _silu_mul,
        (tokens, -(-cols // block)),
        {"gate_up": gate_up, "y": y, "scale": scale},
        {"COLS": cols, "BLOCK": block, "KIND": kind, "NATIVE": native_fp8(y.device)},
        num_warps=warps_for(block),
    )


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 * n] -> float64 [tokens, n]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
