"""Rows of every kind in one step, against softmax attention written out over the tokens themselves."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from engine.attention import AttentionBackend, Rows
from engine.attention.base import MAX_SHORT
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


def check_mixed_rows(backend: AttentionBackend, window: int | None, block_size: int) -> None:
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
    got = backend.plan(rows, kv, spec, torch.from_numpy).attend(0, q, k, v)
    torch.testing.assert_close(got.double(), torch.stack(wants).flatten(1), rtol=1e-5, atol=1e-5)
