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


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [tokens, heads, head_dim] in place; elements from rotary_dim on stay as they are."""
    rotary_dim = cos.shape[-1]
    part = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    swapped = part.roll(rotary_dim // 2, -1)
    part.mul_(cos).addcmul_(swapped, sin)
