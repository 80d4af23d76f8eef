"""OpenVINO GenAI's continuous batching. ``python -m tests.bench.peer_openvino PLAN IR THREADS PRECISION``.

PRECISION is what it is asked to compute in (``bf16``, ``f32``). Tokens are read where the pipeline hands them
out, as ids; it makes no text of them.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

CACHE_GIB = 1
STEP_TOKENS = 2048  # of one step, as our engine has it; its own default of 256 cuts prompts into pieces


class OpenVino:
    def __init__(self, folder: str, threads: int, precision: str) -> None:
        self._folder = folder
        self._properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._caching: bool | None = None
        self._precision = precision
        self._next = 0
        self.prepare("plain")

    def about(self) -> Ready:
        able = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        note = ""
        if self._precision == "bf16" and "BF16" not in able:
            note = "asked for bf16, which this CPU does not have for it: it computes in float32"
        return Ready(genai.__version__, note)

    def prepare(self, arm: str) -> None:
        caching = arm in ("cache_on", "cache_primed")
        if caching == self._caching:
            return
        self._pipeline = None  # its memory is free before the next one takes its own
        config = genai.SchedulerConfig()
        config.cache_size = CACHE_GIB
        config.max_num_batched_tokens = STEP_TOKENS
        config.enable_prefix_caching = caching
        self._pipeline = genai.ContinuousBatchingPipeline(
            self._folder, config, "CPU", properties=self._properties
        )
        self._caching = caching

    def run(self, items: list[Item]) -> Times:
        pipeline = self._pipeline
        start = time.perf_counter()
        handles = []
        for item in items:
            config = genai.GenerationConfig(max_new_tokens=item.out, ignore_eos=True, do_sample=False)
            ids = ov.Tensor(np.array([item.ids], dtype=np.int64))
            handles.append(pipeline.add_request(self._next, ids, config))
            self._next += 1
        token_s: list[list[float]] = [[] for _ in items]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for mine, handle in zip(token_s, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        mine += [now] * len(output.generated_ids)
        return Times([RequestTimes(len(i.ids), mine) for i, mine in zip(items, token_s, strict=True)])


if __name__ == "__main__":
    serve(sys.argv[1], lambda: OpenVino(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
