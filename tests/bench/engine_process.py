"""Our engine as the product runs it: its own process, spoken to over ZeroMQ."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ipc import messages as m
from ipc.client import Client, EngineError

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


@contextmanager
def engine(model: str, *options: str) -> Iterator[str]:
    """A managed engine on ``model`` with further command line ``options``; gives its control address."""
    command = [sys.executable, "-m", "engine", "--managed", "--model", model, *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield _address(process, log)
        finally:
            if process.stdin is not None:
                process.stdin.close()  # the lifetime pipe: the engine ends by itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str], log: object) -> str:
    stdout = process.stdout
    if stdout is None:
        raise RuntimeError("the engine was started without a pipe for its output")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not select.select([stdout], [], [], 0.5)[0]:
            continue
        line = stdout.readline()
        if not line:
            break
        if line.startswith("{"):
            ready = json.loads(line)
            if ready.get("ready"):
                return str(ready["ctl"])
    raise RuntimeError(f"the engine did not say where it listens (exit status {process.poll()})")


def configure(client: Client, patch: dict[str, m.KnobValue], timeout_s: float = 60.0) -> None:
    """Change knobs and wait until the engine runs with them."""
    current = client.config()
    changes = {knob: value for knob, value in patch.items() if current.values[knob] != value}
    if not changes:
        return
    client.configure(changes, expect_rev=current.rev)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = client.config()
        if all(now.values[knob] == value for knob, value in changes.items()):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the engine did not apply {changes} within {timeout_s:g} s")


class Collector:
    """Submits requests at once and gathers, for each, when its tokens arrived."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.token_s: list[list[float]] = []
        self.done: list[m.Done | None] = []

    def run(self, prompts: Sequence[Sequence[int]], outs: Sequence[int], timeout_s: float = 900.0) -> None:
        """Returns when every request has ended. Raises when one is refused or generates another number."""
        client = self._client
        self.token_s = [[] for _ in prompts]
        self.done = [None] * len(prompts)
        commands = [
            client.build_submit(list(ids), sampling=m.Sampling(max_tokens=out, ignore_eos=True))
            for ids, out in zip(prompts, outs, strict=True)
        ]
        by_id = {command.id: index for index, command in enumerate(commands)}
        by_rid: dict[int, int] = {}
        early: list[m.Tokens | m.Done] = []
        start = time.perf_counter()
        for command in commands:
            client.send(command)
        while any(done is None for done in self.done):
            now = time.perf_counter() - start
            if now > timeout_s:
                raise RuntimeError(f"{self.done.count(None)} of {len(prompts)} requests did not end in time")
            replies = client.poll(0.1)
            now = time.perf_counter() - start
            for reply in [*early, *replies]:
                early = []
                if isinstance(reply, m.Accepted):
                    by_rid[reply.rid] = by_id[reply.id]
                elif isinstance(reply, m.Error):
                    raise EngineError(reply)
                elif isinstance(reply, m.Tokens | m.Done):
                    if reply.rid in by_rid:
                        self._take(by_rid[reply.rid], reply, now)
                    else:
                        early.append(reply)
        for index, out in enumerate(outs):
            if len(self.token_s[index]) != out:
                raise RuntimeError(f"request {index} has {len(self.token_s[index])} tokens instead of {out}")

    def _take(self, index: int, item: m.Tokens | m.Done, now: float) -> None:
        self.token_s[index] += [now] * len(item.ids or [])
        if isinstance(item, m.Done):
            if item.finish == "error":
                raise RuntimeError(f"request {index} failed: {item.message}")
            self.done[index] = item


def environment() -> dict[str, str]:
    """The environment for a peer: how its threads wait is its own default (see this folder's README)."""
    own = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return {name: value for name, value in os.environ.items() if name not in own}
