"""vLLM on the CPU, its engine in its own process. ``python -m tests.bench.peer_vllm PLAN HF THREADS DTYPE``.

HF is a Hugging Face folder. The prefix cache is on, as by default; requests of ``cache_off`` do not read it.
"""

from __future__ import annotations

import os
import sys
import time

from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

MAX_MODEL_LEN = 2048
KV_GIB = "1"


class Vllm:
    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=KV_GIB,
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)),
            VLLM_HOST_IP="127.0.0.1",  # its processes talk over this machine's loopback only
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        import vllm  # reads the settings above

        self._vllm = vllm
        self._engine = vllm.LLM(
            model=folder, dtype=dtype, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=True
        ).llm_engine
        self._read_cache = True
        self._next = 0

    def about(self) -> Ready:
        return Ready(self._vllm.__version__)

    def prepare(self, arm: str) -> None:
        self._read_cache = arm != "cache_off"

    def run(self, items: list[Item]) -> Times:
        engine = self._engine
        names = [str(self._next + index) for index in range(len(items))]
        self._next += len(items)
        token_s: dict[str, list[float]] = {name: [] for name in names}
        cached = dict.fromkeys(names, 0)
        start = time.perf_counter()
        for name, item in zip(names, items, strict=True):
            sampling = self._vllm.SamplingParams(
                temperature=0.0,
                max_tokens=item.out,
                ignore_eos=True,
                skip_reading_prefix_cache=not self._read_cache,
            )
            engine.add_request(name, {"prompt_token_ids": item.ids}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                mine = token_s[output.request_id]
                mine += [now] * (len(output.outputs[0].token_ids) - len(mine))
                cached[output.request_id] = output.num_cached_tokens or 0
        return Times(
            [
                RequestTimes(len(item.ids), token_s[name], cached[name])
                for name, item in zip(names, items, strict=True)
            ]
        )


if __name__ == "__main__":
    serve(sys.argv[1], lambda: Vllm(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
