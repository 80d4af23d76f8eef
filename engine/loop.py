"""The engine core: requests in, steps, events out.

One thread, the step thread, owns scheduler, runner and every request. Others talk to it through a queue
that it empties between two steps, and hear of everything through the events of the sink.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from engine import attention_choice, reconfigure
from engine.answer import Answers, Event
from engine.block_pool import BlockView
from engine.calibration import calibration_ids
from engine.changes import Changes
from engine.config import EngineConfig
from engine.door import RequestRefused, check_fit, check_request, check_whole
from engine.identity import answer_identity, kv_identity
from engine.knob_store import KnobStore, Proposal
from engine.layout import Layout, layout_of
from engine.mailbox import Cancel, Closed, Fetched, Mailbox, StopFound
from engine.memory_profile import size_pool
from engine.metrics import MeterReader, Meters, StageTotals
from engine.models.loader import LoadedModel, load_model
from engine.models.reading import Progress
from engine.pipeline import Landing, Pipeline
from engine.pulse import Pulse
from engine.request import Request
from engine.result_cache import ResultCache
from engine.runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerKnobs
from engine.sizes import counted
from engine.speculation.draft_models import DraftModels, DraftWeights
from engine.speculation.rounds import RoundDrafter
from engine.speculation.speculator import Speculator
from engine.state import state_of
from engine.weight_precision import WeightPrecision
from ipc.messages import DeviceInfo, EngineState, KnobValue, Phase

__all__ = ["BlockView", "EngineCore", "Event", "RequestRefused"]

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
STUCK_WAIT_S = 0.02
BUSY_RETRY_MS = 1000


class EngineCore:
    """One model, one scheduler, one step thread.

    ``sink`` gets events from the step thread, at most once a step, those of request streams from the delivery
    thread, and how far weights are from the one that loads them; it must not block. Stream items name a
    request by its rid alone: whoever submitted it keeps the way back. Log lines go through `logging`.
    ``clock_ns`` is the engine's monotonic clock.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        knobs: KnobStore,
        sink: Callable[[list[Event]], None],
        *,
        device_info: DeviceInfo | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        consume: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Allocates the KV pool and what host memory the knobs ask for.

        MemoryError if it does not fit, PatchRefused if it is known not to, ConfigError if the pool would hold
        no block. ``consume`` takes the weights out of ``loaded``, so that they are not held twice.
        ``progress`` hears how far the conversion of weights is that the knobs ask for.
        """
        self.loaded = loaded
        self.config = config
        self.knobs = knobs
        self.max_model_len = min(config.max_model_len or loaded.spec.max_model_len, loaded.spec.max_model_len)
        self.text_meters = Meters()
        self.device_info = device_info
        self.clock_ns = clock_ns
        self.attention = attention_choice.resolve(knobs.values, knobs.context)  # by the name it is asked for
        embed = loaded.weights["embed"]
        self._dtype, device = embed.dtype, embed.device
        self.runner = ModelRunner(
            loaded,
            device=device,
            dtype=self._dtype,
            attention=self.attention,
            max_model_len=self.max_model_len,
            consume=consume,
            check=config.check,
            calibration_ids=calibration_ids(loaded.tokenizer, self.max_model_len),
            precision=WeightPrecision.of(knobs.values),
            progress=progress or (lambda *_: None),
        )
        load = None
        if config.draft_model is not None:
            load = functools.partial(
                load_model,
                config.draft_model,
                dtype=self._dtype,
                device=device,
                load_format=config.load_format,
            )
        self.drafts = DraftModels(
            loaded,
            self.runner,
            max_model_len=self.max_model_len,
            load=load,
            progress=progress or (lambda *_: None),
            wanted=DraftWeights.of(knobs.values),
        )
        self.memory_profile, self.pool_bytes = size_pool(config, self.runner, self.drafts, knobs.values)
        self.drafts.kept_bytes = 0 if self.memory_profile is None else self.memory_profile.step
        without_host = {**knobs.values, "kv_host_gib": 0.0, "preemption": "recompute"}
        self.layout: Layout = layout_of(without_host, self.runner, self.pool_bytes)  # what is really there
        layout = self.layout
        self.runner.set_window(layout.window)
        self.runner.allocate_kv(layout.num_blocks, layout.block_size, layout.kv_dtype)
        self.scheduler = Scheduler(
            SchedulerKnobs.of(knobs.values),
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            identity=kv_identity(loaded.info, self.runner, knobs.values),
            release_slot=lambda slot: self.pipeline.release(slot),
            window=self.drafts.kept_window,
        )
        self.results = ResultCache(answer_identity(loaded.info, self.runner, self.max_model_len))
        self.speculator = Speculator(loaded.spec.vocab_size)
        for kind in ("draft", "self"):
            self.speculator.makers[kind] = self._make_drafter
        stages = StageTotals()
        self.answers = Answers(
            self.scheduler,
            loaded.tokenizer,
            sink,
            on_stop=lambda rid: self._inbox.put(StopFound(rid)),
            on_end=self.speculator.forget,
            results=self.results,
            meters=self.text_meters,
            stages=stages,
            clock_ns=clock_ns,
        )
        self.answers.cfg_rev = knobs.rev
        self.pipeline = Pipeline(
            self.runner,
            self.scheduler,
            self.answers,
            stages,
            MeterReader(self.text_meters),
            self.speculator,
            clock_ns,
            check=config.check,
        )
        self.pulse = Pulse(config, self.scheduler, self.answers, self.state, clock_ns)
        self.drafts.progress = self.progress
        self._rids = itertools.count(1)
        self._inbox = Mailbox()
        self._changes = Changes(self, self._inbox)
        self._doomed: dict[int, str | None] = {}  # to be ended once their step has landed: why, None: stopped
        self.num_begun = 0  # requests that came to the step thread
        self._wake_ns: int | None = None
        reconfigure.set_up(self)

    def _make_drafter(self, values: Mapping[str, KnobValue]) -> RoundDrafter:
        wanted = DraftWeights.of(values)
        assert wanted is not None
        return self.drafts.make(wanted)

    # --- any thread ---

    @property
    def phase(self) -> Phase:
        return self.pulse.phase

    @property
    def step_count(self) -> int:
        """Steps launched since start."""
        return self.pipeline.num_launched

    @property
    def last_step_ns(self) -> int:
        """When the step that runs began, or the last thing done ended: its age shows a loop that hangs."""
        return self.pulse.beat_ns

    def new_rid(self) -> int:
        """A fresh request id."""
        return next(self._rids)

    def submit(self, request: Request) -> None:
        """Queue a request, or answer it from the result cache.

        RequestRefused if it can never run here, or if too many are waiting.
        """
        if request.rid in self.answers.live:
            raise ValueError(f"request id {request.rid} is in use; take ids from new_rid")
        if self.phase in ("failed", "stopping"):
            raise RequestRefused("not_ready", f"the engine is {self.phase}: {self.pulse.reason}")
        check_request(request, vocab_size=self.loaded.spec.vocab_size, max_model_len=self.max_model_len)
        request.max_total = min(request.num_prompt + request.sampling.max_tokens, self.max_model_len)
        if not request.stream:
            check_whole(request, self.loaded.tokenizer)
        sampling = request.sampling
        request.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else self.loaded.eos_token_ids
        )
        request.arrive_ns = request.arrive_ns or self.clock_ns()
        if self.answers.enter(request):
            return  # a known answer needs neither blocks nor a place in the queue
        pool = self.scheduler.pool
        check_fit(request, self.scheduler.blocks_for(request), pool.num_blocks, pool.block_size)
        limit = int(self.knobs["max_num_queued"] or 0)
        if len(self.scheduler.waiting) + len(self._inbox) >= limit:
            raise RequestRefused(
                "busy",
                f"{counted(limit, 'request')} may wait, and so many do; come back later",
                BUSY_RETRY_MS,
            )
        try:
            self._inbox.put(request)
        except Closed:
            raise RequestRefused("not_ready", "the engine is stopping") from None

    def cancel(self, rids: Iterable[int], why: str = "cancelled") -> None:
        """End requests. Unknown and finished ids are ignored; each live one gets its Done."""
        self._inbox.put(Cancel(list(rids), why))

    def propose(self, patch: Mapping[str, KnobValue], expect_rev: int, *, dry_run: bool = False) -> Proposal:
        """Validate a patch and queue it for the gap between two steps. PatchRefused if it is not taken.

        How it ended is told by an ApplyEvent with the proposal's ``apply_id``.
        """
        proposal = self.knobs.propose(patch, expect_rev, dry_run=dry_run)
        if not dry_run:
            self._inbox.put(proposal)
        return proposal

    def state(self) -> EngineState:
        """Phase, counts, memory and model as they are now."""
        return state_of(self)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Tell how far a change is that is being applied, or loaded. Step thread or fetching thread.

        Raises `ChangeCancelled` if nobody wants it any more.
        """
        self.pulse.progress(stage, done_bytes, total_bytes)
        self.knobs.heed_cancel()

    def wake(self) -> None:
        """Make a sleeping loop look again."""
        self._inbox.wake()

    # --- step thread ---

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set (and `wake` called), asleep while idle; then cancel what is live."""
        # What was loaded until now stays: a full collection that walks it would hold up a step.
        gc.collect()
        gc.freeze()
        self.answers.delivery.start()
        try:
            self._run(stop)
        finally:
            self._changes.stop()
            self.answers.delivery.stop()
            self.pipeline.stop()
            gc.unfreeze()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if self.step():
                continue
            self._inbox.wait(self._rest_s(), unless=stop.is_set)
        self._guarded(self._end)

    def _rest_s(self) -> float:
        """How long there is nothing to do, unless something comes in."""
        if not self.answers.live:
            return IDLE_WAIT_S
        if self._wake_ns is None:
            return STUCK_WAIT_S
        return min(IDLE_WAIT_S, max(0, self._wake_ns - self.clock_ns()) / 1e9)

    def step(self) -> bool:
        """Stage, launch and land steps as far as that goes without waiting. True if anything was done.

        Without overlap one step is computed. With it, one is in flight when this returns, as long as there is
        work. A fault of the engine itself ends every request with an error, leaves it failed and is raised.
        """
        return self._guarded(self._do_step)

    def _guarded(self, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except Exception as error:
            self.pipeline.abandon()
            self.pulse.set_phase("failed", f"{type(error).__name__}: {error}")
            self.knobs.abandon()
            self.answers.finish_all(
                "error", self.clock_ns(), code="internal", message=f"the engine failed: {error}"
            )
            self.flush()
            raise

    def _end(self) -> bool:
        """The loop was asked to stop: what was computed is delivered, then everything is cancelled."""
        if self.pipeline.in_flight:
            self._land()
        self.pulse.set_phase("stopping")
        self._inbox.close()
        self._take_inbox(self.clock_ns())
        self.answers.finish_all("cancelled", self.clock_ns(), message="the engine stopped")
        self.flush()
        return True

    def _do_step(self) -> bool:
        pipeline = self.pipeline
        self.pulse.beat_ns = self.clock_ns()  # what the loop slept before is no part of the step
        took = self._take_inbox(self.clock_ns())
        flew = pipeline.in_flight
        step = None
        if flew:
            if self._may_stage():
                step = pipeline.stage(self._doomed)
                pipeline.launch_ahead(step)
            landing = self._land()
            step = pipeline.settle(step, landing) if step is not None else None
            if step is None:
                took |= self._take_inbox(self.clock_ns())
        if step is None:
            if reconfigure.swap_space_is_idle(self):
                reconfigure.release_swap_space(self, self.clock_ns())
            if self.answers.live:
                step = pipeline.stage()
        launched = step is not None and bool(step.plan.scheduled)
        if step is not None and launched:
            pipeline.launch(step)
            if not pipeline.overlap:
                self._land()
        elif step is not None:
            pipeline.forgo(step)
        plan = step.plan if step is not None else None
        self._wake_ns = plan.wake_ns if plan is not None else None
        if plan is None or launched or flew or plan.wake_ns is not None:
            self.pulse.moved()
        else:
            self.pulse.look_for_stall(plan.reason)
        self.pulse.publish()
        self.flush()
        self.pulse.beat_ns = self.clock_ns()
        return took or flew or launched or (plan is not None and bool(plan.preemptions))

    def _may_stage(self) -> bool:
        """Whether the next step may be staged while one is in flight, or the pipeline is to run empty."""
        return (
            bool(self.answers.live)
            and not self._inbox.has_change_next
            and not reconfigure.swap_space_is_idle(self)
            and self.pipeline.may_stage_ahead()
        )

    def _land(self) -> Landing:
        """Take the results of the step in flight, then end who was to be ended meanwhile."""
        landing = self.pipeline.land()
        self.pulse.blocks_changed()
        now = self.clock_ns()
        if landing == "copies lost":
            reconfigure.start_over(self, now)
        doomed, self._doomed = self._doomed, {}
        for rid, why in doomed.items():
            self._finish(rid, why, now)
        return landing

    def _take_inbox(self, now_ns: int) -> bool:
        """Act on what came in, up to a change of the configuration while a step is in flight.

        True if anything was done.
        """
        took = False
        while self._inbox:
            if self._inbox.has_change_next and self.pipeline.in_flight:
                break
            took = True
            match self._inbox.take():
                case Request() as request:
                    self._accept_request(request, now_ns)
                case Proposal() as proposal:
                    self._changes.begin(proposal, now_ns)
                case Fetched(proposal, error):
                    self._changes.carry_out(proposal, now_ns, error)
                case StopFound(rid):
                    self._finish(rid, None, now_ns)
                case Cancel(rids, why):
                    for rid in rids:
                        self._finish(rid, why, now_ns)
                    self.pulse.blocks_changed()
        return took

    def _finish(self, rid: int, why: str | None, now_ns: int) -> None:
        """End a request that was cancelled (``why``) or has met a stop string (None), if it is still there.

        One that a step in flight computes for is ended after it, as its blocks and its slot are in use.
        """
        request = self.answers.live.get(rid)
        if request is None:
            return
        if self.pipeline.holds(request):
            self._doomed.setdefault(rid, why)
        elif why is None:
            self.answers.stopped(rid, now_ns)
        else:
            self.answers.finish(request, "cancelled", now_ns, code="cancelled", message=why)

    def _accept_request(self, request: Request, now_ns: int) -> None:
        self.num_begun += 1
        self.answers.begin(request)
        pool = self.scheduler.pool
        try:  # again, because the pool may have been rebuilt since
            check_fit(request, self.scheduler.blocks_for(request), pool.num_blocks, pool.block_size)
        except RequestRefused as refused:
            self.answers.finish(request, "error", now_ns, code=refused.code, message=refused.message)

    def flush(self) -> None:
        """Send what there is to be told. Step thread."""
        begin = self.clock_ns()
        self.answers.flush()
        self.pipeline.published_ns = (begin, self.clock_ns())
