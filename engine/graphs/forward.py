"""Decoding and verifying steps, replayed: the forward pass and, where kernels do it, choosing tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionPlan, Ints, Rows
from engine.batch import Batch
from engine.graphs.capturing import Captures
from engine.graphs.choosing import GraphChooser, Needs
from engine.graphs.direct import DirectForward, DirectStep
from engine.graphs.driver import Captured, Driver
from engine.graphs.memory import Chosen, Result, SharedRows
from engine.graphs.newest import awaited
from engine.graphs.rejecting import place_proposals
from engine.graphs.shapes import NO_SLOT, ROWS, GraphShape, Kind, shape_of
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.out_of_memory import kind_of, text_of
from engine.sampling import FusedSampling

if TYPE_CHECKING:
    from engine.graphs.drafting import GraphedRounds

log = logging.getLogger(__name__)


@runtime_checkable
class Capturable(AttentionBackend, Protocol):
    """An attention backend whose launches depend on the shape of a step alone."""

    def pack(self, rows: Rows, count: int, width: int) -> Ints:
        """What its plan sends to the device, for ``count`` rows of tables of ``width`` blocks."""
        ...

    def move(self, words: Tensor, by: Tensor) -> None:
        """Let row r of packed ``words`` on the device lie ``by[r]`` positions further: int64 [count].

        All of them have as many new tokens as before.
        """
        ...


@dataclass(slots=True)
class GraphCounts:
    """What became of steps while graphs were switched on."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # by reason
    tokens: int = 0  # computed in replays, padding included
    padded_tokens: int = 0  # of them, those computed for nobody
    logits: Counter[str] = field(default_factory=Counter)  # hits that ended with the logits, by reason
    ahead: int = 0  # launched behind a step whose tokens were not read yet, replayed or not
    drafted: int = 0  # steps whose drafts were made in replayed rounds
    drafts_missed: Counter[str] = field(default_factory=Counter)  # in rounds that the host read, why
    drafts_waited: Counter[str] = field(default_factory=Counter)  # until tokens were read, by reason
    drafts_read: int = 0  # of ``drafted``, those whose drafts the host had to read before they were verified


BUFFERS = 2  # on the host: the next step may be launched before this one's results are read


@dataclass(slots=True)
class _Entry:
    """A captured shape: static memory for what goes in, and what comes out of a replay."""

    shape: GraphShape
    hosts: list[Tensor]  # int64 words: ids, positions, slots, then what choosing and attention pack
    device: Tensor  # the same on the device
    chosen: Tensor  # int64: see `Result`
    results: list[Tensor]  # the same on the host
    split: int  # where in the words that begins which belongs to attention
    turn: int = 0
    logits: Tensor | None = None  # float32 [tokens, vocab_size], where they are read
    proposals: Tensor | None = None  # float32 [tokens, vocab_size] at least, where drafts were drawn
    captured: Captured | None = None
    plan: AttentionPlan | None = None  # holds memory that the graph works in

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """ids, positions and slots [tokens], what choosing tokens needs, and attention, on the device."""
        n, held = self.shape.tokens, self.device
        return held[:n], held[n : 2 * n], held[2 * n : 3 * n], held[3 * n : self.split], held[self.split :]


class GraphedForward:
    """Captures a shape when it is first met, within a budget, and replays it from then on.

    Good for one decoder with its parts, backend, pool and windows; when any of them changes it has to go.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Capturable,
        kv: KVCache,
        spec: ModelSpec,
        driver: Driver,
        counts: GraphCounts,
        chooser: GraphChooser | None,
        *,
        max_blocks: int,
        budget_bytes: int,
    ) -> None:
        """chooser: what chooses tokens, None where that is not done by kernels. max_blocks: of a request.

        No shape is captured that would take graphs beyond ``budget_bytes`` of device memory.
        """
        self.counts = counts
        self._decoder = decoder
        self._ops = decoder.ops
        self._attention = attention
        self._kv = kv
        self._spec = spec
        self._driver = driver
        self._chooser = chooser
        self._direct = None if chooser is None else DirectForward(decoder, kv, driver, chooser)
        self._max_blocks = max_blocks
        self.captures = Captures(budget_bytes, kv.device)
        self.rounds: GraphedRounds | None = None  # of what drafts for it
        self._entries: dict[GraphShape, _Entry] = {}
        self._logits, self._proposals = (SharedRows(spec.vocab_size, kv.device) for _ in range(2))

    def holds_for(
        self, attention: AttentionBackend, kv: KVCache, spec: ModelSpec, fused: FusedSampling | None
    ) -> bool:
        """Whether graphs are still those of the decoder, with its parts, over this pool."""
        mine = self._attention, self._kv, self._ops, self._spec
        chooses = None if self._chooser is None else self._chooser.fused
        return fused is chooses and all(
            a is b for a, b in zip(mine, (attention, kv, self._decoder.ops, spec), strict=True)
        )

    @property
    def chooser(self) -> GraphChooser | None:
        """What chooses tokens, None where that is not done by kernels."""
        return self._chooser

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that graphs and their static memory took. Any thread."""
        return self.captures.nbytes

    @property
    def num_graphs(self) -> int:
        """Captured shapes, those of rounds included."""
        return len(self._entries) + (0 if self.rounds is None else self.rounds.num_graphs)

    def step_for(self, batch: Batch) -> tuple[GraphStep | str, DirectStep | None]:
        """How a step is to be replayed, or in a word why it has to run by itself; and how its tokens are
        chosen on the device then, None if they are not.

        Launches no step: it may be asked while another one is computed.
        """
        needs = None if self._chooser is None else self._needs_of(batch, self._chooser)
        direct = None if needs is None or self._direct is None else self._direct.step_for(batch, needs)
        shape = shape_of(batch, self._max_blocks)
        if isinstance(shape, str):
            return shape, direct
        outside = "fused_sampling"
        if needs is not None:
            shape, outside = needs.in_shape(shape)
        why = None if shape in self._entries else self._why_not(shape)
        return (GraphStep(self, shape, outside) if why is None else why), direct

    def forget_texts(self) -> None:
        """A step was dropped, with what it may have fed. Nothing may be computed meanwhile."""
        if self._chooser is not None:
            self._chooser.counts.forget()

    def _needs_of(self, batch: Batch, chooser: GraphChooser) -> Needs:
        """What a step's choice takes, and what it penalizes by there: the host does it if that cannot be."""
        needs = chooser.needs_of(batch)
        if needs.outside or not needs.adjusted or not chooser.counts.lacking or self._reserve_lists(chooser):
            return needs
        return replace(needs, outside="lists")

    def _reserve_lists(self, chooser: GraphChooser) -> bool:
        """Allocate the lists of penalties, within the budget. Whether they are there."""
        captures, lacking = self.captures, chooser.counts.lacking
        if captures.short or not captures.has_room(lacking):
            return False
        try:
            chooser.counts.reserve()
        except (RuntimeError, MemoryError) as error:
            if kind_of(error) != "memory":
                raise
            log.warning("no memory for the lists of penalties, the host counts tokens: %s", text_of(error))
            captures.lacked()
            return False
        captures.nbytes += lacking
        return True

    def logits(self, batch: Batch, step: GraphStep, begins: Callable[[], None]) -> Tensor | None:
        """Float32 logits of all tokens of a filled step, [tokens, vocab_size], valid until the next replay.

        ``begins`` is called when the step is ready to be sent. None, and counted, if the shape could not be
        captured; the reason is in the log, once.
        """
        entry = self._replay(batch, step.shape, begins)
        if entry is None:
            return None
        self.counts.logits[step.outside] += 1
        assert entry.logits is not None
        self._decoder.finite = Result.of(entry.chosen, entry.shape).finite[: len(batch.ids)].bool()
        return entry.logits[: len(batch.ids)]

    def choose(self, batch: Batch, step: GraphStep, begins: Callable[[], None]) -> Chosen | None:
        """Compute a step and choose its tokens; the host waits for nothing. None as in `logits`.

        The step may lack tokens that the one launched before it chooses.
        """
        entry = self._replay(batch, step.shape, begins)
        if entry is None:
            return None
        result = entry.results[entry.turn]
        arrival, count = self._driver.fetch(entry.chosen, result), len(batch.ids)
        return Chosen(arrival, Result.of(result, entry.shape), count, count)

    def _replay(self, batch: Batch, shape: GraphShape, begins: Callable[[], None]) -> _Entry | None:
        entry = self._entries.get(shape) or self._capture(shape)
        if entry is None:
            if not shape.moved:  # else it is prepared anew when it is known where its rows lie
                self.counts.misses[self.captures.why_failed(shape)] += 1
            return None
        assert entry.captured is not None
        entry.turn = (entry.turn + 1) % BUFFERS
        self._fill(entry, batch)
        begins()  # what comes before, capturing among it, is no part of what the step costs
        chooser = None if shape.kind == "logits" else self._chooser
        if chooser is not None:
            chooser.send(self._driver)
        self._driver.send(entry.hosts[entry.turn], entry.device)
        if entry.proposals is not None:
            for at, probs in place_proposals(batch):
                self._driver.send(probs, entry.proposals[at : at + len(probs)])
        entry.captured.replay()
        if chooser is not None:
            chooser.launched()
        self.counts.hits += 1
        self.counts.tokens += shape.tokens
        self.counts.padded_tokens += shape.tokens - len(batch.ids)
        return entry

    def _why_not(self, shape: GraphShape) -> str | None:
        """Why a shape is not captured, by what its logits alone will add to the memory of all graphs."""
        more = self._logits.lacking(shape.tokens) if shape.kind == "logits" else 0
        if shape.drawn:
            more += self._proposals.lacking(shape.tokens)
        return self.captures.why_not(shape, self._working_bytes(shape), more)

    def _working_bytes(self, shape: GraphShape) -> int:
        """What its logits take in memory that graphs share: in 16 bits, in float32, and as probabilities.

        With log-probabilities, also as they are before penalties and, twice, on the way to their sum. With
        penalties, what these take besides.
        """
        copies = 1 + shape.drawn + shape.logprobs * (2 + (shape.kind == "adjusted"))
        counting = 0 if self._chooser is None else self._chooser.counts.working_bytes(shape)
        return shape.tokens * (2 + 4 * copies) * self._spec.vocab_size + counting

    def warm_up(self, max_rows: int, told: Callable[[int, int], None]) -> None:
        """Run what graphs of decoding steps will hold, the largest first, up to ``max_rows`` requests.

        So that each variant of a kernel is compiled before anybody waits for it. Nothing is captured, and
        nothing in the pool changes. ``told`` hears how many shapes were run, and of how many. A shape that
        fails is told of when it is to be captured. RuntimeError if the device is lost.
        """
        kind: Kind = "logits" if self._chooser is None else "tokens"
        shapes = [GraphShape(rows, 1, kind) for rows in ROWS[: bisect_left(ROWS, max_rows) + 1]]
        for done, shape in enumerate(reversed(shapes)):
            told(done, len(shapes))
            if self._why_not(shape) is not None:
                continue
            try:
                self._body(*self._entry(shape))()
            except RuntimeError as error:
                if kind_of(error) == "lost":
                    raise
                log.exception("steps of %s could not be run before they are captured", shape)

    def _entry(self, shape: GraphShape) -> tuple[_Entry, Rows]:
        """Static memory for a shape, with nobody in it, and rows of that shape."""
        rows = empty_rows(shape.rows, shape.queries, self._max_blocks, self._kv.block_size)
        packed = self._attention.pack(rows, shape.rows, self._max_blocks)
        split = 3 * shape.tokens + (0 if self._chooser is None else self._chooser.num_words(shape))
        hosts, results = (
            [self._driver.host(words) for _ in range(BUFFERS)]
            for words in (split + len(packed), Result.num_words(shape))
        )
        device, chosen = (torch.zeros_like(each[0], device=self._kv.device) for each in (hosts, results))
        entry = _Entry(shape, hosts, device, chosen, results, split)
        entry.parts[2].fill_(NO_SLOT)  # nobody is there while it is captured
        if self._chooser is not None:
            self._chooser.clear(entry.parts[3], shape)
        return entry, rows

    def _capture(self, shape: GraphShape) -> _Entry | None:
        def captured() -> tuple[_Entry, Captured]:
            entry, rows = self._entry(shape)
            entry.captured = self._driver.capture(self._body(entry, rows))
            return entry, entry.captured

        name = f"steps of {shape}"
        found = self.captures.attempt(shape, name, captured)
        if found is None:
            return None
        entry, graph = found
        self._entries[shape] = entry
        nbytes = graph.nbytes + entry.device.nbytes + entry.chosen.nbytes
        self.captures.add(name, nbytes, self._working_bytes(shape))
        return entry

    def _body(self, entry: _Entry, rows: Rows) -> Callable[[], None]:
        """The forward pass of a shape over its static memory, and the choice of tokens."""
        ids, positions, slots, choice, packed = entry.parts
        chooser, shape = self._chooser, entry.shape
        result = Result.of(entry.chosen, shape)
        if shape.kind == "logits":
            entry.logits = self._take(self._logits, shape.tokens)
        if shape.drawn:
            entry.proposals = self._take(self._proposals, shape.tokens)

        def body() -> None:
            given = ids if chooser is None else chooser.feed(ids, shape)
            if shape.moved:
                assert chooser is not None  # else there are no such shapes
                self._attention.move(packed, chooser.move(positions, slots, choice, shape))
            entry.plan = self._attention.plan(rows, self._kv, self._spec, lambda ints: packed)
            known = given.clamp(min=0)
            logits = self._decoder.forward(known, positions, slots, entry.plan, self._kv, None)
            finite = self._decoder.finite
            assert finite is not None
            result.finite.copy_(finite)
            if entry.logits is not None:
                entry.logits.copy_(logits)
                return
            assert chooser is not None  # else there are no such shapes
            chooser.choose(logits, choice, shape, result, given, entry.proposals)

        return body

    def _take(self, shared: SharedRows, count: int) -> Tensor:
        """The first rows of memory that graphs share, which counts once it is there."""
        lacking = shared.lacking(count)
        taken = shared.first(count)
        self.captures.nbytes += lacking
        return taken

    def _fill(self, entry: _Entry, batch: Batch) -> None:
        """Write a step to the host's side of the static memory, padded to its shape."""
        count, n = len(batch.ids), entry.shape.tokens
        words = entry.hosts[entry.turn].numpy()
        for i, (part, padding) in enumerate(((batch.ids, 0), (batch.positions, 0), (batch.slots, NO_SLOT))):
            words[i * n : i * n + count] = part
            words[i * n + count : (i + 1) * n] = padding
        for at, request, _ in batch.pending:
            words[at] = awaited(batch.source_of(request))
        if entry.split > 3 * n:
            assert self._chooser is not None
            self._chooser.fill(words[3 * n : entry.split], entry.shape, batch)
        words[entry.split :] = self._attention.pack(batch.rows, entry.shape.rows, self._max_blocks)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """How a prepared step is to be replayed; ``outside``: why its tokens are chosen elsewhere, or ""."""

    forward: GraphedForward
    shape: GraphShape
    outside: str

    @property
    def chooses(self) -> bool:
        """Whether the graph ends with tokens."""
        return self.shape.kind != "logits"


def empty_rows(rows: int, queries: int, width: int, block_size: int) -> Rows:
    """Rows as full as a shape allows, of which only the shape counts."""
    num_new = np.full(rows, queries)
    starts = np.arange(rows) * queries
    tables = np.zeros((rows, width), dtype=np.int64)
    single = rows if queries == 1 else 0
    return Rows(starts, num_new, np.zeros_like(num_new), tables, single, block_size)
