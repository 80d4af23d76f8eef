"""The parts of a decoder as Triton kernels, one launch each. Triton is imported when a part is made.

Where the product behind a norm or an activation takes rows in 8 bits, for the number of rows at hand, they
are written so, which saves the product a launch and the memory half of what was written and read again. They
are, to the last bit, those that the product would make itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import Needs
from engine.kernels import availability
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.quantized import AnyRows, QuantizedRows
from engine.layers.rope import RotaryTable
from engine.models.spec import ModelSpec
from engine.ops.base import AddNorm, Gate, StoreQKV, StoreStep

NAME = "triton"


def probe(knob: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the part behind a knob cannot run here for this model, or None."""
    reason = availability.probe(device)
    if reason is not None:
        return reason
    from engine.kernels import qkv, rmsnorm, silu_mul

    if knob == "fused_norm":
        return rmsnorm.probe(spec.hidden_size, dtype)
    if knob == "fused_rope_kv":
        return qkv.probe(spec.head_dim, spec.rope.rotary_dim, dtype, dtype)
    return silu_mul.probe(spec.intermediate_size, dtype, quantized=False)


def add_norm() -> AddNorm:
    """One launch for the addition and the norm."""
    return _AddNorm()


def store_qkv() -> StoreQKV:
    """One launch for the norm of heads, the rotation and the write to the pool."""
    return _StoreQKV()


def gate() -> Gate:
    """One launch between the two products."""
    return _Gate()


def _codes_for(product: LinearLayer, rows: int, device: torch.device) -> QuantizedRows | None:
    """Memory for the input of a product in 8 bits, None for one that wants it in the activations' dtype."""
    return QuantizedRows.empty(rows, product.shape[1], device) if product.takes_codes(rows) else None


class _AddNorm:
    name = NAME
    quantizes = True

    def __init__(self) -> None:
        from engine.kernels.rmsnorm import add_rmsnorm

        self._kernel = add_rmsnorm

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to: LinearLayer
    ) -> AnyRows:
        added = None if delta is None else delta.contiguous()
        codes = _codes_for(to, len(x), x.device)
        if codes is not None:
            self._kernel(added, x, weight, eps, codes.codes, codes.scales).run()
            return codes
        y = torch.empty_like(x)
        self._kernel(added, x, weight, eps, y).run()
        return y


class _StoreQKV:
    name = NAME

    def __init__(self) -> None:
        from engine.kernels.qkv import qk_norm_rope_kv_write

        self._kernel = qk_norm_rope_kv_write

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        quantizer = kv.quantizer

        def store(
            layer: int, qkv: Tensor, head_norm: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            k, v = kv.k[layer], kv.v[layer]
            heads = qkv.shape[1] - 2 * k.shape[1]
            q = qkv.new_empty((len(qkv), heads, qkv.shape[2]), dtype=kv.compute_dtype)
            scales = None if quantizer is None else (quantizer.k_scale[layer], quantizer.v_scale[layer])
            self._kernel(
                qkv, positions, slots, rotary.cos, rotary.sin, q, k, v,
                head_norm=head_norm, eps=eps, scales=scales,
            ).run()  # fmt: skip
            if quantizer is not None and needs.scaled:
                q *= quantizer.before[layer, :heads]
            return (q, k[slots], v[slots]) if needs.new else (q, None, None)

        return store


class _Gate:
    name = NAME
    quantizes = True

    def __init__(self) -> None:
        from engine.kernels.silu_mul import silu_mul

        self._kernel = silu_mul

    def __call__(self, mlp: GatedMLP, x: AnyRows) -> Tensor:
        both = mlp.gate_up(x).contiguous()
        codes = _codes_for(mlp.down, len(both), both.device)
        if codes is not None:
            self._kernel(both, codes.codes, codes.scales).run()
            return mlp.down(codes)
        y = both.new_empty((len(both), mlp.intermediate))
        self._kernel(both, y).run()
        return mlp.down(y)
