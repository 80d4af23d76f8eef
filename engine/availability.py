"""What can be switched on for a model on a device, and why the rest cannot."""

from __future__ import annotations

import torch

from engine.attention.base import usable
from engine.graphs import driver
from engine.models.spec import ModelSpec
from engine.ops import choice, compiled_ops


def available(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Attention backends that can run here, and the reasons of `engine.knob.KnobContext` for what cannot."""
    attention, reasons = usable(spec, device, dtype)
    reasons |= choice.reasons(spec, device, dtype)
    others = {"cuda_graphs": driver.probe(device), choice.COMPILE: compiled_ops.probe(device)}
    reasons |= {knob: reason for knob, reason in others.items() if reason is not None}
    return attention, reasons
