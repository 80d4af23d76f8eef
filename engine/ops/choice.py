"""Which implementation of each part a decoder runs with: torch's, or the fused one of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.kernels import availability
from engine.models.linears import NO_CODES, TakesCodes
from engine.models.spec import ModelSpec
from engine.native import unavailable
from engine.ops import native_ops, triton_ops
from engine.ops.base import AddNorm, Gate, Ops, StoreQKV
from engine.ops.native_sampling import NativeSampling
from engine.ops.plain import PLAIN
from engine.ops.triton_sampling import TritonSampling
from engine.sampling import FusedSampling

FUSED = ("fused_norm", "fused_rope_kv", "fused_mlp")
"""The knobs that each fuse one part of a decoder."""
SAMPLING = "fused_sampling"
COMPILE = "compile"
"""The knob that lets torch compile the parts that none of `FUSED` is on for."""


class Source(Protocol):
    """A module with fused parts."""

    @property
    def NAME(self) -> str: ...

    def probe(self, knob: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None: ...
    def add_norm(self) -> AddNorm: ...
    def store_qkv(self) -> StoreQKV: ...
    def gate(self) -> Gate: ...


def sources(device: torch.device) -> tuple[Source, ...]:
    """Where fused parts for a device can come from, what is preferred first."""
    found: dict[str, tuple[Source, ...]] = {"cuda": (triton_ops,), "cpu": (native_ops,)}
    return found.get(device.type, ())


def probe(knob: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the part behind a knob cannot be fused here, or None. ``dtype``: of the activations."""
    found = _find(knob, spec, device, dtype)
    return found if isinstance(found, str) else None


def reasons(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Why knobs of `FUSED`, and `SAMPLING`, cannot be switched on here, without those that can."""
    found = {knob: probe(knob, spec, device, dtype) for knob in FUSED}
    found[SAMPLING] = probe_sampling(device)
    return {knob: reason for knob, reason in found.items() if reason is not None}


def samples_by_triton(device: torch.device) -> bool:
    """Whether tokens are chosen by Triton kernels on a kind of device, if by kernels."""
    return device.type == "cuda"


def probe_sampling(device: torch.device) -> str | None:
    """Why tokens cannot be chosen by kernels here, or None. The first call on a machine compiles some."""
    if samples_by_triton(device):
        return availability.probe(device)
    if device.type != "cpu":
        return f"there are no sampling kernels for {device.type}"
    return unavailable() or None


def make_sampling(wanted: bool, device: torch.device) -> FusedSampling | None:
    """The kernels to choose tokens with, None for torch. ValueError with the reason if there are none."""
    if not wanted:
        return None
    reason = probe_sampling(device)
    if reason is not None:
        raise ValueError(f"{SAMPLING} cannot be switched on: {reason}")
    return TritonSampling() if samples_by_triton(device) else NativeSampling()


def make_ops(
    wanted: Mapping[str, bool], spec: ModelSpec, device: torch.device, dtype: torch.dtype, rest: Ops = PLAIN
) -> Ops:
    """The parts for values of the knobs of `FUSED`, the others from ``rest``.

    ValueError with the reason for one that cannot run.
    """
    found: dict[str, Source] = {}
    for knob in FUSED:
        if wanted.get(knob):
            source = _find(knob, spec, device, dtype)
            if isinstance(source, str):
                raise ValueError(f"{knob} cannot be switched on: {source}")
            found[knob] = source
    norm, store, gate = map(found.get, FUSED)
    return Ops(
        norm=rest.norm if norm is None else norm.add_norm(),
        store=rest.store if store is None else store.store_qkv(),
        gate=rest.gate if gate is None else gate.gate(),
    )


def kernels(ops: Ops, takes: TakesCodes = NO_CODES) -> str:
    """What runs where it is not torch: ``norm=triton,rope_kv=triton,mlp=triton``, or "".

    ``takes``: what the products behind them take. A part that quantizes for its product is told as
    ``triton+e4m3``, and as ``triton+e4m3|triton`` where it does so for some layers only.
    """
    names = {
        "norm": _name(ops.norm, takes.norm),
        "rope_kv": ops.store.name,
        "mlp": _name(ops.gate, takes.mlp),
    }
    return ",".join(f"{part}={name}" for part, name in names.items() if name != PLAIN.norm.name)


def _name(part: AddNorm | Gate, takes_codes: tuple[bool, ...]) -> str:
    if not part.quantizes:
        return part.name
    return "|".join(f"{part.name}+e4m3" if codes else part.name for codes in takes_codes)


def _find(knob: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Source | str:
    """The first source that can serve a knob, or why the preferred one cannot."""
    why = [f"there are no fused kernels for {device.type}"]
    for source in sources(device):
        reason = source.probe(knob, spec, device, dtype)
        if reason is None:
            return source
        why.insert(-1, reason)
    return why[0]
