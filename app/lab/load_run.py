"""`LoadRun`: the console's handle on one load generator process. No Qt, and no call blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.lab.stats import LoadRow, RunStats
from app.lab.workload import WorkloadSpec


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Where a load stands. ``phase``: idle, starting, running, draining, done, failed."""

    phase: str = "idle"
    message: str = ""  # why it failed, or what it waits for
    elapsed_s: float = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    target_rps: float | None = None
    achieved_rps: float | None = None
    lag_p99_s: float | None = None  # actual minus intended sending
    valid: bool = True
    invalid_reasons: tuple[str, ...] = field(default=())
    workload_sha256: str = ""


class LoadRun:
    """One load at a time; after `done` or `failed` it can be started again."""

    def start(self, spec: WorkloadSpec, ctl: str) -> None:
        """Start the generator against the engine at ``ctl``. Raises LoadError if one is running."""
        raise NotImplementedError

    def stop(self, drain: bool = True) -> None:
        """Send nothing more; with ``drain`` let what is in flight end, else cancel it."""
        raise NotImplementedError

    def poll(self) -> LoadProgress:
        """Take in what the generator reported; call it from a timer."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        raise NotImplementedError

    @property
    def spec(self) -> WorkloadSpec | None:
        raise NotImplementedError

    def rows(self) -> list[LoadRow]:
        """Rows of the requests that ended, in the order they ended."""
        raise NotImplementedError

    def stats(self) -> RunStats:
        raise NotImplementedError

    def close(self) -> None:
        """End the generator at once, if one runs."""
        raise NotImplementedError
