"""Several quantized weights over the same input as one, rows below rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.precision.weights import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)


def fuse(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The parts, one below the other, exactly; None if one weight cannot stand for all of them.

    They must be of one class, with the same groups or blocks, order of the input channels and scale of them.
    """
    first, *others = parts
    if not others:
        return first
    if any(type(part) is not type(first) or part.shape[1] != first.shape[1] for part in others):
        return None
    if isinstance(first, Fp8Weight):
        return Fp8Weight(
            torch.cat([part.codes for part in parts if isinstance(part, Fp8Weight)]),
            torch.cat([part.scales for part in parts if isinstance(part, Fp8Weight)]),
        )
    if isinstance(first, Fp8BlockWeight):
        return _blocks([part for part in parts if isinstance(part, Fp8BlockWeight)])
    return _grouped([part for part in parts if isinstance(part, (Int4Weight, Int8Weight))])


def _blocks(parts: Sequence[Fp8BlockWeight]) -> Fp8BlockWeight | None:
    first = parts[0]
    if any(part.block != first.block for part in parts):
        return None
    if any(part.shape[0] % first.block[0] for part in parts[:-1]):
        return None  # the first block of the next part would be cut
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
    )


def _grouped(parts: Sequence[Int4Weight | Int8Weight]) -> Int4Weight | Int8Weight | None:
    first = parts[0]
    for part in parts[1:]:
        alike = part.group == first.group and part.scales.dtype == first.scales.dtype
        if (
            not alike
            or not _same(part.order, first.order)
            or not _same(part.input_scale, first.input_scale)
            or (part.zeros is None) != (first.zeros is None)
        ):
            return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat(zeros, dim=1) if zeros else None,
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
