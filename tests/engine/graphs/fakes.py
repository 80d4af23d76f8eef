"""A driver that replays by running again, and parts of a decoder that can be captured without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionPlan, Rows
from engine.attention.base import Ints, Needs, ToDevice
from engine.attention.naive import NaiveAttention
from engine.kv_cache import KVCache
from engine.layers.rope import RotaryTable, rotate_
from engine.models.spec import ModelSpec
from engine.ops.base import Ops, StoreStep
from engine.ops.plain import PLAIN

GRAPH_BYTES = 1000


@dataclass
class Graph:
    """Replays by running the body again, over the same static memory."""

    body: Callable[[], None]
    nbytes: int = GRAPH_BYTES

    def replay(self) -> None:
        self.body()


class FakeDriver:
    """At the driver's edge: runs a body twice where a GPU would run and then capture it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.captures = 0
        self.fails = fails

    def capture(self, body: Callable[[], None]) -> Graph:
        body()
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        body()
        self.captures += 1
        return Graph(body)


class StaticAttention(NaiveAttention):
    """Naive attention over the rows that were packed last, as a kernel reads what lies on the device."""

    name = "paged"

    def __init__(self) -> None:
        self.rows: Rows | None = None

    def pack(self, rows: Rows, count: int, width: int) -> Ints:
        assert rows.tables.shape[0] <= count
        assert rows.tables.shape[1] <= width
        self.rows = rows
        return rows.starts[:1]

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        if to_device(rows.starts[:1]).data_ptr() == rows.starts.ctypes.data:
            return super().plan(rows, kv, spec, to_device)
        return _StaticPlan(self, kv, spec, Needs(new=False))


@dataclass
class _StaticPlan:
    """A plan over static memory: what is in there when it runs counts."""

    attention: StaticAttention
    kv: KVCache
    spec: ModelSpec
    needs: Needs

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert self.attention.rows is not None
        plan = NaiveAttention().plan(self.attention.rows, self.kv, self.spec, torch.from_numpy)
        return plan.attend(layer, q, k, v)


class PaddedStore:
    """Torch's way, but for tokens without a slot, which are written nowhere."""

    name = "padded"

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        def store(
            layer: int, qkv: Tensor, head_norm: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            kv_heads = kv.k[layer].shape[1]
            assert head_norm is None
            rotate_(qkv[:, :-kv_heads], *rotary.at(positions, dtype))
            there = slots >= 0
            kv.store(layer, slots[there], qkv[there])
            return qkv[:, : -2 * kv_heads], None, None

        return store


CAPTURABLE = Ops(PLAIN.norm, PaddedStore(), PLAIN.gate)
