"""The parts of rows whose keys are shared among programs, and how they become one result (Flash-Decoding)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_rows import split_row


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory for the parts of rows that are split, shared by all layers.

    values: float32 [tokens, heads, splits, head_dim]; sums: float32 [tokens, heads, splits, 2], the largest
    score and the sum of weights. Only rows that lie within the first ``tokens`` tokens of a launch are split,
    into at most ``splits`` parts, which is no more than `engine.kernels.attention_rows.MAX_SPLITS`.
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def allocate(cls, tokens: int, heads: int, head_dim: int, splits: int, device: torch.device) -> Parts:
        """Memory for up to ``splits`` parts of each of ``tokens`` tokens."""
        shape = (tokens, heads, splits)
        return cls(
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, 2, dtype=torch.float32, device=device),
        )


@triton.jit(
    do_not_specialize=["rows", "split_tokens", "max_splits"],
    do_not_specialize_on_alignment=["cu", "lengths", "v_scale"],
)
def combine_parts(
    out,
    parts,
    part_sums,
    cu,
    lengths,
    split_tiles,
    v_scale,
    rows,
    split_tokens,
    max_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    KIND: tl.constexpr,
):
    index, head = tl.program_id(0), tl.program_id(1)
    base = tl.load(cu)
    if index >= tl.load(cu + rows) - base:
        return
    # Here every token is a tile, and rows without one are skipped: the last row that starts at or before it.
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle) - base <= index:
            low = middle
        else:
            high = middle
    start = tl.load(cu + low)
    queries = tl.load(cu + low + 1) - start
    length = tl.load(lengths + low)
    _, _, _, splits = split_row(queries, length, tl.load(split_tiles), max_splits, BLOCK_N, WINDOW)
    if start - base + queries > split_tokens or splits == 1:
        return  # it was written where it belongs already
    s = tl.arange(0, MOST_SPLITS)
    dim = tl.arange(0, DIM_BLOCK)
    part = (index.to(tl.int64) * HEADS + head) * max_splits + s
    there = s < splits
    best = tl.load(part_sums + part * 2, mask=there, other=float("-inf"))
    total = tl.load(part_sums + part * 2 + 1, mask=there, other=0.0)
    # A part whose keys this query does not see counts for nothing.
    weight = tl.exp2(best - tl.max(best, axis=0))
    at = parts + (part * DIM)[:, None] + dim[None, :]
    values = tl.load(at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    result = tl.sum(values * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    if KIND != "none":
        result *= tl.load(v_scale + head // (HEADS // KV_HEADS))
    out_at = out + ((index + base).to(tl.int64) * HEADS + head) * DIM + dim
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dim < DIM)
