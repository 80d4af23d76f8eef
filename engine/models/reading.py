"""What every format's loader shares: progress, paths, memory for tensors, reading bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from engine.models.errors import ModelError
from engine.out_of_memory import allocating

Progress = Callable[[str, int, int], None]
"""Called with (stage, done_bytes, total_bytes), often, on the loading thread."""


class Meter:
    """Counts the bytes of one stage and reports them."""

    def __init__(self, stage: str, total_bytes: int, progress: Progress) -> None:
        self.stage, self.total, self.done = stage, total_bytes, 0
        self._progress = progress
        progress(stage, 0, total_bytes)

    def add(self, count: int) -> None:
        self.done += count
        self._progress(self.stage, self.done, self.total)


def resolve(path: Path, roots: Sequence[Path]) -> Path:
    """The real path behind ``path``, which must exist and, if roots are given, lie under one of them."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be opened: {error}") from error
    if roots and not any(real.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots))
        raise ModelError(f"{path} lies outside the folders that models may come from ({allowed})")
    return real


def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor. MemoryError, with what is needed and what there is, if it does not fit."""
    what = f"{name} {list(shape)} in {dtype} on {device}"
    advice = "use a smaller model, another dtype or another device"
    with allocating(what, device, math.prod(shape) * dtype.itemsize, advice):
        return torch.empty(shape, dtype=dtype, device=device)


def read_exactly(file: BinaryIO, target: torch.Tensor) -> None:
    """Fill a contiguous uint8 CPU tensor from the file. Raises `ModelError` if the file ends early."""
    view = target.numpy().data
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]  # unbuffered and buffered files have it
        if not count:
            raise ModelError(f"{getattr(file, 'name', 'the file')} ended early: it was cut or changed")
        view = view[count:]


def listing(names: Sequence[str], limit: int = 6) -> str:
    """Names for an error message, the first few and how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
