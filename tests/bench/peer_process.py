"""The other side of a peer: starts it, gives it orders, and watches who else used the machine meanwhile."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from tests.bench.peer_loop import Order, Ready, Refused, Reply, Times

SAID_LINES = 6  # of a peer's output, when it fails


class PeerFailed(Exception):
    """A peer could not be started or ended before its time; it takes no more orders."""


class PeerRefused(Exception):
    """A peer could not carry out one order."""


class PeerProcess:
    """One peer in a session of its own. Everything it prints goes to a file."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        self._buffer = b""
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def ready(self, timeout_s: float) -> Ready:
        reply = self._receive(timeout_s, "load its model")
        if not isinstance(reply, Ready):
            raise PeerFailed(f"it answered {type(reply).__name__} before it was ready")
        return reply

    def ask(self, order: Order, timeout_s: float) -> tuple[Times, float]:
        """Carry out an order; its times, and how many processors others kept busy meanwhile."""
        stdin = self._process.stdin
        if stdin is None:
            raise PeerFailed("it has no pipe to take orders from")
        try:
            stdin.write(msgspec.json.encode(order) + b"\n")
            stdin.flush()
        except OSError as error:
            raise PeerFailed(self._gone()) from error
        busy, own, start = _busy_s(), self._own_s(), time.monotonic()
        reply = self._receive(timeout_s, f"run {order.workload}")
        if isinstance(reply, Refused):
            raise PeerRefused(reply.reason)
        if not isinstance(reply, Times):
            raise PeerFailed(f"it answered {type(reply).__name__} to an order")
        others = (_busy_s() - busy) - (self._own_s() - own)
        return reply, max(0.0, others / (time.monotonic() - start))

    def close(self) -> None:
        """End it: politely, then by force."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
        self._log.close()

    def _receive(self, timeout_s: float, what: str) -> Reply:
        stdout = self._process.stdout
        if stdout is None:
            raise PeerFailed("it has no pipe to answer through")
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self._kill()
                raise PeerFailed(f"it did not {what} within {timeout_s:.0f} s and was ended")
            if select.select([stdout], [], [], min(left, 1.0))[0]:
                data = os.read(stdout.fileno(), 1 << 20)
                if not data:
                    raise PeerFailed(self._gone())
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=Reply)

    def _gone(self) -> str:
        status = self._process.wait(20)
        how = f"exit status {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").splitlines()[-SAID_LINES:]
        return f"it ended with {how}: {' | '.join(line.strip() for line in said)}"

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()

    def _own_s(self) -> float:
        """Processor time of the peer and all that it started."""
        total = 0.0
        try:
            mine = psutil.Process(self._process.pid)
            for process in [mine, *mine.children(recursive=True)]:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            return total  # it has just ended, and the answer will say so
        return total


def _busy_s() -> float:
    """Processor time that anybody used since the machine started."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))
