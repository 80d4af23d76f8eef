"""Kernels of one pass over the tokens against their float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import quantize, rmsnorm, silu_mul
from engine.kernels.rmsnorm import add_rmsnorm, reference_add_rmsnorm
from tests.engine.kernels.support import DEVICE, assert_close, assert_codes, poisoned, randn

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STORAGES = [torch.uint8, torch.int8]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [1, 64, 80, 896])
@pytest.mark.parametrize("add", [True, False])
def test_add_rmsnorm_is_its_reference(dtype: torch.dtype, hidden: int, add: bool) -> None:
    x = randn(3, hidden, dtype=dtype, seed=1) if add else None
    residual, weight = randn(3, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=2)
    expected, _ = reference_add_rmsnorm(x, residual, weight, 1e-5)
    y = poisoned(3, hidden, dtype=dtype)
    add_rmsnorm(x, residual, weight, 1e-5, y).run()
    assert_close(residual, expected.double(), dtype)
    _, exact = reference_add_rmsnorm(None, residual, weight, 1e-5)
    assert_close(y, exact, dtype)


def codes_of(y: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a launch of its own makes of y."""
    codes, scale = poisoned(*y.shape, dtype=storage), poisoned(len(y), dtype=torch.float32)
    quantize.quantize(y, codes, scale).run()
    return codes, scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("add", [True, False])
def test_add_rmsnorm_quantizes_what_it_gives(storage: torch.dtype, dtype: torch.dtype, add: bool) -> None:
    """To the last bit as in two launches, with the rounding between them; without one it is the reference."""
    x, residual = (randn(4, 320, dtype=dtype, seed=seed) for seed in (1, 2))
    x[2], residual[2] = 0.0, 0.0
    weight, kept = randn(320, dtype=dtype, seed=3), residual.clone()
    codes, scale = poisoned(4, 320, dtype=storage), poisoned(4, dtype=torch.float32)
    add_rmsnorm(x if add else None, residual, weight, 1e-6, codes, scale).run()
    y = poisoned(4, 320, dtype=dtype)
    add_rmsnorm(x if add else None, kept, weight, 1e-6, y).run()
    assert torch.equal(residual, kept)
    expected, expected_scale = codes_of(y, storage)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)
    assert not (codes[2] & 0x7F).any()  # 0, with either sign
    if dtype == torch.float32:
        _, exact = reference_add_rmsnorm(None, residual, weight, 1e-6)
        assert_codes(codes, scale, exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cols", [1, 72, 2048, 2500])
def test_silu_mul_is_its_reference(dtype: torch.dtype, cols: int) -> None:
    gate_up = randn(3, 2 * cols, dtype=dtype, scale=4.0)
    y = poisoned(3, cols, dtype=dtype)
    silu_mul.silu_mul(gate_up, y).run()
    assert_close(y, silu_mul.reference_silu_mul(gate_up), dtype, factor=2.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("cols", [700, 2500])
def test_silu_mul_quantizes_what_it_gives(storage: torch.dtype, dtype: torch.dtype, cols: int) -> None:
    """As the norm does, and also where the launch that does not quantize takes a row in parts."""
    gate_up = randn(3, 2 * cols, dtype=dtype, scale=3.0)
    codes, scale = poisoned(3, cols, dtype=storage), poisoned(3, dtype=torch.float32)
    silu_mul.silu_mul(gate_up, codes, scale).run()
    y = poisoned(3, cols, dtype=dtype)
    silu_mul.silu_mul(gate_up, y).run()
    expected, expected_scale = codes_of(y, storage)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)
    if dtype == torch.float32:
        assert_codes(codes, scale, silu_mul.reference_silu_mul(gate_up))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_is_bit_for_bit_what_the_layers_do_on_a_cpu(
    storage: torch.dtype, dtype: torch.dtype
) -> None:
    """Rows that are strided, of zeros, and of numbers that differ widely."""
    x = randn(5, 300, dtype=dtype)[:, :200]
    x[1] = 0.0
    x[2] = torch.logspace(-30, 4, 200, base=2.0).to(dtype)
    x[3, 7] = 5e4
    kind = "e4m3" if storage == torch.uint8 else "int8"
    codes, scale = poisoned(5, 200, dtype=storage), poisoned(5, dtype=torch.float32)
    quantize.quantize(x, codes, scale).run()
    expected, expected_scale = quantize.reference_quantize(x, kind)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected)


class _DividesAsACard(TorchDispatchMode):
    """On CUDA torch multiplies with the inverse of a number of Python's (BinaryDivTrueKernel.cu)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return args[0] * torch.full_like(args[0], args[1]).reciprocal()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_the_reference_is_the_same_to_the_last_bit_on_a_card(kind: str) -> None:
    """Where it runs when a card is checked, and a scale that is off by a bit would be the kernel's fault."""
    x = randn(200, 64, seed=4)
    codes, scale = quantize.reference_quantize(x, kind)
    with _DividesAsACard():
        assert (x.abs().amax(-1) / 448.0 != x.abs().amax(-1) / torch.full((), 448.0)).any()
        there, there_scale = quantize.reference_quantize(x, kind)
    assert torch.equal(there_scale, scale)
    assert torch.equal(there, codes)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_no_other(storage: torch.dtype) -> None:
    """A25: a NaN makes the scale of its token NaN, whichever kernel quantizes; an infinity is not hidden."""
    x = randn(3, 96, dtype=torch.bfloat16)
    x[1, 5], x[2, 90] = float("nan"), float("inf")
    codes, scale = poisoned(3, 48, dtype=storage), poisoned(3, dtype=torch.float32)
    both = torch.cat((x[:, :48], x[:, 48:]), dim=1).contiguous()
    launches = {
        "quantize": quantize.quantize(x[:, :48], codes, scale),
        "silu_mul": silu_mul.silu_mul(both, codes, scale),
        "add_rmsnorm": add_rmsnorm(
            None, x[:, :48].contiguous(), torch.ones(48, device=DEVICE), 1e-5, codes, scale
        ),
    }
    for name, launch in launches.items():
        scale.fill_(-77.0)
        launch.run()
        assert scale[0].isfinite(), name
        assert scale[1].isnan(), name
        assert name != "silu_mul" or not scale[2].isfinite()


def test_no_tokens_are_no_launch() -> None:
    empty = torch.empty(0, 64, device=DEVICE)
    add_rmsnorm(empty, empty, torch.ones(64, device=DEVICE), 1e-5, empty).run()


def test_what_cannot_be_served_is_told() -> None:
    assert rmsnorm.probe(4096, torch.bfloat16) is None
    assert "at most" in str(rmsnorm.probe(20000, torch.bfloat16))
    assert "not torch.float64" in str(rmsnorm.probe(64, torch.float64))
    assert quantize.probe(14336, torch.float32) is None
    assert "at most" in str(quantize.probe(40000, torch.float16))
    assert "float64" in str(quantize.probe(64, torch.float64))
    assert silu_mul.probe(40000, torch.bfloat16, quantized=False) is None
    assert "at most" in str(silu_mul.probe(40000, torch.bfloat16, quantized=True))
    assert "float64" in str(silu_mul.probe(64, torch.float64, quantized=False))
