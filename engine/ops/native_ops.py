"""The parts of a decoder in C++, for CPUs: each one call, where torch makes several passes over memory.

They compute in float32, whatever the activations are stored in. The kernels are compiled at first use.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.attention.base import Needs
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.quantized import AnyRows
from engine.layers.rope import RotaryTable
from engine.models.spec import ModelSpec
from engine.native import Kernels, kernels, unavailable
from engine.native.kernels import STORED_AS
from engine.native.structs import QKVLayer, QKVStep
from engine.ops.base import AddNorm, Gate, Ops, StoreQKV, StoreStep

NAME = "native"


def probe(knob: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the part behind a knob cannot run here, or None. The first call on a machine compiles it."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the C++ kernels need activations in float32 or bfloat16, not {dtype}"
    return unavailable() or None


def add_norm() -> AddNorm:
    """One pass over each row for the addition and the norm."""
    return _AddNorm(_kernels())


def store_qkv() -> StoreQKV:
    """One pass for the norm of heads, the rotation and the write to the pool."""
    return _StoreQKV(_kernels())


def gate() -> Gate:
    """One pass between the two products."""
    return _Gate(_kernels())


def _kernels() -> Kernels:
    found = kernels()
    if found is None:
        raise RuntimeError(f"the C++ kernels cannot be used: {unavailable()}")
    return found


class _AddNorm:
    name = NAME
    quantizes = False

    def __init__(self, native: Kernels) -> None:
        self._add_norm = native.add_norm

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to: LinearLayer
    ) -> Tensor:
        y = torch.empty_like(x)
        self._add_norm[x.dtype](
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
            torch.get_num_threads(),
        )
        return y


class _Gate:
    name = NAME
    quantizes = False

    def __init__(self, native: Kernels) -> None:
        self._silu_mul = native.silu_mul

    def __call__(self, mlp: GatedMLP, x: AnyRows) -> Tensor:
        both = mlp.gate_up(x)
        y = both.new_empty(both.shape[0], mlp.intermediate)
        self._silu_mul[both.dtype](
            both.data_ptr(), y.data_ptr(), y.shape[0], y.shape[1], torch.get_num_threads()
        )
        return mlp.down(y)


class _StoreQKV:
    name = NAME

    def __init__(self, native: Kernels) -> None:
        self._native = native

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        return _Step(self._native, rotary, positions, slots, kv, needs)


class _Step:
    """See `engine.ops.base.StoreStep`."""

    def __init__(
        self,
        native: Kernels,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
    ) -> None:
        self._store = native.store_qkv
        self._held = (rotary, positions, slots)  # whose memory is read by address
        self._kv, self._needs = kv, needs
        self._step: QKVStep | None = None

    def __call__(
        self, layer: int, qkv: Tensor, head_norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        kv = self._kv
        k_pool, v_pool = kv.k[layer], kv.v[layer]
        tokens, all_heads, head_dim = qkv.shape
        kv_heads = k_pool.shape[1]
        heads = all_heads - 2 * kv_heads
        if self._step is None:
            self._step = qkv_step(*self._held, kv, (tokens, heads, kv_heads), qkv.dtype)
        q = torch.empty((tokens, heads, head_dim), dtype=kv.compute_dtype)
        factors = head_factors(kv, layer, heads, scaled=self._needs.scaled)
        self._store(
            ctypes.byref(self._step),
            ctypes.byref(
                QKVLayer(
                    qkv.data_ptr(),
                    None if head_norm is None else head_norm.data_ptr(),
                    None if factors is None else factors.data_ptr(),
                    q.data_ptr(),
                    k_pool.data_ptr(),
                    v_pool.data_ptr(),
                    eps,
                )
            ),
            torch.get_num_threads(),
        )
        if not self._needs.new:
            return q, None, None
        slots = self._held[2]
        return q, k_pool.index_select(0, slots), v_pool.index_select(0, slots)


def qkv_step(
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    kv: KVCache,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> QKVStep:
    """The tokens of one step, as the library is told of them. shape: tokens, heads, kv_heads. Keeps nothing.

    dtype: of the product of queries, keys and values.
    """
    return QKVStep(
        positions.data_ptr(),
        slots.data_ptr(),
        rotary.cos.data_ptr(),
        rotary.sin.data_ptr(),
        *shape,
        kv.k[0].shape[2],
        rotary.rotary_dim,
        STORED_AS[dtype],
        STORED_AS[kv.compute_dtype],
        STORED_AS[kv.dtype],
    )


def head_factors(kv: KVCache, layer: int, heads: int, *, scaled: bool) -> Tensor | None:
    """float32 [heads + 2 * kv_heads], what each head is multiplied by before it is written; None: nothing.

    ``scaled``: queries too, as `engine.attention.base.Needs` says.
    """
    if kv.quantizer is None:
        return None
    before = kv.quantizer.before[layer].flatten()
    if not scaled:
        before = before.clone()
        before[:heads] = 1.0
    return before


def are_native(ops: Ops) -> bool:
    """Whether all of the parts are of this module."""
    return isinstance(ops.norm, _AddNorm) and isinstance(ops.store, _StoreQKV) and isinstance(ops.gate, _Gate)
