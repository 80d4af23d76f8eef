"""Rounds of drafts, replayed: each takes what it continues from the device, and leaves what it says there.

A round computes the newest token of each request that is drafted for, and chooses the one that it would go on
with. As that is taken from and put to where all steps find what is not on the host yet (`Newest`), the rounds
of a step and its verification are launched one behind the other, and nobody waits for any of them.

They may be launched behind another step's verification too. Then they are moved to where they belong, as the
step that they are made for is (see `engine.graphs.moving`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionPlan, Ints
from engine.batch import Batch
from engine.graphs.capturing import Captures
from engine.graphs.choosing import CHOICE_WORDS, POSITION_WORD, GraphChooser
from engine.graphs.driver import Arrival, Captured, Driver
from engine.graphs.forward import Capturable, empty_rows
from engine.graphs.moving import words_to_move
from engine.graphs.newest import NOBODY, cell_of
from engine.graphs.shapes import NO_SLOT, ROWS
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.ops.base import Ops
from engine.penalties import SampledRequest

RunsWith = tuple[Decoder, AttentionBackend, KVCache, ModelSpec]
"""What a drafter's passes are computed by, over which pool, and the model that drafts with its windows."""

MOST_QUERIES = 2  # the token before the newest one too, where the draft before was accepted as a whole


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Up to ``rows`` requests of up to ``queries`` tokens to compute, each of which gets one token.

    ``moved``: they lie behind drafts of the step before.
    """

    rows: int
    queries: int
    moved: bool = False

    @classmethod
    def of(cls, rows: int, queries: int, *, moved: bool = False) -> RoundShape:
        """The smallest one for so many requests, or the largest that there is."""
        return cls(ROWS[min(bisect_left(ROWS, rows), len(ROWS) - 1)], queries, moved)

    @property
    def tokens(self) -> int:
        """Tokens that a replay computes, however few there are."""
        return self.rows * self.queries

    def __str__(self) -> str:
        return f"{self.rows}x{self.queries}+draft{'+moved' * self.moved}"


@dataclass(slots=True)
class _Entry:
    """A captured shape and its static memory: see `GraphedRounds._sizes`."""

    device: Tensor
    captured: Captured
    plan: AttentionPlan  # holds memory that the graph works in


class GraphedRounds:
    """Captures the rounds of a drafter when their shapes are first met, and replays them from then on.

    Good for one decoder with its parts, backend, pool and windows, as long as the target's graphs hold.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Capturable,
        kv: KVCache,
        spec: ModelSpec,
        driver: Driver,
        chooser: GraphChooser,
        captures: Captures,
        *,
        max_blocks: int,
    ) -> None:
        """spec: of what drafts, with its windows. chooser, captures: of the target. max_blocks: of a row."""
        self._decoder = decoder
        self._ops: Ops = decoder.ops
        self._attention = attention
        self._kv = kv
        self._spec = spec
        self._driver = driver
        self._chooser = chooser
        self._captures = captures
        self._max_blocks = max_blocks
        self._entries: dict[RoundShape, _Entry] = {}

    def holds_for(self, decoder: Decoder, attention: AttentionBackend, kv: KVCache, spec: ModelSpec) -> bool:
        """Whether graphs are still those of the decoder, with its parts, over this pool."""
        mine = self._decoder, self._ops, self._attention, self._kv, self._spec
        now = decoder, decoder.ops, attention, kv, spec
        return all(a is b for a, b in zip(mine, now, strict=True))

    @property
    def num_graphs(self) -> int:
        """Captured shapes."""
        return len(self._entries)

    def drop(self) -> None:
        """Forget the graphs, with static memory, and which shapes could not be captured.

        What they worked in stays with other graphs.
        """
        self._captures.forget_refused(RoundShape)
        self._captures.nbytes -= sum(entry.device.nbytes for entry in self._entries.values())
        self._entries.clear()

    def why_not(self, shapes: Collection[RoundShape]) -> str:
        """Capture what of these shapes is not captured yet. In a word why one cannot be replayed, else ""."""
        for shape in shapes:
            if shape in self._entries:
                continue
            why = self._captures.why_not(shape, self._working_bytes(shape))
            if why is not None:
                return why
            if not self._capture(shape):
                return self._captures.why_failed(shape)
        return ""

    def compute(self, forward: Callable[[], object]) -> None:
        """Launch a pass that is not replayed, in turn with all rounds."""

        def body() -> None:
            forward()

        self._driver.run(body)

    def launch(self, shape: RoundShape, batch: Batch, rows: Sequence[SampledRequest], place: int) -> None:
        """Compute a round, and keep what it says as the tokens at ``place`` >= 1 of the requests' slots.

        The shape is captured. Ids of the batch may be `awaited`. ``rows``: the requests as the token is
        chosen for them, all of the batch's in the order of its logits. The host waits for nothing.
        """
        entry = self._entries[shape]
        host = self._driver.host(len(entry.device))
        ids, positions, slots, wanted, cells, choice, moves, attention = np.split(
            host.numpy(), np.cumsum(self._sizes(shape))
        )
        count = len(batch.ids)
        ids[:count], positions[:count] = batch.ids, batch.positions
        slots[:count], slots[count:] = batch.slots, NO_SLOT
        wanted[: len(rows)] = batch.logit_tokens
        cells[: len(rows)] = [cell_of(row.slot, place) for row in rows]
        cells[len(rows) :] = NOBODY
        choice[:] = self._pack(rows, shape)
        if shape.moved:
            self._chooser.moves.fill_moves(moves, shape.rows, shape.tokens, batch)
        attention[:] = self._attention.pack(batch.rows, shape.rows, self._max_blocks)
        self._driver.send(host, entry.device)
        entry.captured.replay()

    def fetch(self, rounds: int) -> tuple[Arrival, Tensor]:
        """Let what so many rounds said come to the host: see `Newest.drafted`."""
        drafted = self._chooser.newest.drafted(rounds)
        host = self._driver.host(len(drafted))
        return self._driver.fetch(drafted, host), host

    def _sizes(self, shape: RoundShape) -> list[int]:
        """Words of: ids, positions and slots of tokens; whose logits are wanted, where what these come to is
        kept, and what it takes to choose it, of rows; and how all that is moved. Attention has the rest.
        """
        moves = words_to_move(shape.rows, shape.tokens) if shape.moved else 0
        return [*[shape.tokens] * 3, *[shape.rows] * 2, CHOICE_WORDS * shape.rows, moves]

    def _pack(self, rows: Sequence[SampledRequest], shape: RoundShape) -> Ints:
        """What choosing takes, as the target would choose it at that place."""
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        settings = [row.sampling for row in rows]
        return self._chooser.fused.pack(settings, seeds, positions, shape.rows).reshape(-1)

    def _working_bytes(self, shape: RoundShape) -> int:
        """Of logits: in 16 bits, in float32, and in float32 over as many tokens as the target has."""
        return shape.rows * (6 * self._spec.vocab_size + 4 * self._chooser.vocab_size)

    def _capture(self, shape: RoundShape) -> bool:
        name = f"rounds of {shape}"
        entry = self._captures.attempt(shape, name, lambda: self._captured(shape))
        if entry is None:
            return False
        self._entries[shape] = entry
        self._captures.add(name, entry.captured.nbytes + entry.device.nbytes, self._working_bytes(shape))
        return True

    def _captured(self, shape: RoundShape) -> _Entry:
        """The forward pass of a shape over static memory with nobody in it, and the choice of tokens."""
        rows = empty_rows(shape.rows, shape.queries, self._max_blocks, self._kv.block_size)
        sizes = self._sizes(shape)
        words = sum(sizes) + len(self._attention.pack(rows, shape.rows, self._max_blocks))
        device = torch.zeros(words, dtype=torch.int64, device=self._kv.device)
        ids, positions, slots, wanted, cells, choice, moves, packed = torch.split(
            device, [*sizes, words - sum(sizes)]
        )
        slots.fill_(NO_SLOT)
        cells.fill_(NOBODY)
        chooser, decoder, plans = self._chooser, self._decoder, list[AttentionPlan]()
        if shape.moved:
            chooser.moves.clear_moves(moves, shape.rows, shape.tokens)

        def body() -> None:
            if shape.moved:
                by, each = chooser.moves.move(moves, slots, shape.rows)
                positions.add_(each)
                choice.view(CHOICE_WORDS, shape.rows)[POSITION_WORD].add_(by)
                self._attention.move(packed, by)
            plans[:] = [self._attention.plan(rows, self._kv, self._spec, lambda ints: packed)]
            logits = decoder.forward(
                chooser.newest.known(ids), positions, slots, plans[0], self._kv,
                None if shape.queries == 1 else wanted,
            )  # fmt: skip
            chooser.propose(logits, choice, cells)

        captured = self._driver.capture(body)
        return _Entry(device, captured, plans[0])
