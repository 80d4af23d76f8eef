"""A kernel with everything that one launch of it needs, so that it can be run or only compiled."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.errors import TritonError

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels of this process run in Triton's interpreter; settled when triton is imported."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations that kernels take."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of ``kernel`` over ``grid``, on the current CUDA device and stream.

    ``arguments`` are tensors, numbers and None, ``constants`` what the kernel is compiled for.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launch it, unless the grid is empty. RuntimeError where it cannot be compiled or does not fit."""
        if 0 in self.grid:
            return
        try:
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )
        # A first launch runs a compiler, an assembler and a C compiler. What those raise is no RuntimeError,
        # which alone a step, a capture and the switch of a knob take for a failure of their own.
        except (TritonError, subprocess.SubprocessError, OSError) as error:
            raise RuntimeError(
                f"{self} cannot be launched ({type(error).__name__}: {error}); "
                "switch off the knob that chose this kernel"
            ) from error

    def __str__(self) -> str:
        """The kernel's name, and what it was to be launched with."""
        sizes = ", ".join(
            f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in self.arguments.items()
            if isinstance(value, Tensor)
        )
        constants = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"the kernel {self.kernel.__name__.lstrip('_')} over {list(self.grid)} ({sizes}; {constants})"


@functools.cache
def native_fp8(device: torch.device) -> int:
    """Ten times the compute capability where kernels may convert to e4m3 in hardware, from 89 on, else 0.

    0 in the interpreter, whose conversion to e4m3 loses the carry of the mantissa (7.9 becomes 4, not 8).
    """
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor if (major, minor) >= (8, 9) else 0


def cdiv(a: int, b: int) -> int:
    """How many parts of ``b`` hold ``a``. Triton's own costs 10 us a call outside of kernels."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps for one program over ``elements`` numbers: 16 a thread, two loads of 128 bits each."""
    return min(16, max(1, next_power_of_2(elements) // 512))
