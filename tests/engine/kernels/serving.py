"""Steps as a server would launch them, for the sizes of a model whose weights are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.attention import Rows
from engine.attention.base import MAX_SHORT, Ints
from engine.attention.paged_triton import PagedAttention
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec
from tests.engine.driving import CPU, tiny


def spec_of(heads: int, kv_heads: int, head_dim: int, windows: tuple[int | None, ...] = (None,)) -> ModelSpec:
    return replace(
        tiny("llama")[0].spec,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layer_windows=windows,
    )


def pool_of(spec: ModelSpec, dtype: torch.dtype, block_size: int = 16) -> KVCache:
    """Small: nothing is read where launches are only looked at."""
    return KVCache.allocate(spec, num_blocks=4, block_size=block_size, dtype=dtype, device=CPU)


def rows_of(rows: Sequence[tuple[int, int]], block_size: int) -> Rows:
    """Rows with (new tokens, tokens before them), put in the order of a step."""
    new, computed = np.array(rows).T
    order = np.lexsort((-(new + computed), np.minimum(new, MAX_SHORT + 1)))
    new, computed = new[order], computed[order]
    width = -(-int((new + computed).max()) // block_size)
    tables: Ints = np.zeros((len(new), width), dtype=np.int64)
    return Rows(new.cumsum() - new, new, computed, tables, int((new == 1).sum()), block_size)


def attend(
    backend: PagedAttention, spec: ModelSpec, kv: KVCache, rows: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Attention of every layer of one step; of the last one what it gave."""
    step = rows_of(rows, kv.block_size)
    plan = backend.plan(step, kv, spec, torch.from_numpy)
    for layer in range(spec.num_layers):
        q = torch.empty(int(step.num_new.sum()), spec.num_heads, spec.head_dim, dtype=kv.compute_dtype)
        out = plan.attend(layer, q, None, None)
    return out
