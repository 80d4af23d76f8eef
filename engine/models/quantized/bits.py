"""Integers packed into the 32-bit words of quantized checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: column c of a word's eight is at the nibble AWQ_ORDER[c] (its kernel reads 0, 2, 4, 6, 1, 3, 5, 7)."""


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words as uint8 values of 4 or 8 ``bits``, the lowest bits first, along ``dim`` (0 or 1)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    mask = (1 << bits) - 1
    if dim == 0:
        values = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & mask
        return values.to(torch.uint8).flatten(0, 1)
    values = (words.unsqueeze(2) >> shifts) & mask
    return values.to(torch.uint8).flatten(1, 2)


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [rows, cols / 8] of AWQ's gemm layout as uint8 [rows, cols]."""
    straight = unpack(words, 4, 1).view(words.shape[0], -1, 8)
    return straight[..., list(AWQ_ORDER)].flatten(1)
