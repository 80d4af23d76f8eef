"""Activations in 8 bits: what a product in fp8 makes of its input, or gets so from the part before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in float8 e4m3 with a scale each: row i is ``codes[i] * scales[i]``.

    codes: uint8 [rows, n], contiguous, the bytes of e4m3. scales: float32 [rows].
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, cols: int, device: torch.device) -> QuantizedRows:
        """Memory for rows that are still to be written."""
        return cls(
            torch.empty((rows, cols), dtype=torch.uint8, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


AnyRows = Tensor | QuantizedRows
"""The input of a linear layer, [rows, in]."""
