"""Which rows of a step a program of the attention kernels works on, and into how many parts their keys go.

Split-KV (Flash-Decoding): where few rows are long, the keys of a row are shared among several programs, whose
parts are combined afterwards. How many is decided on the device from lengths that lie there, so that a
captured graph serves every step: `plan_splits` looks at the whole step and sets how many tiles of keys one
program takes, each row's number of parts follows from that, and the grid is an upper bound.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch

MAX_SPLITS = 32
GRID = 2048  # programs of a launch up to which room for more parts is kept; those without work cost time too
MIN_SPLIT_TILES = 2  # fewer keys than two tiles are not worth a program and its part of the combination
PLAN_ROWS = 256  # rows that the planning program looks at at once


def most_splits(rows: int, kv_heads: int) -> int:
    """Into how many parts a launch over ``rows`` rows may split one: a power of two, from the shape alone."""
    room = GRID // max(1, rows * kv_heads)
    return min(MAX_SPLITS, 1 << max(0, room.bit_length() - 1))


@triton.jit
def row_of_tile(cu, base, rows, index, BLOCK_Q: tl.constexpr):
    """The row that tile ``index`` belongs to: the last r with ``(cu[r] - base) // BLOCK_Q + r <= index``.

    So a row of n queries has n // BLOCK_Q + 1 places for its tiles, of which the last may stay empty, and
    the place of a row's first tile needs no sum over the rows before it.
    """
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(cu + middle) - base) // BLOCK_Q + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def first_key(queries, length, WINDOW: tl.constexpr):
    """Position of the first key that any of a row's new tokens attends to."""
    if WINDOW > 0:
        return tl.maximum(length - queries + 1 - WINDOW, 0)
    else:
        return length * 0


@triton.jit
def split_row(queries, length, split_tiles, max_splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """(first tile of a row's keys, end of its tiles, tiles a part, parts)."""
    first = first_key(queries, length, WINDOW) // BLOCK_N
    end = tl.cdiv(length, BLOCK_N)
    each = tl.maximum(split_tiles, tl.cdiv(end - first, max_splits))
    return first, end, each, tl.maximum(tl.cdiv(end - first, each), 1)


@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["cu", "lengths"])
def _plan_splits(
    cu,
    lengths,
    split_tiles,
    rows,
    programs,
    KV_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.int64)  # of long prompts over long contexts it is more than 2^31
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        here = row < rows
        queries = tl.load(cu + row + 1, mask=here, other=0) - tl.load(cu + row, mask=here, other=0)
        length = tl.load(lengths + row, mask=here, other=0)
        tiles = tl.cdiv(length, BLOCK_N) - first_key(queries, length, WINDOW) // BLOCK_N
        total += tl.where(here, tl.cdiv(queries, BLOCK_Q) * tiles, 0)
    work = tl.sum(total, axis=0) * KV_HEADS
    tl.store(split_tiles, tl.maximum(tl.cdiv(work, programs), MIN_TILES))


def plan_splits(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    split_tiles: Tensor,
    *,
    programs: int,
    kv_heads: int,
    block_q: int,
    block_n: int,
    window: int | None,
) -> Launch:
    """Set ``split_tiles`` (int32 [1]) so that the step becomes about ``programs`` programs of equal work.

    Once a step and window; all layers share it. A caller whose results shall not depend on the other rows of
    a batch, to the last bit, writes a constant there instead. For the other arguments see
    `engine.kernels.paged_attention`.
    """
    return Launch(
        _plan_splits,
        (1,),
        {
            "cu": cu_seqlens_q,
            "lengths": seq_lens,
            "split_tiles": split_tiles,
            "rows": seq_lens.shape[0],
            "programs": programs,
        },
        {
            "KV_HEADS": kv_heads,
            "BLOCK_Q": block_q,
            "BLOCK_N": block_n,
            "WINDOW": window or 0,
            "MIN_TILES": MIN_SPLIT_TILES,
            "BLOCK": PLAN_ROWS,
        },
        num_warps=4,
    )


def reference_plan_splits(
    queries: list[int],
    lengths: list[int],
    *,
    programs: int,
    kv_heads: int,
    block_q: int,
    block_n: int,
    window: int | None,
) -> int:
    """What `plan_splits` writes, from each row's numbers of new tokens and of keys."""
    work = 0
    for new, length in zip(queries, lengths, strict=True):
        first = 0 if window is None else max(length - new + 1 - window, 0)
        work += -(-new // block_q) * (-(-length // block_n) - first // block_n) * kv_heads
    return max(-(-work // programs), MIN_SPLIT_TILES)
