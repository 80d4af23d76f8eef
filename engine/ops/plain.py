"""The parts of a decoder as torch computes them, one operation after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import Needs
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.norm import head_rms_norm, rms_norm
from engine.layers.quantized import AnyRows
from engine.layers.rope import RotaryTable, rotate_
from engine.ops.base import Ops, StoreStep

NAME = "torch"


class TorchAddNorm:
    """See `engine.ops.base.AddNorm`."""

    name = NAME
    quantizes = False

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to: LinearLayer
    ) -> Tensor:
        if delta is not None:
            x += delta
        return rms_norm(x, weight, eps)


class TorchStoreQKV:
    """See `engine.ops.base.StoreQKV`."""

    name = NAME

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        cos, sin = rotary.at(positions, dtype)
        kv_heads, turn = kv.k[0].shape[1], self.turn

        def store(
            layer: int, qkv: Tensor, head_norm: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor, Tensor]:
            turn(qkv, kv_heads, cos, sin, head_norm, eps)
            return kv.store(layer, slots, qkv, scaled=needs.scaled)

        return store

    def turn(
        self, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, head_norm: Tensor | None, eps: float
    ) -> None:
        """Norm the heads of queries and keys, for models that do, and rotate them, both in place."""
        qk = qkv[:, :-kv_heads]
        if head_norm is not None:
            qk.copy_(head_rms_norm(qk, head_norm, eps))
        rotate_(qk, cos, sin)


class TorchGate:
    """See `engine.ops.base.Gate`."""

    name = NAME
    quantizes = False

    def __call__(self, mlp: GatedMLP, x: AnyRows) -> Tensor:
        return mlp(x)


PLAIN = Ops(TorchAddNorm(), TorchStoreQKV(), TorchGate())
