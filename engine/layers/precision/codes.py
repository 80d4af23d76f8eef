"""Bit layouts: four-bit codes in bytes, and float8 values by shifting bits.

torch converts float8 one element at a time; the same conversion by shifts of whole vectors takes a tenth of
the time on a CPU, which is what makes fp8 weights usable there.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
HALF_BIAS = 256.0  # what a float8 e4m3 value is divided by when its bits are read as float16


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 [rows, cols], cols even, as bytes [rows, cols / 2]: the even column in the low half."""
    pairs = codes.to(torch.uint8).view(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 codes [rows, cols]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def e4m3_as_half(codes: Tensor, bits: Tensor) -> Tensor:
    """float8 e4m3fn values as float16, each divided by `HALF_BIAS`. Exact; NaN codes must not occur.

    ``bits``: int16 memory of the shape of ``codes``, which the result is a view of. Sign, exponent and
    mantissa move to their places in float16 (e4m3: 1, 4 and 3 bits, bias 7; float16: 1, 5 and 10 bits,
    bias 15; arXiv 2209.05433 for the former). Subnormal values need no care: they stay subnormal.
    """
    bits.copy_(codes.view(torch.int8))  # the sign is extended over the upper byte
    bits.mul_(128)  # a shift by 7 that also runs vectorized
    return bits.bitwise_and_(-0x4001).view(torch.float16)  # bit 14 held a copy of the sign


def has_e4m3_nan(codes: Tensor) -> bool:
    return bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any())
