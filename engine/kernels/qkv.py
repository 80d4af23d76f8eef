"""From the product of queries, keys and values to what attention reads, in one pass over it.

Norm of each query and key head (Qwen3), rotary embedding (arXiv 2104.09864, in halves as
`engine.layers.rope`), and the new keys and values into the paged pool in its own precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.codes import encode, kind_of, reference_encode, scales_of
from engine.kernels.launch import FLOATS, Launch, cdiv, native_fp8, next_power_of_2

HEADS_A_PROGRAM = 8  # so that one token alone still spreads over several multiprocessors
MAX_HEAD_DIM = 256
STORAGES = (*FLOATS, torch.uint8, torch.int8)


def probe(head_dim: int, rotary_dim: int, dtype: torch.dtype, storage: torch.dtype) -> str | None:
    """Why heads of ``head_dim``, of which ``rotary_dim`` turn, cannot be written to ``storage``, or None.

    storage: that of the pool, uint8 for e4m3.
    """
    if dtype not in FLOATS:
        return f"qk_norm_rope_kv_write needs bfloat16, float16 or float32, not {dtype}"
    if storage not in STORAGES:
        return f"qk_norm_rope_kv_write cannot write a KV cache of {storage}"
    if head_dim > MAX_HEAD_DIM:
        return f"qk_norm_rope_kv_write holds heads of at most {MAX_HEAD_DIM}, the model's have {head_dim}"
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        return f"qk_norm_rope_kv_write turns an even part of a head, not {rotary_dim} of {head_dim}"
    return None


@triton.jit
def _store_part(
    part,
    inside,
    dims,
    token,
    slot,
    head,
    before,
    q,
    k_pool,
    v_pool,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store elements ``dims`` of some heads of one token, [heads of the program, dims], where they belong."""
    is_query = (head < HEADS)[:, None]
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None]
    q_at = q + (token * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(q_at, part.to(q.dtype.element_ty), mask=inside & is_query)
    if KIND == "none":
        new = part.to(k_pool.dtype.element_ty)
    else:
        new = encode(part * before[:, None], KIND, NATIVE)
    # A token whose slot is negative pads a bucket and is written nowhere.
    written = inside & (slot >= 0)
    k_at = (slot * KV_HEADS + head - HEADS)[:, None] * DIM + dims[None, :]
    tl.store(k_pool + k_at, new, mask=written & is_key)
    v_at = (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * DIM + dims[None, :]
    tl.store(v_pool + v_at, new, mask=written & is_value)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots", "k_scale", "v_scale"])
def _qk_norm_rope_kv_write(
    qkv,
    positions,
    slots,
    cos,
    sin,
    head_norm,
    k_scale,
    v_scale,
    q,
    k_pool,
    v_pool,
    eps,
    stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Some heads of one token: queries, keys and values alike, each to where it belongs.

    In one piece, for each step works on what the one before has in registers; a third of it are parameters.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    low = tl.arange(0, HALF_BLOCK)
    is_head = (head < HEADS + 2 * KV_HEADS)[:, None]
    turns = (head < HEADS + KV_HEADS)[:, None]
    inside = is_head & (low < HALF)[None, :]
    row = qkv + token * stride + head[:, None] * DIM
    a = tl.load(row + low[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + HALF + low[None, :], mask=inside, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_inside = is_head & (rest < DIM)[None, :]
        c = tl.load(row + rest[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(a * a + b * b, axis=1)
        if REST_BLOCK > 0:
            square += tl.sum(c * c, axis=1)
        inverse = tl.where(turns, tl.rsqrt(square / DIM + eps)[:, None], 1.0)
        weight = head_norm + head[:, None] * DIM
        a *= inverse * tl.load(weight + low[None, :], mask=inside & turns, other=1.0).to(tl.float32)
        b *= inverse * tl.load(weight + HALF + low[None, :], mask=inside & turns, other=1.0).to(tl.float32)
        if REST_BLOCK > 0:
            c *= inverse * tl.load(weight + rest[None, :], mask=rest_inside & turns, other=1.0).to(tl.float32)
    # The tables hold each angle twice, the first half of the sines negated.
    angle = tl.load(positions + token).to(tl.int64) * (2 * HALF) + HALF + low
    cosine = tl.load(cos + angle, mask=low < HALF, other=0.0)[None, :]
    sine = tl.load(sin + angle, mask=low < HALF, other=0.0)[None, :]
    turned_a = tl.where(turns, a * cosine - b * sine, a)
    turned_b = tl.where(turns, b * cosine + a * sine, b)
    slot = tl.load(slots + token).to(tl.int64)
    before = tl.full((GROUP,), 1.0, tl.float32)
    if KIND != "none":
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        k_s = tl.load(k_scale + head - HEADS, mask=is_key, other=1.0)
        v_s = tl.load(v_scale + head - HEADS - KV_HEADS, mask=is_value, other=1.0)
        before = tl.div_rn(before, tl.where(is_value, v_s, k_s))
    _store_part(
        turned_a, inside, low, token, slot, head, before,
        q, k_pool, v_pool, HEADS, KV_HEADS, DIM, KIND, NATIVE,
    )  # fmt: skip
    _store_part(
        turned_b, inside, HALF + low, token, slot, head, before,
        q, k_pool, v_pool, HEADS, KV_HEADS, DIM, KIND, NATIVE,
    )  # fmt: skip
    if REST_BLOCK > 0:
        _store_part(
            c, rest_inside, rest, token, slot, head, before,
            q, k_pool, v_pool, HEADS, KV_HEADS, DIM, KIND, NATIVE,
        )  # fmt: skip


def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    head_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """Turn queries and keys to their positions, write queries to ``q``, keys and values to their slots.

    qkv: [tokens, heads + 2 * kv_heads, head_dim], heads contiguous. positions, slots: integers [tokens]; a
    token with a negative slot is not written to the pool. cos, sin: the tables of
    `engine.layers.rope.RotaryTable`, float32 [positions, rotary_dim]. q: [tokens, heads, head_dim],
    contiguous. k_pool, v_pool: one layer of the pool, [slots, kv_heads, head_dim].
    head_norm: [heads + kv_heads, head_dim], with ``eps``; None for no norm. scales: of keys and of values,
    float32 [kv_heads], which a pool in 8 bits divides by.
    """
    tokens, all_heads, dim = qkv.shape
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    half = cos.shape[1] // 2
    group = min(HEADS_A_PROGRAM, next_power_of_2(all_heads))
    half_block = next_power_of_2(half)
    k_scale, v_scale = scales_of(k_pool.dtype, scales)
    return Launch(
        _qk_norm_rope_kv_write,
        (tokens, cdiv(all_heads, group)),
        {
            "qkv": qkv,
            "positions": positions,
            "slots": slots,
            "cos": cos,
            "sin": sin,
            "head_norm": head_norm,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "q": q,
            "k_pool": k_pool,
            "v_pool": v_pool,
            "eps": eps,
            "stride": qkv.stride(0),
        },
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "HALF": half,
            "HALF_BLOCK": half_block,
            "REST_BLOCK": next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
            "GROUP": group,
            "NORM": head_norm is not None,
            "KIND": kind_of(k_pool.dtype),
            "NATIVE": native_fp8(q.device),
        },
        num_warps=2 if group * half_block <= 512 else 4,
    )


def reference_qkv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    head_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention wants them, in float64."""
    wide = qkv.double()
    turned, v = wide[:, : heads + kv_heads], wide[:, heads + kv_heads :]
    if head_norm is not None:
        turned = turned * (turned.square().mean(-1, keepdim=True) + eps).rsqrt() * head_norm.double()
    rotary_dim = cos.shape[1]
    part = turned[..., :rotary_dim]
    swapped = part.roll(rotary_dim // 2, -1)
    at = positions.long()
    part = part * cos[at].double().unsqueeze(1) + swapped * sin[at].double().unsqueeze(1)
    turned = torch.cat((part, turned[..., rotary_dim:]), dim=-1)
    return turned[:, :heads], turned[:, heads:], v


def reference_stored(x: Tensor, scale: Tensor | None, storage: torch.dtype) -> Tensor:
    """Keys or values [tokens, kv_heads, head_dim] as a pool of ``storage`` holds them."""
    if scale is None:
        return x.to(storage)
    return reference_encode(x.float() * (1 / scale).view(1, -1, 1), kind_of(storage))
