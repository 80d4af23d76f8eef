"""A quantized weight expanded some rows at a time, on any device.

A head of 128,256 rows in float32 takes gigabytes beside the codes that it is made of, so no more than a part
of a weight is ever expanded. Expanding waits for nothing and takes its memory from torch's allocator, so that
CUDA graphs can be captured. `engine.layers.precision.tiles` does the same within a CPU's caches.
"""

from __future__ import annotations

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

PART_ELEMENTS = 16 << 20  # 64 MiB in float32


class Parts:
    """``weight`` in the order and scale of its codes, as views of its rows."""

    def __init__(self, weight: QuantizedWeight) -> None:
        out, cols = weight.shape
        step = max(1, PART_ELEMENTS // cols)
        if isinstance(weight, Fp8BlockWeight):  # a part begins with a block
            step = max(1, step // weight.block[0]) * weight.block[0]
        self._out = out
        self._parts = [
            (start, min(start + step, out), _rows(weight, start, min(start + step, out)))
            for start in range(0, out, step)
        ]

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [rows, in] times the weight, both in ``dtype``, [rows, out] in it."""
        x = x.to(dtype)
        if len(self._parts) == 1:
            return x @ self._parts[0][2].dequantize().to(dtype).t()
        y = torch.empty(x.shape[0], self._out, dtype=dtype, device=x.device)
        for start, stop, part in self._parts:
            y[:, start:stop] = x @ part.dequantize().to(dtype).t()
        return y


def _rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Rows [start, stop) of the weight as one that shares its memory; x is reordered and scaled before."""
    if isinstance(weight, Fp8Weight):
        return replace(weight, codes=weight.codes[start:stop], scales=weight.scales[start:stop])
    if isinstance(weight, Fp8BlockWeight):
        first, last = start // weight.block[0], -(-stop // weight.block[0])
        return replace(weight, codes=weight.codes[start:stop], scales=weight.scales[first:last])
    if isinstance(weight, Int4Weight | Int8Weight):
        return replace(
            weight,
            codes=weight.codes[start:stop],
            scales=weight.scales[:, start:stop],
            zeros=None if weight.zeros is None else weight.zeros[:, start:stop],
            order=None,
            input_scale=None,
        )
    raise TypeError(f"no parts of a {type(weight).__name__}")
