"""TPOT over batches and contexts: whole steps of the engine's runner, keys and values of random numbers.

Steps follow each other as in the engine, each launched before the host has read the one before.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from engine.memory import free_bytes
from engine.models.errors import ModelError
from tests.gpu.check.context import Context
from tests.gpu.check.model import Model, floor_s, timed_steps
from tests.gpu.check.settings import Cell

STEPS, WARM = 20, 3
ROOM = 2 * (STEPS + WARM) + 4  # tokens that a request gets, of steps of both kinds
FIRST_S = 4.0  # a first guess at what a cell takes, graph and all; then it is what the last one took
SPARE = 0.92  # of the memory that is free


def run(context: Context) -> dict[str, Any]:
    """Cells with weights as they were loaded."""
    return _cells(context, [cell for cell in context.settings.grid if cell.weights == "model"], budget_s=50.0)


def run_fp8(context: Context) -> dict[str, Any]:
    """Cells with weights in fp8, with and without keys and values in fp8."""
    try:
        return _cells(
            context, [cell for cell in context.settings.grid if cell.weights == "fp8"], budget_s=50.0
        )
    finally:  # its weights are in host memory by now, and under other names
        context.drop_model()


def _cells(context: Context, cells: list[Cell], budget_s: float) -> dict[str, Any]:
    began, last = time.perf_counter(), 0.0 if context.settings.tiny else FIRST_S
    model = context.the_model()
    found = context.begin(cells={}, not_run={}, off=model.off, model_s=round(model.made_s, 2))
    found["attention"] = model.runner.attention_name
    found["convert_s"] = round(model.set_weights(cells[0].weights), 2)
    held: tuple[str, int] | None = None
    for cell in cells:
        if held is None or held[0] != cell.kv:
            held = _allocate(context, model, [c for c in cells if c.kv == cell.kv])
        if _tokens(context, cell) > held[1]:
            found["not_run"][cell.name] = f"its keys and values do not fit: the pool has {held[1]} tokens"
            continue
        spent = time.perf_counter() - began
        if not context.settings.tiny and (spent + last > budget_s or context.left_s < 2 * last):
            found["not_run"][cell.name] = f"{spent:.0f} s of this stage were spent, a cell takes {last:.1f} s"
            continue
        start = time.perf_counter()
        try:
            found["cells"][cell.name] = _cell(context, model, cell)
        except (RuntimeError, ValueError, MemoryError, ModelError) as error:
            found["not_run"][cell.name] = f"{type(error).__name__}: {error}"[:500]
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                model.runner.free_kv()
                context.timer.free()
                held = None
        if len(found["cells"]) > 1:  # the first one compiled what the others find
            last = time.perf_counter() - start
    model.runner.free_kv()
    if not found["cells"]:
        raise RuntimeError(f"no cell could be measured: {found['not_run']}")
    return found


def _tokens(context: Context, cell: Cell) -> int:
    size = context.settings.block_size
    return cell.batch * -(-(cell.context + ROOM) // size) * size


def _allocate(context: Context, model: Model, cells: list[Cell]) -> tuple[str, int]:
    """A pool for the largest of the cells that fits, with the precision of its keys: one for all of them."""
    model.runner.free_kv()
    context.timer.free()
    kind, size = cells[0].kv, context.settings.block_size
    per_token = model.runner.kv_bytes_per_block(size, kind) / size
    fits = int(free_bytes(context.device) * SPARE / per_token)
    sizes = [_tokens(context, cell) for cell in cells]
    largest = max((n for n in sizes if n <= fits), default=min(sizes))
    model.allocate(largest, kind)
    return kind, largest


def _cell(context: Context, model: Model, cell: Cell) -> dict[str, Any]:
    rows = model.rows(cell.batch, cell.context, ROOM)
    try:
        took = timed_steps(model, rows, 3 if context.settings.tiny else STEPS, WARM)
    finally:
        model.release(rows)
    out, least = took.out, floor_s(took.out, context.ceilings(), cell.weights)
    step_s = took.overlapped_s or took.alone_s
    return {
        "tpot_ms": 1e3 * step_s, "overlapped": took.overlapped_s is not None, "alone_ms": 1e3 * took.alone_s,
        "forward_ms": 1e3 * took.forward_s, "floor_ms": 1e3 * least, "of_floor": least / step_s,
        "tok_per_s": cell.batch / step_s, "weight_bytes": out.weight_bytes, "kv_bytes": out.kv_bytes,
        "flops": out.flops, "kernels": out.kernels,
    }  # fmt: skip
