"""What the I/O thread hands to the rest of the console: link states, batches, ends of streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ipc.messages import (
    ApplyEvent,
    Cfg,
    DeviceInfo,
    Done,
    EngineInfo,
    EngineState,
    GpuRow,
    Heartbeat,
    KnobValue,
    LogLine,
    ModelInfo,
    Phase,
    Preempted,
    Refusal,
    Reply,
    RequestRow,
    StepRow,
    Tokens,
)

LOADING: tuple[Phase, ...] = ("starting", "loading", "warming")
"""The phases of an engine that has no model yet."""


class LinkState(StrEnum):
    """How the console stands with its engine."""

    OFFLINE = "offline"  # none was asked for, or it was detached
    STARTING = "starting"  # the process runs and has not said where it listens
    CONNECTING = "connecting"  # its address is known; no welcome yet
    LOADING = "loading"  # it answers; the model is being loaded
    READY = "ready"
    FAILED = "failed"  # it answers, but its model could not be loaded; `reason` says why
    STALLED = "stalled"  # the socket lives, the step loop does not move on
    UNRESPONSIVE = "unresponsive"  # nothing was heard of it for a second
    DEAD = "dead"  # its process ended


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The link as of one `drain`. Times are seconds of the console's monotonic clock."""

    state: LinkState = LinkState.OFFLINE
    reason: str = ""  # for the person who reads it; empty where the state says it all
    since_s: float = 0.0
    endpoint: str = ""
    managed: bool = False  # the engine is our child: it can be stopped and restarted
    pid: int | None = None
    session: str | None = None
    engine: EngineInfo | None = None
    exit_code: int | None = None  # of a managed engine that ended by itself
    exit_signal: int | None = None  # or by this signal
    log_tail: tuple[str, ...] = ()  # the last lines it printed, when DEAD
    data_age_s: float | None = None  # since anything was heard
    heartbeat: Heartbeat | None = None
    clock_offset_ns: int = 0  # engine's monotonic clock minus ours
    rtt_s: float | None = None
    lost: dict[str, int] = field(default_factory=dict)  # messages missed, per topic, in this session
    bad_frames: int = 0  # messages this side could not read
    can_restart: bool = False
    left_out: dict[str, KnobValue] = field(default_factory=dict)  # of the last configuration, by the restart
    command_line: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockView:
    """The block map, one entry a block: ``state`` [N] u8, ``fill`` [N] u16, ``owner`` [N] u32.

    The last ``num_host`` entries are blocks of host memory.
    """

    t_s: float
    block_size: int
    state: NDArray[np.uint8]
    fill: NDArray[np.uint16]
    owner: NDArray[np.uint32]
    num_host: int = 0

    @property
    def num_blocks(self) -> int:
        """All of them, in the pool and in host memory."""
        return int(self.state.shape[0])

    @property
    def num_pool(self) -> int:
        """Those of the pool."""
        return self.num_blocks - self.num_host


@dataclass(frozen=True, slots=True)
class StreamLost:
    """A stream that ended without `Done`, because its engine died or the link was closed."""

    rid: int
    message: str


StreamEvent = Tokens | Done | StreamLost
OnReply = Callable[[Reply], None]
OnItem = Callable[[StreamEvent], None]


@dataclass(slots=True)
class Batch:
    """Everything new since the last `drain`, coalesced: rows in order, of the rest the latest only."""

    now_s: float  # the console's monotonic clock
    link: LinkStatus
    new_session: bool = False  # an engine process not seen before began in this batch
    resynced: bool = False  # a snapshot was taken in: what it holds replaces what was known
    state: EngineState | None = None
    cfg: Cfg | None = None
    model: ModelInfo | None = None
    device: DeviceInfo | None = None
    steps: list[StepRow] = field(default_factory=list)
    requests: list[RequestRow] = field(default_factory=list)  # the last row of each, ended ones always
    events: list[ApplyEvent] = field(default_factory=list)
    preemptions: list[Preempted] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    refused: int | None = None  # all requests that the engine has refused, where that is news
    logs: list[LogLine] = field(default_factory=list)
    gpu: list[GpuRow] = field(default_factory=list)
    blocks: BlockView | None = None
    live: frozenset[int] | None = None  # after a resync: the requests that live; others ended unheard
    dropped_rows: int = 0  # rows this side gave up because nobody drained for long


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How to start a managed engine. ``knobs`` are initial values, as `--knob id=value`."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    draft_model: str | None = None
    knobs: dict[str, KnobValue] = field(default_factory=dict)
    kv_pool_gib: float | None = None
    threads: int | None = None
    extra: tuple[str, ...] = ()  # further arguments of decodeck-engine

    def argv(self, python: str) -> list[str]:
        """The command line, one list item an argument: no shell ever sees it."""
        # -P: a folder named engine in the working directory must not stand in for the package.
        line = [python, "-P", "-m", "engine", "--managed", "--model", self.model]
        line += ["--dtype", self.dtype, "--device", self.device]
        if self.load_format != "auto":
            line += ["--load-format", self.load_format]
        if self.draft_model is not None:
            line += ["--draft-model", self.draft_model]
        if self.kv_pool_gib is not None:
            line += ["--kv-pool-gib", repr(self.kv_pool_gib)]
        if self.threads is not None:
            line += ["--threads", str(self.threads)]
        for knob, value in sorted(self.knobs.items()):
            line += ["--knob", f"{knob}={knob_text(value)}"]
        return [*line, *self.extra]


def knob_text(value: KnobValue) -> str:
    """A knob's value as the engine's command line reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
