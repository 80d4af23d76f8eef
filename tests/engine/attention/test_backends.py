"""Every backend against softmax attention written out over the tokens themselves, not over blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention import Rows, get_backend, paged, probe
from engine.attention.base import usable
from engine.attention.sdpa import QUERY_TILE
from engine.kv_cache import KVCache
from tests.engine.attention.mixed_rows import DIM, HEADS, KV_HEADS, check_mixed_rows
from tests.engine.driving import CPU, tiny

HERE = usable(tiny("llama")[0].spec, CPU, torch.float32)[0]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_rows_equal_attention_over_the_tokens_themselves(
    name: str, window: int | None, block_size: int
) -> None:
    """See `check_mixed_rows`."""
    check_mixed_rows(get_backend(name, CPU), window, block_size)


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
    outs = [get_backend(n, CPU).plan(rows, kv, spec, torch.from_numpy).attend(0, q, k, v) for n in HERE]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


def test_probe_says_why_a_backend_cannot_run() -> None:
    spec = tiny("llama")[0].spec
    assert HERE[:2] == ("naive", "sdpa")
    for name in HERE:
        assert probe(name, spec, CPU, torch.bfloat16) is None
        assert get_backend(name, CPU).name == name
    assert "not on meta" in (probe("sdpa", spec, torch.device("meta"), torch.float32) or "")
    assert "torch.int8" in (probe("naive", spec, CPU, torch.int8) or "")
    assert "there are naive, sdpa, paged" in (probe("paged9", spec, CPU, torch.float32) or "")


def test_where_nothing_reads_blocks_in_place_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is refused with its reason, and nothing else runs under its name."""
    monkeypatch.setattr(paged, "source", lambda device: None)
    found, cannot = usable(tiny("llama")[0].spec, CPU, torch.float32)
    assert found == ("naive", "sdpa")
    assert cannot["attention=paged"] == "there is no such kernel for cpu"
    with pytest.raises(ValueError, match="there is no paged attention for cpu"):
        get_backend("paged", CPU)
