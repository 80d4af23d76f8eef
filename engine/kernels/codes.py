"""Numbers in 8 bits inside kernels: float8 e4m3 as bytes, and symmetric int8.

Before compute capability 8.9 there are no instructions for e4m3 and Triton has no type for it; then its bits
are made and read with integer arithmetic, bit for bit the same (OCP 8-bit floating point, arXiv 2209.05433:
1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinities, NaN is 0x7F). ``NATIVE`` is 0 there, and 89, 90
and so on, ten times the capability, elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = {"e4m3": 448.0, "int8": 127.0}
"""The largest number of each kind that is used."""

SCALE_FLOOR = 1e-30  # of a row's largest magnitude: a row of zeros keeps a scale that can be divided by


def kind_of(dtype: torch.dtype) -> str:
    """The name that kernels know a storage by: "e4m3", "int8" or, for wider floats, "none"."""
    kinds = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3", torch.int8: "int8"}
    return kinds.get(dtype, "none")


@triton.jit
def encode(x, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """float32 x as it is stored in 8 bits, rounded to nearest even and clamped; e4m3 as uint8.

    NaN stays NaN in e4m3 and becomes 0 in int8, which has none. For 8.9 Triton goes by way of
    float16 and cuts off the rest: what lies just above the middle of two codes would become the middle.
    """
    if KIND == "int8":
        # Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
        clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
        bits = (clamped + 12582912.0).to(tl.int32, bitcast=True)
        return (bits - 0x4B400000).to(tl.int8)
    elif NATIVE >= 90:
        clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
        return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_e4m3(x)


@triton.jit
def _encode_e4m3(x):
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: round the mantissa to 3 of its 23 bits, then move the exponent's bias from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the spacing is 2^-9, as it is of float32 from 2^14 on.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, tiny, normal)
    code = tl.where(x == x, code, 0x7F)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def decode(stored, TO: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Numbers as they are stored in the dtype ``TO`` (bfloat16, float16 or float32), exactly."""
    if KIND == "int8":
        return stored.to(tl.float32).to(TO)
    elif KIND == "none":
        return stored.to(TO)
    elif NATIVE:
        number = stored.to(tl.float8e4nv, bitcast=True)
        if NATIVE < 90:
            # From float16, which the instruction gives, to bfloat16 there is none before 9.0, and not every
            # compiler goes round it.
            return number.to(tl.float16).to(tl.float32).to(TO)
        else:
            return number.to(TO)
    else:
        # Read as float16 the same bits stand for 2^-8 of the number, for its bias is 15.
        wide = stored.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(TO)


@triton.jit
def row_scale(row, KIND: tl.constexpr):
    """The scale of a row of float32 numbers; NaN if one of them is.

    The maximum of a device leaves NaN out, and the row would seem sound. Magnitudes have the order of their
    bits, with NaN above all others.
    """
    largest: tl.constexpr = 127.0 if KIND == "int8" else 448.0
    amax = tl.max(tl.abs(row).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.where(amax < 1e-30, 1e-30, amax), largest)


def scales_of(
    storage: torch.dtype, scales: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The scales of keys and of values for a pool of ``storage``; ValueError if it needs or has none."""
    if (kind_of(storage) != "none") != (scales is not None):
        raise ValueError(f"a KV cache of {storage} {'needs' if scales is None else 'has no'} scales")
    return (None, None) if scales is None else scales


def reference_encode(x: Tensor, kind: str) -> Tensor:
    """x of any float dtype as e4m3 bytes (uint8) or int8."""
    largest = LARGEST[kind]
    clamped = x.float().clamp(-largest, largest)
    if kind == "int8":
        return clamped.round().to(torch.int8)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def reference_decode(stored: Tensor) -> Tensor:
    """What bytes of e4m3, int8 or wider floats stand for, in float64."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e4m3fn)
    return stored.double()
