"""The engine core: requests in, steps, events out.

One thread, the step thread, owns scheduler, runner and every request. Others talk to it through a queue
that it empties between two steps, and hear of everything through the events of the sink.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from engine.answer import Answers, Event
from engine.block_pool import BlockView
from engine.config import GIB, EngineConfig
from engine.door import RequestRefused, check_fit, check_request, check_whole
from engine.knob_store import KnobStore, PatchRefused, Proposal
from engine.kv_cache import KVCache
from engine.memory import kv_pool_bytes
from engine.metrics import Meters, StageTotals, StepClock, step_row
from engine.models.loader import LoadedModel
from engine.plan import StepPlan
from engine.reconfigure import reconfigure, text_of
from engine.request import Request
from engine.result_cache import ResultCache
from engine.runner import ModelRunner
from engine.scheduler import Scheduler, SchedulerKnobs
from ipc.messages import MAX_BLOCKS, ApplyEvent, DeviceInfo, EngineState, ErrorCode, KnobValue, Phase

__all__ = ["BlockView", "EngineCore", "Event", "RequestRefused"]

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
STUCK_WAIT_S = 0.02
BUSY_RETRY_MS = 1000


class EngineCore:
    """One model, one scheduler, one step thread.

    ``sink`` gets the events of each step on the step thread, at most once a step, and what clients are told
    on the delivery thread; it must not block. Stream items name a request by its rid alone: whoever submitted
    it keeps the way back. Log lines go through `logging`. ``clock_ns`` is the engine's monotonic clock.
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
    ) -> None:
        """Allocates the KV pool. MemoryError if it does not fit, ValueError if it would hold no block.

        ``consume`` takes the weights out of ``loaded``, so that they are not held twice.
        """
        self.loaded = loaded
        self.config = config
        self.knobs = knobs
        self.max_model_len = min(config.max_model_len or loaded.spec.max_model_len, loaded.spec.max_model_len)
        self.phase: Phase = "ready"
        self._device_info = device_info
        self._clock = clock_ns
        embed = loaded.weights["embed"]
        self._dtype, device = embed.dtype, embed.device
        self.runner = ModelRunner(
            loaded,
            device=device,
            dtype=self._dtype,
            attention=str(knobs["attention"]),
            max_model_len=self.max_model_len,
            consume=consume,
        )
        self._pool_bytes = kv_pool_bytes(config, device)  # of what the weights have left
        num_blocks, block_size = self.pool_shape(knobs.values)
        if num_blocks < 1:
            raise ValueError(f"the KV pool is too small for even one block of {block_size} tokens")
        self.runner.allocate_kv(num_blocks, block_size)
        self.scheduler = Scheduler(
            SchedulerKnobs.of(knobs.values),
            num_blocks=num_blocks,
            block_size=block_size,
            identity=f"{loaded.info.sha256 or loaded.info.path}|{loaded.info.name}|{self._dtype}",
            release_slot=self.runner.release,
        )
        self.text_meters = Meters()
        self.stages = StageTotals()
        info = loaded.info
        self.results = ResultCache(
            f"{info.sha256 or info.path}|{info.name}|{info.format}|{self._dtype}|{info.tokenizer_sha256}|"
            f"{self.max_model_len}|{self.runner.kernels}"
        )
        self.answers = Answers(
            self.scheduler,
            loaded.tokenizer,
            sink,
            on_stop=lambda rid: self._put(rid),
            results=self.results,
            meters=self.text_meters,
            stages=self.stages,
            clock_ns=clock_ns,
        )
        self.answers.cfg_rev = knobs.rev
        self._obey()

        now = clock_ns()
        self._rids = itertools.count(1)
        self._inbox: deque[Request | tuple[list[int], str] | Proposal | int] = deque()
        self._wakeup = threading.Condition()
        self._closed = False
        self._since_ns = now
        self._reason = ""
        self._step = 0
        self._last_step_ns = now
        self._progress_ns = now
        self._view_ns = 0
        self._view_due = True
        self._progress_rows_ns = now
        self._publish_ns = 0

    # --- any thread ---

    @property
    def step_count(self) -> int:
        return self._step

    @property
    def last_step_ns(self) -> int:
        """When the last step, or look at an empty queue, ended: its age shows a loop that hangs."""
        return self._last_step_ns

    def new_rid(self) -> int:
        """A fresh request id."""
        return next(self._rids)

    def submit(self, request: Request) -> None:
        """Queue a request. RequestRefused if it can never run here, or if too many are waiting."""
        if request.rid in self.answers.live:
            raise ValueError(f"request id {request.rid} is in use; take ids from new_rid")
        if self.phase in ("failed", "stopping"):
            raise RequestRefused("not_ready", f"the engine is {self.phase}: {self._reason}")
        check_request(request, vocab_size=self.loaded.spec.vocab_size, max_model_len=self.max_model_len)
        request.max_total = min(request.num_prompt + request.sampling.max_tokens, self.max_model_len)
        if not request.stream:
            check_whole(request, self.loaded.tokenizer)
        request.stop_ids = frozenset(request.sampling.stop_token_ids) | (
            frozenset() if request.sampling.ignore_eos else self.loaded.eos_token_ids
        )
        request.arrive_ns = request.arrive_ns or self._clock()
        with self._wakeup:
            if self._closed:
                raise RequestRefused("not_ready", "the engine is stopping")
            if self.answers.enter(request):
                self._wakeup.notify()
                return
        pool = self.scheduler.pool
        check_fit(request, self.scheduler.blocks_for(request), pool.num_blocks, pool.block_size)
        limit = int(self.knobs["max_num_queued"] or 0)
        if len(self.scheduler.waiting) + len(self._inbox) >= limit:
            raise RequestRefused(
                "busy", f"{limit} requests are waiting already; come back later", BUSY_RETRY_MS
            )
        self._put(request)

    def cancel(self, rids: Iterable[int], why: str = "cancelled") -> None:
        """End requests. Unknown and finished ids are ignored; each live one gets its Done."""
        self._put((list(rids), why))

    def propose(self, patch: Mapping[str, KnobValue], expect_rev: int, *, dry_run: bool = False) -> Proposal:
        """Validate a patch and queue it for the gap between two steps. PatchRefused if it is not taken.

        How it ended is told by an ApplyEvent with the proposal's ``apply_id``.
        """
        proposal = self.knobs.propose(patch, expect_rev, dry_run=dry_run)
        if not dry_run:
            self._put(proposal)
        return proposal

    def state(self) -> EngineState:
        """Phase, counts, pool and model as they are now."""
        pending = self.knobs.pending
        pool = self.scheduler.pool
        return EngineState(
            phase=self.phase,
            since_ns=self._since_ns,
            cfg_rev=self.knobs.rev,
            pending_apply=pending.apply_id if pending is not None else None,
            reason=self._reason[:4096],
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            model=self.loaded.info,
            device=self._device_info,
        )

    def pool_shape(self, values: Mapping[str, KnobValue]) -> tuple[int, int]:
        """Number of blocks and tokens of a block that these knob values ask for.

        ValueError for more blocks than the block map of the protocol can show.
        """
        block_size = int(values["block_size"] or 0)
        budget = int(float(values["kv_pool_gib"] or 0) * GIB) or self._pool_bytes
        spec, dtype = self.loaded.spec, self._dtype
        num_blocks = KVCache.max_blocks(budget, spec, block_size=block_size, dtype=dtype)
        if num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"a KV pool of {budget / GIB:.2f} GiB has {num_blocks} blocks of {block_size} tokens, at "
                f"most {MAX_BLOCKS} are possible; choose a larger block_size or a smaller pool"
            )
        return num_blocks, block_size

    def wake(self) -> None:
        """Make a sleeping loop look again."""
        with self._wakeup:
            self._wakeup.notify()

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
            with self._wakeup:
                self._closed = True
            self.answers.delivery.stop()
            gc.unfreeze()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if self.step():
                continue
            with self._wakeup:
                if not self._inbox and not stop.is_set():
                    self._wakeup.wait(STUCK_WAIT_S if self.answers.live else IDLE_WAIT_S)
        self._set_phase("stopping", "")
        with self._wakeup:
            self._closed = True  # whatever is put from now on is refused, so nothing is left without an end
        self._take_inbox(self._clock())
        self.answers.finish_all("cancelled", self._clock(), message="the engine stopped")
        self._flush()

    def step(self) -> bool:
        """One synchronous step. True if anything was done.

        A fault of the engine itself ends every request with an error, leaves it failed and is raised.
        """
        try:
            return self._do_step()
        except Exception as error:
            self._set_phase("failed", f"{type(error).__name__}: {error}")
            self.knobs.abandon()
            self.answers.finish_all(
                "error", self._clock(), code="internal", message=f"the engine failed: {error}"
            )
            self._flush()
            raise

    def _do_step(self) -> bool:
        took = self._take_inbox(self._clock())
        clock = StepClock(begin=self._clock())
        plan = self.scheduler.plan(clock.begin) if self.answers.live else None
        clock.planned = self._clock()
        if plan is not None:
            self.answers.note_plan(plan)
        if plan is not None and plan.scheduled:
            self._compute(plan, clock)
            self._progress_ns = clock.planned
            self._view_due = True
            if self.phase == "stalled":
                self._set_phase("ready", "")
        else:
            self._look_for_stall(plan, clock.planned)
        self._publish_view(clock.planned)
        self._publish_progress(clock.planned)
        self._flush()
        self._last_step_ns = self._clock()
        return took or (plan is not None and bool(plan.scheduled or plan.preempted))

    def _compute(self, plan: StepPlan, clock: StepClock) -> None:
        self._step += 1
        try:
            out = self.runner.execute(plan)
        except torch.AcceleratorError:
            raise  # the device's context is lost: every later step would fail too
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            log.exception(
                "step %d failed; its %d requests end with an error", self._step, len(plan.scheduled)
            )
            code: ErrorCode = (
                "oom" if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else "internal"
            )
            why = text_of(error)
            for scheduled in plan.scheduled:
                self.answers.finish(scheduled.request, "error", self._clock(), code=code, message=why)
            return
        clock.computed = self._clock()
        self.scheduler.advance(plan)
        self.answers.accept(plan, out, clock.computed)
        clock.accepted = clock.detokenized = self._clock()
        if self.config.check:
            self.scheduler.check()
        clock.end = self._clock()
        self.answers.events.append(
            step_row(
                self._step,
                clock,
                plan,
                out,
                self.scheduler,
                publish_ns=self._publish_ns,
                attention=self.runner.attention_name,
                cfg_rev=self.knobs.rev,
            )
        )

    def _take_inbox(self, now_ns: int) -> bool:
        """Act on what came in. True if anything did."""
        took = False
        while self._inbox:
            item = self._inbox.popleft()
            took = True
            if isinstance(item, Request):
                self._accept_request(item, now_ns)
            elif isinstance(item, Proposal):
                if self.phase == "stopping":
                    self.knobs.abandon()
                else:
                    self._apply(item, now_ns)
            elif isinstance(item, int):
                self.answers.stopped(item, now_ns)
            else:
                rids, why = item
                for rid in rids:
                    if (request := self.answers.live.get(rid)) is not None:
                        self.answers.finish(request, "cancelled", now_ns, code="cancelled", message=why)
                self._view_due = True
        return took

    def _accept_request(self, request: Request, now_ns: int) -> None:
        self.answers.begin(request)
        pool = self.scheduler.pool
        try:  # again, because the pool may have been rebuilt since
            check_fit(request, self.scheduler.blocks_for(request), pool.num_blocks, pool.block_size)
        except RequestRefused as refused:
            self.answers.finish(request, "error", now_ns, code=refused.code, message=refused.message)

    def _apply(self, proposal: Proposal, now_ns: int) -> None:
        """Change the configuration between two steps, or leave all as it was and say why."""
        if proposal.mode != "step":
            self._set_phase("applying", "")
            self._flush()
        preempted, why = 0, ""
        try:
            preempted = reconfigure(self, proposal, now_ns)
        except (PatchRefused, MemoryError, RuntimeError, ValueError) as error:
            why = text_of(error)
            self.knobs.abandon()
        else:
            self.answers.cfg_rev = self.knobs.commit(proposal)
            self._obey()
        self._view_due = True
        self._view_ns = 0
        done_ns = self._clock()
        self.answers.events.append(
            ApplyEvent(
                apply_id=proposal.apply_id,
                from_rev=proposal.from_rev,
                to_rev=self.knobs.rev,
                result="rolled_back" if why else "ok",
                t_ns=done_ns,
                at_step=self._step + 1,
                took_us=(done_ns - now_ns) // 1000,
                mode=proposal.mode,
                patch=dict(proposal.changed),
                preempted=preempted,
                why=why[:4096],
            )
        )
        if why:
            log.warning("change %d was rolled back: %s", proposal.apply_id, why)
        if self.phase == "applying":
            self._set_phase("ready", "")

    def _obey(self) -> None:
        """Have the parts that read no plan obey the knobs as they are."""
        self.answers.delivery.batched = bool(self.knobs["batched_detokenize"])
        self.results.configure(self.knobs.values)

    def _look_for_stall(self, plan: StepPlan | None, now_ns: int) -> None:
        """Work waits and nothing was done: after a while that is a stall, told to everybody."""
        if plan is None:
            self._progress_ns = now_ns
            if self.phase == "stalled":
                self._set_phase("ready", "")
            return
        waited_s = (now_ns - self._progress_ns) / 1e9
        if waited_s < self.config.stall_after_s or self.phase == "stalled":
            return
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        reason = f"{waiting} requests wait and {running} run, but nothing was computed for {waited_s:.1f} s"
        self._set_phase("stalled", f"{reason}: {plan.reason or 'the plan is empty'}")
        log.error("%s", self._reason)

    def _publish_view(self, now_ns: int) -> None:
        interval_ns = int(self.config.block_view_interval_s * 1e9)
        if self._view_due and (now_ns - self._view_ns >= interval_ns or not self.answers.live):
            self.answers.events.append(self.scheduler.pool.view(now_ns))
            self._view_ns = now_ns
            self._view_due = False

    def _publish_progress(self, now_ns: int) -> None:
        """Rows of the running requests, so that whoever watches sees their tokens grow."""
        if now_ns - self._progress_rows_ns >= int(self.config.progress_interval_s * 1e9):
            self._progress_rows_ns = now_ns
            self.answers.events += [request.row() for request in self.scheduler.running]

    def _set_phase(self, phase: Phase, reason: str) -> None:
        self.phase, self._reason, self._since_ns = phase, reason, self._clock()
        self.answers.events.append(self.state())

    def _flush(self) -> None:
        begin = self._clock()
        self.answers.flush()
        self._publish_ns = self._clock() - begin

    def _put(self, item: Request | tuple[list[int], str] | Proposal | int) -> None:
        with self._wakeup:
            if self._closed and isinstance(item, Request):
                raise RequestRefused("not_ready", "the engine is stopping")
            self._inbox.append(item)
            self._wakeup.notify()
