"""The forward pass of decoding and verifying steps, replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionPlan, Ints, Rows
from engine.batch import Batch
from engine.graphs.driver import Captured, Driver
from engine.graphs.shapes import GraphShape, shape_of
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec

log = logging.getLogger(__name__)

NO_SLOT = -1  # of a token that only fills a shape up: its keys and values are written nowhere


@runtime_checkable
class Capturable(AttentionBackend, Protocol):
    """An attention backend whose launches depend on the shape of a step alone."""

    def pack(self, rows: Rows, count: int, width: int) -> Ints:
        """What its plan sends to the device, for ``count`` rows of tables of ``width`` blocks."""
        ...


@dataclass(slots=True)
class GraphCounts:
    """What became of steps while graphs were switched on."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # by reason
    tokens: int = 0  # computed in replays, padding included
    padded_tokens: int = 0  # of them, those computed for nobody


@dataclass(slots=True)
class _Entry:
    """A captured shape: static memory for what goes in, and what comes out of a replay."""

    shape: GraphShape
    host: Tensor  # int64 words, page-locked: ids, positions, slots, then what attention packs
    device: Tensor  # the same on the device
    logits: Tensor | None = None
    finite: Tensor | None = None
    captured: Captured | None = None
    plan: AttentionPlan | None = None  # holds memory that the graph works in

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, positions and slots [tokens], and what belongs to attention, on the device."""
        n = self.shape.tokens
        held = self.device
        return held[:n], held[n : 2 * n], held[2 * n : 3 * n], held[3 * n :]


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
        *,
        max_blocks: int,
        budget_bytes: int,
    ) -> None:
        """max_blocks: of a request. No shape is captured once ``budget_bytes`` of device memory are taken."""
        self.counts = counts
        self._decoder = decoder
        self._ops = decoder.ops
        self._attention = attention
        self._kv = kv
        self._spec = spec
        self._driver = driver
        self._max_blocks = max_blocks
        self._budget = budget_bytes
        self._entries: dict[GraphShape, _Entry] = {}
        self._refused: dict[GraphShape, str] = {}
        self.nbytes = 0
        """Bytes of device memory that graphs took. Any thread may read it while a shape is captured."""

    def holds_for(self, attention: AttentionBackend, kv: KVCache, spec: ModelSpec) -> bool:
        """Whether graphs are still those of the decoder, with its parts, over this pool."""
        mine = self._attention, self._kv, self._ops
        return all(
            a is b for a, b in zip((*mine, self._spec), (attention, kv, self._decoder.ops, spec), strict=True)
        )

    @property
    def num_graphs(self) -> int:
        """Captured shapes."""
        return len(self._entries)

    def shape_of(self, batch: Batch) -> GraphShape | None:
        """The shape that a step is to be replayed in; None, and counted, if it has to run by itself.

        Launches nothing: it may be asked while another step is computed.
        """
        shape = shape_of(batch, self._max_blocks)
        if isinstance(shape, str):
            why = shape
        elif shape in self._entries:
            return shape
        else:
            why = self._refused.get(shape) or ("budget" if self.nbytes >= self._budget else "")
        if why:
            self.counts.misses[why] += 1
            return None
        assert isinstance(shape, GraphShape)
        return shape

    def __call__(self, batch: Batch, shape: GraphShape) -> Tensor | None:
        """Float32 logits of all tokens of a filled step, [tokens, vocab_size], valid until the next replay.

        None, and counted, if the shape could not be captured; the reason is in the log, once.
        """
        entry = self._entries.get(shape) or self._capture(shape)
        if entry is None:
            self.counts.misses[self._refused[shape]] += 1
            return None
        assert entry.captured is not None
        count = len(batch.ids)
        self._fill(entry, batch)
        entry.device.copy_(entry.host, non_blocking=True)
        entry.captured.replay()
        assert entry.logits is not None
        assert entry.finite is not None
        self._decoder.finite = entry.finite[:count]
        self.counts.hits += 1
        self.counts.tokens += shape.tokens
        self.counts.padded_tokens += shape.tokens - count
        return entry.logits[:count]

    def _capture(self, shape: GraphShape) -> _Entry | None:
        rows = _empty_rows(shape, self._max_blocks, self._kv.block_size)
        packed = self._attention.pack(rows, shape.rows, self._max_blocks)
        on_gpu = self._kv.device.type == "cuda"
        host = torch.zeros(3 * shape.tokens + len(packed), dtype=torch.int64, pin_memory=on_gpu)
        entry = _Entry(shape, host, torch.zeros_like(host, device=self._kv.device))
        entry.parts[2].fill_(NO_SLOT)  # nobody is there while it is captured
        try:
            entry.captured = self._driver.capture(self._body(entry, rows))
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError):  # the device itself is lost
                raise
            log.exception("steps of %s cannot be captured in a CUDA graph and run without", shape)
            self._refused[shape] = "failed"
            return None
        self._entries[shape] = entry
        self.nbytes += entry.captured.nbytes
        log.info("captured steps of %s, graphs take %d MiB now", shape, self.nbytes >> 20)
        return entry

    def _body(self, entry: _Entry, rows: Rows) -> Callable[[], None]:
        """The forward pass of a shape over its static memory."""
        ids, positions, slots, packed = entry.parts

        def body() -> None:
            entry.plan = self._attention.plan(rows, self._kv, self._spec, lambda ints: packed)
            entry.logits = self._decoder.forward(ids, positions, slots, entry.plan, self._kv, None)
            entry.finite = self._decoder.finite

        return body

    def _fill(self, entry: _Entry, batch: Batch) -> None:
        """Write a step to the host's side of the static memory, padded to its shape."""
        count, n = len(batch.ids), entry.shape.tokens
        words = entry.host.numpy()
        for i, (part, padding) in enumerate(((batch.ids, 0), (batch.positions, 0), (batch.slots, NO_SLOT))):
            words[i * n : i * n + count] = part
            words[i * n + count : (i + 1) * n] = padding
        words[3 * n :] = self._attention.pack(batch.rows, entry.shape.rows, self._max_blocks)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """How a prepared step is to be replayed."""

    forward: GraphedForward
    shape: GraphShape


def _empty_rows(shape: GraphShape, width: int, block_size: int) -> Rows:
    """Rows as full as a shape allows, of which only the shape counts."""
    num_new = np.full(shape.rows, shape.queries)
    starts = np.arange(shape.rows) * shape.queries
    tables = np.zeros((shape.rows, width), dtype=np.int64)
    single = shape.rows if shape.queries == 1 else 0
    return Rows(starts, num_new, np.zeros_like(num_new), tables, single, block_size)
