"""Products with weights of 8 and 4 bits that are widened in registers: what is read is the low precision.

A code becomes a float by an addition: its bits in the mantissa of 2^23 stand for 2^23 + code, from which
2^23 + zero is taken off. Codes minus zeros are small integers, exact in 16 bits, so products run on tensor
cores, and the scale of a group of input channels is applied to its float32 sums. Few rows leave too few tiles
to fill a card, so the input channels are shared among programs (split-K), whose sums another kernel adds in a
fixed order: the result is the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dot import dot
from engine.kernels.launch import FLOATS, INTERPRETED, Launch, cdiv, next_power_of_2
from engine.layers.precision.codes import unpack_nibbles
from engine.layers.precision.weights import Int4Weight, Int8Weight

TILE_K = 128  # input channels that a program multiplies at once
MIN_TILE_K = 32
PROGRAMS = 264  # two a multiprocessor of the largest cards: what split-K aims at
MAX_SPLITS = 16
_BLOCK_N = 64


def probe(weight: Int4Weight | Int8Weight, dtype: torch.dtype) -> str | None:
    """Why products of ``dtype`` with this weight cannot be served, or None."""
    if dtype not in FLOATS:
        return f"the product needs bfloat16, float16 or float32, not {dtype}"
    if dtype == torch.float32 and not INTERPRETED:
        return "the product runs on tensor cores, in bfloat16 or float16, and activations are in float32"
    out, cols = weight.shape
    tile = tile_k(weight)
    if tile < MIN_TILE_K or cols % tile or (weight.group < cols and weight.group % tile):
        return f"it needs groups of a multiple of {MIN_TILE_K} input channels, not {weight.group} of {cols}"
    if out % 16:
        return f"it needs a multiple of 16 output channels, not {out}"
    return None


def tile_k(weight: Int4Weight | Int8Weight) -> int:
    """Input channels of one step: the largest power of two that divides the channels and the groups."""
    cols = weight.shape[1]
    wanted = TILE_K
    while cols % wanted or (weight.group < cols and weight.group % wanted):
        wanted //= 2
    return wanted


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] as the kernels read it.

    codes: int8 [out, in]; or for 4 bits uint8 [out, in / 2], where byte j of the half tile that begins at
    i / 2 holds column i + j in its low half and column i + j + tile / 2 in the upper one, so that neither
    half needs moving. scales: floats [groups, out]. zeros: integers [groups, out], None where all are
    ``zero``. Both are those of the weight itself.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, int]
    bits: int
    tile: int
    group: int

    @property
    def zero(self) -> int:
        """The zero of all groups where there are no zeros."""
        return 8 if self.bits == 4 else 0


def pack(weight: Int4Weight | Int8Weight) -> PackedWeight:
    """For the kernels; ask `probe` first. The caller sees to ``order`` and ``input_scale`` of the weight."""
    tile = tile_k(weight)
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    if isinstance(weight, Int8Weight):
        codes, bits = weight.codes.contiguous(), 8
    else:
        halves = unpack_nibbles(weight.codes).view(weight.shape[0], -1, 2, tile // 2)
        codes, bits = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous(), 4
    group = min(weight.group, weight.shape[1])
    return PackedWeight(codes, weight.scales.contiguous(), zeros, weight.shape, bits, tile, group)


@triton.jit
def _widen(bits, zero, TO: tl.constexpr):
    """Codes 0..255 in int32, minus ``zero``, exactly."""
    number = (bits | 0x4B000000).to(tl.float32, bitcast=True)
    return (number - (8388608.0 + zero)).to(TO)


@triton.jit
def _codes_of(codes, at, inside, zero, TO: tl.constexpr):
    """int8 codes minus their zero; int8 is read as the unsigned code + 128."""
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    return _widen((code & 0xFF) ^ 0x80, zero + 128.0, TO)


@triton.jit(do_not_specialize=["rows", "splits"])
def _gemm(
    x,
    codes,
    scales,
    zeros,
    bias,
    y,
    sums,
    rows,
    splits,
    stride,
    OUT: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of y, or of one program's share of its sums.

    In one piece: a third of it are parameters, the rest is one loop with what comes before and after it.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    TO: tl.constexpr = x.dtype.element_ty
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_out, is_row = out < OUT, row < rows
    x_row = x + row[:, None].to(tl.int64) * stride
    low = tl.arange(0, HALF)
    zero = tl.full((BLOCK_N,), ZERO, tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    TILES: tl.constexpr = COLS // BLOCK_K
    each = (TILES + splits - 1) // splits
    for t in range(split * each, tl.minimum(split * each + each, TILES)):
        k = t * BLOCK_K
        at_group = k // GROUP * OUT + out
        if HAS_ZEROS:
            zero = tl.load(zeros + at_group, mask=is_out, other=0).to(tl.float32)
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if BITS == 4:
            at = out[:, None].to(tl.int64) * (COLS // 2) + (k // 2 + low)[None, :]
            both = tl.load(codes + at, mask=is_out[:, None], other=0).to(tl.int32)
            x_low = tl.load(x_row + (k + low)[None, :], mask=is_row[:, None], other=0.0)
            part = dot(x_low, tl.trans(_widen(both & 15, zero[:, None], TO)), part)
            x_high = tl.load(x_row + (k + HALF + low)[None, :], mask=is_row[:, None], other=0.0)
            part = dot(x_high, tl.trans(_widen(both >> 4, zero[:, None], TO)), part)
        else:
            cols = k + tl.arange(0, BLOCK_K)
            at = out[:, None].to(tl.int64) * COLS + cols[None, :]
            w = _codes_of(codes, at, is_out[:, None], zero[:, None], TO)
            part = dot(tl.load(x_row + cols[None, :], mask=is_row[:, None], other=0.0), tl.trans(w), part)
        acc += part * tl.load(scales + at_group, mask=is_out, other=0.0).to(tl.float32)[None, :]
    inside = is_row[:, None] & is_out[None, :]
    y_at = row[:, None].to(tl.int64) * OUT + out[None, :]
    if IS_SPLIT:
        tl.store(sums + split.to(tl.int64) * rows * OUT + y_at, acc, mask=inside)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
        tl.store(y + y_at, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def _add_splits(sums, bias, y, rows, splits, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = out < OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(sums + (split * rows + row) * OUT + out, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * OUT + out, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize(
    codes,
    scales,
    zeros,
    weight,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_K // 2
    TO: tl.constexpr = weight.dtype.element_ty
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    is_out = (out < OUT)[:, None]
    at_group = k // GROUP * OUT + out
    scale = tl.load(scales + at_group, mask=out < OUT, other=0.0).to(tl.float32)[:, None]
    zero = tl.full((BLOCK_N, 1), ZERO, tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros + at_group, mask=out < OUT, other=0).to(tl.float32)[:, None]
    if BITS == 4:
        low = tl.arange(0, HALF)[None, :]
        at = out[:, None].to(tl.int64) * (COLS // 2) + k // 2 + low
        both = tl.load(codes + at, mask=is_out, other=0).to(tl.int32)
        w_at = weight + out[:, None].to(tl.int64) * COLS + k + low
        tl.store(w_at, (_widen(both & 15, zero, tl.float32) * scale).to(TO), mask=is_out)
        tl.store(w_at + HALF, (_widen(both >> 4, zero, tl.float32) * scale).to(TO), mask=is_out)
    else:
        at = out[:, None].to(tl.int64) * COLS + k + tl.arange(0, BLOCK_K)[None, :]
        wide = _codes_of(codes, at, is_out, zero, tl.float32) * scale
        tl.store(weight + at, wide.to(TO), mask=is_out)


def splits_for(rows: int, weight: PackedWeight) -> int:
    """Among how many programs input channels are shared, for a product of ``rows`` rows to fill a card."""
    tiles = cdiv(weight.shape[0], _BLOCK_N) * cdiv(rows, _block_m(rows))
    steps = weight.shape[1] // weight.tile
    return max(1, min(MAX_SPLITS, PROGRAMS // tiles, steps // 4))


def rows_unsplit(out: int) -> int:
    """Of so many rows a product with ``out`` output channels fills a card without sharing input channels."""
    tiles = cdiv(out, _BLOCK_N)
    return (PROGRAMS // 2 // tiles + 1) * _block_m(PROGRAMS)


def gemm(
    x: Tensor, weight: PackedWeight, y: Tensor, *, bias: Tensor | None = None, sums: Tensor | None = None
) -> tuple[Launch, ...]:
    """The launches that compute ``y = x @ weight.T + bias``.

    x: [rows, in], rows contiguous. y: contiguous [rows, out]. bias: [out]. sums: memory for split-K, float32
    [splits, rows, out]; None for no split (see `splits_for`).
    """
    rows, (out, cols) = x.shape[0], weight.shape
    splits = 1 if sums is None else sums.shape[0]
    block_m = _block_m(rows)
    shared = {"bias": bias, "y": y, "sums": sums, "rows": rows, "splits": splits}
    constants = {"OUT": out, "HAS_BIAS": bias is not None}
    product = Launch(
        _gemm,
        (cdiv(out, _BLOCK_N), cdiv(rows, block_m), splits),
        {
            **shared,
            "x": x,
            "codes": weight.codes,
            "scales": weight.scales,
            "zeros": weight.zeros,
            "stride": x.stride(0),
        },
        {
            **constants,
            "IS_SPLIT": splits > 1,
            "COLS": cols,
            "GROUP": weight.group,
            "BITS": weight.bits,
            "HAS_ZEROS": weight.zeros is not None,
            "ZERO": weight.zero,
            "BLOCK_M": block_m,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": weight.tile,
        },
        num_warps=4,
        num_stages=3,
    )
    if splits == 1:
        return (product,)
    block = min(1024, next_power_of_2(out))
    adding = Launch(_add_splits, (rows, cdiv(out, block)), shared, {**constants, "BLOCK": block})
    return product, adding


def dequantize(weight: PackedWeight, into: Tensor) -> Launch:
    """Write the whole weight into ``into``, contiguous [out, in], for a product of many rows."""
    out, cols = weight.shape
    return Launch(
        _dequantize,
        (cdiv(out, 16), cols // weight.tile),
        {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "weight": into},
        {
            "COLS": cols,
            "GROUP": weight.group,
            "OUT": out,
            "BITS": weight.bits,
            "HAS_ZEROS": weight.zeros is not None,
            "ZERO": weight.zero,
            "BLOCK_N": 16,
            "BLOCK_K": weight.tile,
        },
        num_warps=4,
    )


def reference_product(x: Tensor, weight: Int4Weight | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """What `gemm` computes, in float64. What `dequantize` does is the weight's own ``dequantize``."""
    y = x.double() @ weight.dequantize().double().t()
    return y if bias is None else y + bias.double()


def _block_m(rows: int) -> int:
    return min(64, max(16, next_power_of_2(rows)))
