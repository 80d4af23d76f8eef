"""The scales that a quantized KV cache divides by: static, one a layer and KV head, for keys and for values.

They are calibrated: the model reads a text with keys and values in its own precision, and the largest
magnitude that each head showed becomes the largest number that the storage can hold (per-head static scaling,
as in FP8 KV caches of vLLM and TensorRT-LLM). What is larger later is clamped. There is no default: a scale
that cannot be used is an error that says which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.spec import ModelSpec

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number of each storage that is used (OCP 8-bit floating point; symmetric 8-bit integers)."""


class KVScalesError(ValueError):
    """A scale of the KV cache is missing or cannot be used. Says of which layer and head, and its value."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """``k`` and ``v``, float32 [layers, kv_heads]: a stored number times its scale is the key or value.

    Raises `KVScalesError` for a scale that is not a positive, finite number, and for one that is missing.
    """

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        for what, scales in (("keys", self.k), ("values", self.v)):
            smallest = torch.finfo(torch.float32).tiny  # its reciprocal is finite
            good = scales.isfinite() & (scales >= smallest)
            if not good.all():
                layer, head = (~good).nonzero()[0].tolist()
                raise KVScalesError(
                    f"the scale of the {what} of layer {layer}, KV head {head} is "
                    f"{float(scales[layer, head])}, it must be positive and finite: the KV cache cannot be "
                    "quantized with it. Keep kv_dtype at model"
                )

    def check(self, spec: ModelSpec) -> None:
        """Raise `KVScalesError` unless there is a scale for every layer and head of the model."""
        for what, scales in (("keys", self.k), ("values", self.v)):
            layers, heads = scales.shape
            have = f"there are scales for {layers} layers of {heads} KV heads, the model has "
            have += f"{spec.num_layers} of {spec.num_kv_heads}"
            if layers < spec.num_layers or heads < spec.num_kv_heads:
                layer, head = (layers, 0) if layers < spec.num_layers else (0, heads)
                raise KVScalesError(
                    f"the scale of the {what} of layer {layer}, KV head {head} is missing: {have}"
                )
            if (layers, heads) != (spec.num_layers, spec.num_kv_heads):
                raise KVScalesError(f"the scales of the {what} belong to another model: {have}")


@dataclass(frozen=True, slots=True)
class Extremes:
    """Largest magnitude of the keys and values of a text, float32 [layers, kv_heads]."""

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, k: Sequence[Tensor], v: Sequence[Tensor]) -> Extremes:
        """Of the keys and values of each layer, [tokens, kv_heads, head_dim] in the model's own precision."""

        def largest(layers: Sequence[Tensor]) -> Tensor:
            return torch.stack([layer.abs().amax(dim=(0, 2)).float() for layer in layers])

        return cls(largest(k), largest(v))

    def scales(self, storage: torch.dtype) -> KVScales:
        """The scales that make the largest magnitude the largest stored number. Raises `KVScalesError`."""
        return KVScales(self.k / LARGEST[storage], self.v / LARGEST[storage])
