"""What a baseline is: its identity, its configuration, its workload, and what was measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.lab.stats import LoadRow, RunStats
from ipc.messages import DeviceInfo, EngineInfo, KnobValue, ModelInfo, RequestRow

BUNDLE_FORMAT = "decodeck-baseline"
BUNDLE_VERSION = 3
ExportFormat = Literal["json", "csv", "md"]


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The console's side of the identity; secrets never enter it (variables by an allow-list)."""

    app_version: str
    git_commit: str = ""
    git_dirty: bool | None = None
    python: str = ""
    os: str = ""
    kernel: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    packages: dict[str, str] = {}
    variables: dict[str, str] = {}


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, and on what."""

    model: ModelInfo | None
    device: DeviceInfo | None
    engine: EngineInfo | None
    environment: Environment


class Validity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the figures may be believed, and what speaks against it."""

    valid: bool = True
    reasons: list[str] = []


class BaselineData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a baseline except its id and its dates. ``source``: live window or load run."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    note: Annotated[str, Meta(max_length=16_384)] = ""
    source: Literal["live", "load"]
    identity: Identity
    cfg_rev: int
    config: dict[str, KnobValue]  # every resolved knob
    workload: dict[str, Any] | None = None  # the WorkloadSpec as JSON; None for foreign live traffic
    workload_sha256: str = ""  # of the materialised request list
    duration_s: float | None = None
    requests: list[RequestRow] = []  # the engine's rows (live)
    load_rows: list[LoadRow] = []  # the generator's rows (load)
    stats: RunStats
    step_stats: dict[str, float | int | None] = {}
    validity: Validity = Validity()


BaselineId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: BaselineId
    created_unix_ms: int
    locked: bool = False
    imported: bool = False  # came from a file: perhaps another machine's
    data: BaselineData


class BaselineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the list; figures as in `RunStats`."""

    id: str
    name: str
    note: str
    created_unix_ms: int
    source: str
    model: str
    device: str
    requests: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    output_tok_s: float | None
    valid: bool
    locked: bool
    imported: bool
    caution: str = ""  # why the figures of a valid run may mislead: other work on the machine meanwhile


class ConfigDiff(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    a: KnobValue
    b: KnobValue
    in_a: bool = True
    in_b: bool = True


class MetricDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One metric side by side. ``ratio`` is b / a; ``better`` is None where equal or undefined."""

    name: str
    unit: str
    a: float | None
    b: float | None
    n_a: int
    n_b: int
    delta: float | None
    ratio: float | None
    better: Literal["a", "b"] | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    a: BaselineSummary
    b: BaselineSummary
    identity: list[ConfigDiff]  # differences of model, device, versions
    config: list[ConfigDiff]  # only what differs
    metrics: list[MetricDelta]
    warnings: list[str]  # e.g. another workload, an invalid run: why a difference may mean nothing
