"""The gated feed-forward layer (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import LinearLayer
from engine.layers.quantized import AnyRows


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up as one product: weight [2 * intermediate, hidden]."""

    __slots__ = ("down", "gate_up", "intermediate")

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        self.gate_up = gate_up
        self.down = down
        self.intermediate = gate_up.shape[0] // 2

    def __call__(self, x: AnyRows) -> Tensor:
        both = self.gate_up(x)
        gate, up = both[:, : self.intermediate], both[:, self.intermediate :]
        return self.down(F.silu(gate).mul_(up))
