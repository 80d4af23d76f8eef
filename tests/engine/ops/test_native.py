"""The parts of a decoder in C++, each against torch's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Needs
from engine.kv_cache import KVCache
from engine.kv_scales import KVScales
from engine.layers.linear import Linear, plain_choice
from engine.layers.mlp import GatedMLP
from engine.layers.rope import RotaryTable
from engine.models.spec import ModelSpec
from engine.ops import native_ops
from engine.ops.base import StoreQKV
from engine.ops.plain import PLAIN
from tests.engine.driving import CPU, tiny

DTYPES = (torch.float32, torch.bfloat16)
HEADS, KV_HEADS, DIM = 6, 2, 20
Stored = tuple[Tensor, Tensor, Tensor, KVCache]


def close(got: Tensor, want: Tensor) -> None:
    """Equal but for the rounding of sums, in bfloat16 by the last bits, for torch rounds in between."""
    assert got.dtype == want.dtype
    bound = 1e-5 if want.dtype == torch.float32 else 2.0**-5
    torch.testing.assert_close(got.float(), want.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 7, 64, 577])
def test_addition_and_norm(dtype: torch.dtype, cols: int) -> None:
    for rows in (1, 3, 200):
        x, delta = (torch.randn(rows, cols).to(dtype) for _ in range(2))
        weight = torch.randn(cols).to(dtype)
        behind = Linear(torch.zeros(1, cols, dtype=dtype), None, plain_choice(dtype))
        for added in (None, delta):
            ours, theirs = x.clone(), x.clone()
            got = native_ops.add_norm()(ours, added, weight, 1e-5, behind)
            close(got, PLAIN.norm(theirs, added, weight, 1e-5, behind))
            assert torch.equal(ours, theirs)
            for row in (0, rows - 1):
                own = None if added is None else added[row : row + 1]
                alone = native_ops.add_norm()(x[row : row + 1].clone(), own, weight, 1e-5, behind)
                assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 9, 96, 1000])
def test_the_gate_between_two_products(dtype: torch.dtype, inner: int) -> None:
    choice = plain_choice(dtype)
    mlp = GatedMLP(
        Linear(torch.randn(2 * inner, 12).to(dtype), None, choice, dtype),
        Linear(torch.randn(12, inner).to(dtype) * inner**-0.5, None, choice, dtype),
    )
    for rows in (1, 5, 40):
        x = torch.randn(rows, 12).to(dtype)
        got, want = native_ops.gate()(mlp, x), mlp(x)
        assert got.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 2.0**-6
        assert float((got - want).abs().max()) <= bound * float(want.abs().max())


def test_the_activation_holds_at_both_ends() -> None:
    """From where e^-x is no finite number any more to where it is nothing beside 1; NaN stays NaN."""
    values = torch.tensor([-1e30, -200.0, -89.0, -87.0, -20.0, -1.0, -0.0, 1e-30, 3.0, 88.0, 200.0, 1e30])
    values = torch.cat((values, torch.linspace(-100, 100, 5001), torch.tensor([float("nan")])))
    both = torch.stack((values, torch.ones_like(values)), dim=1)
    mlp: Any = SimpleNamespace(gate_up=lambda x: both, down=lambda x: x, intermediate=1)
    got = native_ops.gate()(mlp, both)[:, 0]
    torch.testing.assert_close(got, F.silu(values), rtol=1e-6, atol=1e-8, equal_nan=True)


def stored(
    op: StoreQKV, spec: ModelSpec, qkv: Tensor, norm: Tensor | None, needs: Needs, kv_dtype: str
) -> Stored:
    generator = torch.Generator().manual_seed(1)
    scales = KVScales(*(torch.rand(2, KV_HEADS, generator=generator) * 0.02 + 0.01 for _ in range(2)))
    kv = KVCache.allocate(
        spec, num_blocks=20, block_size=4, dtype=qkv.dtype, device=CPU, kv_dtype=kv_dtype, scales=scales
    )
    slots = torch.randperm(80, generator=generator)[: len(qkv)]
    rotary = RotaryTable(spec.rope, 100, CPU)
    step = op.begin(rotary, torch.arange(len(qkv)) + 3, slots, kv, needs, qkv.dtype)
    q, k, v = step(1, qkv.clone(), norm, 1e-6)
    if not needs.new:
        assert op is PLAIN.store or (k is None and v is None)
        k, v = kv.k[1][slots], kv.v[1][slots]
    assert k is not None
    assert v is not None
    assert torch.equal(k, kv.k[1][slots])
    assert torch.equal(v, kv.v[1][slots])
    return q, k, v, kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["model", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("rotary_dim", [DIM, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_keys_and_values(dtype: torch.dtype, kv_dtype: str, rotary_dim: int, normed: bool) -> None:
    """Rotated in whole or in part, with and without norms of heads, into every kind of pool."""
    base = tiny("llama")[0].spec
    spec = replace(
        base, num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, layer_windows=(None, None),
        rope=replace(base.rope, rotary_dim=rotary_dim),
    )  # fmt: skip
    norm = torch.rand(HEADS + KV_HEADS, DIM).add(0.5).to(dtype) if normed else None
    for tokens in (1, 3, 70):
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).to(dtype)
        for needs in (Needs(), Needs(scaled=False, new=False)):
            got = stored(native_ops.store_qkv(), spec, qkv, norm, needs, kv_dtype)
            want = stored(PLAIN.store, spec, qkv, norm, needs, kv_dtype)
            scale = want[0].float().abs().max()
            close(got[0] / scale, want[0] / scale)
            for ours, theirs in zip(got[1:3], want[1:3], strict=True):
                if kv_dtype == "model":
                    close(ours, theirs)
                    continue
                # What lies between two codes may be rounded to the other one.
                codes = [
                    each if kv_dtype == "int8" else each.view(torch.float8_e4m3fn) for each in (ours, theirs)
                ]
                a, b = (each.float() for each in codes)
                if dtype == torch.bfloat16:
                    assert float((a - b).abs().max()) <= 0.13 * float(b.abs().max())  # a step of e4m3
                    continue
                step = torch.ones(()) if kv_dtype == "int8" else 2.0**-3 * b.abs() + 2.0**-9
                assert bool(((a - b).abs() <= step).all())
                assert float((a != b).float().mean()) < 0.01
            untouched = torch.ones(80, dtype=torch.bool)
            untouched[torch.randperm(80, generator=_same_slots())[:tokens]] = False
            assert not got[3].k[1][untouched].any()
            assert not got[3].k[0].any()


def _same_slots() -> torch.Generator:
    """The generator of `stored`, where it draws the slots."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        torch.rand(2, KV_HEADS, generator=generator)
    return generator


def test_every_value_between_two_codes_of_e4m3_is_rounded_as_torch_does() -> None:
    base = tiny("llama")[0].spec
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    around = torch.cat(
        (codes, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9)))
    )
    values = torch.cat((around, -around, torch.tensor([449.0, -1e6, 1e-12, -0.0])))
    values = F.pad(values, (0, -len(values) % DIM)).view(-1, 1, DIM)
    spec = replace(
        base, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=DIM, layer_windows=(None,),
        rope=replace(base.rope, rotary_dim=DIM),
    )  # fmt: skip
    one = KVScales(torch.ones(1, 1), torch.ones(1, 1))
    kv = KVCache.allocate(
        spec,
        num_blocks=1,
        block_size=len(values),
        dtype=torch.float32,
        device=CPU,
        kv_dtype="fp8_e4m3",
        scales=one,
    )
    qkv = values.repeat(1, 3, 1).contiguous()
    at = torch.arange(len(values))
    rotary = RotaryTable(spec.rope, len(values), CPU)
    native_ops.store_qkv().begin(rotary, at, at, kv, Needs(), torch.float32)(0, qkv, None, 1e-6)
    want = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(kv.v[0], want)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny("llama")[0].spec
    assert native_ops.probe("fused_norm", spec, CPU, torch.float32) is None
    assert "not float16" in str(native_ops.probe("fused_norm", spec, CPU, torch.float16)).replace(
        "torch.", ""
    )
    assert "not on cuda" in str(native_ops.probe("fused_norm", spec, torch.device("cuda"), torch.float32))
    monkeypatch.setattr(native_ops, "unavailable", lambda: "there is no C++ compiler")
    assert native_ops.probe("fused_mlp", spec, CPU, torch.float32) == "there is no C++ compiler"
