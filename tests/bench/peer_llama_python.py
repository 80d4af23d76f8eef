"""llama.cpp through llama-cpp-python. ``python -m tests.bench.peer_llama_python PLAN GGUF THREADS``.

The library runs one request after the other. Its prefix cache is what it does by itself: it keeps the tokens
of the last request that the next one begins with.
"""

from __future__ import annotations

import sys
import time

import llama_cpp

from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

CONTEXT = 2048


class LlamaPython:
    def __init__(self, file: str, threads: int) -> None:
        self._llama = llama_cpp.Llama(
            file, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._caching = False

    def about(self) -> Ready:
        return Ready(llama_cpp.__version__, "one request after the other")

    def prepare(self, arm: str) -> None:
        self._caching = arm in ("cache_on", "cache_primed")

    def run(self, items: list[Item]) -> Times:
        llama = self._llama
        start = time.perf_counter()
        requests = []
        for item in items:
            if not self._caching:
                llama.reset()
            token_s: list[float] = []
            for _ in llama.generate(item.ids, temp=0.0):
                token_s.append(time.perf_counter() - start)
                if len(token_s) == item.out:
                    break
            requests.append(RequestTimes(len(item.ids), token_s))
        return Times(requests)


if __name__ == "__main__":
    serve(sys.argv[1], lambda: LlamaPython(sys.argv[2], int(sys.argv[3])))
