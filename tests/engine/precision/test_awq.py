"""Activation-aware scaling: what it finds is exact arithmetic, and never worse than rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from engine.layers.precision import ActivationStats, quantize_int4
from engine.layers.precision.awq import MAX_INPUTS, search
from engine.layers.precision.weights import Int4Weight


def inputs_with_strong_channels(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """As in language models, a few channels are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.ones(cols)
    strength[torch.randperm(cols, generator=generator)[: cols // 20]] = 30.0
    return torch.randn(rows, cols, generator=generator) * strength


def output_error(weight: torch.Tensor, got: Int4Weight, x: torch.Tensor) -> float:
    return float(((got.dequantize() - weight) @ x.t()).square().sum())


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 192, generator=torch.Generator().manual_seed(9))


def test_it_beats_rounding_to_nearest_on_inputs_it_has_not_seen(weight: torch.Tensor) -> None:
    seen, unseen = inputs_with_strong_channels(200, 192).split([100, 100])
    importance = seen.abs().mean(0)
    plain = output_error(weight, quantize_int4(weight), unseen)
    for inputs in (seen, None):
        scaled = output_error(
            weight, quantize_int4(weight, importance=importance, inputs=inputs, clip=False), unseen
        )
        assert scaled < 0.7 * plain
        clipped = output_error(weight, quantize_int4(weight, importance=importance, inputs=inputs), unseen)
        assert clipped < 0.7 * plain


def test_equal_channels_leave_little_to_gain_and_nothing_is_lost(weight: torch.Tensor) -> None:
    x = torch.randn(400, 192, generator=torch.Generator().manual_seed(3))
    importance = torch.ones(192)
    got = quantize_int4(weight, importance=importance, inputs=x, clip=False)
    assert got.input_scale is None  # alpha 0: rounding to nearest
    assert torch.equal(got.dequantize(), quantize_int4(weight).dequantize())
    clipped = quantize_int4(weight, importance=importance, inputs=x)
    assert output_error(weight, clipped, x) < output_error(weight, got, x)


def test_the_input_scale_undoes_what_was_scaled(weight: torch.Tensor) -> None:
    x = inputs_with_strong_channels(64, 192)
    found = search(weight, 64, x.abs().mean(0), x)
    assert found.alpha > 0
    assert found.input_scale is not None
    got = quantize_int4(weight, 64, importance=x.abs().mean(0), inputs=x)
    values = found.rounded.values().flatten(1) * found.input_scale
    torch.testing.assert_close(got.dequantize(), values)
    assert float((got.dequantize() - weight).abs().max()) < 1.5


def test_silent_channels_do_not_lose_their_weights(weight: torch.Tensor) -> None:
    x = inputs_with_strong_channels(64, 192)
    x[:, 7] = 0.0
    got = quantize_int4(weight, importance=x.abs().mean(0), inputs=x, clip=False).dequantize()
    assert float(got[:, 7].norm()) > 0.3 * float(weight[:, 7].norm())


def test_stats_keep_the_mean_and_some_rows() -> None:
    x = torch.randn(3 * MAX_INPUTS, 12, generator=torch.Generator().manual_seed(0))
    stats, again = ActivationStats(12), ActivationStats(12)
    for part in x.split(100):
        stats.add(part)
        again.add(part)
    torch.testing.assert_close(stats.importance, x.abs().mean(0))
    assert stats.rows == len(x)
    assert stats.inputs.shape == (MAX_INPUTS, 12)
    assert torch.equal(stats.inputs, again.inputs)
    kept = [int((x == row).all(1).nonzero()[0, 0]) for row in stats.inputs]  # each row is one of x
    assert max(kept) > 2 * MAX_INPUTS
    assert min(kept) < MAX_INPUTS // 2
    few = ActivationStats(12)
    few.add(x[:5])
    assert torch.equal(few.inputs, x[:5])


def test_what_cannot_be_right_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no calibration input"):
        _ = ActivationStats(4).importance
    with pytest.raises(ValueError, match="not finite"):
        ActivationStats(2).add(torch.tensor([[1.0, float("nan")]]))
    for importance in (torch.ones(5), torch.full((192,), -1.0), torch.full((192,), float("nan"))):
        with pytest.raises(ValueError, match="importance"):
            quantize_int4(weight, importance=importance)
    with pytest.raises(ValueError, match="inputs"):
        quantize_int4(weight, importance=torch.ones(192), inputs=torch.ones(3, 5))
