"""Which implementation of paged attention a device has: one kernel that reads keys where their blocks lie."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.models.spec import ModelSpec


class Source(Protocol):
    """A module with an implementation."""

    def probe(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None: ...
    def make(self, device: torch.device) -> AttentionBackend: ...


def source(device: torch.device) -> Source | None:
    """Where the implementation for a device comes from, None if there is none."""
    from engine.attention import paged_native, paged_triton

    found: dict[str, Source] = {"cuda": paged_triton, "cpu": paged_native}
    return found.get(device.type)


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why paged attention cannot serve this model here, or None if it can."""
    found = source(device)
    return f"there is no such kernel for {device.type}" if found is None else found.probe(spec, device, dtype)


def make(device: torch.device) -> AttentionBackend:
    """The backend; ask `probe` first. ValueError where there is none."""
    found = source(device)
    if found is None:
        raise ValueError(f"there is no paged attention for {device.type}; ask probe first")
    return found.make(device)
