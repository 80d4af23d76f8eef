"""`SessionModel`: what is known of the engine and its traffic, kept for the panels.

The window feeds it each `Batch` and reads figures, series and rows from it. All times are seconds of the
console's own monotonic clock (the engine's stamps are shifted by the measured clock offset), so a change of
wall clock moves nothing. A figure that is undefined is None and says why; in series it is a gap (NaN).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from app.model.series import BinTable
from app.net.types import Batch, BlockView, LinkStatus
from ipc.messages import (
    ApplyMode,
    Cfg,
    DeviceInfo,
    EngineState,
    GpuRow,
    Heartbeat,
    KnobValue,
    LogLine,
    ModelInfo,
    RequestRow,
)

NO_TRAFFIC = "no traffic"

# Columns of `SessionModel.timeline`, one value a bin (1/2 s), NaN where undefined.
TIMELINE_COLUMNS = (
    "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_n",  # over the trailing `latency_window_s`
    "tpot_p50_s", "tpot_p95_s", "tpot_p99_s", "tpot_n",
    "itl_p50_s", "itl_p99_s", "itl_n",
    "queue_p50_s", "queue_n",
    "prefill_tok_s", "decode_tok_s", "finished_req_s",
    "running", "waiting", "preempted",
    "kv_used_share", "kv_cached_share", "kv_free_share",  # of all blocks; they add up to 1
    "kv_waste_share",  # of the tokens the used blocks could hold
    "hit_rate",  # prefix cache: tokens found / tokens looked up, NaN without look-ups
    "model_bytes_s", "flops_s",  # modelled traffic per second of wall time
    "step_bytes_s", "step_flops_s",  # the same per second spent in steps
    "busy_share",  # of wall time spent in steps
    "steps", "step_mean_s", "plan_s", "prepare_s", "forward_s", "sample_s", "detokenize_s", "publish_s",
    "rss_bytes", "cpu_percent", "cfg_rev",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One number for a person: its value or why there is none, its sample size and its window."""

    value: float | None
    n: int | None = None
    window_s: float | None = None
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class Kpis:
    """The strip at the top, over the trailing window. Times in seconds, rates per second, shares 0..1."""

    ttft_p50_s: Figure
    ttft_p95_s: Figure
    ttft_p99_s: Figure
    tpot_p50_s: Figure
    tpot_p95_s: Figure
    tpot_p99_s: Figure
    queue_p50_s: Figure
    e2e_p50_s: Figure
    decode_tok_s: Figure
    prefill_tok_s: Figure
    finished_req_s: Figure
    error_share: Figure  # of the requests that ended
    running: Figure
    waiting: Figure
    kv_used_share: Figure
    kv_cached_share: Figure
    kv_waste_share: Figure
    hit_rate: Figure
    bandwidth_share: Figure  # modelled bytes per second of step time / measured copy bandwidth
    preemptions: Figure


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Mean and standard deviation of each stage of a step, in seconds, over the trailing window."""

    n: int
    mean_s: dict[str, float]  # plan, prepare, forward, sample, detokenize, publish, other
    std_s: dict[str, float]
    total_mean_s: float | None
    outside_forward_share: float | None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where the steps of the trailing window stand against the machine's measured peaks."""

    verdict: str  # memory-bound, compute-bound, overhead-bound, idle, unknown
    explanation: str  # one sentence with the numbers it rests on
    intensity_flop_per_byte: float | None
    ridge_flop_per_byte: float | None
    bandwidth_bytes_s: float | None  # modelled, per second of step time
    peak_bytes_s: float | None
    flops_s: float | None
    peak_flops_s: float | None
    weight_byte_share: float | None  # the rest is KV


@dataclass(frozen=True, slots=True)
class Marker:
    """An applied or rolled-back change, for a line on every chart."""

    t_s: float
    apply_id: int
    rev: int
    ok: bool
    mode: ApplyMode
    patch: dict[str, KnobValue]
    label: str  # "prefix_cache = off"
    took_s: float
    preempted: int
    why: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of time for which telemetry was lost; charts leave it empty."""

    t0_s: float
    t1_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a table shows it. Undefined times are None."""

    row: RequestRow
    arrive_s: float
    queue_s: float | None
    ttft_s: float | None  # first token - arrival at the engine
    tpot_s: float | None
    e2e_s: float | None

    @property
    def rid(self) -> int:
        return self.row.rid


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """The trailing window of the live session, raw, for a baseline: `Store.save_baseline` takes it."""

    t0_s: float
    t1_s: float
    requests: tuple[RequestRow, ...]  # that ended inside the window
    step_stats: dict[str, float | int | None]
    markers: tuple[Marker, ...]  # a change inside the window makes the baseline mixed
    sessions: int  # engine processes seen inside it; more than one marks it
    lost: int  # telemetry messages lost in the session


class SessionModel:
    """See the module. One instance lives as long as the window; engine restarts go into the same series."""

    def __init__(self, history_s: float = 3600.0, window_s: float = 30.0) -> None:
        self.window_s = window_s  # of `kpis`, `stages`, `roofline`; may be changed at any time
        self.latency_window_s = 10.0  # of the percentiles in the timeline
        self.history_s = history_s
        self.now_s = 0.0
        self.link = LinkStatus()
        self.state: EngineState | None = None
        self.heartbeat: Heartbeat | None = None
        self.cfg: Cfg | None = None
        self.model: ModelInfo | None = None
        self.device: DeviceInfo | None = None
        self.blocks: BlockView | None = None
        self.gpus: dict[str, GpuRow] = {}
        self.timeline = BinTable(TIMELINE_COLUMNS, 0.5, int(history_s / 0.5))
        self.markers: deque[Marker] = deque(maxlen=500)
        self.gaps: deque[Gap] = deque(maxlen=500)
        self.logs: deque[LogLine] = deque(maxlen=2000)
        self.log_total = 0  # lines ever taken in, so that a view knows what is new
        self.requests_rev = 0  # grows when `request_rows` changed

    def ingest(self, batch: Batch) -> None:
        raise NotImplementedError

    def kpis(self) -> Kpis:
        raise NotImplementedError

    def stages(self) -> StageTimes:
        raise NotImplementedError

    def roofline(self) -> Roofline:
        raise NotImplementedError

    def request_rows(self) -> list[RequestView]:
        """Live requests, newest first, then the newest 2000 that ended."""
        raise NotImplementedError

    def changed_requests(self, since_rev: int) -> list[RequestView]:
        """Those whose row changed after revision ``since_rev``, for a table that updates in place."""
        raise NotImplementedError

    def blocks_of(self, rid: int) -> list[int]:
        """The physical blocks the map shows as owned by a request."""
        raise NotImplementedError

    def live_window(self, span_s: float | None = None, newest: int | None = None) -> LiveWindow:
        """Raw rows of the last ``span_s`` seconds, or of the ``newest`` ended requests."""
        raise NotImplementedError
