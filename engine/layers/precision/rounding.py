"""Rounding groups of weights to four bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 15


@dataclass(frozen=True, slots=True)
class Rounded:
    """codes [out, groups, group] 0..15 as float32; scales (bfloat16), zeros (float32) [out, groups, 1]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def values(self) -> Tensor:
        """What the codes stand for, float32 [out, groups, group]."""
        return (self.codes - self.zeros) * self.scales.float()


def in_groups(wide: Tensor, group: int) -> Tensor:
    """[rows, in] as [rows, groups, group]; what the last group lacks is 0, which changes no scale or zero."""
    return F.pad(wide, (0, -wide.shape[1] % group)).view(wide.shape[0], -1, group)


def round_groups(weight: Tensor, shrink: float = 1.0) -> Rounded:
    """Asymmetric rounding of float32 [out, groups, group] to nearest, 0 staying exactly 0.

    ``shrink`` times each group's range is covered; what lies beyond is clipped. Scales are bfloat16, as
    kernels take them, and the codes are rounded with the scales as they are stored.
    """
    low = weight.amin(-1, keepdim=True).clamp_(max=0.0) * shrink
    high = weight.amax(-1, keepdim=True).clamp_(min=0.0) * shrink
    span = high - low
    least = torch.finfo(torch.bfloat16).tiny
    scales = torch.where(span > 0, (span / LEVELS).clamp(min=least), 1.0).to(torch.bfloat16)
    inverse = scales.float().reciprocal()
    zeros = (-low * inverse).round_().clamp_(0, LEVELS)
    codes = (weight * inverse).add_(zeros).round_().clamp_(0, LEVELS)
    return Rounded(codes, scales, zeros)
