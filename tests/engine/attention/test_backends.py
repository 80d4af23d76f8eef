"""Every backend against softmax attention written out over the tokens themselves, not over blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention import Rows, get_backend, names, probe
from engine.attention.base import MAX_SHORT
from engine.attention.sdpa import QUERY_TILE
from engine.kv_cache import KVCache
from engine.speculation.base import MAX_DRAFT
from tests.engine.driving import CPU, tiny

HEADS, KV_HEADS, DIM = 6, 2, 8
# Rows of few new tokens over contexts of many lengths, in the order in which a step has them.
SHORT = [(2, 7), (5, 700), (5, 300), (5, 11), (5, 0), (9, 0), (17, 64)]


def direct(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """One query [heads, d] at ``position`` over all keys [tokens, kv_heads, d] up to it, in float64."""
    first = 0 if window is None else max(0, position + 1 - window)
    keys = k[first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = v[first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    weights = torch.softmax(torch.einsum("hd,thd->ht", q.double(), keys) / DIM**0.5, dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("window", [None, 1, 5, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_rows_equal_attention_over_the_tokens_themselves(
    name: str, window: int | None, block_size: int
) -> None:
    """Single tokens and drafts at many lengths (several buckets), chunks with and without earlier context."""
    rng = random.Random(3)
    base = tiny("llama")[0].spec
    spec = replace(
        base, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, layer_windows=(window,)
    )
    shapes = [(1, n) for n in (900, 700, 60, 41, 7, 1, 0)] + [*SHORT, (20, 0), (30, 33)]
    num_blocks = sum(-(-(n + c) // block_size) for n, c in shapes) + 5
    kv = KVCache.allocate(spec, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=CPU)
    # Whatever lies in slots that belong to no token of a row must not matter.
    kv.k[0].normal_(std=100.0)
    kv.v[0].normal_(std=100.0)
    free = rng.sample(range(num_blocks), num_blocks)
    new = np.array([n for n, _ in shapes])
    computed = np.array([c for _, c in shapes])
    starts = new.cumsum() - new
    width = -(-int((new + computed).max()) // block_size)
    tables = np.zeros((len(shapes), width), dtype=np.int64)
    q = torch.randn(int(new.sum()), HEADS, DIM)
    k, v = torch.empty(len(q), KV_HEADS, DIM), torch.empty(len(q), KV_HEADS, DIM)
    wants = []
    for r, (n, c) in enumerate(shapes):
        count = -(-(n + c) // block_size)
        tables[r, :count] = [free.pop() for _ in range(count)]
        keys, values = torch.randn(n + c, KV_HEADS, DIM), torch.randn(n + c, KV_HEADS, DIM)
        at = np.arange(n + c)
        slots = torch.from_numpy(tables[r, at // block_size] * block_size + at % block_size)
        kv.k[0][slots], kv.v[0][slots] = keys, values
        here = slice(int(starts[r]), int(starts[r]) + n)
        k[here], v[here] = keys[c:], values[c:]
        wants += [direct(q[starts[r] + i], keys, values, c + i, window) for i in range(n)]
    rows = Rows(starts, new, computed, tables, num_single=7, block_size=block_size)
    assert max(n for n, _ in SHORT) == MAX_SHORT == MAX_DRAFT + 1
    got = get_backend(name).plan(rows, kv, spec, torch.from_numpy).attend(0, q, k, v)
    torch.testing.assert_close(got.double(), torch.stack(wants).flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_longer_than_a_tile_equals_the_reference(window: int | None) -> None:
    base = tiny("llama")[0].spec
    spec = replace(
        base, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, layer_windows=(window,)
    )
    new, computed = QUERY_TILE + 40, 70
    blocks = -(-(new + computed) // 16)
    kv = KVCache.allocate(spec, num_blocks=blocks, block_size=16, dtype=torch.float32, device=CPU)
    kv.k[0].normal_()
    kv.v[0].normal_()
    tables = np.random.default_rng(0).permutation(blocks).reshape(1, -1)
    at = np.arange(computed, computed + new)
    slots = torch.from_numpy(tables[0, at // 16] * 16 + at % 16)
    q, k, v = torch.randn(new, HEADS, DIM), kv.k[0][slots], kv.v[0][slots]
    rows = Rows(np.array([0]), np.array([new]), np.array([computed]), tables, num_single=0, block_size=16)
    outs = [get_backend(n).plan(rows, kv, spec, torch.from_numpy).attend(0, q, k, v) for n in names()]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


def test_probe_says_why_a_backend_cannot_run() -> None:
    spec = tiny("llama")[0].spec
    for name in names():
        assert probe(name, spec, CPU, torch.bfloat16) is None
        assert get_backend(name).name == name
    assert "not on meta" in (probe("sdpa", spec, torch.device("meta"), torch.float32) or "")
    assert "torch.int8" in (probe("naive", spec, CPU, torch.int8) or "")
    assert "there are naive, sdpa" in (probe("paged9", spec, CPU, torch.float32) or "")
