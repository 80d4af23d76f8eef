"""A real engine process under a long random load, over ZeroMQ. ``python -m tests.bench.soak --json FILE``.

Short requests with cancels and flips of every knob that the knob benchmark knows; then, if asked, one-token
requests by the thousands, and a steady load of high priority beside one request of low priority. What is
held: every request ends once and its stream has no gap; the engine's memory, files and threads are after
the load what they were before; the low request gets its first token within what ageing promises.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ipc import messages as m
from ipc.client import Client, EngineError
from tests import demo_model
from tests.bench.engine_process import configure, engine
from tests.bench.knob_report import machine, now
from tests.bench.knob_specs import SPECS
from tests.bench.knob_workloads import FIRST_ID

RATE_PER_CLIENT = 150  # requests a second that a client may send; the engine refuses above 200 commands
FIRST_TIME_S = 900.0  # AWQ's search and torch.compile, on a busy machine
FLIP_EVERY_S = 0.1
QUIET_S = 30.0
MAX_GROWTH_BYTES = 64 << 20
IN_USE = (m.BLOCK_USED, m.BLOCK_SHARED, m.BLOCK_RESERVED, m.BLOCK_SWAPPED)
LOW, HIGH = 5, 0
AGEING_S = 2.0


@dataclass(slots=True)
class Open:
    """A request that has not ended."""

    command: m.Submit
    sent_s: float
    rid: int | None = None
    ids: int = 0
    first_s: float | None = None


@dataclass(slots=True)
class Fleet:
    """Several clients of one engine, as each may only send so much."""

    clients: Sequence[Client]
    vocab_size: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    open: dict[tuple[int, int], Open] = field(default_factory=dict)  # by client and command
    _by_rid: dict[int, tuple[int, int]] = field(default_factory=dict)
    _early: list[m.Tokens | m.Done] = field(default_factory=list)
    _turn: int = 0
    _again: deque[tuple[float, int, m.Submit]] = field(default_factory=deque)

    @property
    def num_open(self) -> int:
        return len(self.open) + len(self._again)

    def is_open(self, request: Open) -> bool:
        """Whether a request that `submit` gave has not ended."""
        return any(each is request for each in self.open.values())

    def submit(self, pick: random.Random, length: int, sampling: m.Sampling, **options: Any) -> Open:
        """Send one request of random ids, by the client whose turn it is."""
        turn = self._turn = (self._turn + 1) % len(self.clients)
        client = self.clients[turn]
        command = m.Submit(
            id=client.next_id(),
            tokens=[pick.randrange(FIRST_ID, self.vocab_size) for _ in range(length)],
            sampling=sampling,
            **options,
        )
        self.counts["submitted"] += 1
        return self._send(turn, command)

    def _send(self, turn: int, command: m.Submit) -> Open:
        self.clients[turn].send(command)
        opened = self.open[turn, command.id] = Open(command, time.monotonic())
        return opened

    def poll(self, timeout_s: float) -> None:
        """Take what has come for any client, and send again what was refused for now."""
        for turn, client in enumerate(self.clients):
            replies = client.poll(timeout_s if turn == 0 else 0.0)
            early, self._early = self._early, []
            for reply in [*early, *replies]:
                self._take(turn, reply)
            client.telemetry()
        while self._again and self._again[0][0] <= time.monotonic():
            _, turn, command = self._again.popleft()
            self._send(turn, command)

    def cancel(self, pick: random.Random) -> None:
        """Cancel one open request."""
        known = [(turn, each.rid) for (turn, _), each in self.open.items() if each.rid is not None]
        if known:
            turn, rid = pick.choice(known)
            client = self.clients[turn]
            client.send(m.Cancel(id=client.next_id(), rid=rid))

    def _take(self, turn: int, reply: m.Reply) -> None:
        match reply:
            case m.Accepted():
                self._by_rid[reply.rid] = turn, reply.id
                self.open[turn, reply.id].rid = reply.rid
            case m.Error():
                refused = self.open.pop((turn, reply.id), None)
                if refused is None or reply.retry_after_ms is None:
                    self.faults.append(f"an unexpected error: {reply.message} ({reply.code})")
                else:
                    self.counts[f"sent again: {reply.code}"] += 1
                    self._again.append((time.monotonic() + reply.retry_after_ms / 1e3, turn, refused.command))
            case m.Tokens() | m.Done():
                self._stream(reply)

    def _stream(self, item: m.Tokens | m.Done) -> None:
        key = self._by_rid.get(item.rid)
        if key is None:
            self.faults.append(f"request {item.rid} sent something before it was accepted or after its end")
            return
        request = self.open[key]
        if isinstance(item, m.Tokens):
            if item.index != request.ids:
                self.faults.append(f"request {item.rid}: index {item.index} after {request.ids} ids")
            request.ids += len(item.ids)
            request.first_s = request.first_s or time.monotonic()
            return
        del self.open[key], self._by_rid[item.rid]
        self.counts["ended"] += 1
        self.counts[f"ended, {item.finish}"] += 1
        self.counts["preempted"] += item.row.preempt_n
        if item.finish == "error":
            self.faults.append(f"request {item.rid} failed: {item.message}")
        if request.ids != item.row.output_tok:
            self.faults.append(
                f"request {item.rid}: {request.ids} ids came, its row says {item.row.output_tok}"
            )

    def settle(self) -> None:
        """Wait until everything has ended."""
        deadline = time.monotonic() + QUIET_S
        before = -1
        while self.num_open:
            self.poll(0.05)
            if self.counts["ended"] != before:
                before, deadline = self.counts["ended"], time.monotonic() + QUIET_S
            if time.monotonic() > deadline:
                some = [(each.rid, each.ids, each.command.sampling) for each in self.open.values()][:3]
                self.faults.append(
                    f"{self.num_open} requests did not end, nothing came for {QUIET_S:g} s: {some}"
                )
                return


def reading(process: psutil.Process, ended: int) -> dict[str, int]:
    """Memory, files and threads of the engine's process."""
    with process.oneshot():
        return {
            "ended": ended,
            "rss_bytes": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
        }


def values_to_flip(client: Client, pool_gib: float) -> dict[str, list[m.KnobValue]]:
    """For each knob of the benchmark that this engine has, the values its entries compare."""
    infos = {info.id: info for info in client.config().knobs}
    flips: dict[str, list[m.KnobValue]] = {"kv_pool_gib": [pool_gib, 0.75 * pool_gib]}
    for spec in SPECS:
        info = infos[spec.knob]
        for value in (spec.off, spec.on):
            if info.available and str(value) not in info.choice_reasons:
                values = flips.setdefault(spec.knob, [])
                if value not in values:
                    values.append(value)
    flips["batch_wait_ms"] = [0.0, 50.0]
    flips["kv_host_gib"] = [0.0, max(0.001, pool_gib)]
    flips["swap_space_gib"] = [max(0.001, pool_gib), max(0.002, 2 * pool_gib)]
    return flips


class Flipper:
    """Gives a random knob another value ten times a second; what is refused or rolled back is counted."""

    def __init__(self, client: Client, flips: dict[str, list[m.KnobValue]], counts: Counter[str]) -> None:
        self._client = client
        self._flips = flips
        self._counts = counts
        self._due_s = time.monotonic()

    def maybe(self, pick: random.Random) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + FLIP_EVERY_S
        knob = pick.choice(list(self._flips))
        try:
            self._client.configure({knob: pick.choice(self._flips[knob])})
            self._counts["flips"] += 1
        except EngineError as error:
            self._counts[f"flips refused: {error.code}"] += 1


def storm(
    fleet: Fleet, flipper: Flipper, pick: random.Random, requests: int, tell: Callable[[], None]
) -> None:
    """Short requests, cancels and flips, until so many were submitted; then wait for the last."""
    begin, sent = time.monotonic(), 0
    while sent < requests:
        allowed = RATE_PER_CLIENT * len(fleet.clients) * (time.monotonic() - begin)
        while sent < min(requests, allowed) and fleet.num_open < 200:
            sampling = m.Sampling(
                max_tokens=pick.randint(1, 6),
                ignore_eos=pick.random() < 0.5,
                stop=pick.sample("etaoinshr", 3) if pick.random() < 0.2 else [],
                temperature=pick.choice((0.0, 0.8)),
            )
            fleet.submit(pick, pick.randint(1, 40), sampling, priority=pick.randrange(5))
            sent += 1
            if sent % 1000 == 0:
                tell()
        if pick.random() < 0.05:
            fleet.cancel(pick)
        flipper.maybe(pick)
        fleet.poll(0.005)
    fleet.settle()


def one_token(fleet: Fleet, pick: random.Random, requests: int, tell: Callable[[], None]) -> None:
    """Requests of one token each, as many as the engine's limits on commands allow."""
    begin, sent = time.monotonic(), 0
    while sent < requests:
        allowed = RATE_PER_CLIENT * len(fleet.clients) * (time.monotonic() - begin)
        while sent < min(requests, allowed) and fleet.num_open < 200:
            fleet.submit(pick, pick.randint(1, 8), m.Sampling(max_tokens=1, ignore_eos=True))
            sent += 1
            if sent % 1000 == 0:
                tell()
        fleet.poll(0.005)
    fleet.settle()


def high_load(fleet: Fleet, pick: random.Random, seconds: float) -> dict[str, float | bool | None]:
    """Always twice as many requests of high priority as there are seats, and one low one among them.

    Ageing promises that only those overtake it that come within the ageing time multiplied by the
    difference of the levels; those that are there then must still run, which may take three times what
    the slowest high one took.
    """
    configure(fleet.clients[0], {"policy": "priority", "max_num_seqs": 4, "priority_ageing_s": AGEING_S})
    high: list[Open] = []
    took: list[float] = []
    low: Open | None = None
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < seconds:
        while sum(map(fleet.is_open, high)) < 8:
            high = [each for each in high if fleet.is_open(each)]
            sampling = m.Sampling(max_tokens=8, ignore_eos=True)
            high.append(fleet.submit(pick, 16, sampling, priority=HIGH))
        if low is None and elapsed > seconds / 10:
            low = fleet.submit(pick, 16, m.Sampling(max_tokens=8, ignore_eos=True), priority=LOW)
        fleet.poll(0.005)
        took += [each.first_s - each.sent_s for each in high if each.first_s and not fleet.is_open(each)]
    waited = low.first_s - low.sent_s if low is not None and low.first_s is not None else None
    window = AGEING_S * (LOW - HIGH)
    limit = window + 3 * max(took, default=0.0)
    fleet.settle()
    if waited is None or waited > limit:
        fleet.faults.append(
            f"the low request waited {waited} s for its first token, {limit:.1f} s are promised"
        )
    return {"low_waited_s": waited, "limit_s": limit, "ageing_window_s": window, "high_requests": len(took)}


def judge(fleet: Fleet, readings: Sequence[dict[str, int]], client: Client) -> list[str]:
    """What is not as it was, or was promised. ``readings``: before, several in between, after."""
    wrong = list(fleet.faults)
    counts = fleet.counts
    if counts["ended"] != counts["submitted"]:
        wrong.append(f"{counts['submitted']} requests were submitted and {counts['ended']} ended")
    snapshot = client.snapshot()
    if snapshot.state.running or snapshot.state.waiting:
        wrong.append(f"{snapshot.state.running} requests run and {snapshot.state.waiting} wait at the end")
    if snapshot.blocks is not None and (used := sum(map(snapshot.blocks.state.count, IN_USE))):
        wrong.append(f"{used} blocks are in use by nobody")
    if bad := sum(each.bad_frames for each in fleet.clients):
        wrong.append(f"{bad} messages of the engine were none that the protocol allows")
    log = client.call(m.LogTail(id=client.next_id(), max=2000), m.LogLines).lines
    wrong += [f"the engine's log: {line.message}" for line in log if line.level == "error"]
    before, middle, after = readings[0], readings[len(readings) // 2], readings[-1]
    for what in ("fds", "threads"):
        if after[what] > before[what]:
            wrong.append(f"{after[what]} {what}, {before[what]} before the load")
    grown = after["rss_bytes"] - middle["rss_bytes"]
    if grown > MAX_GROWTH_BYTES:
        wrong.append(f"{grown / 2**20:.0f} MiB more memory than after half of the requests")
    return wrong


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--one-token", type=int, default=0, metavar="N", help="then N one-token requests")
    parser.add_argument(
        "--high-load", type=float, default=0.0, metavar="S", help="then S seconds of high load"
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--model", type=Path, help="a model folder or a GGUF file; the demo model by default")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="that share the load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = str(args.model.resolve() if args.model else demo_model.path())
    options = ["--dtype", args.dtype, "--threads", str(args.threads), "--check"]
    result: dict[str, Any] = {"date": now(), "machine": machine(), "model": model, "seed": args.seed}
    with ExitStack() as stack:
        ctl = stack.enter_context(engine(model, *options))
        clients = [stack.enter_context(Client(ctl, silence_s=60.0)) for _ in range(args.clients)]
        welcomes = [client.hello() for client in clients]
        state = clients[0].wait_ready()
        if state.model is None:
            raise RuntimeError("the engine is ready but names no model")
        soak(args, clients, psutil.Process(welcomes[0].engine.pid), state.model, result)
    args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for name in ("counts", "high_load", "before", "after"):
        if name in result:
            print(f"{name}: {json.dumps(result[name])}")
    for fault in result["faults"]:
        print(f"FAULT: {fault}")
    print("no fault" if not result["faults"] else f"{len(result['faults'])} faults")
    return 1 if result["faults"] else 0


def soak(
    args: argparse.Namespace,
    clients: Sequence[Client],
    process: psutil.Process,
    model: m.ModelInfo,
    result: dict[str, Any],
) -> None:
    """Run what was asked for, the engine's defaults in between."""
    pick = random.Random(args.seed)
    fleet = Fleet(clients, model.vocab_size)
    defaults = {info.id: info.default for info in clients[0].config().knobs if info.available}
    pool_gib = 4096 * model.kv_bytes_per_token / (1 << 30)
    flips = values_to_flip(clients[0], pool_gib)
    for knob, value in itertools.chain.from_iterable([(k, v) for v in values] for k, values in flips.items()):
        # So that what starts once has started, and what is searched or compiled once was found.
        configure(clients[0], {knob: value}, timeout_s=FIRST_TIME_S)
    configure(clients[0], {**defaults, "kv_pool_gib": pool_gib})
    one_token(fleet, pick, 200, lambda: None)
    readings = [reading(process, fleet.counts["ended"])]

    def tell() -> None:
        readings.append(reading(process, fleet.counts["ended"]))
        print(f"{fleet.counts['ended']} ended, {readings[-1]}", file=sys.stderr, flush=True)

    storm(fleet, Flipper(clients[0], flips, fleet.counts), pick, args.requests, tell)
    configure(clients[0], {**defaults, "kv_pool_gib": pool_gib})
    if args.one_token:
        one_token(fleet, pick, args.one_token, tell)
    if args.high_load:
        result["high_load"] = high_load(fleet, pick, args.high_load)
    configure(clients[0], {**defaults, "kv_pool_gib": pool_gib})
    time.sleep(1.0)
    tell()
    result |= {
        "counts": dict(fleet.counts),
        "before": readings[0],
        "after": readings[-1],
        "readings": readings,
        "faults": judge(fleet, readings, clients[0]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
