"""What can be switched on for a model on a device, and why the rest cannot."""

from __future__ import annotations

import torch

from engine.attention.base import usable
from engine.graphs import driver
from engine.models.spec import ModelSpec
from engine.ops import choice


def available(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Attention backends that can run here, and the reasons of `engine.knob.KnobContext` for what cannot."""
    attention, reasons = usable(spec, device, dtype)
    reasons |= choice.reasons(spec, device, dtype)
    graphs = driver.probe(device)
    if graphs is not None:
        reasons["cuda_graphs"] = graphs
    return attention, reasons
