"""Launches of every kernel with the sizes of an 8B model (Llama 3) and a 0.5B one (Qwen 2.5), to compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention_parts import Parts
from engine.kernels.attention_rows import plan_splits
from engine.kernels.launch import Launch
from engine.kernels.paged_attention import paged_attention, tiles_for
from engine.kernels.penalties import penalize
from engine.kernels.qkv import qk_norm_rope_kv_write
from engine.kernels.quantize import quantize
from engine.kernels.rejection_sample import match_drafts, rejection_sample, sums_for
from engine.kernels.rmsnorm import add_rmsnorm
from engine.kernels.sample import probabilities, sample
from engine.kernels.silu_mul import silu_mul
from engine.kernels.vocabulary import Found
from engine.kernels.weight_only_gemm import PackedWeight, dequantize, gemm

EVERY = (80, 89, 90)
EIGHT_BITS = (torch.uint8, torch.int8)
KINDS = {torch.bfloat16: "bf16", torch.uint8: "e4m3", torch.int8: "int8"}
TOKENS = 4
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Case:
    """A launch by name, and what must be found in its code."""

    name: str
    launch: Launch
    has_dot: bool = False
    wide_loads: bool = True
    archs: tuple[int, ...] = (90,)  # what it is compiled for, unless every shape is asked for


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = (Sizes("8b", 4096, 14336, 32, 8, 128), Sizes("0.5b", 896, 4864, 14, 2, 64))


def launches(arch: int = 90) -> Iterator[Case]:
    """Every case as a card of compute capability ``arch`` / 10 would run it, the small kernels first."""
    for model in MODELS:
        yield from _elementwise(model)
        yield from _qkv(model)
        yield from _attention(model, arch)
    yield from _rare(arch)
    yield from _sampling()
    yield from _products()


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _elementwise(model: Sizes) -> Iterator[Case]:
    x, residual, y = (_empty(TOKENS, model.hidden) for _ in range(3))
    weight, scale = _empty(model.hidden), _empty(TOKENS, dtype=torch.float32)
    codes = _empty(TOKENS, model.hidden, dtype=torch.uint8)
    yield Case(f"add_rmsnorm bf16 {model.name}", add_rmsnorm(x, residual, weight, 1e-5, y))
    large = model is MODELS[0]
    quantizing = add_rmsnorm(x, residual, weight, 1e-5, codes, scale)
    yield Case(f"add_rmsnorm e4m3 {model.name}", quantizing, archs=(80, 90) if large else (89, 90))
    gate_up, y = _empty(TOKENS, 2 * model.intermediate), _empty(TOKENS, model.intermediate)
    codes = _empty(TOKENS, model.intermediate, dtype=torch.uint8)
    yield Case(f"silu_mul bf16 {model.name}", silu_mul(gate_up, y), archs=(90,) if large else (80,))
    yield Case(
        f"silu_mul e4m3 {model.name}", silu_mul(gate_up, codes, scale), archs=(89, 90) if large else (90,)
    )
    quantizing = quantize(y, codes.view(torch.int8), scale)
    yield Case(f"quantize int8 {model.name}", quantizing, archs=(80, 90) if large else (89,))
    yield Case(f"quantize e4m3 {model.name}", quantize(y, codes, scale), archs=(80, 90) if large else ())


def _pool(model: Sizes, dtype: torch.dtype) -> Tensor:
    """Keys or values of one layer."""
    return _empty(64 * BLOCK_SIZE, model.kv_heads, model.head_dim, dtype=dtype)


def _qkv(model: Sizes) -> Iterator[Case]:
    qkv = _empty(TOKENS, model.heads + 2 * model.kv_heads, model.head_dim)
    q = _empty(TOKENS, model.heads, model.head_dim)
    at = _empty(TOKENS, dtype=torch.int64)
    table = _empty(4096, model.head_dim, dtype=torch.float32)
    weight = _empty(model.heads + model.kv_heads, model.head_dim)
    scale = _empty(model.kv_heads, dtype=torch.float32)
    pool = _pool(model, torch.bfloat16)
    yield Case(
        f"qkv bf16 norm {model.name}",
        qk_norm_rope_kv_write(qkv, at, at, table, table, q, pool, pool, head_norm=weight, eps=1e-6),
    )
    yield Case(
        f"qkv bf16 {model.name}",
        qk_norm_rope_kv_write(qkv, at, at, table, table, q, pool, pool),
        archs=() if model is MODELS[0] else (80,),
    )
    pool = _pool(model, torch.uint8)
    yield Case(
        f"qkv e4m3 {model.name}",
        qk_norm_rope_kv_write(qkv, at, at, table, table, q, pool, pool, scales=(scale, scale)),
        archs=(80, 90) if model is MODELS[0] else (89,),
    )


def _attend(
    model: Sizes,
    arch: int,
    queries: int,
    storage: torch.dtype,
    block_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
) -> tuple[Launch, ...]:
    """Rows of ``queries`` new tokens over a pool of ``storage``."""
    q, out = (_empty(TOKENS, model.heads, model.head_dim, dtype=dtype) for _ in range(2))
    cu, lengths = _empty(TOKENS + 1, dtype=torch.int32), _empty(TOKENS, dtype=torch.int32)
    tables, split_tiles = _empty(TOKENS, 16, dtype=torch.int32), _empty(1, dtype=torch.int32)
    parts = Parts.allocate(TOKENS, model.heads, model.head_dim, 16, torch.device("cpu"))
    scale = _empty(model.kv_heads, dtype=torch.float32)
    pool = _pool(model, storage)
    return paged_attention(
        q, pool, pool, out,
        cu_seqlens_q=cu, seq_lens=lengths, block_tables=tables, split_tiles=split_tiles,
        parts=parts,
        tiles=tiles_for(
            model.heads // model.kv_heads, model.head_dim, queries, pool.itemsize, hopper=arch == 90
        ),
        block_size=block_size, window=window, scales=(scale, scale) if storage in EIGHT_BITS else None,
    )  # fmt: skip


def _attention(model: Sizes, arch: int) -> Iterator[Case]:
    """Decode, verification and prefill, over keys in 16 and in 8 bits, over small and large blocks."""
    large = model is MODELS[0]
    for what, queries, block_size, storage, archs in (
        ("decode", 1, BLOCK_SIZE, torch.bfloat16, EVERY if large else (90,)),
        ("decode", 1, 16, torch.bfloat16, (90,) if large else (89,)),
        ("decode", 1, BLOCK_SIZE, torch.uint8, EVERY if large else ()),
        ("decode", 1, 16, torch.uint8, () if large else (89,)),
        ("decode", 1, BLOCK_SIZE, torch.int8, (90,) if large else ()),
        ("decode", 1, 16, torch.int8, () if large else (80,)),
        ("verify", 5, BLOCK_SIZE, torch.bfloat16, (80, 90) if large else (90,)),
        ("verify", 5, 16, torch.int8, (89,) if large else ()),
        ("prefill", 512, BLOCK_SIZE, torch.bfloat16, EVERY if large else (80, 90)),
        ("prefill", 512, 16, torch.bfloat16, EVERY if large else ()),
        ("prefill", 512, BLOCK_SIZE, torch.uint8, (80, 90) if large else (90,)),
    ):
        attention, *combine = _attend(model, arch, queries, storage, block_size)
        name = f"attention {what} {KINDS[storage]} page {block_size} {model.name}"
        yield Case(name, attention, has_dot=True, archs=archs)
    yield Case(f"attention combine {model.name}", combine[0], archs=(80, 90) if large else (89,))
    if large:
        cu = _empty(TOKENS + 1, dtype=torch.int32)
        sizes = {"programs": 264, "kv_heads": 8, "block_q": 4, "block_n": 64, "window": 1024}
        yield Case("attention plan", plan_splits(cu, cu[1:], cu[:1], **sizes), wide_loads=False, archs=EVERY)


def _rare(arch: int) -> Iterator[Case]:
    """Heads of other sizes and in other numbers, float16, windows, and heads that turn in part: several of
    them in each case."""
    d80, d96 = Sizes("d80", 2560, 6912, 32, 32, 80), Sizes("9/3 d96", 864, 2304, 9, 3, 96)
    d256 = Sizes("d256", 2048, 16384, 8, 2, 256)
    for name, model, queries, storage, dtype, window, archs in (
        ("decode int8 page 16", d80, 1, torch.int8, torch.float16, None, (80,)),
        ("decode e4m3 page 16", d96, 1, torch.uint8, torch.bfloat16, 1024, (89,)),
        ("verify bf16 page 16", d96, 9, torch.bfloat16, torch.bfloat16, None, (90,)),
        ("prefill f16 page 16", d96, 512, torch.float16, torch.float16, 1024, (90,)),
        ("prefill int8 page 16", d80, 512, torch.int8, torch.bfloat16, None, (89,)),
        ("prefill e4m3 page 16", d256, 512, torch.uint8, torch.bfloat16, 1024, (89,)),
        ("decode bf16 page 16", d256, 1, torch.bfloat16, torch.bfloat16, None, (90,)),
    ):
        launch = _attend(model, arch, queries, storage, 16, dtype=dtype, window=window)[0]
        yield Case(f"attention {name} {model.name}", launch, has_dot=True, archs=archs)
    qkv, q = _empty(TOKENS, 15, 96), _empty(TOKENS, 9, 96)
    at, table, pool = (
        _empty(TOKENS, dtype=torch.int64),
        _empty(64, 48, dtype=torch.float32),
        _pool(d96, torch.int8),
    )
    scale = _empty(3, dtype=torch.float32)
    turned = qk_norm_rope_kv_write(qkv, at, at, table, table, q, pool, pool, scales=(scale, scale))
    yield Case("qkv int8 half turned 9/3 d96", turned, wide_loads=False, archs=(89,))


def _sampling() -> Iterator[Case]:
    """Over the vocabulary of the 8B model."""
    n = 128256
    logits, out = (_empty(TOKENS, n, dtype=torch.float32) for _ in range(2))
    floats, ints = _empty(TOKENS, dtype=torch.float32), _empty(TOKENS, dtype=torch.int32)
    longs, cu = _empty(TOKENS, dtype=torch.int64), _empty(TOKENS + 1, dtype=torch.int32)
    found = Found.allocate(TOKENS, n, logits.device)
    rows = logits, floats, ints, floats, floats
    highest, *searching, adding, drawing = sample(*rows, longs, longs, longs, found, greedy_below=1e-5)
    yield Case("sample: highest", highest, archs=EVERY)
    by_kind = {each.constants["COUNT"]: each for each in searching}  # all alike but for what they read
    yield Case("sample: search by top-k", by_kind[True], archs=EVERY)
    yield Case("sample: search by top-p", by_kind[False], archs=EVERY)
    yield Case("sample: add up", adding, archs=EVERY)
    yield Case("sample: draw", drawing, archs=EVERY)
    yield Case("probabilities", probabilities(*rows, out, found)[-1], archs=EVERY)
    finite = _empty(2 * TOKENS, dtype=torch.int8)
    sums = sums_for(TOKENS, n, logits.device)
    accepting, adding, drawing = rejection_sample(
        logits, out, longs, cu, finite, longs, longs, ints, longs, sums, accept=64, residual=65
    )
    yield Case("rejection_sample: accept", accepting, wide_loads=False, archs=EVERY)
    yield Case("rejection_sample: add up", adding, archs=EVERY)
    yield Case("rejection_sample: draw", drawing, archs=EVERY)
    matched = match_drafts(longs, longs, cu, ints, longs, max_drafted=16)
    yield Case("match_drafts", matched, wide_loads=False, archs=EVERY)
    scattered = penalize(logits, cu, ints, ints, floats, floats, floats, max_tokens=4096)
    yield Case("penalize", scattered, wide_loads=False, archs=EVERY)


def _products() -> Iterator[Case]:
    """The down projections of both models, of one row and of many, and groups as other makers choose them."""
    for bits, out, cols, group, archs in (
        (8, 4096, 14336, 14336, (89, 90)),
        (4, 4096, 14336, 128, EVERY),
        (4, 896, 4864, 32, (90,)),
        (4, 896, 4864, 64, ()),
        (8, 896, 4864, 128, ()),
    ):
        scales = _empty(cols // group, out, dtype=torch.float32 if bits == 8 else torch.bfloat16)
        zeros = None if bits == 8 else _empty(cols // group, out, dtype=torch.uint8)
        held = _empty(out, cols * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
        tile = min(128, group)
        weight = PackedWeight(held, scales, zeros, (out, cols), bits, tile, group)
        name = f"int{bits}" + ("" if out == 4096 else f" group {group} 0.5b")
        for rows in (1, 64):
            x, y = _empty(rows, cols), _empty(rows, out)
            sums = _empty(4, rows, out, dtype=torch.float32)
            product, adding = gemm(x, weight, y, sums=sums)
            wide = rows > 1 or group > 32  # one row of 32 channels is 64 bytes, spread over a warp
            yield Case(f"gemm {name} {rows} rows", product, has_dot=True, wide_loads=wide, archs=archs)
        expanding = dequantize(weight, _empty(out, cols))
        yield Case(f"dequantize {name}", expanding, wide_loads=bits == 8, archs=archs if out == 4096 else ())
    yield Case("gemm add splits", adding, archs=EVERY)
