"""torch's four-bit kernel for CPUs, and how to read its layout back.

``_weight_int4pack_mm_for_cpu`` wants codes in blocks of output channels, K-major: for each input channel of
a block of B channels B / 2 bytes, the low halves for the first B / 2 channels, the high halves for the
others. B is 64 with AVX-512 and 32 with AVX2; it is found by packing a small weight. As its layout is
known, products of many rows can expand the same bytes and no second copy is held.

A code stands for ``(code - 8) * scale + zero`` with scale and zero in bfloat16; a zero in code units becomes
``(8 - zero) * scale``, rounded to bfloat16 (at most 1/64 of a step of the code).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.precision.codes import unpack_nibbles
from engine.layers.precision.tiles import PART_ELEMENTS, scratch
from engine.layers.precision.weights import Int4Weight, QuantizedWeight

KERNEL_GROUPS = (256, 128, 64, 32)
ROWS = 64  # output channels are padded to a multiple of this, so that no block is smaller than the others


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in the kernel's layout.

    codes: uint8 [padded out, in / 2]; scales_and_zeros: bfloat16 [in / group, padded out, 2].
    """

    codes: Tensor
    scales_and_zeros: Tensor
    out: int
    cols: int
    group: int

    def multiply(self, x: Tensor) -> Tensor:
        """The kernel: x [rows, in] -> bfloat16 [rows, out]."""
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self.codes, self.group, self.scales_and_zeros
        )
        return y[:, : self.out]

    def expand_and_multiply(self, x: Tensor, block: int) -> Tensor:
        """The same weight expanded to float32 part by part: x [rows, in] -> float32 [rows, out]."""
        x = x.float()
        half = block // 2
        blocks = self.codes.view(-1, self.cols, half)
        y = torch.empty(x.shape[0], blocks.shape[0] * block)
        at_once = max(1, PART_ELEMENTS // (self.cols * block))
        for first in range(0, blocks.shape[0], at_once):
            part = blocks[first : first + at_once]
            n = part.shape[0]
            nibbles = scratch("nibbles", part.numel(), torch.uint8).view(part.shape)
            weight = scratch("part", n * self.cols * block, torch.float32).view(self.cols, n * block)
            by_half = weight.view(self.cols, n, 2, half).transpose(0, 1)  # [n, in, 2, half]
            by_half[:, :, 0].copy_(torch.bitwise_and(part, 15, out=nibbles))
            by_half[:, :, 1].copy_(torch.bitwise_right_shift(part, 4, out=nibbles))
            here = slice(first * block, (first + n) * block)
            scales, offsets = self.scales_and_zeros[:, here].float().unsqueeze(1).unbind(-1)
            weight.view(-1, self.group, n * block).mul_(scales).add_(offsets - 8 * scales)
            torch.mm(x, weight, out=y[:, here])
        return y[:, : self.out]


def kernel_group(weight: Int4Weight) -> int | None:
    """The kernel's group size that serves this weight: its own, or a part of it that divides ``in``."""
    cols = weight.shape[1]
    own = weight.group if weight.groups > 1 else cols
    return next((g for g in KERNEL_GROUPS if cols % g == 0 and own % g == 0), None)


def refuses(weight: QuantizedWeight) -> str | None:
    if not isinstance(weight, Int4Weight):
        return "it is no int4 weight"
    if kernel_group(weight) is None:
        cols = weight.shape[1]
        return f"{cols} input channels in groups of {weight.group} are no groups of 32, 64, 128 or 256"
    return None


def pack(weight: Int4Weight) -> Packed:
    """``weight`` in the kernel's layout; scales are repeated where the kernel's groups are smaller."""
    out, cols = weight.shape
    group = kernel_group(weight)
    if group is None:
        raise ValueError(f"{refuses(weight)}")
    more = -out % ROWS
    codes = F.pad(unpack_nibbles(weight.codes), (0, 0, 0, more)).to(torch.int32)
    scales, offsets = scales_and_offsets(weight, group)
    both = torch.stack((scales, offsets), dim=-1).to(torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Packed(packed, F.pad(both, (0, 0, 0, more)).contiguous(), out, cols, group)


def scales_and_offsets(weight: Int4Weight, group: int) -> tuple[Tensor, Tensor]:
    """float32 [in / group, out] each, for groups that divide the weight's own: w = (code - 8) * s + o."""
    cols = weight.shape[1]
    scales = weight.scales.float()
    offsets = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
    repeat = (weight.group if weight.groups > 1 else cols) // group
    kept = cols // group
    return scales.repeat_interleave(repeat, 0)[:kept], offsets.repeat_interleave(repeat, 0)[:kept]


@functools.cache
def block_size() -> int | None:
    """Channels in a block of the kernel's layout on this CPU, None if it is one that is not known."""
    codes = torch.randint(0, 16, (2 * ROWS, 64), generator=torch.Generator().manual_seed(0))
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    for block in (64, 32):
        parts = packed.view(-1, 64, block // 2)
        found = torch.cat((parts & 15, parts >> 4), dim=-1).transpose(1, 2).reshape(codes.shape)
        if torch.equal(found.long(), codes):
            return block
    return None
