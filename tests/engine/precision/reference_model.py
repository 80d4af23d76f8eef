"""The Llama forward pass of one text, written out in float32, with its linear layers open to be replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.loaded import LoadedModel
from engine.models.spec import ModelSpec

FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
Key = tuple[int, str]  # a layer's number, and the first name of its fused linear layers
Tap = Callable[[Key, Tensor], None]


def linears(model: LoadedModel) -> dict[Key, Tensor]:
    """The weights of all linear layers but the head, fused as `FUSED` says."""
    return {
        (i, names[0]): torch.cat([model.weights[f"layers.{i}.{name}.weight"] for name in names])
        for i in range(model.spec.num_layers)
        for names in FUSED
    }


def log_probs(
    model: LoadedModel, ids: Sequence[int], weights: Mapping[Key, Tensor], tap: Tap | None = None
) -> Tensor:
    """[tokens, vocab] with the linear layers' ``weights``; ``tap`` sees what each of them is given."""
    spec, plain = model.spec, model.weights

    def linear(key: Key, x: Tensor) -> Tensor:
        if tap is not None:
            tap(key, x)
        return F.linear(x, weights[key])

    heads, rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
    cos, sin = _rotation(spec, len(ids))
    x = F.embedding(torch.tensor(ids), plain["embed"])
    for i in range(spec.num_layers):
        h = linear((i, "q_proj"), _norm(x, plain[f"layers.{i}.input_norm"], spec))
        h = h.view(len(ids), -1, spec.head_dim).transpose(0, 1)
        q, k, v = _rotate(h[:heads], cos, sin), _rotate(h[heads:rotated], cos, sin), h[rotated:]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        x = x + linear((i, "o_proj"), out[0].transpose(0, 1).flatten(1))
        h = linear((i, "gate_proj"), _norm(x, plain[f"layers.{i}.post_norm"], spec))
        gate, up = h.chunk(2, dim=-1)
        x = x + linear((i, "down_proj"), F.silu(gate) * up)
    return F.linear(_norm(x, plain["norm"], spec), plain["embed"]).log_softmax(-1)


def _norm(x: Tensor, weight: Tensor, spec: ModelSpec) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, spec.rms_norm_eps)


def _rotation(spec: ModelSpec, length: int) -> tuple[Tensor, Tensor]:
    frequencies, factor = spec.rope.inv_freq()
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
