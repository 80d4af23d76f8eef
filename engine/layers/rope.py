"""Rotary position embedding (arXiv 2104.09864): tables of cosine and sine, and the rotation.

Heads are rotated in halves: element i turns together with element i + rotary_dim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.rope import RopeSpec


class RotaryTable:
    """Cosine and sine of every position that the engine serves, float32, ready for the rotation.

    ``cos`` and ``sin`` have shape [max_len, rotary_dim]. The first half of ``sin`` is negated, so that the
    rotation is ``x * cos + swap_halves(x) * sin``.
    """

    __slots__ = ("cos", "rotary_dim", "sin")

    def __init__(self, spec: RopeSpec, max_len: int, device: torch.device) -> None:
        inv_freq, scaling = spec.inv_freq()
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq.float())
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        self.rotary_dim = spec.rotary_dim
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine at positions [tokens], each [tokens, 1, rotary_dim]."""
        return (
            self.cos.index_select(0, positions).to(dtype).unsqueeze(1),
            self.sin.index_select(0, positions).to(dtype).unsqueeze(1),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim]; elements from rotary_dim on stay as they are. Returns a copy."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin)
    part = x[..., :rotary_dim]
    turned = torch.addcmul(part * cos, part.roll(rotary_dim // 2, -1), sin)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
