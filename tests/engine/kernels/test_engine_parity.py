"""The kernels in the place of the engine's own steps: the same pool, the same rows, the same scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import Rows, get_backend
from engine.kernels.attention_parts import Parts
from engine.kernels.attention_rows import plan_splits
from engine.kernels.paged_attention import paged_attention, tiles_for
from engine.kernels.qkv import qk_norm_rope_kv_write
from engine.kv_cache import KVCache
from engine.kv_scales import KVScales
from engine.layers.rope import RotaryTable, rotate_
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec
from tests.engine.driving import tiny
from tests.engine.kernels.support import DEVICE, poisoned, randn

HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS, WINDOW = 6, 3, 64, 16, 20, 40
ROWS = [(1, 70), (1, 17), (3, 37), (20, 33)]  # new tokens, and those computed before
SCALES = KVScales(torch.tensor([[0.01, 0.02, 0.05]]), torch.tensor([[0.03, 0.01, 0.02]]))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    base = tiny("llama")[0].spec
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "layer_windows": (WINDOW,)}
    return replace(base, num_layers=1, **sizes)


@dataclass
class Step:
    """Rows of a step over scattered blocks, and where the keys and values of their tokens go."""

    rows: Rows
    positions: Tensor
    slots: Tensor


def step() -> Step:
    new, computed = (np.array(column) for column in zip(*ROWS, strict=True))
    starts = new.cumsum() - new
    tables = np.zeros((len(ROWS), 8), dtype=np.int64)
    free = list(np.random.default_rng(1).permutation(NUM_BLOCKS))
    for r, length in enumerate((new + computed).tolist()):
        for b in range(-(-length // BLOCK_SIZE)):
            tables[r, b] = free.pop()
    row_of = np.repeat(np.arange(len(ROWS)), new)
    positions = np.arange(int(new.sum())) + (computed - starts)[row_of]
    slots = tables[row_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = Rows(starts, new, computed, tables, 2, BLOCK_SIZE)
    return Step(rows, torch.from_numpy(positions).to(DEVICE), torch.from_numpy(slots).to(DEVICE))


def attend(x: Step, kv: KVCache, q: Tensor, layer_scales: tuple[Tensor, Tensor] | None) -> Tensor:
    """Attention of the step's only layer by the kernels, from the engine's rows."""
    cu = torch.tensor([0, *x.rows.num_new.cumsum()], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.from_numpy(x.rows.lengths).to(torch.int32).to(DEVICE)
    most = int(x.rows.num_new.max())
    tiles = tiles_for(HEADS // KV_HEADS, DIM, most, kv.k[0].itemsize, hopper=False)
    split_tiles, out = poisoned(1, dtype=torch.int32), poisoned(*q.shape, dtype=torch.float32)
    plan_splits(
        cu, seq_lens, split_tiles,
        programs=16, kv_heads=KV_HEADS, block_q=tiles.block_q, block_n=tiles.block_n, window=WINDOW,
    ).run()  # fmt: skip
    for launch in paged_attention(
        q, kv.k[0], kv.v[0], out,
        cu_seqlens_q=cu, seq_lens=seq_lens,
        block_tables=torch.from_numpy(x.rows.tables).to(torch.int32).to(DEVICE), split_tiles=split_tiles,
        parts=Parts.allocate(len(q), HEADS, DIM, 4, DEVICE), tiles=tiles, block_size=BLOCK_SIZE,
        window=WINDOW, scales=layer_scales,
    ):  # fmt: skip
        launch.run()
    return out.flatten(1)


@pytest.mark.parametrize("kv_dtype", ["model", "fp8_e4m3", "int8"])
def test_a_step_of_the_engine_comes_out_the_same(kv_dtype: str, spec: ModelSpec) -> None:
    """A31: rotation, write and attention of a layer with a window, with the scales of an 8-bit pool."""
    x = step()
    engines, ours = (
        KVCache.allocate(
            spec, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE,
            kv_dtype=kv_dtype, scales=SCALES,
        )
        for _ in range(2)
    )  # fmt: skip
    earlier = randn(NUM_BLOCKS * BLOCK_SIZE, HEADS + 2 * KV_HEADS, DIM, seed=1)
    for cache in (engines, ours):
        cache.store(0, torch.arange(len(earlier), device=DEVICE), earlier.clone())
    qkv = randn(len(x.slots), HEADS + 2 * KV_HEADS, DIM, seed=2)
    table = RotaryTable(RopeSpec("default", 1e4, DIM, 128), 128, DEVICE)

    turned = qkv.clone()
    rotate_(turned[:, : HEADS + KV_HEADS], *table.at(x.positions, torch.float32))
    q, k, v = engines.store(0, x.slots, turned)
    plan = get_backend("naive", DEVICE).plan(
        x.rows, engines, spec, lambda ints: torch.from_numpy(ints).to(DEVICE)
    )
    expected = engines.finish(0, plan.attend(0, q, k, v))

    is_quantized = engines.quantizer is not None
    scales = (SCALES.k[0].to(DEVICE), SCALES.v[0].to(DEVICE)) if is_quantized else None
    queries = poisoned(len(qkv), HEADS, DIM, dtype=torch.float32)
    qk_norm_rope_kv_write(
        qkv, x.positions, x.slots, table.cos, table.sin, queries, ours.k[0], ours.v[0], scales=scales
    ).run()
    for written, kept in ((ours.k[0], engines.k[0]), (ours.v[0], engines.v[0])):
        same = written == kept if is_quantized else (written - kept).abs() < 1e-5
        assert same.double().mean() > 0.999  # a rounding may tip a number to the code beside it
        written.copy_(kept)
    torch.testing.assert_close(attend(x, ours, queries, scales), expected, rtol=1e-4, atol=1e-5)
