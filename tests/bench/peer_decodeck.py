"""Runs a plan on our engine. ``python -m tests.bench.peer_decodeck PLAN OUT DTYPE THREADS``."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ipc.client import Client
from tests.bench.engine_process import Collector, configure, engine
from tests.bench.timing import RequestTimes, Run
from tests.bench.workloads import Item, Plan, each


def _run(client: Client, items: list[Item]) -> list[RequestTimes]:
    collector = Collector(client)
    collector.run([item.ids for item in items], [item.out for item in items])
    return [
        RequestTimes(len(item.ids), times, done.row.cached_tok if done is not None else 0)
        for item, times, done in zip(items, collector.token_s, collector.done, strict=True)
    ]


def main(plan_file: str, out_file: str, dtype: str, threads: str) -> None:
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=Plan)
    runs: list[Run] = []
    with (
        engine(plan.model, "--dtype", dtype, "--threads", threads, "--device", "cpu") as ctl,
        Client(ctl) as client,
    ):
        version = client.hello().engine.version
        client.wait_ready()
        for workload, arm, index, items in each(plan):
            if index == 0:
                configure(client, {"prefix_cache": arm != "cache_off"})
                _run(client, plan.warm_up)
            times = _run(client, items)
            limit = (len(items) - 1) * len(items[0].ids) if arm == "cache_on" else 0
            cached = sum(request.cached_tok for request in times)
            if cached > limit and len(items) > 1:
                raise RuntimeError(f"{workload} {arm}: {cached} cached tokens, {limit} at most can be honest")
            runs.append(Run("decodeck", version, dtype, workload, arm, times))
            print(f"decodeck {dtype} {workload} {arm} {index}", file=sys.stderr, flush=True)
    Path(out_file).write_bytes(msgspec.json.encode(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
