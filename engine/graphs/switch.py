"""Whether steps are replayed from graphs, and those that hold for the decoder as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch
from engine.graphs.choosing import GraphChooser
from engine.graphs.direct import DirectStep
from engine.graphs.drafting import GraphedRounds, RoundShape, RunsWith
from engine.graphs.driver import Driver, make_driver, probe
from engine.graphs.forward import Capturable, GraphCounts, GraphedForward, GraphStep
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.ops import compiled_ops
from engine.ops.plain import PLAIN
from engine.speculation.verify import DraftSampler
from ipc.messages import GraphUse

BUDGET_BYTES = 1 << 30  # of device memory for graphs


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is computed: replayed, or by itself, ``missed`` saying in a word why: "" while graphs are
    off. ``direct``: how its tokens are chosen on the device then.
    """

    replay: GraphStep | None = None
    missed: str = ""
    direct: DirectStep | None = None

    @property
    def feeding(self) -> GraphChooser | None:
        """What chooses its tokens on the device and feeds them to the next step there, if anything does."""
        if self.replay is not None and self.replay.chooses:
            return self.replay.forward.chooser
        return None if self.direct is None else self.direct.forward.chooser


class Graphs:
    """Off at first. Only `step_for` may be called while a step is computed."""

    def __init__(
        self, decoder: Decoder, sampler: DraftSampler, padded: Tensor | None, device: torch.device
    ) -> None:
        """padded: ids that no token belongs to, on the device, which are never chosen."""
        self.counts = GraphCounts()
        self._decoder = decoder
        self._sampler = sampler
        self._padded = padded
        self._device = device
        self._driver: Driver | None = None  # there while it is on
        self._forward: GraphedForward | None = None

    @property
    def on(self) -> bool:
        """Whether steps are replayed where they can be."""
        return self._driver is not None

    def switch(self, on: bool) -> None:
        """Replay steps from the next one on, or no longer. ValueError with the reason if that cannot be."""
        if on == self.on:
            return
        if on:
            reason = probe(self._device)
            if reason is not None:
                raise ValueError(f"cuda_graphs cannot be switched on: {reason}")
            self.counts = GraphCounts()
            self._driver = make_driver(self._device)
        else:
            self._driver = None
            self.drop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Replay no steps meanwhile, which are not counted. What was captured is kept."""
        driver, self._driver = self._driver, None
        try:
            yield
        finally:
            self._driver = driver

    def drop(self) -> None:
        """Forget all graphs, and the memory that they use."""
        self._forward = None

    def forget_texts(self) -> None:
        """A step was dropped, with what it may have fed: rely on no text that the device has counted."""
        if self._forward is not None:
            self._forward.forget_texts()

    def use(self) -> GraphUse | None:
        """What became of steps since this was switched on, None while it is off. Any thread."""
        if not self.on:
            return None
        counts, forward = self.counts, self._forward
        return GraphUse(
            replayed_n=counts.hits,
            replayed_tok=counts.tokens,
            padded_tok=counts.padded_tokens,
            missed_n=dict(counts.misses),
            logits_n=dict(counts.logits),
            ahead_n=counts.ahead,
            drafted_n=counts.drafted,
            drafts_missed_n=dict(counts.drafts_missed),
            drafts_read_n=counts.drafts_read,
            drafts_waited_n=dict(counts.drafts_waited),
            graphs_n=0 if forward is None else forward.num_graphs,
            graph_bytes=0 if forward is None else forward.nbytes,
            budget_bytes=BUDGET_BYTES,
        )

    def step_for(
        self, batch: Batch, attention: AttentionBackend, kv: KVCache, spec: ModelSpec, max_len: int
    ) -> Way:
        """How a step is to be computed.

        spec: with the windows that are in force. max_len: of a request, in tokens.
        """
        if self._driver is None:
            return Way()
        forward = self._forward_for(attention, kv, spec, max_len)
        if isinstance(forward, str):
            return Way(missed=forward)
        found, direct = forward.step_for(batch)
        return Way(None, found, direct) if isinstance(found, str) else Way(found, "", direct)

    def rounds_for(
        self,
        shapes: Collection[RoundShape],
        outside: str,
        runs_with: RunsWith,
        attention: AttentionBackend,
        kv: KVCache,
        spec: ModelSpec,
        max_len: int,
    ) -> GraphedRounds | None:
        """What replays the rounds of a step's drafts, in all of these shapes; None, and counted by the
        reason, if that cannot be. Without shapes nothing is to be drafted, or counted.

        outside: in a word why what is drafted needs the host, "" if it does not. The rest: see `step_for`.
        """
        if self._driver is None:
            return None
        rounds: GraphedRounds | str = outside
        if not outside:
            rounds = self._rounds(runs_with, attention, kv, spec, max_len)
        why = rounds if isinstance(rounds, str) else rounds.why_not(shapes)
        if why or isinstance(rounds, str):
            self.counts.drafts_missed[why] += bool(shapes)
            return None
        self.counts.drafted += bool(shapes)
        return rounds

    def why_no_rounds(
        self,
        shapes: Collection[RoundShape],
        runs_with: RunsWith,
        attention: AttentionBackend,
        kv: KVCache,
        spec: ModelSpec,
        max_len: int,
    ) -> str:
        """In a word why rounds of these shapes would not be replayed, "" if they would. Counts nothing."""
        if self._driver is None:
            return "off"
        rounds = self._rounds(runs_with, attention, kv, spec, max_len)
        return rounds if isinstance(rounds, str) else rounds.why_not(shapes)

    def drop_rounds(self) -> None:
        """Forget the graphs of rounds."""
        if self._forward is not None and self._forward.rounds is not None:
            self._forward.rounds.drop()
            self._forward.rounds = None

    def warm_up(
        self,
        attention: AttentionBackend,
        kv: KVCache,
        spec: ModelSpec,
        max_len: int,
        max_rows: int,
        told: Callable[[int, int], None],
    ) -> None:
        """Compile what graphs will hold, if any can be captured. See `GraphedForward.warm_up`."""
        if self._driver is None:
            return
        forward = self._forward_for(attention, kv, spec, max_len)
        if not isinstance(forward, str):
            forward.warm_up(max_rows, told)

    def _forward_for(
        self, attention: AttentionBackend, kv: KVCache, spec: ModelSpec, max_len: int
    ) -> GraphedForward | str:
        """What replays steps of the decoder as it is now, or in a word why none can be."""
        assert self._driver is not None
        forward, fused, timed = self._forward, self._sampler.fused, self._decoder.timer is not None
        if forward is not None and not timed and forward.holds_for(attention, kv, spec, fused):
            return forward
        why = _why_not(self._decoder, attention)
        if why or not isinstance(attention, Capturable):
            return why
        chooser = None
        if fused is not None:
            chooser = GraphChooser(self._sampler, fused, self._padded, self._device)
        self._forward = GraphedForward(
            self._decoder, attention, kv, spec, self._driver, self.counts, chooser,
            max_blocks=-(-max_len // kv.block_size), budget_bytes=BUDGET_BYTES,
        )  # fmt: skip
        return self._forward

    def _rounds(
        self,
        runs_with: RunsWith,
        attention: AttentionBackend,
        kv: KVCache,
        spec: ModelSpec,
        max_len: int,
    ) -> GraphedRounds | str:
        """What replays rounds of a drafter as it is now, or in a word why none can be."""
        assert self._driver is not None
        forward = self._forward_for(attention, kv, spec, max_len)
        if isinstance(forward, str):
            return forward
        if forward.chooser is None:
            return "fused_sampling"
        if forward.rounds is not None and forward.rounds.holds_for(*runs_with):
            return forward.rounds
        decoder, backend, pool, windowed = runs_with
        why = _why_not(decoder, backend)
        if why or not isinstance(backend, Capturable):
            return why
        self.drop_rounds()
        forward.rounds = GraphedRounds(
            decoder, backend, pool, windowed, self._driver, forward.chooser, forward.captures,
            max_blocks=-(-max_len // kv.block_size),
        )  # fmt: skip
        return forward.rounds


def _why_not(decoder: Decoder, attention: AttentionBackend) -> str:
    """Which part of a decoder cannot be captured as it is, "" if all can."""
    if decoder.timer is not None:
        return "forward_timing"  # its marks mean something only where they are launched one by one
    if not isinstance(attention, Capturable):
        return "attention"
    without_padding = PLAIN.store.name, compiled_ops.NAME
    return "rope_kv" if decoder.ops.store.name in without_padding else ""
