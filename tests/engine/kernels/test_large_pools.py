"""A pool that fills a card has more elements than 32 bits count, and kernels reach its end.

Memory that is never touched takes none of a CPU's, so that such a pool is there in no time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.qkv import qk_norm_rope_kv_write, reference_qkv, reference_stored
from engine.layers.rope import RotaryTable
from engine.models.rope import RopeSpec
from tests.engine.kernels.support import DEVICE, poisoned, randn
from tests.engine.kernels.test_paged_attention import Step, run

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
BLOCKS = 4  # at the end, all that is used
TOKENS = 37


def test_keys_and_values_at_the_end_of_a_large_pool_are_written_and_read() -> None:
    """Each token in its slot, three blocks scattered; then attention of the last one over all of them."""
    blocks = (1 << 31) // (BLOCK * KV_HEADS * DIM) + BLOCKS
    k, v = (torch.empty(blocks * BLOCK, KV_HEADS, DIM, dtype=torch.int8, device=DEVICE) for _ in range(2))
    assert k.numel() > 2**31
    last_k, last_v = (pool[-BLOCKS * BLOCK :].zero_() for pool in (k, v))
    tables = torch.tensor([[3, 1, 2]], dtype=torch.int32, device=DEVICE)
    at = torch.arange(TOKENS, device=DEVICE)
    slots = tables[0, at // BLOCK] * BLOCK + at % BLOCK
    first = blocks - BLOCKS
    table = RotaryTable(RopeSpec("default", 1e4, DIM, 64), 64, DEVICE)
    qkv = randn(TOKENS, HEADS + 2 * KV_HEADS, DIM)
    scales = torch.tensor([0.03, 0.05], device=DEVICE), torch.tensor([0.04, 0.02], device=DEVICE)
    q = poisoned(TOKENS, HEADS, DIM, dtype=torch.float32)
    qk_norm_rope_kv_write(
        qkv, at, first * BLOCK + slots.long(), table.cos, table.sin, q, k, v, scales=scales
    ).run()
    _, keys, values = reference_qkv(qkv, at, table.cos, table.sin, HEADS, KV_HEADS)
    for pool, exact, scale in ((last_k, keys, scales[0]), (last_v, values, scales[1])):
        wanted = reference_stored(exact, scale, torch.int8)
        assert bool(((pool[slots].int() - wanted.int()).abs() <= 1).all()), "a code, but for rounding"
    step = Step([(1, TOKENS)], q[-1:], last_k, last_v, tables, BLOCK, None)
    large = replace(step, k=k, v=v, tables=tables + first)
    for splits in (1, 2):
        attended = run(large, splits=splits, scales=scales)
        torch.testing.assert_close(attended.double(), step.exact(scales), rtol=1e-4, atol=1e-4)
