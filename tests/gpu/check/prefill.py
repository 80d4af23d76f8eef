"""TTFT of one prompt that is computed in one step, with weights as they were loaded."""

from __future__ import annotations

import time
from typing import Any

from engine.batch import TextRow
from tests.gpu.check.context import Context
from tests.gpu.check.model import Rows, floor_s

RUNS = 4  # the first is not counted


def run(context: Context) -> dict[str, Any]:
    """Milliseconds to the first token of each length, by the length."""
    model, settings = context.the_model(), context.settings
    model.set_weights("model")
    found = context.begin(prompts={}, attention=model.runner.attention_name)
    for length in settings.prompts:
        model.allocate(length + settings.block_size, "model")
        blocks = list(range(-(-(length + 1) // settings.block_size)))
        ids = [i * 7 % 256 for i in range(length)]
        times = []
        for _ in range(RUNS):
            row = TextRow(list(ids), blocks, num_new=length)
            began = time.perf_counter()
            out = model.runner.execute(Rows([row]))
            times.append(time.perf_counter() - began)
            model.release([row])
        took = sorted(times[1:])[len(times[1:]) // 2]
        least = floor_s(out, context.ceilings(), "model")
        found["prompts"][str(length)] = {
            "ttft_ms": 1e3 * took, "forward_ms": 1e3 * out.forward_s, "floor_ms": 1e3 * least,
            "of_floor": least / took, "tok_per_s": length / took, "flops": out.flops, "kernels": out.kernels,
        }  # fmt: skip
    model.runner.free_kv()
    return found
