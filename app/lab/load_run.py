"""`LoadRun`: the console's handle on one load generator process. No Qt, and no call blocks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import msgspec

from app.lab.orders import Control, Order, Report
from app.lab.stats import LoadRow, RunStats, summarize
from app.lab.workload import WorkloadSpec
from app.net.supervisor import child_environment

_KILL_AFTER_S = 0.5
_SILENT_S = 5.0  # a generator that was told to stop reports four times a second, or it hangs


class LoadError(Exception):
    """The load cannot be started; the text says why."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Where a load stands. ``phase``: idle, starting, running, draining, done, failed."""

    phase: str = "idle"
    message: str = ""  # why it failed, or what it waits for
    elapsed_s: float = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    last_error: str = ""  # of the request that failed last
    common_error: str = ""  # the newest of the most frequent kind
    in_flight: int = 0
    target_rps: float | None = None
    achieved_rps: float | None = None
    lag_p99_s: float | None = None  # actual minus intended sending
    valid: bool = True
    invalid_reasons: tuple[str, ...] = field(default=())
    workload_sha256: str = ""


def error_kind(error: str) -> str:
    """What errors of one kind have in common, as their figures differ: the code in front of the colon."""
    return error.partition(":")[0]


class LoadRun:
    """One load at a time; after `done` or `failed` it can be started again."""

    def __init__(self) -> None:
        self.session = ""  # of the engine it ran against
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._reports: deque[Report] = deque()
        self._rows: list[LoadRow] = []
        self._progress = LoadProgress()
        self._spec: WorkloadSpec | None = None
        self._errors: deque[str] = deque(maxlen=20)
        self._kinds: Counter[str] = Counter()  # of requests that failed
        self._newest: dict[str, str] = {}  # text by kind
        self._expected_s: float | None = None  # since when a report is due, once it was told to stop
        self._ended_why = ""

    def start(self, spec: WorkloadSpec, ctl: str) -> None:
        """Start the generator against the engine at ``ctl``.

        Raises LoadError if one is running or ``ctl`` is empty, and WorkloadError if the specification
        describes no load.
        """
        if self.running:
            raise LoadError("A load is running; stop it before starting another.")
        if not ctl:
            raise LoadError("There is no engine to send a load to; start one first.")
        spec.check()
        self.close()
        self.session, self._rows, self._spec = "", [], spec
        self._reports.clear()
        self._errors.clear()
        self._kinds.clear()
        self._newest.clear()
        self._expected_s, self._ended_why = None, ""
        target = spec.rate_rps if spec.arrival != "concurrency" else None
        self._progress = LoadProgress(phase="starting", target_rps=target)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app.lab.loadgen"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            self._progress = LoadProgress(phase="failed", message=f"It could not be started: {error}.")
            raise LoadError(f"The load generator could not be started: {error}.") from error
        self._process = process
        self._reader = threading.Thread(target=self._read, args=(process,), name="load-reports", daemon=True)
        self._reader.start()
        threading.Thread(target=self._read_errors, args=(process,), name="load-errors", daemon=True).start()
        # A salt of its own keeps an earlier run of the same prompts from warming this one's prefix cache.
        self._write(Order(ctl=ctl, spec=spec, salt=uuid.uuid4().hex))

    def _write(self, line: Order | Control) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(msgspec.json.encode(line) + b"\n")
                process.stdin.flush()

    @property
    def pid(self) -> int | None:
        """The number of the load's process, the last one's where none runs."""
        return None if self._process is None else self._process.pid

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self._reports.append(msgspec.json.decode(line, type=Report))
            except msgspec.MsgspecError:
                self._errors.append(line.decode("utf-8", "replace").strip())

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._errors.append(line.decode("utf-8", "replace").rstrip())

    def stop(self, drain: bool = True) -> None:
        """Send nothing more; with ``drain`` let what is in flight end, else cancel it.

        A generator that hangs is ended by `poll` some seconds later.
        """
        if self.running:
            self._expected_s = self._expected_s or time.monotonic()
            self._write(Control(stop="drain" if drain else "now"))

    def poll(self) -> LoadProgress:
        """Take in what the generator reported; call it from a timer."""
        process = self._process
        ended = process is not None and process.poll() is not None
        if ended and self._reader is not None:
            self._reader.join(timeout=0.5)  # its last report is in the pipe still
        if self._reports and self._expected_s is not None:
            self._expected_s = time.monotonic()
        while self._reports:
            self._take(self._reports.popleft())
        if process is not None and not ended:
            self._end_hanging(process)
        if ended and process is not None and self._progress.phase not in ("done", "failed"):
            last = f": {self._errors[-1]}" if self._errors else ""
            reason = self._ended_why or (
                f"the load generator ended by itself (exit code {process.returncode}){last}"
            )
            self._progress = replace(
                self._progress, phase="failed", message=reason, valid=False, invalid_reasons=(reason,)
            )
        return self._progress

    def _end_hanging(self, process: subprocess.Popen[bytes]) -> None:
        """End a generator that was told to stop and says nothing more: it may be frozen."""
        silent_s = time.monotonic() - self._expected_s if self._expected_s is not None else 0.0
        if silent_s > _SILENT_S and not self._ended_why:
            self._ended_why = f"the load generator did not stop within {_SILENT_S:.0f} s and was ended"
            process.kill()

    def _take(self, report: Report) -> None:
        self._rows += report.rows
        self.session = report.session or self.session
        old = self._progress
        reasons = tuple(report.invalid_reasons)
        for row in report.rows:
            if row.error and row.error_class != "cancelled":
                kind = error_kind(row.error)
                self._kinds[kind] += 1
                self._newest[kind] = row.error
        common = self._kinds.most_common(1)
        if report.phase == "failed" and not report.sent:
            reasons = (report.message,)
        self._progress = LoadProgress(
            phase=report.phase,
            message=report.message,
            elapsed_s=report.elapsed_s or old.elapsed_s,
            sent=report.sent,
            done=report.done,
            failed=report.failed,
            last_error=next(
                (r.error for r in reversed(report.rows) if r.error and r.error_class != "cancelled"),
                old.last_error,
            ),
            common_error=self._newest[common[0][0]] if common else "",
            in_flight=report.in_flight,
            target_rps=old.target_rps,
            achieved_rps=report.achieved_rps,
            lag_p99_s=report.lag_p99_s,
            valid=not reasons,
            invalid_reasons=reasons,
            workload_sha256=report.workload_sha256 or old.workload_sha256,
        )

    @property
    def running(self) -> bool:
        """A load is on: its generator lives and has not said that it is through."""
        alive = self._process is not None and self._process.poll() is None
        return alive and self._progress.phase not in ("done", "failed")

    @property
    def spec(self) -> WorkloadSpec | None:
        """Of the present or last load."""
        return self._spec

    def rows(self) -> list[LoadRow]:
        """Rows of the requests that ended, in the order they ended."""
        return list(self._rows)

    def stats(self) -> RunStats:
        """Statistics of the requests that ended so far."""
        return summarize(self._rows)

    def close(self) -> None:
        """End the generator at once, if one runs; its requests are cancelled with its connection."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()
