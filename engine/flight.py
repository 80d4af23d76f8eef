"""A step whose tokens are chosen on the device, in its graph or behind it: launched first, read later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.choosing import fail_nonfinite, put_sampled, put_verified
from engine.current_device import make_current
from engine.graphs.memory import Chosen
from engine.sampling import as_sampled
from engine.speculation.verify import judge_drafts, match_drafts
from engine.step import Prepared, StepOutput
from engine.timing import Timer


@dataclass(frozen=True, slots=True)
class Flight:
    """Launched: the device works on it, and the host waits for nothing until `land`."""

    prepared: Prepared
    chosen: Chosen
    forward: Timer
    vocab_size: int
    copied_blocks: int = 0
    copying: Timer | None = None  # where any were copied

    @property
    def slots(self) -> dict[int, int]:
        """The slot that a token is chosen for here, by request."""
        return {row.rid: row.slot for row in self.prepared.batch.sampled_rows}

    def feeds(self, prepared: Prepared) -> dict[int, int] | None:
        """Whether a step may be launched right behind this one, as the tokens that it lacks are chosen here.

        Then the slot that each is chosen for, by request. None where one of the two steps takes part in no
        feeding, as its tokens are chosen by torch's operations, or nothing of it can be captured (see
        `engine.graphs.switch`). Behind drafts only what is replayed can be moved to where it belongs.
        """
        mine, other = self.prepared.way.feeding, prepared.way.feeding
        if mine is None or mine is not other:
            return None
        # One that was preempted meanwhile may have come back in another slot.
        here = self.slots
        lacking = {request.rid for _, request, _ in prepared.batch.pending}
        return {rid: here[rid] for rid in lacking} if here.keys() >= lacking else None

    def land(self, entries: Sequence[int] | None = None) -> StepOutput:
        """Wait for the tokens and take them, as `engine.choosing` does where the host chooses.

        entries: of the plan that still count. The blocks of all are cleaned of what is not finite; whether
        others had such is told too, as their blocks may be another's by then.
        """
        batch, kv = self.prepared.batch, self.prepared.kv
        make_current(kv.device)
        tokens = self.chosen.read()
        batch.take_drafts()
        began = time.perf_counter()
        out = StepOutput.of(self.prepared.num_entries)
        with torch.inference_mode():
            rows, drafts = batch.sampled_rows, batch.drafts
            places = [row for row, draft in zip(rows, drafts, strict=True) for _ in range(len(draft) + 1)]
            top = None if tokens.top is None else tokens.top.of(places, self.vocab_size)
            sampled = as_sampled(tokens.ids, top)
            if tokens.accepted:
                found = judge_drafts(sampled, rows, drafts, tokens.accepted, tokens.own)
                put_verified(found, batch, kv, out)
            elif any(drafts):
                put_verified(match_drafts(sampled, drafts), batch, kv, out)
            else:
                put_sampled(sampled, batch, kv, out)
            fail_nonfinite(tokens.finite, batch, kv, out)
        if entries is not None:
            out.keep(entries)
        self.prepared.tell(out)
        out.copied_blocks, out.copy_s = self.copied_blocks, self.copying.elapsed_s() if self.copying else 0.0
        out.forward_s = self.forward.elapsed_s()
        out.sample_s = time.perf_counter() - began
        return out
