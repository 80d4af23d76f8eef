"""Attention over the paged pool: one kernel for prefill, decode and verification of drafts.

A program takes a tile of queries of one KV head: new tokens of a row times the query heads that share the
head (GQA), so that each key and value is read once for all of them, and goes over the row's keys with an
online softmax (FlashAttention-2, arXiv 2307.08691). Keys are found through the block table (PagedAttention,
arXiv 2309.06180). Keys in 8 bits are widened in registers; the scale of their head goes into the softmax's
scale, that of the values into the result, so no number is multiplied for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_parts import Parts, combine_parts
from engine.kernels.attention_rows import MAX_SPLITS, row_of_tile, split_row
from engine.kernels.codes import decode, kind_of, scales_of
from engine.kernels.dot import dot
from engine.kernels.launch import FLOATS, INTERPRETED, Launch, native_fp8, next_power_of_2

MIN_ROWS = 16  # of a tile: the least that tensor cores take
SHORT_ROWS = 64  # up to this many rows of queries a tile holds all that a row has; beyond, it is prefill
MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 1024
STORAGES = (*FLOATS, torch.uint8, torch.int8)


def probe(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, storage: torch.dtype
) -> str | None:
    """Why attention of these sizes cannot be served, or None. storage: of the pool, uint8 for e4m3."""
    if dtype not in FLOATS:
        return f"paged_attention needs queries in bfloat16, float16 or float32, not {dtype}"
    if dtype == torch.float32 and not INTERPRETED:
        # Not rounded to TF32, which loses what float32 is chosen for, it runs beside the tensor cores and
        # takes more registers and shared memory than there are.
        return (
            "paged_attention multiplies on tensor cores, in bfloat16 or float16, and the model is in "
            "float32; choose attention=sdpa, or a dtype of 16 bits"
        )
    if storage not in STORAGES:
        return f"paged_attention cannot read a KV cache of {storage}"
    if head_dim > MAX_HEAD_DIM:
        return f"paged_attention holds heads of at most {MAX_HEAD_DIM}, the model's have {head_dim}"
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        return f"paged_attention reads blocks of 1 to {MAX_BLOCK_SIZE} tokens, not {block_size}"
    if heads % kv_heads:
        return f"{heads} query heads cannot share {kv_heads} KV heads evenly"
    return None


@dataclass(frozen=True, slots=True)
class Tiles:
    """How work is cut: ``block_q`` new tokens make a tile of ``block_m`` rows, ``block_n`` keys one step."""

    block_q: int
    block_m: int
    block_n: int
    one_tile: bool  # every row's queries fit into one tile
    num_warps: int
    num_stages: int


def tiles_for(group: int, head_dim: int, max_queries: int, itemsize: int, *, hopper: bool) -> Tiles:
    """For rows of up to ``max_queries`` new tokens, ``group`` query heads a KV head.

    itemsize: bytes of a number in the pool. hopper: compute capability 9, whose tensor cores take operands
    from shared memory, which leaves registers for larger tiles. Chosen so that everything fits into the
    99 KiB of shared memory that the smallest of the supported cards have, and no register is spilled.
    """
    packed = next_power_of_2(max_queries * group)
    short = packed <= SHORT_ROWS
    wide = head_dim > 128
    long_rows = 128 if hopper and not wide else 64
    block_m = max(MIN_ROWS, packed if short else max(long_rows, next_power_of_2(group)))
    many = block_m >= 64
    return Tiles(
        # Not max_queries: what a program is compiled for shall not follow the number of drafted tokens.
        block_q=block_m // group,
        block_m=block_m,
        block_n=32 if wide or itemsize == 4 else 64,
        one_tile=short,
        num_warps=8 if many and head_dim > 64 and (block_m > 64 or wide or not hopper) else 4,
        num_stages=2 if wide or itemsize == 4 or many else 3,
    )


@triton.jit
def _slots(table, tile, key, there, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where in the pool the keys of a tile are, of which those that are ``there`` may be read."""
    if BLOCK_SIZE % BLOCK_N == 0:
        first = tile * BLOCK_N
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + (key - first // BLOCK_SIZE * BLOCK_SIZE)
    else:
        # Blocks before the window may be gone, and those behind the last key are of others.
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        return block * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _weigh(scores, best):
    """One step of the online softmax: (weights, what earlier weights are multiplied by, largest score)."""
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # A query that has seen no key yet has no largest score either.
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(scores - origin[:, None]), tl.exp2(best - origin), higher


@triton.jit(
    do_not_specialize=["rows", "split_tokens", "max_splits", "table_stride"],
    do_not_specialize_on_alignment=["cu", "lengths", "tables", "k_scale", "v_scale"],
)
def _paged_attention(
    q,
    k_pool,
    v_pool,
    out,
    parts,
    part_sums,
    cu,
    lengths,
    tables,
    split_tiles,
    k_scale,
    v_scale,
    rows,
    split_tokens,
    max_splits,
    softmax_scale,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of queries of one row over a part of its keys (FlashAttention-2, with split keys).

    In one piece: a third of it are parameters, and the loop with what comes before and after it shares a
    dozen of tiles and numbers, which a function for each would only hand to and fro.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(cu)
    if ONE_TILE:
        row = index
        tile = 0
        start = tl.load(cu + row)
    else:
        row = row_of_tile(cu, base, rows, index, BLOCK_Q)
        start = tl.load(cu + row)
        tile = index - ((start - base) // BLOCK_Q + row)
    queries = tl.load(cu + row + 1) - start
    if tile * BLOCK_Q >= queries:
        return
    length = tl.load(lengths + row)
    first, end, each, splits = split_row(queries, length, tl.load(split_tiles), max_splits, BLOCK_N, WINDOW)
    if start - base + queries > split_tokens:  # there is no room for parts of this row
        splits = 1
        each = end - first
    if split >= splits:
        return

    m = tl.arange(0, BLOCK_M)
    new = tile * BLOCK_Q + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_query = (m < BLOCK_Q * GROUP) & (new < queries)
    position = length - queries + new
    token = (start + new).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    q_at = q + (token * q_stride + head * DIM)[:, None] + dim[None, :]
    q_tile = tl.load(q_at, mask=is_query[:, None] & (dim < DIM)[None, :], other=0.0)
    scale = softmax_scale
    if KIND != "none":
        scale *= tl.load(k_scale + kv_head)

    # Keys that some query of this tile attends to, of those that are this part's.
    key_end = tl.minimum(length - queries + (tile + 1) * BLOCK_Q, length)
    key_first = 0
    if WINDOW > 0:
        key_first = tl.maximum(length - queries + tile * BLOCK_Q + 1 - WINDOW, 0)
    low = tl.maximum(first + split * each, key_first // BLOCK_N)
    high = tl.minimum(tl.minimum(first + (split + 1) * each, end), tl.cdiv(key_end, BLOCK_N))
    n = tl.arange(0, BLOCK_N)
    table = tables + row.to(tl.int64) * table_stride
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
    for t in range(low, high):
        key = t * BLOCK_N + n
        there = (key >= key_first) & (key < key_end)
        slot = _slots(table, t, key, there, BLOCK_SIZE, BLOCK_N)
        at = (slot * (KV_HEADS * DIM) + kv_head * DIM)[:, None] + dim[None, :]
        read = there[:, None] & (dim < DIM)[None, :]
        k = decode(tl.load(k_pool + at, mask=read, other=0), q.dtype.element_ty, KIND, NATIVE)
        scores = dot(q_tile, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > (position - WINDOW)[:, None]
        weights, kept, best = _weigh(tl.where(seen, scores, float("-inf")), best)
        total = total * kept + tl.sum(weights, axis=1)
        v = decode(tl.load(v_pool + at, mask=read, other=0), q.dtype.element_ty, KIND, NATIVE)
        acc = dot(weights.to(q.dtype.element_ty), v, acc * kept[:, None])

    store = is_query[:, None] & (dim < DIM)[None, :]
    if SPLITS:  # noqa: SIM102  # without, there is no memory that the branch could be compiled for
        if splits > 1:
            part = ((token - base) * HEADS + head) * max_splits + split
            tl.store(parts + (part * DIM)[:, None] + dim[None, :], acc, mask=store)
            tl.store(part_sums + part * 2, best, mask=is_query)
            tl.store(part_sums + part * 2 + 1, total, mask=is_query)
            return
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    if KIND != "none":
        inverse *= tl.load(v_scale + kv_head)
    out_at = out + ((token * HEADS + head) * DIM)[:, None] + dim[None, :]
    tl.store(out_at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=store)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    split_tiles: Tensor,
    parts: Parts | None,
    tiles: Tiles,
    block_size: int,
    tokens: int | None = None,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Launch, ...]:
    """The launches, one after the other, that compute attention of all new tokens of some rows.

    q: [tokens, heads, head_dim], heads contiguous. k_pool, v_pool: one layer of the pool, contiguous
    [slots, kv_heads, head_dim], with the new keys and values in it. out: as q, contiguous.
    cu_seqlens_q: int32 [rows + 1], row r has the tokens [cu[r], cu[r + 1]); it need not begin with 0.
    seq_lens: int32 [rows], the keys of each row, new ones included. block_tables: int32 [rows, most blocks];
    entries of blocks that nothing attends to may hold anything. A row without tokens computes nothing.
    split_tiles: int32 [1], see `engine.kernels.attention_rows.plan_splits`. parts: None to split nothing.
    tokens: at least so many new tokens as the rows have together; None for those of q.
    window: a token attends to so many tokens, itself included. scales: of keys and values, float32
    [kv_heads], for a pool in 8 bits.

    Most of its lines name what the two kernels are launched with, which has no parts to be told apart.
    """
    all_tokens, heads, dim = q.shape
    tokens = all_tokens if tokens is None else tokens
    kv_heads, rows = k_pool.shape[1], seq_lens.shape[0]
    split_tokens, max_splits = (0, 1) if parts is None else (parts.sums.shape[0], parts.sums.shape[2])
    k_scale, v_scale = scales_of(k_pool.dtype, scales)
    shared = {
        "out": out,
        "parts": None if parts is None else parts.values,
        "part_sums": None if parts is None else parts.sums,
        "cu": cu_seqlens_q,
        "lengths": seq_lens,
        "split_tiles": split_tiles,
        "v_scale": v_scale,
        "rows": rows,
        "split_tokens": split_tokens,
        "max_splits": max_splits,
    }
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "DIM_BLOCK": max(16, next_power_of_2(dim)),
        "BLOCK_N": tiles.block_n,
        "WINDOW": window or 0,
        "KIND": kind_of(k_pool.dtype),
    }
    places = rows if tiles.one_tile else tokens // tiles.block_q + rows
    attention = Launch(
        _paged_attention,
        (places, kv_heads, max_splits),
        {
            **shared,
            "q": q,
            "k_pool": k_pool,
            "v_pool": v_pool,
            "tables": block_tables,
            "k_scale": k_scale,
            "softmax_scale": dim**-0.5 * math.log2(math.e),
            "q_stride": q.stride(0),
            "table_stride": block_tables.stride(0),
        },
        {
            **constants,
            "BLOCK_SIZE": block_size,
            "BLOCK_Q": tiles.block_q,
            "BLOCK_M": tiles.block_m,
            "ONE_TILE": tiles.one_tile,
            "SPLITS": parts is not None,
            "NATIVE": native_fp8(q.device),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if max_splits == 1:
        return (attention,)
    # Whether any row is split is known on the device alone; where none is, programs end after a few numbers.
    return attention, Launch(
        combine_parts,
        (min(split_tokens, tokens), heads),
        shared,
        {**constants, "MOST_SPLITS": MAX_SPLITS},
        num_warps=4,
    )


def reference_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: list[int],
    lengths: list[int],
    block_tables: Tensor,
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """float64 [tokens, heads, head_dim], from a pool k, v [slots, kv_heads, head_dim] of float64 numbers."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k.shape[1]
    start = 0
    for row, (new, length) in enumerate(zip(queries, lengths, strict=True)):
        key = torch.arange(length, device=q.device)
        position = torch.arange(length - new, length, device=q.device).unsqueeze(1)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        table = block_tables[row].long()
        slot = table[key // block_size] * block_size + key % block_size
        # Keys that nobody sees may lie in blocks that are gone.
        unseen = hidden.all(0)
        slot[unseen] = 0
        keys, values = (x[slot].repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = q[start : start + new].double().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out[start : start + new] = (weights @ values.masked_fill(unseen[:, None], 0.0)).transpose(0, 1)
        start += new
    return out
