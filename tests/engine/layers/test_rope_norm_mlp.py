"""Rotation, normalization and the gated MLP against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from engine.layers.linear import Linear, plain_choice
from engine.layers.mlp import GatedMLP
from engine.layers.norm import head_rms_norm, rms_norm
from engine.layers.rope import RotaryTable, rotate_
from engine.models.rope import RopeSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotation_turns_pairs_by_position_times_frequency(rotary_dim: int) -> None:
    """Pair (i, i + rotary_dim / 2) turns by position * theta^(-2i / rotary_dim); the rest stays."""
    spec = RopeSpec("default", 100.0, rotary_dim, 64)
    table = RotaryTable(spec, 64, CPU)
    positions = [0, 1, 5, 63]
    x = torch.randn(4, 3, 8)
    got = x.clone()
    rotate_(got, *table.at(torch.tensor(positions), torch.float32))
    half = rotary_dim // 2
    for t, position in enumerate(positions):
        for i in range(half):
            angle = position * 100.0 ** (-2 * i / rotary_dim)
            a, b = x[t, :, i], x[t, :, i + half]
            cos, sin = math.cos(angle), math.sin(angle)
            torch.testing.assert_close(got[t, :, i], a * cos - b * sin, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got[t, :, i + half], b * cos + a * sin, rtol=1e-4, atol=1e-5)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_norms_follow_their_definition() -> None:
    x, weight = torch.randn(5, 12), torch.randn(12)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), want)
    heads, weights = torch.randn(5, 3, 12), torch.randn(3, 12)
    want = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights
    torch.testing.assert_close(head_rms_norm(heads, weights, 1e-6), want)


def test_the_mlp_gates_with_silu() -> None:
    gate, up, down = torch.randn(10, 6), torch.randn(10, 6), torch.randn(6, 10)
    choice = plain_choice(torch.float32)
    mlp = GatedMLP(Linear(torch.cat((gate, up)), None, choice), Linear(down, None, choice))
    x = torch.randn(4, 6)
    g = x @ gate.T
    torch.testing.assert_close(mlp(x), (g * torch.sigmoid(g) * (x @ up.T)) @ down.T)
