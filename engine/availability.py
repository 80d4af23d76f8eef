"""What can be switched on for a model on a device, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.attention.base import usable
from engine.graphs import driver
from engine.models.spec import ModelSpec
from engine.ops import choice, compiled_ops
from ipc.messages import KnobValue


def available(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Attention backends that can run here, and the reasons of `engine.knob.KnobContext` for what cannot."""
    attention, reasons = usable(spec, device, dtype)
    reasons |= choice.reasons(spec, device, dtype)
    others = {"cuda_graphs": driver.probe(device), choice.COMPILE: compiled_ops.probe(device)}
    reasons |= {knob: reason for knob, reason in others.items() if reason is not None}
    return attention, reasons


def preferred(device: torch.device, reasons: Mapping[str, str]) -> dict[str, KnobValue]:
    """Values of knobs to start with on a device, given what `available` found there.

    On a CPU the kernels in C++ are faster than torch's operations for every number of rows that was measured;
    elsewhere what is declared holds.
    """
    if device.type != "cpu":
        return {}
    return {knob: True for knob in choice.FUSED if knob not in reasons}
