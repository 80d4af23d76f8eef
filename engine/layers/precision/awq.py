"""Activation-aware weight quantization (AWQ, arXiv 2306.00978).

Input channels that carry large activations matter more for the output. Their weights are scaled up before
rounding, and the activations down: ``W x = (W diag(s)) (x / s)``, with ``s = mean|x|^alpha``. alpha is found
by trying twenty values (the paper's grid) and keeping the one with the least error of the output over some
calibration inputs; alpha = 0 is rounding to nearest, so the result is never worse by that measure. Then each
group's range may shrink, again where that lessens the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.precision.rounding import Rounded, in_groups, round_groups

GRID = 20
SHRINKS = tuple(1 - i / GRID for i in range(1, GRID // 2 + 1))  # down to half of the range, as the paper
MAX_INPUTS = 256  # rows of calibration inputs that are kept for each linear layer
LEAST = 1e-3  # of the mean: a channel that was silent over the calibration text may still speak later


class ActivationStats:
    """What a calibration pass sees at the input of one linear layer.

    Keeps the mean magnitude of each channel over all rows and up to `MAX_INPUTS` of the rows, chosen evenly
    (reservoir sampling with a fixed seed, so that the same text gives the same weights).
    """

    def __init__(self, cols: int, device: torch.device | None = None) -> None:
        self.rows = 0
        self._sum = torch.zeros(cols, dtype=torch.float64, device=device)
        self._inputs = torch.zeros(MAX_INPUTS, cols, device=device)
        self._random = torch.Generator().manual_seed(0)

    def add(self, x: Tensor) -> None:
        """Take in x [rows, in]. ValueError if a value is not finite."""
        wide = x.detach().float()
        total = wide.abs().sum(0, dtype=torch.float64)
        if not bool(torch.isfinite(total).all()):
            raise ValueError("a calibration input is not finite")
        self._sum += total
        seen = torch.arange(self.rows, self.rows + len(wide))
        places = (torch.rand(len(wide), generator=self._random) * (seen + 1)).long()
        places = torch.where(seen < MAX_INPUTS, seen, places)
        for row in torch.nonzero(places < MAX_INPUTS).flatten().tolist():
            self._inputs[places[row]] = wide[row]
        self.rows += len(wide)

    @property
    def importance(self) -> Tensor:
        """float32 [in]: mean |x|. ValueError before any row was added."""
        if not self.rows:
            raise ValueError("no calibration input was seen")
        return (self._sum / self.rows).float()

    @property
    def inputs(self) -> Tensor:
        """float32 [rows, in], at most `MAX_INPUTS` rows."""
        return self._inputs[: min(self.rows, MAX_INPUTS)]


@dataclass(frozen=True, slots=True)
class Found:
    """The best rounding of ``weight / input_scale``; input_scale is None for alpha = 0."""

    rounded: Rounded
    input_scale: Tensor | None
    alpha: float


def search(
    weight: Tensor, group: int, importance: Tensor, inputs: Tensor | None, *, clip: bool = True
) -> Found:
    """Scale and round float32 ``weight`` [out, in]. See `engine.layers.precision.quantize.quantize_int4`."""
    cols = weight.shape[1]
    _check(cols, importance, inputs)
    importance = importance.to(device=weight.device, dtype=torch.float32)
    # Without inputs the channels count as independent, each as strong as its mean magnitude.
    probe = torch.diag(importance) if inputs is None else inputs.to(weight.device).float()
    best_error, best_alpha = float("inf"), 0.0
    for step in range(GRID):
        alpha = step / GRID
        scale = _scale(importance, alpha)
        rounded = round_groups(in_groups(weight * scale, group))
        difference = rounded.values().flatten(1)[:, :cols] / scale - weight
        error = float((difference @ probe.t()).square_().sum(dtype=torch.float64))
        if error < best_error:
            best_error, best_alpha = error, alpha
    scale = _scale(importance, best_alpha)
    scaled = in_groups(weight * scale, group)
    rounded = round_groups(scaled)
    if clip:
        rounded = _clipped(scaled, rounded, in_groups(probe / scale, group))
    return Found(rounded, scale.reciprocal() if best_alpha else None, best_alpha)


def _clipped(scaled: Tensor, rounded: Rounded, probe: Tensor) -> Rounded:
    """For each channel and group the shrunk range that lessens the error of that group's part of the output.

    The squared error of d = rounded - exact over inputs X is d (X^T X) d^T, so each group needs only its own
    [group, group] part of X^T X.
    """
    gram = torch.bmm(probe.permute(1, 2, 0), probe.transpose(0, 1))

    def errors(candidate: Rounded) -> Tensor:
        d = (candidate.values() - scaled).transpose(0, 1)  # [groups, out, group]
        return (torch.bmm(d, gram) * d).sum(-1).t().unsqueeze(-1)

    best = errors(rounded)
    codes, scales, zeros = rounded.codes, rounded.scales, rounded.zeros
    for shrink in SHRINKS:
        candidate = round_groups(scaled, shrink)
        error = errors(candidate)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, candidate.codes, codes)
        scales = torch.where(better, candidate.scales, scales)
        zeros = torch.where(better, candidate.zeros, zeros)
    return Rounded(codes, scales, zeros)


def _scale(importance: Tensor, alpha: float) -> Tensor:
    """mean|x|^alpha, normalized so that the largest and the smallest are as far from 1; all 1 for alpha 0."""
    if alpha == 0.0:
        return torch.ones_like(importance)
    scale = importance.clamp(min=LEAST * float(importance.mean())).pow(alpha)
    return scale / (scale.max() * scale.min()).sqrt()


def _check(cols: int, importance: Tensor, inputs: Tensor | None) -> None:
    if tuple(importance.shape) != (cols,) or not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise ValueError(
            f"importance has the shape {list(importance.shape)}; {cols} finite values that are not negative "
            "are needed, one an input channel"
        )
    if inputs is not None and (
        inputs.dim() != 2 or inputs.shape[1] != cols or not bool(torch.isfinite(inputs).all())
    ):
        raise ValueError(
            f"inputs have the shape {list(inputs.shape)}; finite values [rows, {cols}] are needed"
        )
