"""The model runner: one step's copies, forward pass and sampling.

A step has two halves. `ModelRunner.prepare` builds everything that the host builds: it may run while the step
before it is computed by another thread. `ModelRunner.compute` does the rest, one step after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import Batch, Plan, ScheduledRow
from engine.choosing import choose_tokens, fail_nonfinite
from engine.current_device import make_current
from engine.flight import Flight
from engine.graphs.drafting import GraphedRounds, RoundShape, RunsWith
from engine.graphs.switch import Way
from engine.kv_cache import KVCache
from engine.native import forward_pass
from engine.plan import Copy
from engine.running_model import RunningModel
from engine.staging import OneCopy
from engine.step import Inputs, Prepared, StepOutput
from engine.swap import CopyFailed
from engine.timing import Part, Timer
from engine.traffic import StepTraffic

__all__ = ["CopyFailed", "ModelRunner", "Prepared", "StepOutput"]


class ModelRunner(RunningModel):
    """Runs steps of one model over one KV pool.

    The step thread owns it. Only `compute` may run on another thread, one call at a time, and while it does
    the step thread may call `prepare` and nothing else.
    """

    def warm_up(self, max_rows: int, told: Callable[[int, int], None]) -> None:
        """Compile the kernels of steps that will be replayed, of up to ``max_rows`` requests.

        Nothing where graphs are off. ``told`` hears how many shapes were run, and of how many.
        """
        make_current(self.device)
        with torch.inference_mode():
            self.graphs.warm_up(self._attention, self._pool(), self._windowed, self.max_len, max_rows, told)

    def prepare(self, scheduled: Sequence[ScheduledRow]) -> Prepared:
        """Build what a step with at least one request needs. May run while another step is computed.

        A request's newest token may still be pending (see `engine.batch`). Raises RuntimeError without a
        pool, and ValueError for a plan that contradicts its requests.
        """
        kv = self._pool()
        assert self._builder is not None  # there whenever the pool is
        with torch.inference_mode():
            started = time.perf_counter()
            batch = self._builder.build(scheduled)
            way = self.graphs.step_for(batch, self._attention, kv, self._windowed, self.max_len)
            replay = way.replay
            inputs = self._inputs(batch, kv) if replay is None else None
            traffic = self._traffic_of(batch)
            computed = len(batch.ids) if replay is None else replay.shape.tokens
            kernels = self._step_kernels(computed, replay)
            took = time.perf_counter() - started
        return Prepared(batch, inputs, way, kv, len(scheduled), traffic, kernels, took)

    def rounds_for(
        self,
        shapes: Collection[RoundShape],
        outside: str,
        runs_with: RunsWith,
    ) -> GraphedRounds | None:
        """What replays the rounds of the next step's drafts, if that can be. See `Graphs.rounds_for`."""
        make_current(self.device)
        target = self._attention, self._pool(), self._windowed, self.max_len
        with torch.inference_mode():
            return self.graphs.rounds_for(shapes, outside, runs_with, *target)

    def why_no_rounds(self, shapes: Collection[RoundShape], runs_with: RunsWith) -> str:
        """Why the rounds of the next step's drafts would not be replayed. See `Graphs.why_no_rounds`."""
        make_current(self.device)
        target = self._attention, self._pool(), self._windowed, self.max_len
        with torch.inference_mode():
            return self.graphs.why_no_rounds(shapes, runs_with, *target)

    def drop_rounds(self) -> None:
        """Forget the graphs of rounds: what they draft with goes."""
        self.graphs.drop_rounds()

    def compute(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> StepOutput:
        """Copy blocks, compute the tokens, and choose the next one of each request that lacks no more.

        Raises RuntimeError for a step that was not filled or belongs to another pool, `CopyFailed` for copies
        that failed, before anything else was done.
        """
        batch, kv = prepared.batch, prepared.kv
        if kv is not self.kv:
            raise RuntimeError("the KV pool was replaced since this step was prepared")
        if not batch.filled:
            raise RuntimeError("the step was not filled: call fill before compute")
        make_current(self.device)
        out = StepOutput.of(prepared.num_entries)
        with torch.inference_mode():
            copying, forward, until_sampling = (Timer(self.device) for _ in range(3))
            replay = prepared.way.replay
            if replay is None or not replay.chooses:
                self._read_drafts(batch)
            started = time.perf_counter()
            until_sampling.start()
            copied = self._host.run(copies, kv, copying) if copies else 0
            flight = self._launch_replay(prepared, copied, copying if copies else None)
            if flight is not None:
                return flight.land()
            self._read_drafts(batch)  # as it could not be replayed
            out.copied_blocks = copied
            self._note_missed(prepared)
            forward.start()
            logits = self._logits(prepared, forward.start)
            forward.stop()
            until_sampling.stop()
            choose_tokens(self.sampler, logits, batch, kv, out, self._padded)
            if self.decoder.finite is not None:
                fail_nonfinite(self.decoder.finite, batch, kv, out)
            took = time.perf_counter() - started
        prepared.tell(out)
        out.copy_s = copying.elapsed_s() if copies else 0.0
        out.forward_s = forward.elapsed_s()
        # Not the rest beside both: on a GPU copies to the host go on behind the forward pass.
        out.sample_s = max(0.0, took - until_sampling.elapsed_s())
        if self.decoder.timer is not None:
            parts = self.decoder.timer.seconds
            out.attention_s, out.linear_s, out.head_s = map(parts, (Part.ATTENTION, Part.LINEAR, Part.HEAD))
        return out

    def launch(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> Flight | None:
        """Copy blocks and begin a step whose tokens are chosen on the device, and wait for nothing.

        It is filled, or the step launched before it `feeds` it. None if its tokens are chosen elsewhere: then
        `compute` it, without the copies. Raises what `compute` raises.
        """
        make_current(self.device)
        copied, copying = 0, Timer(self.device) if copies else None
        if copying is not None:
            with torch.inference_mode():
                copied = self._host.run(copies, prepared.kv, copying)
        flight = self._launch_replay(prepared, copied, copying)
        direct = prepared.way.direct
        if flight is not None or direct is None:
            return flight
        assert prepared.inputs is not None  # a graph that ends with the logits leaves the choice to the host
        self._note_missed(prepared)
        with torch.inference_mode():
            forward = Timer(self.device)
            chosen = direct.forward.launch(prepared.batch, direct.choice, prepared.inputs, forward.start)
            forward.stop()
        return Flight(prepared, chosen, forward, self.spec.vocab_size, copied, copying)

    def _launch_replay(self, prepared: Prepared, copied: int, copying: Timer | None) -> Flight | None:
        """Replay a step with the choice of its tokens; None if it cannot be, then it has its inputs."""
        replay = prepared.way.replay
        if replay is None or not replay.chooses:
            return None
        if not (prepared.batch.filled or replay.shape.feeds):
            raise RuntimeError("the step was not filled: call fill before launch")
        make_current(self.device)
        with torch.inference_mode():
            forward = Timer(self.device)
            chosen = replay.forward.choose(prepared.batch, replay, forward.start)
            if chosen is None:
                self._go_without(prepared)
                return None
            forward.stop()
        return Flight(prepared, chosen, forward, self.spec.vocab_size, copied, copying)

    def settle(self, prepared: Prepared, accepted: Mapping[int, int]) -> None:
        """A step was launched behind drafts: now it is known how many tokens of each held, by request."""
        batch = prepared.batch
        batch.move(accepted)
        prepared.traffic = self._traffic_of(batch)

    def execute(self, plan: Plan, copies: Sequence[Copy] = ()) -> StepOutput:
        """Prepare and compute a step in one go. A plan without requests only makes the copies."""
        if plan.scheduled:
            prepared = self.prepare(plan.scheduled)
            prepared.fill()
            return self.compute(prepared, copies)
        out = StepOutput.of(0)
        if copies:
            timer = Timer(self.device)
            with torch.inference_mode():
                out.copied_blocks = self._host.run(copies, self._pool(), timer)
            out.copy_s = timer.elapsed_s()
        return out

    def forward(self, prepared: Prepared, wanted: Tensor | None) -> Tensor:
        """Float32 logits of a filled step's tokens in ``wanted``, None for all of them."""
        inputs = prepared.inputs or self._inputs(prepared.batch, prepared.kv)
        ids = self.to_device(prepared.batch.ids)
        with forward_pass():
            return self.decoder.forward(
                ids, inputs.positions, inputs.slots, inputs.attention, prepared.kv, wanted
            )

    def _logits(self, prepared: Prepared, begins: Callable[[], None]) -> Tensor:
        """Float32 logits of the tokens that a filled step wants, replayed or computed.

        ``begins`` is called again once a step that is replayed is ready to be sent.
        """
        replay = prepared.way.replay
        if replay is not None:
            logits = replay.forward.logits(prepared.batch, replay, begins)
            if logits is not None:
                return logits
            self._go_without(prepared)
        assert prepared.inputs is not None
        return self.forward(prepared, prepared.inputs.wanted)

    def _traffic_of(self, batch: Batch) -> StepTraffic:
        return self._traffic.step(batch.rows.num_new, batch.rows.num_computed, len(batch.logit_tokens))

    def _go_without(self, prepared: Prepared) -> None:
        """Let a step that was to be replayed run by itself. It was counted where it could not be."""
        prepared.way = Way(direct=prepared.way.direct)
        prepared.inputs = self._inputs(prepared.batch, prepared.kv)
        prepared.kernels = self._step_kernels(len(prepared.batch.ids))

    def _read_drafts(self, batch: Batch) -> None:
        """Wait for drafts that were only launched, as their verification takes none from the device."""
        if batch.awaits_drafts:
            self.graphs.counts.drafts_read += 1
            batch.take_drafts()

    def _note_missed(self, prepared: Prepared) -> None:
        """Count a step that is not replayed."""
        if prepared.way.missed:
            self.graphs.counts.misses[prepared.way.missed] += 1

    def _inputs(self, batch: Batch, kv: KVCache) -> Inputs:
        """What a step runs with that is not replayed."""
        # All rows in order, as when only decoding, need no selection.
        every = len(batch.logit_tokens) == len(batch.ids)
        arrays = [batch.positions, batch.slots, *([] if every else [batch.logit_tokens])]
        if self.device.type == "cpu":  # where nothing is copied at all
            plan = self._attention.plan(batch.rows, kv, self._windowed, self.to_device)
            positions, slots, *wanted = map(self.to_device, arrays)
        else:
            send = OneCopy(arrays, self.to_device)
            plan = self._attention.plan(batch.rows, kv, self._windowed, send)
            positions, slots, *wanted = send.taken()
        return Inputs(plan, positions, slots, wanted[0] if wanted else None)
