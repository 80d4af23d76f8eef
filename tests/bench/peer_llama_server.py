"""llama.cpp's own server over HTTP. ``python -m tests.bench.peer_llama_server PLAN GGUF THREADS SERVER``.

SERVER is its program. Sixteen slots and no flash attention were its fastest on CPUs.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
import threading
import time

from tests.bench.peer_loop import Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

SLOTS = 16
SLOT_TOKENS = 1152  # the longest request of the workloads and its answer
START_TIMEOUT_S = 120.0
HOST = "127.0.0.1"


class LlamaServer:
    def __init__(self, file: str, threads: int, program: str) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        options = {
            "-m": file, "-t": threads, "-tb": threads, "-np": SLOTS, "-c": SLOTS * SLOT_TOKENS, "-fa": "off",
            "--host": HOST, "--port": self._port,
        }  # fmt: skip
        command = [program, *(str(part) for pair in options.items() for part in pair)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        atexit.register(self._end)
        self._wait()
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        self._version = (said.stdout + said.stderr).strip().splitlines()[0].removeprefix("version: ")
        self._caching = False

    def about(self) -> Ready:
        return Ready(self._version, f"{SLOTS} slots, flash attention off")

    def prepare(self, arm: str) -> None:
        self._caching = arm in ("cache_on", "cache_primed")

    def run(self, items: list[Item]) -> Times:
        results: list[RequestTimes | None] = [None] * len(items)
        failures: list[Exception] = []
        start = time.perf_counter()

        def one(index: int) -> None:
            try:
                results[index] = self._request(items[index], start)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(items))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return Times([result for result in results if result is not None])

    def _request(self, item: Item, start: float) -> RequestTimes:
        body = {
            "prompt": item.ids,
            "n_predict": item.out,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": self._caching,
            "samplers": ["top_k"],  # with an empty list it draws at random, whatever the temperature
            "top_k": 1,
        }
        connection = http.client.HTTPConnection(HOST, self._port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"the server answered {response.status}: {response.read(500)!r}")
        token_s: list[float] = []
        cached = 0
        for line in response:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter() - start
            event = json.loads(line.removeprefix(b"data: "))
            token_s += [now] * len(event["tokens"])
            if event["stop"]:
                # what waited for the rest of a character comes with the end
                token_s += [now] * (event["tokens_predicted"] - len(token_s))
                cached = event.get("timings", {}).get("cache_n", 0)
        connection.close()
        return RequestTimes(len(item.ids), token_s, cached)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with exit status {self._process.returncode}")
            try:
                connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.2)
        raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(20)


if __name__ == "__main__":
    serve(sys.argv[1], lambda: LlamaServer(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
