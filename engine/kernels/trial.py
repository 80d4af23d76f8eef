"""The least that can be launched, to see whether anything can."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.current_device import make_current
from engine.kernels.launch import Launch

_WRITTEN = 7.0


@triton.jit
def _write(out, number):
    tl.store(out, number)


def run(device: torch.device) -> None:
    """Compile and launch a kernel and read what it wrote. RuntimeError if it is something else."""
    make_current(device)
    out = torch.zeros(1, device=device)
    Launch(_write, (1,), {"out": out, "number": _WRITTEN}, {}, num_warps=1).run()
    if out.item() != _WRITTEN:
        raise RuntimeError(f"it wrote {out.item()}, not {_WRITTEN}")
