"""Norm, rotation and the write into the pool, against the float64 reference and the engine's own layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels.codes import reference_decode
from engine.kernels.qkv import probe, qk_norm_rope_kv_write, reference_qkv, reference_stored
from engine.layers.norm import head_rms_norm
from engine.layers.rope import RotaryTable, rotate_
from engine.models.rope import RopeSpec
from tests.engine.kernels.support import DEVICE, assert_close, poisoned, randn

TOKENS, SLOTS, POSITIONS = 5, 40, 64


@dataclass
class Inputs:
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor


def inputs(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    storage: torch.dtype,
    rotary_dim: int | None = None,
) -> Inputs:
    """Tokens at scattered positions and slots; the third is padding. The product has wider rows than used."""
    all_heads = heads + 2 * kv_heads
    table = RotaryTable(RopeSpec("default", 1e4, rotary_dim or dim, POSITIONS), POSITIONS, DEVICE)
    return Inputs(
        randn(TOKENS, all_heads + 1, dim, dtype=dtype, scale=2.0)[:, :all_heads],
        torch.tensor([0, 63, 0, 17, 5], device=DEVICE),
        torch.tensor([39, 0, -1, 21, 7], device=DEVICE),
        table.cos,
        table.sin,
        poisoned(TOKENS, heads, dim, dtype=dtype),
        poisoned(SLOTS, kv_heads, dim, dtype=storage),
        poisoned(SLOTS, kv_heads, dim, dtype=storage),
    )


def assert_only_slots_written(x: Inputs) -> None:
    written = x.slots[x.slots >= 0]
    for pool in (x.k_pool, x.v_pool):
        rest = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
        rest[written] = False
        untouched = poisoned(*pool[rest].shape, dtype=pool.dtype)
        torch.testing.assert_close(pool[rest], untouched, rtol=0.0, atol=0.0, equal_nan=True)


SHAPES = [(9, 3, 64), (14, 2, 64), (4, 4, 80), (8, 2, 128), (2, 1, 256), (32, 8, 128), (12, 4, 96)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("norm", [False, True])
def test_queries_keys_and_values_are_their_reference(heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    dtype = torch.float32
    x = inputs(heads, kv_heads, dim, dtype, dtype)
    weight = randn(heads + kv_heads, dim, seed=4) if norm else None
    qk_norm_rope_kv_write(
        x.qkv, x.positions, x.slots, x.cos, x.sin, x.q, x.k_pool, x.v_pool, head_norm=weight, eps=1e-6
    ).run()
    q, k, v = reference_qkv(x.qkv, x.positions, x.cos, x.sin, heads, kv_heads, weight, 1e-6)
    real = x.slots >= 0
    assert_close(x.q, q, dtype, factor=4.0)
    assert_close(x.k_pool[x.slots[real]], k[real], dtype, factor=4.0)
    assert torch.equal(x.v_pool[x.slots[real]].double(), v[real])
    assert_only_slots_written(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
def test_sixteen_bits_and_a_partial_rotation(dtype: torch.dtype, norm: bool) -> None:
    x = inputs(6, 2, 96, dtype, dtype, rotary_dim=24)
    weight = randn(8, 96, seed=4, dtype=dtype) if norm else None
    qk_norm_rope_kv_write(
        x.qkv, x.positions, x.slots, x.cos, x.sin, x.q, x.k_pool, x.v_pool, head_norm=weight, eps=1e-6
    ).run()
    q, k, v = reference_qkv(x.qkv, x.positions, x.cos, x.sin, 6, 2, weight, 1e-6)
    real = x.slots >= 0
    assert_close(x.q, q, dtype)
    assert_close(x.k_pool[x.slots[real]], k[real], dtype)
    assert torch.equal(x.v_pool[x.slots[real]].double(), v[real])
    assert_only_slots_written(x)


@pytest.mark.parametrize("storage", [torch.uint8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_with_a_scale_a_head(storage: torch.dtype, dtype: torch.dtype) -> None:
    """A31: keys and values divided by their head's scale, what is beyond it clamped."""
    x = inputs(6, 3, 64, dtype, storage)
    largest = 448.0 if storage == torch.uint8 else 127.0
    scales = (
        torch.tensor([0.5, 3.0, 8.0], device=DEVICE) / largest,
        torch.tensor([6.0, 0.25, 2.0], device=DEVICE) / largest,
    )
    qk_norm_rope_kv_write(
        x.qkv, x.positions, x.slots, x.cos, x.sin, x.q, x.k_pool, x.v_pool, scales=scales
    ).run()
    q, k, v = reference_qkv(x.qkv, x.positions, x.cos, x.sin, 6, 3)
    real = x.slots >= 0
    assert_close(x.q, q, dtype, factor=4.0)
    for pool, exact, scale in ((x.k_pool, k, scales[0]), (x.v_pool, v, scales[1])):
        stored = pool[x.slots[real]]
        expected = reference_decode(reference_stored(exact[real], scale, storage))
        # A float32 rounding may tip a number to the code beside it.
        off = (reference_decode(stored) - expected).abs() > 0
        assert off.double().mean() < 0.01
        near = expected.abs().clamp(min=1.0) / (8.0 if storage == torch.uint8 else 1.0)
        assert bool(((reference_decode(stored) - expected).abs() <= near).all())
    assert torch.equal(x.v_pool[x.slots[real]], reference_stored(v[real], scales[1], storage))
    assert_only_slots_written(x)


def test_it_does_what_the_engines_layers_do() -> None:
    x = inputs(6, 2, 64, torch.float32, torch.float32)
    weight = randn(8, 64, seed=4)
    qk_norm_rope_kv_write(
        x.qkv, x.positions, x.slots, x.cos, x.sin, x.q, x.k_pool, x.v_pool, head_norm=weight, eps=1e-5
    ).run()
    qk = head_rms_norm(x.qkv[:, :8].contiguous(), weight, 1e-5)
    rotate_(qk, x.cos[x.positions].unsqueeze(1), x.sin[x.positions].unsqueeze(1))
    torch.testing.assert_close(x.q, qk[:, :6])
    torch.testing.assert_close(x.k_pool[x.slots[3]], qk[3, 6:])


def test_scales_go_with_eight_bits() -> None:
    x = inputs(2, 1, 64, torch.float32, torch.int8)
    with pytest.raises(ValueError, match="int8 needs scales"):
        qk_norm_rope_kv_write(x.qkv, x.positions, x.slots, x.cos, x.sin, x.q, x.k_pool, x.v_pool)


def test_what_cannot_be_served_is_told() -> None:
    bf16 = torch.bfloat16
    assert probe(128, 128, bf16, torch.uint8) is None
    assert "at most 256" in str(probe(512, 512, bf16, bf16))
    assert "even part" in str(probe(64, 63, bf16, bf16))
    assert "float64" in str(probe(64, 64, torch.float64, bf16))
    assert "KV cache of torch.int16" in str(probe(64, 64, bf16, torch.int16))
