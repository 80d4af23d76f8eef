"""Our engine, as the product runs it. ``python -m tests.bench.peer_decodeck PLAN MODEL THREADS DTYPE KNOBS``.

KNOBS is a JSON object of knobs that differ from their defaults. Each order has a client of its own: between
orders, which can be minutes, nobody listens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ipc import messages as m
from ipc.client import Client
from tests.bench.engine_process import Collector, configure, engine
from tests.bench.peer_loop import Ceilings, Ready, Times, serve
from tests.bench.timing import RequestTimes
from tests.bench.workloads import Item

CONVERT_S = 600.0  # all weights into fewer bits, before anything is measured
ROWS_S = 0.5  # the last step's row comes a little after its tokens


class Decodeck:
    def __init__(self, ctl: str, knobs: Mapping[str, m.KnobValue]) -> None:
        self._ctl = ctl
        with self._client() as (client, welcome):
            self._engine = welcome.engine
            self._device = client.wait_ready().device
            configure(client, dict(knobs), CONVERT_S)

    def about(self) -> Ready:
        device = self._device
        ceilings = None
        if device is not None and device.read_bytes_per_s and device.flops_per_s:
            ceilings = Ceilings(device.read_bytes_per_s, device.flops_per_s)
        return Ready(f"{self._engine.version}, torch {self._engine.torch}", ceilings=ceilings)

    def prepare(self, arm: str) -> None:
        with self._client() as (client, _):
            configure(client, {"prefix_cache": arm != "cache_off"})

    def run(self, items: list[Item]) -> Times:
        with self._client() as (client, _):
            collector = Collector(client)
            collector.run([item.ids for item in items], [item.out for item in items])
            rows = _rows(client)
        requests = [
            RequestTimes(len(item.ids), times, done.row.cached_tok if done is not None else 0)
            for item, times, done in zip(items, collector.token_s, collector.done, strict=True)
        ]
        steps = [(row.weight_bytes + row.kv_bytes, row.flops) for row in rows]
        return Times(requests, steps, rows[-1].weight_bytes if rows else 0)

    @contextmanager
    def _client(self) -> Iterator[tuple[Client, m.Welcome]]:
        with Client(self._ctl) as client:
            client.subscribe(["step"])
            yield client, client.hello()


def _rows(client: Client) -> list[m.StepRow]:
    """Each step of the run that has just ended."""
    rows: list[m.StepRow] = []
    deadline = time.monotonic() + ROWS_S
    while (left := deadline - time.monotonic()) > 0:
        for _, _, message in client.telemetry(left):
            if isinstance(message, m.StepRows):
                rows += message.rows
    return rows


def main(plan_file: str, model: str, threads: str, dtype: str, knobs: str) -> None:
    values = msgspec.json.decode(knobs, type=dict[str, m.KnobValue])
    with engine(model, "--dtype", dtype, "--threads", threads, "--device", "cpu") as ctl:
        serve(plan_file, lambda: Decodeck(ctl, values))


if __name__ == "__main__":
    main(*sys.argv[1:])
