"""Parts of a quantized weight as float32 in scratch memory that stays in the cache.

A product of many rows is bound by arithmetic, so it pays to expand the weight part by part and to use the
plain float product. Scratch memory is kept: fresh pages would cost more than filling them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.precision.codes import HALF_BIAS, e4m3_as_half, unpack_nibbles
from engine.layers.precision.weights import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)

PART_ELEMENTS = 1 << 19  # 2 MiB as float32: measured best among 2^17 to 2^21 on a CPU with 1 MiB of L2 a core

_memory = threading.local()


def scratch(name: str, elements: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory of this thread on the CPU, the same at each call of that name."""
    held: dict[str, Tensor] = _memory.__dict__
    found = held.get(name)
    if found is None or found.numel() < elements or found.dtype != dtype:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be filled outside
            held[name] = found = torch.empty(elements, dtype=dtype)
    return found[:elements]


@dataclass(frozen=True, slots=True)
class Tiles:
    """``fill(start, stop, out)`` writes the rows [start, stop) of the weight into float32 [rows, in].

    The weight is ``filled * row_scale`` ([out], None for 1), its columns in the order of the codes and
    without `QuantizedWeight.input_scale`. ``held`` are the tensors that are kept.
    """

    shape: tuple[int, int]
    fill: Callable[[int, int, Tensor], None]
    row_scale: Tensor | None
    held: tuple[Tensor, ...]

    def product(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """x [rows, in] times the weight, float32 [rows, out], computed in ``dtype``."""
        out, cols = self.shape
        x = x.to(dtype)
        y = torch.empty(x.shape[0], out)
        at_once = max(1, PART_ELEMENTS // cols)
        for start in range(0, out, at_once):
            stop = min(start + at_once, out)
            part = scratch("part", (stop - start) * cols, torch.float32).view(stop - start, cols)
            self.fill(start, stop, part)
            if dtype == torch.float32:
                torch.mm(x, part.t(), out=y[:, start:stop])
            else:
                y[:, start:stop] = x @ part.to(dtype).t()
        return y if self.row_scale is None else y.mul_(self.row_scale)


def tiles_of(weight: QuantizedWeight) -> Tiles:
    """How to expand ``weight``, which must be on the CPU."""
    if isinstance(weight, Fp8Weight):
        return Tiles(
            weight.shape,
            _filler(_e4m3(weight.codes)),
            weight.scales.float() * HALF_BIAS,
            (weight.codes, weight.scales),
        )
    if isinstance(weight, Fp8BlockWeight):
        scales = weight.scales.float() * HALF_BIAS
        filler = _filler(_e4m3(weight.codes), scales, None, weight.block[1], weight.block[0])
        return Tiles(weight.shape, filler, None, (weight.codes, scales))
    if isinstance(weight, Int8Weight):
        codes = weight.codes
        if weight.per_channel:
            return Tiles(
                weight.shape,
                _filler(lambda a, b, out: out.copy_(codes[a:b])),
                weight.scales[0].float(),
                (codes, weight.scales),
            )
        return _grouped(weight, lambda a, b, out: out.copy_(codes[a:b]), 0)
    if isinstance(weight, Int4Weight):
        packed = weight.codes
        return _grouped(weight, lambda a, b, out: out.copy_(unpack_nibbles(packed[a:b])), 8)
    raise TypeError(f"no tiles for a {type(weight).__name__}")


_Codes = Callable[[int, int, Tensor], object]


def _e4m3(codes: Tensor) -> _Codes:
    def fill(start: int, stop: int, out: Tensor) -> None:
        bits = scratch("bits", out.numel(), torch.int16).view(out.shape)
        out.copy_(e4m3_as_half(codes[start:stop], bits))

    return fill


def _grouped(weight: Int8Weight | Int4Weight, codes: _Codes, zero: int) -> Tiles:
    zeros = weight.zeros
    offsets = (
        torch.full((1, 1), float(zero)).expand(weight.shape[0], weight.groups) if zeros is None else zeros.t()
    )
    held = (weight.codes, weight.scales) if zeros is None else (weight.codes, weight.scales, zeros)
    return Tiles(weight.shape, _filler(codes, weight.scales.t(), offsets, weight.group), None, held)


def _filler(
    codes: _Codes, scales: Tensor | None = None, zeros: Tensor | None = None, group: int = 0, block: int = 1
) -> Callable[[int, int, Tensor], None]:
    """Codes, then for each group of columns minus its zero and times its scale.

    scales: [ceil(out / block), groups]; zeros: [out, groups].
    """

    def expanded(scales: Tensor, start: int, stop: int) -> Tensor:
        first = start // block
        some = scales[first : -(-stop // block)].float()
        return (
            some if block == 1 else some.repeat_interleave(block, 0)[start - first * block :][: stop - start]
        )

    def fill(start: int, stop: int, out: Tensor) -> None:
        codes(start, stop, out)
        if scales is None:
            return
        cols = out.shape[1]
        whole = cols // group
        factors = expanded(scales, start, stop).unsqueeze(-1)
        offsets = None if zeros is None else zeros[start:stop].float().unsqueeze(-1)
        parts = [(out[:, : whole * group].view(stop - start, whole, group), slice(0, whole))] if whole else []
        if cols % group:
            parts.append((out[:, whole * group :].unsqueeze(1), slice(whole, whole + 1)))
        for part, groups in parts:
            if offsets is not None:
                part.sub_(offsets[:, groups])
            part.mul_(factors[:, groups])

    return fill
