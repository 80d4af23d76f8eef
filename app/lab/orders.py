"""What the console and its load generator say to each other, one JSON line a message."""

from __future__ import annotations

from typing import Literal

import msgspec

from app.lab.stats import LoadRow
from app.lab.workload import WorkloadSpec


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do, the first line on stdin."""

    ctl: str
    spec: WorkloadSpec
    salt: str = ""  # keeps this run's prefix cache entries apart from earlier runs'


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A later line on stdin: send nothing more; let what is in flight end, or cancel it."""

    stop: Literal["drain", "now"]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line on stdout. Rows are those that ended since the last report."""

    phase: Literal["starting", "running", "draining", "done", "failed"]
    message: str = ""
    session: str = ""
    workload_sha256: str = ""
    elapsed_s: float = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    achieved_rps: float | None = None
    lag_p99_s: float | None = None
    invalid_reasons: list[str] = []
    rows: list[LoadRow] = []
