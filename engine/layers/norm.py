"""Root-mean-square normalization (arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, of which ``weight`` has the length."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize each head on its own: x [tokens, heads, head_dim], weight [heads, head_dim]."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
