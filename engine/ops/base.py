"""The interfaces of the parts of a decoder that can be computed in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.base import Needs
from engine.kv_cache import KVCache
from engine.layers.linear import LinearLayer
from engine.layers.mlp import GatedMLP
from engine.layers.quantized import AnyRows
from engine.layers.rope import RotaryTable

StoreStep = Callable[[int, Tensor, Tensor | None, float], tuple[Tensor, Tensor | None, Tensor | None]]
"""``(layer, qkv, head_norm, eps) -> q, k, v`` for the tokens of one step.

qkv: [tokens, heads + 2 * kv_heads, head_dim], contiguous, the product of queries, keys and values, which
may be overwritten. head_norm: [heads + kv_heads, head_dim], with ``eps``, or None for models without. The new
keys and values are in the pool then. Returns the queries [tokens, heads, head_dim] in the pool's
``compute_dtype``, and keys and values as they are stored, [tokens, kv_heads, head_dim], or None where nobody
reads them.
"""


class AddNorm(Protocol):
    """The residual addition and the norm behind it."""

    name: str
    quantizes: bool
    """Whether it gives `QuantizedRows` to a product that takes them."""

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to: LinearLayer
    ) -> AnyRows:
        """Add ``delta`` to ``x`` in place (None: nothing), and return the norm of the sum in new memory.

        x, delta: [tokens, hidden], contiguous. weight: [hidden]. The result has the dtype of x, unless
        ``to``, the product that reads it, takes rows in 8 bits and this part quantizes.
        """
        ...


class StoreQKV(Protocol):
    """From the product of queries, keys and values to what attention reads."""

    name: str

    def begin(
        self,
        rotary: RotaryTable,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        needs: Needs,
        dtype: torch.dtype,
    ) -> StoreStep:
        """What serves each layer of one step, for tokens at ``positions`` [tokens] and ``slots`` [tokens].

        ``needs`` says in what form attention wants them. ``dtype`` is that of the products.
        """
        ...


class Gate(Protocol):
    """The feed-forward layer around its activation."""

    name: str
    quantizes: bool
    """Whether it gives `QuantizedRows` to a product that takes them."""

    def __call__(self, mlp: GatedMLP, x: AnyRows) -> Tensor:
        """``down(silu(gate(x)) * up(x))`` for x [tokens, hidden], as a new tensor of that shape."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The parts that a decoder runs with. Replaced as a whole, between two steps."""

    norm: AddNorm
    store: StoreQKV
    gate: Gate
