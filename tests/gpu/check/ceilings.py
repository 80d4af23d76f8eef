"""What the device itself reaches: memory, matrix products, launches. Fractions elsewhere are of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.linear import product_fp8
from tests.gpu.check.context import Context
from tests.gpu.check.timing import Timer

NODES = 300  # about as many kernels as a step of an 8B model has


def run(context: Context) -> dict[str, Any]:
    """Bytes, operations and seconds. What a device does not have is None, and ``missing`` says why."""
    timer, settings, device = context.timer, context.settings, context.device
    found = context.begin(missing={})
    x, weight = (torch.randn(settings.product, settings.product, device=device).bfloat16() for _ in range(2))
    timer.warm_up(lambda: F.linear(x, weight))
    # In a graph a copy may be left to an engine of its own, which need not be the fastest.
    found["copiers"] = _copiers(timer, settings.buffer_bytes, device)
    found["copy_bytes_per_s"] = max(found["copiers"].values())
    found["readers"] = _readers(timer, settings.buffer_bytes, device)
    # Whatever reads fastest is nearest to what can be read; a copy reads half of what it moves.
    found["read_bytes_per_s"] = max(*found["readers"].values(), found["copy_bytes_per_s"])
    timer.free()
    found["bf16_flops_per_s"] = 2 * settings.product**3 / timer.kernel_s([lambda: F.linear(x, weight)])
    try:
        found["fp8_flops_per_s"] = _fp8(timer, settings.product, device)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        found["fp8_flops_per_s"] = None
        found["missing"]["fp8_flops_per_s"] = str(error).splitlines()[0][:300]
    found |= _launches(timer, device, found["missing"])
    return found


def _copiers(timer: Timer, nbytes: int, device: torch.device) -> dict[str, float]:
    """Bytes a second, read and written, of what writes as much as it reads, by its name."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "addition": lambda: torch.add(source, 1.0, out=target),
    }
    return {name: 2 * source.nbytes / timer.kernel_s([run]) for name, run in work.items()}


def _readers(timer: Timer, nbytes: int, device: torch.device) -> dict[str, float]:
    """Bytes a second of what reads much and writes next to nothing, by its name."""
    rows = torch.ones(nbytes // 4, dtype=torch.float32, device=device).view(-1, 1 << 12)
    wide = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device).view(-1, 1 << 12)
    one = torch.ones(1, 1 << 12, dtype=torch.bfloat16, device=device)
    work: dict[str, Callable[[], object]] = {
        "amax": lambda: rows.amax(dim=-1),
        "sum": lambda: rows.sum(dim=-1),
        "product of one row": lambda: F.linear(one, wide),
    }
    return {name: rows.nbytes / timer.kernel_s([run]) for name, run in work.items()}


def _fp8(timer: Timer, n: int, device: torch.device) -> float:
    """With a scale for each row and column and sums in the tensor cores, as linear layers use it."""
    x, weight = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    ones = torch.ones(n, device=device)

    def product() -> torch.Tensor:
        return product_fp8(x, ones, weight, ones, torch.bfloat16)

    return 2 * n**3 / timer.kernel_s([product])


def _launches(timer: Timer, device: torch.device, missing: dict[str, str]) -> dict[str, float | None]:
    """Seconds for a node of a graph that does next to nothing, and for a launch from Python."""
    one = torch.zeros(1, device=device)
    found: dict[str, float | None] = {"graph_node_s": None}
    found["torch_launch_s"] = timer.wall_s(lambda: [one.add_(1) for _ in range(NODES)]) / NODES
    if timer.on_card:
        graph = timer.captured(lambda: [one.add_(1) for _ in range(NODES)])
        found["graph_node_s"] = timer.events_s(graph.replay) / NODES
        try:
            found["triton_launch_s"] = _triton_launch_s(timer, device)
        except Exception as error:  # a Triton that is broken must not take the other ceilings along
            found["triton_launch_s"] = None
            missing["triton_launch_s"] = f"{type(error).__name__}: {error}"[:300]
    else:
        found["triton_launch_s"] = None
        missing["graph_node_s"] = missing["triton_launch_s"] = "no CUDA"
    return found


def _triton_launch_s(timer: Timer, device: torch.device) -> float:
    from engine.kernels.rmsnorm import add_rmsnorm

    residual, y = (torch.ones(1, 512, dtype=torch.bfloat16, device=device) for _ in range(2))
    launch = add_rmsnorm(None, residual, residual[0], 1e-5, y)
    return timer.wall_s(lambda: [launch.run() for _ in range(NODES)]) / NODES
