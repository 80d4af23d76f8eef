"""What tests of kernels share: tensors whose unwritten places show, and what errors are allowed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from engine.kernels.launch import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

interpreted_only = pytest.mark.skipif(
    not INTERPRETED,
    reason="it puts kernels in the place of a CPU's, which only the interpreter can run there",
)

ALL_SHAPES = os.environ.get("DECODECK_KERNEL_SHAPES") == "all"
"""Whether tests also run the shapes that take long in the interpreter."""

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""What one rounding to that dtype may change, as a part of the value. The interpreter cuts bfloat16 off
instead of rounding it, which is off by twice as much as a GPU.
"""

POISON = {torch.int8: -128, torch.uint8: 0xFF}


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that no kernel would leave so: NaN, for integers a value that none writes."""
    value = POISON.get(dtype, -77 if not dtype.is_floating_point else float("nan"))
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers of that dtype on the device, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_close(got: Tensor, exact: Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> None:
    """``got`` is ``exact`` (float64) but for roundings to ``dtype``."""
    tolerance = ROUNDING[dtype] * factor
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def assert_codes(codes: Tensor, scale: Tensor, exact: Tensor) -> None:
    """Codes [rows, n] times scale [rows] are ``exact`` (float64) within half a step of the codes."""
    wide = (codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes).double()
    amax = exact.abs().amax(-1).clamp(min=1e-30)
    largest = 448.0 if codes.dtype == torch.uint8 else 127.0
    torch.testing.assert_close(scale.double() * largest, amax, rtol=1e-5, atol=0.0)
    got = wide * scale.double().unsqueeze(-1)
    # e4m3 keeps 4 digits: half a step is 1/16 of the number; its least step is 2^-9.
    half_step = torch.full_like(exact, 0.5) if codes.dtype == torch.int8 else wide.abs().div(16).clamp(2**-10)
    allowed = half_step * scale.double().unsqueeze(-1) * 1.01 + exact.abs() * 1e-5
    assert bool(((got - exact).abs() <= allowed).all()), (got - exact).abs().sub(allowed).max()
