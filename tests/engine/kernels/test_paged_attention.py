"""Paged attention against softmax attention in float64 over the tokens themselves.

Blocks are scattered over the pool, everything that belongs to no row is NaN, and table entries that must not
be read point outside the pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels import paged_attention as kernel
from engine.kernels.attention_parts import Parts
from engine.kernels.attention_rows import MAX_SPLITS, most_splits, plan_splits, reference_plan_splits
from engine.kernels.codes import reference_decode
from engine.kernels.paged_attention import (
    Tiles,
    paged_attention,
    probe,
    reference_paged_attention,
    tiles_for,
)
from tests.engine.kernels.support import ALL_SHAPES, DEVICE, assert_close, poisoned, randn

OUTSIDE = 1 << 24  # a block far outside every pool


@dataclass
class Step:
    """Rows with (new tokens, all tokens), and a pool that holds their keys and values."""

    rows: Sequence[tuple[int, int]]
    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor
    block_size: int
    window: int | None

    @property
    def cu(self) -> Tensor:
        sums = torch.tensor([0] + [new for new, _ in self.rows]).cumsum(0)
        return sums.to(torch.int32).to(DEVICE)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([length for _, length in self.rows], dtype=torch.int32, device=DEVICE)

    def exact(self, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
        k, v = reference_decode(self.k), reference_decode(self.v)
        if scales is not None:
            k, v = k * scales[0].double().unsqueeze(1), v * scales[1].double().unsqueeze(1)
        new, lengths = [new for new, _ in self.rows], [length for _, length in self.rows]
        tables = self.tables.clamp(max=len(k) // self.block_size - 1)
        return reference_paged_attention(self.q, k, v, new, lengths, tables, self.block_size, self.window)


def step(
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    window: int | None = None,
) -> Step:
    """Rows over scattered blocks of ``storage``; what no token of a row may see is poison."""
    storage = storage or dtype
    needed = sum(-(-length // block_size) for _, length in rows)
    num_blocks = needed + 3
    free = random.Random(1).sample(range(num_blocks), num_blocks)
    width = max(-(-length // block_size) for _, length in rows) + 2
    tables = torch.full((len(rows), width), OUTSIDE, dtype=torch.int32)
    k, v = (poisoned(num_blocks * block_size, kv_heads, dim, dtype=storage) for _ in range(2))
    if not storage.is_floating_point:
        k.random_(-127, 128) if storage == torch.int8 else k.random_(0, 0x70)
        v.random_(-127, 128) if storage == torch.int8 else v.random_(0, 0x70)
    for r, (new, length) in enumerate(rows):
        oldest = 0 if window is None else max(0, length - new + 1 - window)
        for b in range(oldest // block_size, -(-length // block_size)):
            tables[r, b] = block = free.pop()
            here = min(block_size, length - b * block_size)
            slots = slice(block * block_size, block * block_size + here)
            for seed, pool in ((1, k), (2, v)):
                if storage.is_floating_point:
                    pool[slots] = randn(here, kv_heads, dim, dtype=dtype, seed=seed + 2 * block)
    tokens = sum(new for new, _ in rows)
    q = randn(tokens, heads + 2, dim, dtype=dtype, seed=9)[:, :heads]
    return Step(rows, q, k, v, tables.to(DEVICE), block_size, window)


def run(
    x: Step,
    *,
    splits: int = 1,
    split_tiles: int | None = None,
    split_tokens: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    tokens, heads, dim = x.q.shape
    kv_heads = x.k.shape[1]
    out = poisoned(tokens, heads, dim, dtype=x.q.dtype)
    tiles = tiles or tiles_for(
        heads // kv_heads, dim, max(new for new, _ in x.rows), x.k.itemsize, hopper=False
    )
    tiled = torch.full((1,), 1 if split_tiles is None else split_tiles, dtype=torch.int32, device=DEVICE)
    parts = None
    if splits > 1:
        parts = Parts.allocate(split_tokens or tokens, heads, dim, splits, DEVICE)
        parts.values.fill_(float("nan"))
        parts.sums.fill_(float("nan"))
    for launch in paged_attention(
        x.q, x.k, x.v, out,
        cu_seqlens_q=x.cu, seq_lens=x.lengths, block_tables=x.tables, split_tiles=tiled, parts=parts,
        tiles=tiles, block_size=x.block_size, window=x.window, scales=scales,
    ):  # fmt: skip
        launch.run()
    return out


DECODE = [(1, 130), (1, 17), (1, 16), (1, 15), (1, 1)]
WHOLE_AND_SPLIT = [(9, 3, 64), (4, 4, 80), (2, 1, 256)]
ONE_WAY = [(14, 2, 64, 4), (16, 4, 128, 4), (4, 2, 96, 1)]
LARGE = [(32, 8, 128, 1), (32, 8, 128, 4)] if ALL_SHAPES else []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "splits"),
    [(*shape, splits) for shape in WHOLE_AND_SPLIT for splits in (1, 4)] + ONE_WAY + LARGE,
)
def test_decode_over_contexts_at_the_borders_of_blocks(
    heads: int, kv_heads: int, dim: int, splits: int
) -> None:
    x = step(DECODE, heads, kv_heads, dim)
    assert_close(run(x, splits=splits), x.exact(), torch.float32, factor=4.0)


@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 128, 256])
def test_any_size_of_blocks(block_size: int) -> None:
    lengths = {1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size + 3} - {0}
    x = step([(1, n) for n in sorted(lengths, reverse=True)], 4, 2, 64, block_size)
    assert_close(run(x, splits=2), x.exact(), torch.float32, factor=4.0)


@pytest.mark.parametrize("splits", [1, 8])
def test_verification_of_drafts_and_rows_without_tokens(splits: int) -> None:
    """Rows of several new tokens beside empty ones, which have a place in the grid and nothing to do."""
    x = step([(5, 5), (0, 40), (5, 140), (1, 33), (0, 1), (3, 64), (0, 7)], 6, 2, 64)
    assert_close(run(x, splits=splits), x.exact(), torch.float32, factor=4.0)


@pytest.mark.parametrize("window", [None, 1, 40, 64] if ALL_SHAPES else [None, 40])
@pytest.mark.parametrize("split_tokens", [3, None])
def test_chunks_of_a_prompt_beside_single_tokens(window: int | None, split_tokens: int | None) -> None:
    """Rows of several tiles, found by searching for them; only the first rows have room for parts, or all."""
    x = step([(1, 100), (2, 9), (70, 70), (0, 3), (45, 90)], 4, 2, 64, window=window)
    tiles = tiles_for(2, 64, 70, 4, hopper=False)
    assert not tiles.one_tile
    got = run(x, splits=4, split_tokens=split_tokens, tiles=replace(tiles, block_n=32))
    assert_close(got, x.exact(), torch.float32, factor=4.0)


@pytest.mark.parametrize("window", [1, 7, 16, 50])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_window_hides_what_lies_before_it(window: int, splits: int) -> None:
    """A33: the last W tokens only, at W - 1, W and W + 1; blocks before the window are gone."""
    lengths = sorted({1, max(1, window - 1), window, window + 1, 3 * window + 20}, reverse=True)
    x = step([(1, n) for n in lengths] + [(4, 90)], 2, 1, 64, window=window)
    assert_close(run(x, splits=splits), x.exact(), torch.float32, factor=4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
def test_sixteen_bits(dtype: torch.dtype, splits: int) -> None:
    x = step([(1, 70), (1, 17), (3, 40)], 8, 2, 64, dtype=dtype)
    assert_close(run(x, splits=splits), x.exact(), dtype, factor=2.0)


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
@pytest.mark.parametrize("splits", [1, 4])
def test_eight_bits_with_a_scale_a_head(storage: torch.dtype, splits: int) -> None:
    """A31: read with the scale that was written with."""
    x = step([(1, 70), (1, 17), (3, 40)], 6, 3, 64, storage=storage)
    scales = (
        torch.tensor([0.002, 0.01, 0.03], device=DEVICE),
        torch.tensor([0.5, 0.01, 0.001], device=DEVICE),
    )
    got = run(x, splits=splits, scales=scales)
    exact = x.exact(scales)
    assert float((got.double() - exact).abs().max() / exact.abs().max()) < 1e-5


@dataclass(frozen=True)
class Rare:
    """Several properties at once, each of which is rare."""

    rows: Sequence[tuple[int, int]]
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    dtype: torch.dtype
    storage: torch.dtype
    window: int | None = None
    splits: int = 1


BF16, F16 = torch.bfloat16, torch.float16
CODES, INTS = torch.uint8, torch.int8
RARE = {
    "32/8, e4m3, page 16, split": Rare([(1, 49), (1, 1)], 32, 8, 128, 16, BF16, CODES, None, 2),
    "9/3 d96, int8, pages of a tile, window": Rare([(3, 130)], 9, 3, 96, 128, F16, INTS, 70),
    "14/2, drafts, page 256, window, split": Rare([(2, 257), (4, 255)], 14, 2, 64, 256, BF16, BF16, 200, 4),
    "d80, e4m3, chunk, split": Rare([(40, 70)], 2, 2, 80, 16, BF16, CODES, None, 4),
    "d256, 16 bits, chunk": Rare([(1, 17), (33, 33)], 4, 2, 256, 32, F16, F16, 20),
}


@pytest.mark.parametrize("rare", RARE.values(), ids=RARE)
def test_rare_sizes_together(rare: Rare) -> None:
    """Queries in 16 bits over keys in 8, and windows over pages as large as a tile of keys, among others."""
    x = step(
        rare.rows, rare.heads, rare.kv_heads, rare.dim, rare.block_size,
        dtype=rare.dtype, storage=rare.storage, window=rare.window,
    )  # fmt: skip
    scales = None
    if rare.storage in (CODES, INTS):
        scales = (
            torch.linspace(0.001, 0.01, rare.kv_heads, device=DEVICE),
            torch.linspace(0.5, 0.01, rare.kv_heads, device=DEVICE),
        )
    got, exact = run(x, splits=rare.splits, scales=scales), x.exact(scales)
    size = float(exact.abs().max())
    assert_close(got / size, exact / size, rare.dtype, factor=2.0)


@pytest.mark.parametrize("group", [1, 4])
def test_tiles_of_the_largest_cards(group: int) -> None:
    """128 rows of queries, over several tiles, beside a row of one token."""
    tiles = tiles_for(group, 64, 200, 4, hopper=True)
    assert tiles.block_m == 128
    x = step([(1, 40), (150, 150)], group, 1, 64)
    assert_close(run(x, tiles=tiles), x.exact(), torch.float32, factor=4.0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_reaches_its_own_row_through_parts_too(which: str, splits: int) -> None:
    """A25: a NaN in a query, key or value is seen in what attention gives, and in no other row."""
    x = step([(1, 100), (1, 90)], 2, 1, 64)
    block = int(x.tables[1, 1])
    if which == "q":
        x.q[1, 0, 3] = float("nan")
    else:
        (x.k if which == "k" else x.v)[block * x.block_size + 2, 0, 3] = float("nan")
    got = run(x, splits=splits)
    assert got[0].isfinite().all()
    assert got[1, 0].isnan().any()


def test_a_launch_over_later_rows_leaves_the_others_alone() -> None:
    """Short and long rows of one step are two launches over the same tensors."""
    x = step([(1, 30), (2, 21), (20, 40)], 4, 2, 64)
    exact = x.exact()
    out = poisoned(*x.q.shape, dtype=torch.float32)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for first, last, most in ((0, 2, 2), (2, 3, 20)):
        parts = Parts.allocate(3, 4, 64, 2, DEVICE)
        for launch in paged_attention(
            x.q, x.k, x.v, out,
            cu_seqlens_q=x.cu[first : last + 1], seq_lens=x.lengths[first:last],
            block_tables=x.tables[first:last], split_tiles=one, parts=parts,
            tiles=tiles_for(2, 64, most, 4, hopper=False), block_size=x.block_size,
        ):  # fmt: skip
            launch.run()
        done = int(x.cu[last])
        assert_close(out[:done], exact[:done], torch.float32, factor=4.0)
        assert out[done:].isnan().all()


def test_how_a_step_is_split_changes_nothing_but_rounding() -> None:
    x = step([(1, 200), (1, 60), (2, 33)], 2, 1, 64)
    whole = run(x)
    for split_tiles in (1, 2, 100):
        torch.testing.assert_close(run(x, splits=8, split_tiles=split_tiles), whole, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours_where_the_split_is_fixed() -> None:
    """To the last bit: what a row gets depends on its own lengths and on the size of a part alone."""
    rows = [(1, 200), (1, 60), (2, 33), (1, 90)]
    x = step(rows, 2, 1, 64)
    together = run(x, splits=4, split_tiles=2)
    tiles = tiles_for(2, 64, 2, 4, hopper=False)
    first = 0
    for r, (new, length) in enumerate(rows):
        alone = replace(x, rows=[(new, length)], q=x.q[first : first + new], tables=x.tables[r : r + 1])
        assert torch.equal(run(alone, splits=4, split_tiles=2, tiles=tiles), together[first : first + new])
        first += new


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("programs", [1, 8, 132, 5000])
def test_the_plan_shares_work_evenly(window: int | None, programs: int) -> None:
    new = [1, 5, 0, 1, 300] + [1] * 300
    lengths = [1000, 17, 4, 0, 4000] + [64] * 300
    cu = torch.tensor([0, *new]).cumsum(0).to(torch.int32).to(DEVICE)
    split_tiles = poisoned(1, dtype=torch.int32)
    sizes = {"programs": programs, "kv_heads": 2, "block_q": 8, "block_n": 64, "window": window}
    plan_splits(cu, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), split_tiles, **sizes).run()  # type: ignore[arg-type]
    expected = reference_plan_splits(new, lengths, **sizes)  # type: ignore[arg-type]
    assert split_tiles.item() == expected


def test_the_plan_counts_more_tiles_than_32_bits_do() -> None:
    """Many long prompts over long contexts, of a model whose heads share no keys."""
    new, lengths = [1 << 14] * 64, [1 << 20] * 64
    cu = torch.tensor([0, *new]).cumsum(0).to(torch.int32).to(DEVICE)
    split_tiles = poisoned(1, dtype=torch.int32)
    sizes = {"programs": 264, "kv_heads": 32, "block_q": 16, "block_n": 64, "window": None}
    plan_splits(cu, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), split_tiles, **sizes).run()  # type: ignore[arg-type]
    expected = reference_plan_splits(new, lengths, **sizes)  # type: ignore[arg-type]
    assert 264 * expected > 2**31
    assert split_tiles.item() == expected


def test_room_for_parts_follows_from_the_shape_of_the_launch() -> None:
    assert [most_splits(rows, 8) for rows in (0, 1, 8, 9, 64, 128, 1000)] == [MAX_SPLITS, 32, 32, 16, 4, 2, 1]


@pytest.mark.parametrize("hopper", [False, True])
def test_tiles_hold_what_they_must(hopper: bool) -> None:
    for group in (1, 2, 3, 4, 7, 8):
        for most in (1, 2, 5, 17, 100):
            for dim in (64, 128, 256):
                tiles = tiles_for(group, dim, most, 2, hopper=hopper)
                assert tiles.block_q * group <= tiles.block_m
                assert tiles.block_q >= 1
                assert not tiles.one_tile or tiles.block_q >= most
    assert tiles_for(4, 128, 1, 2, hopper=True).block_m == 16


def test_scales_go_with_eight_bits() -> None:
    x = step([(1, 3)], 2, 1, 64, storage=torch.int8)
    with pytest.raises(ValueError, match="int8 needs scales"):
        run(x)


def test_float32_is_refused_where_it_would_not_be_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    assert "choose attention=sdpa" in str(probe(32, 8, 128, 64, torch.float32, torch.float32))
    assert probe(32, 8, 128, 64, torch.float16, torch.int8) is None


def test_what_cannot_be_served_is_told() -> None:
    bf16 = torch.bfloat16
    assert probe(32, 8, 128, 64, bf16, torch.uint8) is None
    assert "at most 256" in str(probe(8, 8, 512, 64, bf16, bf16))
    assert "blocks of 1 to 1024" in str(probe(8, 8, 64, 2048, bf16, bf16))
    assert "evenly" in str(probe(9, 2, 64, 64, bf16, bf16))
    assert "float64" in str(probe(8, 8, 64, 64, torch.float64, bf16))
    assert "KV cache of torch.int16" in str(probe(8, 8, 64, 64, bf16, torch.int16))
