"""A step whose tokens are chosen in the graph that it is replayed from: launched first, read later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.choosing import fail_nonfinite, put_sampled, put_verified
from engine.current_device import make_current
from engine.graphs.forward import Chosen
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

    def feeds(self, prepared: Prepared) -> bool:
        """Whether a step may be launched right behind this one: the tokens that it lacks are chosen here."""
        mine, other = self.prepared.replay, prepared.replay
        if mine is None or other is None or mine.forward is not other.forward:
            return False
        here = {row.rid for row in self.prepared.batch.sampled_rows}
        lacking = (request.rid for _, request, _ in prepared.batch.pending)
        return mine.shape.feeds and other.shape.feeds and here.issuperset(lacking)

    def land(self, entries: Sequence[int] | None = None) -> StepOutput:
        """Wait for the tokens and take them, as `engine.choosing` does where the host chooses.

        entries: of the plan that still count. The blocks of all are cleaned of what is not finite.
        """
        batch, kv = self.prepared.batch, self.prepared.kv
        make_current(kv.device)
        tokens = self.chosen.read()
        began = time.perf_counter()
        out = StepOutput.of(self.prepared.num_entries)
        with torch.inference_mode():
            sampled = as_sampled(tokens.ids)
            if tokens.accepted:
                found = judge_drafts(sampled, batch.sampled_rows, batch.drafts, tokens.accepted, tokens.own)
                put_verified(found, batch, kv, out)
            elif any(batch.drafts):
                put_verified(match_drafts(sampled, batch.drafts), batch, kv, out)
            else:
                put_sampled(sampled, batch, kv, out)
            fail_nonfinite(tokens.finite, batch, kv, out)
        if entries is not None:
            out.keep(entries)
        self.prepared.tell(out)
        out.forward_s = self.forward.elapsed_s()
        out.sample_s = time.perf_counter() - began
        return out
