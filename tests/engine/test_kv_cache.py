"""The KV pool's memory: sizes, limits and cleaning."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.kv_cache import KVCache, kv_bytes_per_block
from tests.engine.driving import CPU, tiny


def test_sizes_count_every_layer_keys_and_values() -> None:
    spec = tiny("llama")[0].spec
    kv = KVCache.allocate(spec, num_blocks=5, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert len(kv.k) == len(kv.v) == spec.num_layers
    assert kv.k[0].shape == (80, spec.num_kv_heads, spec.head_dim)
    held = sum(t.nbytes for t in kv.k + kv.v)
    assert kv.nbytes == held == 5 * kv_bytes_per_block(spec, 16, torch.bfloat16)
    assert kv.nbytes == 80 * spec.kv_bytes_per_token(torch.bfloat16)


@pytest.mark.parametrize(("block_size", "kv_heads", "widest"), [(16, 3, torch.int64), (1, 1, torch.int32)])
def test_words_are_the_same_memory_in_wider_numbers(
    block_size: int, kv_heads: int, widest: torch.dtype
) -> None:
    spec = replace(tiny("llama")[0].spec, num_heads=kv_heads, num_kv_heads=kv_heads)
    if block_size == 1:
        spec = replace(spec, head_dim=2, rope=replace(spec.rope, rotary_dim=2))
    kv = KVCache.allocate(spec, num_blocks=4, block_size=block_size, dtype=torch.bfloat16, device=CPU)
    for layer in kv.paged:
        layer.normal_()
    for words, paged in zip(kv.words, kv.paged, strict=True):
        assert words.dtype == widest
        assert words.data_ptr() == paged.data_ptr()
        assert torch.equal(words.view(torch.uint8), paged.view(torch.uint8))


def test_max_blocks_is_what_fits_and_not_one_more() -> None:
    spec = tiny("llama")[0].spec
    one = kv_bytes_per_block(spec, 16, torch.float32)
    for budget, blocks in ((0, 0), (-1, 0), (one - 1, 0), (one, 1), (3 * one - 1, 2)):
        assert KVCache.max_blocks(budget, spec, block_size=16, dtype=torch.float32) == blocks


def test_impossible_pools_are_refused_with_their_numbers() -> None:
    spec = tiny("llama")[0].spec
    with pytest.raises(ValueError, match="got 0 blocks of 16 tokens"):
        KVCache.allocate(spec, num_blocks=0, block_size=16, dtype=torch.float32, device=CPU)
    with pytest.raises(MemoryError, match=r"1000000000000 blocks of 128 tokens \(.* GiB on cpu\)"):
        KVCache.allocate(spec, num_blocks=10**12, block_size=128, dtype=torch.float32, device=CPU)


def test_scrub_cleans_what_is_not_finite_and_nothing_else() -> None:
    spec = tiny("llama")[0].spec
    kv = KVCache.allocate(spec, num_blocks=3, block_size=2, dtype=torch.float32, device=CPU)
    for cache in kv.k + kv.v:
        cache.normal_()
        cache[2, 0, 0], cache[3, 1, 0], cache[4, 0, 0] = math.nan, -math.inf, math.nan
    before = [cache.clone() for cache in kv.k + kv.v]
    kv.scrub([1])
    kv.scrub([])
    for cache, was in zip(kv.k + kv.v, before, strict=True):
        assert cache[2, 0, 0] == cache[3, 1, 0] == 0
        assert cache[4, 0, 0].isnan()  # of another block
        same = was.isfinite()
        assert torch.equal(cache[same], was[same])
