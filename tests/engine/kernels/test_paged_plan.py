"""What a step of ``attention=paged`` launches: how many programs, and over how many parts of the keys."""

from __future__ import annotations

import pytest
import torch

from engine.attention.paged_triton import PagedAttention
from engine.kernels.launch import Launch
from tests.engine.driving import CPU
from tests.engine.kernels.serving import attend, pool_of, spec_of

PROGRAMS = 264  # of 132 multiprocessors


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Attention that a step would launch, in order."""
    seen: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: seen.append(launch))
    return seen


def grids(launched: list[Launch], rows: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Of the launches of attention itself: tiles, KV heads and parts."""
    spec = spec_of(32, 8, 128)
    backend = PagedAttention(CPU)
    backend._hopper, backend._programs = True, PROGRAMS
    attend(backend, spec, pool_of(spec, torch.bfloat16), rows)
    return [each.grid for each in launched if each.kernel.__name__ == "_paged_attention"]


def test_a_short_chunk_behind_a_long_prefix_is_split(launched: list[Launch]) -> None:
    """Its tiles of queries alone are a few programs, as where a prefix was found in the cache."""
    (tiles, heads, parts), = grids(launched, [(32, 32768)])  # fmt: skip
    assert (tiles, heads) == (2, 8)
    assert parts == 32
    assert any(each.kernel.__name__ == "combine_parts" for each in launched)
    assert any(each.kernel.__name__ == "_plan_splits" for each in launched)


def test_a_long_prompt_is_not_split(launched: list[Launch]) -> None:
    (_, _, parts), = grids(launched, [(4096, 0)])  # fmt: skip
    assert parts == 1
    assert [each.kernel.__name__ for each in launched] == ["_paged_attention"]


def test_the_grid_counts_the_tokens_of_its_own_rows(launched: list[Launch]) -> None:
    """A chunk beside decoding rows is no more tiles than alone, whichever of the two a launch is over."""
    decode, chunk = grids(launched, [(1, 100)] * 60 + [(512, 0), (64, 0)])
    assert decode[0] == 60
    assert chunk[0] == (512 + 64) // 32 + 2
