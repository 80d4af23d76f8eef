"""All layers of a decoder and its head in one call, for CPUs, where every part of them is in C++ anyway.

The call makes the parts' own calls, with the same numbers in the same order, so that what comes out is the
same bit for bit and what runs is told as before. Only the way from one to the next is shorter.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionPlan
from engine.attention.paged_native import NativePlan
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.native import Kernels, kernels
from engine.native.kernels import STORED_AS
from engine.native.panels import PanelProduct
from engine.native.structs import NativeProduct, Stack, StackLayer, StackPool, StackStep
from engine.ops.native_ops import are_native, head_factors, qkv_step
from engine.timing import Part, PartTimer

if TYPE_CHECKING:
    from engine.models.decoder import Decoder


class Stacks:
    """The calls that serve a decoder, each made when first needed. `forget` them when a layer is replaced."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], NativeStack | None] = {}
        self._starts: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of the layers, of the head
        self._pools = _Pools()

    def forget(self) -> None:
        """A linear layer is another one now."""
        self._made.clear()
        self._starts = None

    def of(
        self, decoder: Decoder, attention: AttentionPlan, rows: int, num_logits: int
    ) -> tuple[NativeStack, NativePlan] | None:
        """What computes ``rows`` tokens and the logits of so many of them, with the plan that it attends by.

        None if any part of the pass would be computed elsewhere.
        """
        if not isinstance(attention, NativePlan) or not are_native(decoder.ops):
            return None
        if self._starts is None:
            *layers, head = decoder.linears.values()
            self._starts = _starts(layers), _starts((head,))
        key = bisect_right(self._starts[0], rows), bisect_right(self._starts[1], num_logits)
        if key not in self._made:
            self._made[key] = _made(decoder, rows, num_logits, self._pools)
        stack = self._made[key]
        return None if stack is None else (stack, attention)


def _starts(linears: Iterable[LinearLayer]) -> tuple[int, ...]:
    return tuple(sorted({start for linear in linears for start in linear.starts}))


def _made(decoder: Decoder, rows: int, num_logits: int, pools: _Pools) -> NativeStack | None:
    products = [linear.native(rows) for linear in decoder.linears.values()]
    products[-1] = decoder.head.native(num_logits)
    whole = [product for product in products if product is not None]
    return NativeStack(decoder, whole, pools) if len(whole) == len(products) else None


class NativeStack:
    """One decoder's layers with the forms of their weights that serve some numbers of rows."""

    def __init__(self, decoder: Decoder, products: list[PanelProduct], pools: _Pools) -> None:
        """products: of each layer the four in the order of `engine.models.linears.PARTS`, then the head."""
        native = kernels()
        assert native is not None  # or there would be no such products
        self._native, self._pools = native, pools
        spec, layers = decoder.spec, decoder.layers
        self._spec, self._rotary, self._dtype = spec, decoder.rotary, decoder.activation_dtype
        structs = [_struct(native, product) for product in products]
        self._layers = (StackLayer * len(layers))(
            *(
                StackLayer(
                    *structs[4 * i : 4 * i + 4],
                    layer.input_norm.data_ptr(),
                    layer.post_norm.data_ptr(),
                    None if layer.head_norm is None else layer.head_norm.data_ptr(),
                )
                for i, layer in enumerate(layers)
            )
        )
        self._stack = Stack(
            ctypes.addressof(self._layers),
            decoder.norm.data_ptr(),
            len(layers),
            spec.hidden_size,
            spec.intermediate_size,
            STORED_AS[self._dtype],
            spec.rms_norm_eps,
            structs[-1],
        )
        # Whose memory is read by address.
        self._held = (
            products,
            decoder.norm,
            [(each.input_norm, each.post_norm, each.head_norm) for each in layers],
        )

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: NativePlan,
        kv: KVCache,
        logit_rows: Tensor | None,
        timer: PartTimer | None,
    ) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] are the embedded tokens, which are overwritten; the rest as for a decoder.

        Returns float32 logits [rows, vocab_size], and whether each token was finite, [tokens].
        """
        spec, native = self._spec, self._native
        tokens, num_logits = x.shape[0], x.shape[0] if logit_rows is None else logit_rows.shape[0]
        pools = self._pools.of(kv, spec.num_heads)
        logits, finite = torch.empty(num_logits, spec.vocab_size), torch.empty(tokens, dtype=torch.bool)
        seconds = np.zeros(len(Part))
        qkv = qkv_step(
            self._rotary, positions, slots, kv, (tokens, spec.num_heads, spec.num_kv_heads), self._dtype
        )
        step = StackStep(
            ctypes.addressof(qkv),
            ctypes.addressof(attention.items),
            attention.address,
            ctypes.addressof(pools),
            attention.windows.ctypes.data,
            x.data_ptr(),
            None if logit_rows is None else logit_rows.data_ptr(),
            num_logits,
            logits.data_ptr(),
            finite.data_ptr(),
            None,
            None if timer is None else seconds.ctypes.data,
        )
        stack = ctypes.byref(self._stack)
        scratch = torch.empty(native.stack_scratch(stack, ctypes.byref(step)), dtype=torch.uint8)
        step.scratch = scratch.data_ptr()
        native.run_stack(stack, ctypes.byref(step), torch.get_num_threads())
        if timer is not None:
            timer.add(seconds.tolist())
        return logits, finite


def _struct(native: Kernels, product: PanelProduct) -> NativeProduct:
    panels = product.panels
    at = (
        None if each is None else each.data_ptr()
        for each in (product.order, product.input_scales, product.bias)
    )
    return NativeProduct(native.address_of_linear(panels), panels.address, *at, panels.shape[0])


class _Pools:
    """The memory of the pool that was used last, as the library is told of it. Does not keep the pool."""

    def __init__(self) -> None:
        self._kv: weakref.ref[KVCache] | None = None
        self._layers: ctypes.Array[StackPool] = (StackPool * 0)()
        self._factors: list[Tensor | None] = []

    def of(self, kv: KVCache, heads: int) -> ctypes.Array[StackPool]:
        if self._kv is None or self._kv() is not kv:
            numbers = range(len(kv.k))
            self._factors = [head_factors(kv, layer, heads, scaled=False) for layer in numbers]
            self._layers = (StackPool * len(kv.k))(*(_pool(kv, i, self._factors[i]) for i in numbers))
            self._kv = weakref.ref(kv)
        return self._layers


def _pool(kv: KVCache, layer: int, factors: Tensor | None) -> StackPool:
    quantizer = kv.quantizer
    return StackPool(
        kv.k[layer].data_ptr(),
        kv.v[layer].data_ptr(),
        None if quantizer is None else quantizer.k_scale[layer].data_ptr(),
        None if quantizer is None else quantizer.v_scale[layer].data_ptr(),
        None if factors is None else factors.data_ptr(),
    )
