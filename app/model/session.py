"""`SessionModel`: what is known of the engine and its traffic, kept for the panels.

The window feeds it each `Batch` and reads figures, series and rows from it. All times are seconds of the
console's own monotonic clock (the engine's stamps are shifted by the measured clock offset), so a change of
wall clock moves nothing. A figure that is undefined is None and says why; in series it is a gap (NaN).
Everything is bounded: hours at ten batches a second take no more memory than the first.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from app.model.cards import CardBook
from app.model.costs import StageClock
from app.model.drafts import DraftBook, DraftFigures, draft_stats
from app.model.figures import (
    NO_DRAFTS,
    Figure,
    Gap,
    Kpis,
    LiveWindow,
    Marker,
    Preemption,
    Roofline,
    SeatUse,
    mean_length,
    patch_label,
    ratio,
    roofline,
    seat_use,
    step_stats,
)
from app.model.holes import Holes
from app.model.machine import OtherWork
from app.model.memory import KernelBook, MemoryBook, WhatRan, memory_stats
from app.model.outages import Outages
from app.model.pauses import longest_wait
from app.model.refusals import RefusalBook
from app.model.requests import Key, RequestBook, RequestView
from app.model.seats import Bars, SeatBook
from app.model.series import BinTable, Ring, percentiles
from app.model.stages import StageTimes, request_times, stage_times
from app.model.steps import STEP_COLUMNS, StepWindow, step_values
from app.model.timeline import TIMELINE_COLUMNS, Now, Timeline, kv_shares, sample
from app.net.types import Batch, BlockView, LinkState, LinkStatus
from ipc.messages import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    BLOCK_USED,
    ApplyEvent,
    Cfg,
    DeviceInfo,
    EngineState,
    Heartbeat,
    KnobValue,
    LogLine,
    ModelInfo,
    Preempted,
    StepRow,
)

__all__ = [
    "NO_TRAFFIC",
    "TIMELINE_COLUMNS",
    "Figure",
    "Gap",
    "Kpis",
    "LiveWindow",
    "Marker",
    "Preemption",
    "RequestView",
    "Roofline",
    "SeatUse",
    "SessionModel",
    "StageTimes",
]

NO_TRAFFIC = "no traffic"

_KEPT_CONFIGS = 500
_NS = 1e-9


class SessionModel:
    """See the module. One instance lives as long as the window; engine restarts go into the same series."""

    def __init__(self, history_s: float = 3600.0, window_s: float = 30.0) -> None:
        self.window_s = window_s  # of `kpis`, `stages`, `roofline`; may be changed at any time
        self.history_s = history_s
        self.now_s = 0.0
        self.link = LinkStatus()
        self.state: EngineState | None = None
        self.heartbeat: Heartbeat | None = None
        self.cfg: Cfg | None = None
        self.model: ModelInfo | None = None
        self.device: DeviceInfo | None = None
        self.blocks: BlockView | None = None
        self.cards = CardBook()
        self.refusals = RefusalBook()
        self.attention = ""  # the backend that the newest step really ran
        self.attention_rev = -1  # the configuration that it ran with
        self.kernels = ""
        self.markers: deque[Marker] = deque(maxlen=500)
        self.gaps: deque[Gap] = deque(maxlen=500)
        self.preemptions: deque[Preemption] = deque(maxlen=2000)
        self.logs: deque[LogLine] = deque(maxlen=2000)
        self.log_total = 0  # lines ever taken in, so that a view knows what is new
        self.dropped_rows = 0
        self._book = RequestBook()
        self.stage_clock = StageClock()
        self.other_work = OtherWork()
        self._seats = SeatBook()
        self._drafts = DraftBook()
        self._memory = MemoryBook()
        self._kernels = KernelBook()
        self._configs: dict[int, dict[str, KnobValue]] = {}  # by revision, of the present engine
        self._steps = Ring(STEP_COLUMNS, 131_072)
        self._timeline = Timeline(history_s)
        self._last_step: int | None = None
        self._steps_before = 0  # steps of the engines before the present one
        self._last_end_s = 0.0
        self._holes = Holes()
        self._outages = Outages()
        self._session_starts: deque[float] = deque(maxlen=100)
        self._begun_s: float | None = None
        self._kpis: tuple[float, Kpis] | None = None  # of which window; none since the last batch

    @property
    def timeline(self) -> BinTable:
        """The charts' values, with `TIMELINE_COLUMNS`, a row each half second."""
        return self._timeline.line

    @property
    def latency_window_s(self) -> float:
        """The trailing window of the percentiles in the timeline."""
        return self._timeline.latency_window_s

    @property
    def outage(self) -> Gap | None:
        """Since when there is no engine that could be measured; None while there is one, or was none yet."""
        return self._outages.present(self.now_s)

    # --- taking in -------------------------------------------------------------------------------

    def ingest(self, batch: Batch) -> None:
        """Take in one batch of the link; call it once for each `drain`."""
        self.now_s, self.link = batch.now_s, batch.link
        self._kpis = None
        if self._begun_s is None:
            self._begun_s = batch.now_s
        self.heartbeat = batch.link.heartbeat
        self.dropped_rows += batch.dropped_rows
        offset_ns = batch.link.clock_offset_ns
        if batch.new_session:
            self._new_engine(batch.now_s)
        self.state = batch.state or self.state
        if batch.state is not None:
            self._memory.take(batch.state, batch.now_s)
            self.stage_clock.take(batch.state, batch.now_s)
        self.cfg = batch.cfg or self.cfg
        self.model = batch.model or self.model
        self.device = batch.device or self.device
        self.blocks = batch.blocks or self.blocks
        self.cards.take(batch.gpu)
        self.logs.extend(batch.logs)
        self.log_total += len(batch.logs)
        self._take_steps(batch.steps, offset_ns)
        self.refusals.take(batch.refusals, batch.refused, offset_ns)
        news = self._book.take(batch.requests, offset_ns)
        self._take_preemptions(batch.preemptions, offset_ns)
        self._seats.take(self._book.engine, news, batch.preemptions, offset_ns, self.now_s)
        if batch.live is not None:
            self._book.resynced(batch.live)
            self._seats.keep_only(self._book.engine, batch.live)
        if batch.link.state is LinkState.DEAD:
            self._book.engine_ended()
            self._seats.engine_ended()
            self.cards.clear()
        for event in batch.events:
            self._take_event(event, offset_ns)
        if batch.cfg is not None:
            self._configs[batch.cfg.rev] = dict(batch.cfg.values)
            while len(self._configs) > _KEPT_CONFIGS:
                del self._configs[next(iter(self._configs))]
        self.gaps.extend(self._holes.close(self.now_s))
        if (outage := self._outages.take(batch.link, batch.now_s, batch.new_session)) is not None:
            self.gaps.append(outage)
        idle = None if self._stepped else self._pool()
        now = Now(self.now_s, self._book, self.state, self.heartbeat, self.link.state, self._stepped, idle)
        self._timeline.draw(now)

    def _new_engine(self, now_s: float) -> None:
        self._book.new_engine()
        self.refusals.new_engine()
        self._seats.engine_ended()
        self._last_step = None
        self._steps_before = self._steps.total
        self.attention, self.attention_rev, self.kernels = "", -1, ""
        self._holes.clear()
        self._kernels = KernelBook()
        self._configs.clear()
        self.cards.clear()
        self.blocks = self.state = self.cfg = None
        self._session_starts.append(now_s)

    def _take_event(self, event: ApplyEvent, offset_ns: int) -> None:
        before = self._configs.get(event.from_rev)
        if event.result == "ok" and before is not None:
            self._configs[event.to_rev] = {**before, **event.patch}
        self.markers.append(
            Marker(
                t_s=(event.t_ns - offset_ns) * _NS,
                apply_id=event.apply_id,
                rev=event.to_rev if event.result == "ok" else event.from_rev,
                ok=event.result == "ok",
                mode=event.mode,
                patch=dict(event.patch),
                label=patch_label(event.patch),
                took_s=event.took_us * 1e-6,
                preempted=event.preempted,
                why=event.why,
            )
        )

    def _take_preemptions(self, events: list[Preempted], offset_ns: int) -> None:
        for event in events:
            t_s = (event.t_ns - offset_ns) * _NS
            self.preemptions.append(Preemption(t_s, (self._book.engine, event.rid), event))

    def _take_steps(self, rows: list[StepRow], offset_ns: int) -> None:
        new: list[tuple[float, ...]] = []
        for row in rows:
            t_s = (row.t_ns - offset_ns) * _NS
            values = step_values(row, t_s)
            self._timeline.add_step(t_s, values)
            if self._last_step is not None and row.step <= self._last_step:
                self._holes.fill(row.step)  # a snapshot brought it late: its bin has it, the ring is in order
                continue
            if self._last_step is not None and row.step > self._last_step + 1:
                self._holes.open(self._last_step + 1, row.step - 1, self._last_end_s, t_s, self.now_s)
            self._last_step, self._last_end_s = row.step, t_s + row.dur_us * 1e-6
            new.append(values)
            self._drafts.take(row, t_s)
            self._kernels.take(row)
        if rows:
            self.attention, self.kernels = rows[-1].attention, rows[-1].kernels
            self.attention_rev = rows[-1].cfg_rev
        if new:
            self._steps.append(new)

    # --- figures ---------------------------------------------------------------------------------

    def _window(self) -> StepWindow:
        return StepWindow(self._steps, self.now_s - self.window_s)

    @property
    def _span_s(self) -> float:
        """The trailing window, shorter while the session is."""
        begun_s = self._begun_s if self._begun_s is not None else self.now_s
        return max(min(self.window_s, self.now_s - begun_s), 1e-9)

    def kpis(self) -> Kpis:
        """The strip's figures over the last ``window_s`` seconds, worked out once for each batch."""
        if self._kpis is None or self._kpis[0] != self.window_s:
            self._kpis = self.window_s, self._work_out_kpis()
        return self._kpis[1]

    def _work_out_kpis(self) -> Kpis:
        steps, book, span_s = self._window(), self._book, self.window_s
        quiet = f"{NO_TRAFFIC} in the last {span_s:g} s"

        def latency(ring: Ring, percent: float, why: str) -> Figure:
            found = percentiles(sample(ring, self.now_s - span_s, self.now_s), (percent,))
            return Figure(found[percent], found.n, span_s, "" if found.n else why)

        def of_steps(value: float | None, why: str) -> Figure:
            if steps.n == 0:
                return Figure(None, 0, span_s, quiet)
            return Figure(value, steps.n, span_s, "" if value is not None else why)

        ended = sample(book.ended_kind, self.now_s - span_s, self.now_s)
        no_first, no_end = "no first token in this window", "no request ended in this window"
        no_tpot = "no request with two tokens or more ended in this window"
        roof = roofline(steps, self.device)
        share = ratio(roof.bandwidth_bytes_s or 0.0, roof.peak_bytes_s or 0.0)
        # Rebuilding the pool preempts between two steps, so no step row tells of those.
        displaced = sum(p.t_s > self.now_s - span_s for p in self.preemptions)
        return Kpis(
            ttft_p50_s=latency(book.ttft, 50.0, no_first),
            ttft_p95_s=latency(book.ttft, 95.0, no_first),
            ttft_p99_s=latency(book.ttft, 99.0, no_first),
            tpot_p50_s=latency(book.tpot, 50.0, no_tpot),
            tpot_p95_s=latency(book.tpot, 95.0, no_tpot),
            tpot_p99_s=latency(book.tpot, 99.0, no_tpot),
            ttft_pause_s=self.pause_s("ttft", span_s),
            tpot_pause_s=self.pause_s("tpot", span_s),
            queue_p50_s=latency(book.queue, 50.0, no_first),
            e2e_p50_s=latency(book.e2e, 50.0, no_end),
            output_tok_s=of_steps(steps.total("output_tok") / self._span_s, ""),
            prefill_tok_s=of_steps(steps.total("prefill_tok") / self._span_s, ""),
            draft_acceptance=of_steps(
                ratio(steps.total("accepted_tok"), steps.total("drafted_tok")), NO_DRAFTS
            ),
            draft_length=of_steps(mean_length(steps), NO_DRAFTS),
            finished_req_s=Figure(
                float(ended.sum()) / self._span_s if ended.size else None,
                int(ended.size),
                span_s,
                "" if ended.size else no_end,
            ),
            error_share=Figure(
                float(1.0 - ended.mean()) if ended.size else None,
                int(ended.size),
                span_s,
                "" if ended.size else no_end,
            ),
            running=self._present("running"),
            waiting=self._present("waiting"),
            kv_used_share=self._kv_figure("kv_used_share"),
            kv_cached_share=self._kv_figure("kv_cached_share"),
            kv_waste_share=self._kv_figure("kv_waste_share"),
            hit_rate=of_steps(
                ratio(steps.total("hit_tok"), steps.total("query_tok")),
                "no prompt was looked up in this window",
            ),
            bandwidth_share=of_steps(share, "the machine's copy bandwidth was not measured"),
            preemptions=of_steps(max(steps.total("preempted"), float(displaced)), ""),
            recompute_share=of_steps(
                ratio(steps.total("recompute_s"), steps.total("forward_s")), "no forward pass took any time"
            ),
            result_cached=Figure(
                float(sample(book.result_cached, self.now_s - span_s, self.now_s).size), None, span_s
            ),
        )

    def pause_s(self, kind: str, span_s: float) -> float | None:
        """How long a change kept requests waiting that a figure of the last ``span_s`` seconds is made of.

        ``kind``: ttft or tpot. None where none did.
        """
        t0_s = self.now_s - span_s
        if kind == "ttft":
            return longest_wait(self._book.ttft, self.markers, t0_s, self.now_s)
        waits = sample(self._book.paused, t0_s, self.now_s)
        return float(waits.max()) if waits.size else None

    def _present(self, name: str) -> Figure:
        """Requests running or waiting now: of the newest step or, when it is newer, the engine's state."""
        if self.state is None or self.link.state in (LinkState.DEAD, LinkState.OFFLINE):
            return Figure(None, why_none="no engine runs")
        steps = StepWindow(self._steps, self.now_s - 1.0)
        if self.state.phase == "applying":  # nothing runs until it is done
            return Figure(0.0 if name == "running" else float(self.state.running + self.state.waiting))
        if steps.n and self._stepped:
            return Figure(steps.last(name))
        return Figure(float(self.state.running if name == "running" else self.state.waiting))

    @property
    def _stepped(self) -> bool:
        """Whether the present engine has run a step: what the newest one says is true of this engine."""
        return self._steps.total > self._steps_before

    def _pool(self) -> tuple[float, float, float, float] | None:
        """Used, cached and free blocks of the present engine and the tokens in used ones, as far as known."""
        if self._stepped:
            columns = ("used_blk", "cached_blk", "free_blk", "used_tok")
            used, cached, free, tokens = (float(self._steps.column(c, 1)[0]) for c in columns)
            return used, cached, free, tokens
        if self.blocks is None:
            return None
        state, fill = (part[: self.blocks.num_pool] for part in (self.blocks.state, self.blocks.fill))
        live = np.isin(state, (BLOCK_USED, BLOCK_SHARED, BLOCK_RESERVED))
        cached, free = (float(np.count_nonzero(state == kind)) for kind in (BLOCK_CACHED, BLOCK_FREE))
        return float(np.count_nonzero(live)), cached, free, float(fill[live].sum())

    def _kv_figure(self, name: str) -> Figure:
        pool = self._pool()
        if self.state is None or pool is None:
            return Figure(None, why_none="no engine" if self.state is None else NO_TRAFFIC)
        value = kv_shares(*pool, self.state.block_size)[name]
        return Figure(value, why_none="" if value is not None else "no block is used")

    def stages(self) -> StageTimes:
        """Where the time of a step goes, over the last ``window_s`` seconds."""
        return stage_times(self._window())

    def request_stages(self) -> StageTimes:
        """Where the time of the requests went that ended well in the last ``window_s`` seconds."""
        return request_times(self._book.stages, self.now_s - self.window_s)

    def drafts(self) -> DraftFigures | None:
        """How drafts did in the last ``window_s`` seconds; None where there were none."""
        return self._drafts.figures(self.now_s - self.window_s)

    def ran(self) -> WhatRan:
        """What the linear layers ran under the present configuration; nothing while no step has."""
        return WhatRan() if self.state is None else self._kernels.ran(self.state.cfg_rev)

    def bars(self, t0_s: float, t1_s: float) -> Bars:
        """Who sat where and when, for the timeline of requests."""
        return self._seats.bars(t0_s, t1_s)

    def seat_use(self, t0_s: float, t1_s: float) -> SeatUse | None:
        """How full the batch was while steps ran; None where none did."""
        return seat_use(StepWindow(self._steps, t0_s, t1_s), self._configs)

    def roofline(self) -> Roofline:
        """Memory- or compute-bound, over the last ``window_s`` seconds."""
        return roofline(self._window(), self.device)

    # --- requests, blocks, baselines -------------------------------------------------------------

    @property
    def requests_rev(self) -> int:
        """Grows whenever `request_rows` changed."""
        return self._book.rev

    def request_rows(self) -> list[RequestView]:
        """Live requests, newest first, then the newest 2000 that ended."""
        return self._book.rows()

    def request(self, key: Key) -> RequestView | None:
        """One request, live or ended, as far as it is kept."""
        return self._book.find(key)

    @property
    def engine_number(self) -> int:
        """Which engine process of this window runs: the first half of its requests' keys."""
        return self._book.engine

    def changed_requests(self, since_rev: int) -> list[RequestView] | None:
        """Those whose row changed after revision ``since_rev``, for a table that updates in place.

        None where rows also went away since, so that the table has to be built anew.
        """
        return None if self._book.forgot_rev > since_rev else self._book.changed(since_rev)

    @property
    def lost_requests(self) -> int:
        """Requests whose end was lost with a telemetry message."""
        return self._book.unheard

    def blocks_of(self, rid: int) -> list[int]:
        """The physical blocks the map shows as owned by a request."""
        if self.blocks is None:
            return []
        return [int(i) for i in np.flatnonzero(self.blocks.owner == (rid & 0xFFFFFFFF))]

    def config_at(self, rev: int) -> dict[str, KnobValue] | None:
        """All knob values under a revision of the present engine; None if it was not seen or is long ago."""
        found = self._configs.get(rev)
        return dict(found) if found is not None else None

    def configs(self) -> list[dict[str, KnobValue]]:
        """All knob values that the present engine is known to have had."""
        return list(self._configs.values())

    def step_stats(self, t0_s: float, t1_s: float | None = None) -> dict[str, float | int | None]:
        """Statistics of the steps from ``t0_s`` to ``t1_s`` (None: now), for a baseline."""
        block_size = self.state.block_size if self.state is not None else 0
        end_s = self.now_s if t1_s is None else t1_s
        window = StepWindow(self._steps, t0_s, t1_s)
        stats = step_stats(window, end_s - t0_s, self.device, block_size)
        drafts = self._drafts.figures(t0_s, t1_s)
        other = self.other_work.stats(t0_s, end_s)
        return stats | draft_stats(drafts) | memory_stats(self._memory.at(end_s)) | other

    @property
    def changed_s(self) -> float | None:
        """When the configuration last changed, or the engine was started anew; None if it never was."""
        changes = [marker.t_s for marker in self.markers if marker.ok and marker.patch]
        return max([*changes[-1:], *list(self._session_starts)[1:][-1:]], default=None)

    def live_window(
        self, span_s: float | None = None, newest: int | None = None, *, whole: bool = False
    ) -> LiveWindow:
        """Raw rows of the last ``span_s`` (else ``window_s``) seconds, or of the ``newest`` that ended.

        ``whole``: only of requests that also arrived within.
        """
        offset_ns = self.link.clock_offset_ns
        t0_s = self.now_s - (span_s if span_s is not None else self.window_s)
        rows = self._book.ended_rows(round(t0_s / _NS) + offset_ns, newest)
        if newest is not None and rows:
            t0_s = min(row.arrive_ns - offset_ns for row in rows) * _NS
        if whole:
            rows = tuple(row for row in rows if (row.arrive_ns - offset_ns) * _NS >= t0_s)
        return LiveWindow(
            t0_s=t0_s,
            t1_s=self.now_s,
            requests=rows,
            step_stats=self.step_stats(t0_s),
            markers=tuple(
                marker for marker in self.markers if marker.t_s >= t0_s and marker.ok and marker.patch
            ),
            sessions=1 + sum(start >= t0_s for start in list(self._session_starts)[1:]),
            lost=sum(self.link.lost.values()),
        )
