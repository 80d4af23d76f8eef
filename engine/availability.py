"""What can be switched on for a model on a device, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.attention.base import pool_limits, usable
from engine.graphs import driver
from engine.hardware import choose_device
from engine.knob import KnobContext
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec
from engine.ops import choice, compiled_ops
from ipc.messages import KnobValue

# What a device can do is asked for a model; where none is loaded, for a common shape (Llama 3 8B).
_USUAL = ModelSpec(
    architecture="llama",
    num_layers=1,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope=RopeSpec(kind="default", theta=500_000.0, rotary_dim=128, max_position=8192),
    tie_word_embeddings=False,
    layer_windows=(None,),
)


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


def context(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "",
    draft_model: str = "",
) -> KnobContext:
    """What the knobs of an engine depend on, for a model that computes in ``dtype``."""
    attention, reasons = available(spec, device, dtype)
    return KnobContext(
        device="cuda" if device.type == "cuda" else "cpu",
        attention=attention,
        quantization=quantization,
        draft_model=draft_model,
        reasons=reasons,
        pools=pool_limits(device),
        preferred=preferred(device, reasons),
    )


def without_model(device: str, draft_model: str = "") -> KnobContext:
    """The same before a model is chosen, for one of a usual shape in bfloat16. Raises `DeviceError`."""
    return context(_USUAL, choose_device(device), torch.bfloat16, draft_model=draft_model)
