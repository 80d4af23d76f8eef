"""Attention in C++ over block tables against the reference, for random steps and every kind of pool."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import Ints, Rows
from engine.attention.naive import NaiveAttention
from engine.attention.paged_native import ITEM_TOKENS, make, probe
from engine.kv_cache import KVCache
from engine.kv_scales import KVScales
from engine.models.spec import ModelSpec
from tests.engine.driving import CPU, tiny

POOL_TOKENS = 4096


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None) -> ModelSpec:
    return replace(
        tiny("llama")[0].spec,
        num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, layer_windows=(window,),
    )  # fmt: skip


def pool(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, kv_dtype: str, compute: torch.dtype
) -> KVCache:
    shape = (1, spec.num_kv_heads)
    scales = KVScales(torch.rand(shape) * 0.05 + 0.01, torch.rand(shape) * 0.05 + 0.01)
    kv = KVCache.allocate(
        spec, num_blocks=POOL_TOKENS // block_size, block_size=block_size, dtype=dtype, device=CPU,
        kv_dtype=kv_dtype, scales=scales, compute_dtype=compute,
    )  # fmt: skip
    whole = torch.randn(POOL_TOKENS, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    kv.store(0, torch.arange(POOL_TOKENS), whole)
    return kv


def step(rng: random.Random, block_size: int) -> Rows:
    """Rows in the order in which a step has them, their blocks anywhere."""
    shapes = [(1, rng.choice((0, 1, 31, 32, 33, rng.randrange(300)))) for _ in range(rng.randrange(4))]
    shapes += sorted((rng.randrange(2, 18), rng.randrange(200)) for _ in range(rng.randrange(3)))
    shapes += [
        (rng.randrange(18, 90), rng.choice((0, rng.randrange(150)))) for _ in range(rng.randrange(1, 3))
    ]
    new, computed = (np.array(each, dtype=np.int64) for each in zip(*shapes, strict=True))
    counts = -(-(new + computed) // block_size)
    free = rng.sample(range(POOL_TOKENS // block_size), int(counts.sum()))
    tables = np.full((len(shapes), int(counts.max())), -1, dtype=np.int64)
    for r, count in enumerate(counts.tolist()):
        tables[r, :count] = [free.pop() for _ in range(count)]
    single = int((new == 1).sum())
    return Rows(new.cumsum() - new, new, computed, tables, num_single=single, block_size=block_size)


def reference(rows: Rows, kv: KVCache, spec: ModelSpec, q: Tensor) -> Tensor:
    """In float32; queries of a quantized pool come with its scales."""
    unused = torch.empty(0)
    if kv.quantizer is None:
        whole = replace(
            kv, k=[kv.k[0].float()], v=[kv.v[0].float()], dtype=torch.float32, compute_dtype=torch.float32
        )
        return NaiveAttention().plan(rows, whole, spec, torch.from_numpy).attend(0, q.float(), unused, unused)
    scaled = q.float() * kv.quantizer.before[0, : spec.num_heads]
    plan = NaiveAttention().plan(rows, kv, spec, torch.from_numpy)
    return kv.finish(0, plan.attend(0, scaled.to(kv.compute_dtype), unused, unused))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "compute", "bound"),
    [
        (torch.float32, "model", torch.float32, 2e-5),
        (torch.bfloat16, "model", torch.bfloat16, 2.0**-7),
        (torch.float32, "int8", torch.float32, 2e-5),
        (torch.float32, "fp8_e4m3", torch.float32, 2e-5),
        (torch.bfloat16, "int8", torch.bfloat16, 2.0**-5),
        (torch.bfloat16, "fp8_e4m3", torch.float32, 2e-5),
    ],
)
def test_random_steps_equal_the_reference(
    dtype: torch.dtype, kv_dtype: str, compute: torch.dtype, bound: float
) -> None:
    rng = random.Random(7)
    torch.manual_seed(7)
    for heads, kv_heads, dim in ((9, 3, 64), (4, 4, 20), (8, 1, 136)):
        for block_size in (1, 16, 128):
            window = rng.choice((None, 1, 7, 40, 1000))
            spec = spec_of(heads, kv_heads, dim, window)
            kv = pool(spec, block_size, dtype, kv_dtype, compute)
            rows = step(rng, block_size)
            q = torch.randn(int(rows.num_new.sum()), heads + 2 * kv_heads, dim).to(compute)[:, :heads]
            plan = make(CPU).plan(rows, kv, spec, torch.from_numpy)
            assert not plan.needs.scaled
            got = plan.attend(0, q, None, None)
            assert got.dtype == compute
            torch.testing.assert_close(
                got.float(), reference(rows, kv, spec, q).float(), rtol=bound, atol=bound
            )


def last_of(count: int, table: Ints, computed: int, q: Tensor, kv: KVCache, spec: ModelSpec) -> Tensor:
    """Attention of the last one of ``count`` equal rows, whose new tokens are q."""
    new = np.full(count, len(q))
    starts, single = np.arange(count) * len(q), count if len(q) == 1 else 0
    rows = Rows(starts, new, np.full(count, computed), np.repeat(table, count, axis=0), single, 16)
    plan = make(CPU).plan(rows, kv, spec, torch.from_numpy)
    return plan.attend(0, q.repeat(count, 1, 1), None, None)[-len(q) :]


def test_a_token_depends_neither_on_other_rows_nor_on_how_its_row_is_cut() -> None:
    """Bit for bit, so that a request's text does not depend on its batch, its chunks or its drafts."""
    torch.manual_seed(3)
    for window in (None, 50):
        spec = spec_of(6, 2, 64, window)
        kv = pool(spec, 16, torch.float32, "model", torch.float32)
        length = 3 * ITEM_TOKENS + 5
        table = np.random.default_rng(0).permutation(POOL_TOKENS // 16)[None, : -(-length // 16)]
        q = torch.randn(length, 6, 64)

        whole = last_of(1, table, 0, q, kv, spec)
        for size in (1, 5, 17, ITEM_TOKENS):
            for first in range(0, length, size):
                part = q[first : first + size]
                got = last_of(size % 3 + 1, table, first, part, kv, spec)
                assert torch.equal(got, whole[first : first + size]), (size, first)


def test_leading_blocks_that_left_the_window_may_be_gone() -> None:
    torch.manual_seed(4)
    spec = spec_of(4, 2, 32, 20)
    kv = pool(spec, 16, torch.float32, "model", torch.float32)
    tables = np.array([[-1, -1, -1, -1, 9, 3]])
    one = np.array([1])
    rows = Rows(one * 0, one, np.array([90]), tables, num_single=1, block_size=16)
    q = torch.randn(1, 4, 32)
    got = make(CPU).plan(rows, kv, spec, torch.from_numpy).attend(0, q, None, None)
    torch.testing.assert_close(got, reference(rows, kv, spec, q), rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_so_and_harms_nobody_else() -> None:
    """A key that is NaN fails the tokens that see it, and only those; unused slots of a block harm none."""
    spec = spec_of(2, 1, 16, None)
    kv = pool(spec, 16, torch.float32, "model", torch.float32)
    kv.k[0][16 + 5] = float("nan")  # position 5 of block 1, and what lies behind the last token of block 2
    kv.v[0][32 + 9 :] = float("nan")
    tables = np.array([[1], [2]])
    new = np.array([8, 9])
    rows = Rows(np.array([0, 8]), new, new * 0, tables, num_single=0, block_size=16)
    out = make(CPU).plan(rows, kv, spec, torch.from_numpy).attend(0, torch.randn(17, 2, 16), None, None)
    finite = out.isfinite().all(dim=1).tolist()
    assert finite == [True] * 5 + [False] * 3 + [True] * 9


def test_probe_says_what_is_missing() -> None:
    spec = spec_of(2, 1, 16, None)
    assert probe(spec, CPU, torch.bfloat16) is None
    assert "not torch.float16" in (probe(spec, CPU, torch.float16) or "")
    assert "not on cuda" in (probe(spec, torch.device("cuda"), torch.float32) or "")
