"""Weights laid out for the products of the library. See ``panels.h``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.native.pages import in_large_pages
from engine.native.structs import LinearWeight

PanelKind = Literal["fp32", "bf16", "int8", "int4"]
PLAIN_KINDS: dict[torch.dtype, PanelKind] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

STEP = 4  # input channels that codes of 4 bits lie together for, `Int4Panels::STEP`


class Panels:
    """A weight [out, in] in panels of ``panel`` output channels, the last one filled up with zeros.

    codes: as ``kind`` says; scales (float32), zeros (uint8) or None, their last dimension filled up like the
    panels; bias: float32 [width] or None. ``width`` is ``out``, filled up; ``held`` is all that is kept.
    """

    __slots__ = ("address", "held", "kind", "reference", "shape", "width")

    def __init__(
        self,
        kind: PanelKind,
        shape: tuple[int, int],
        panel: int,
        codes: Tensor,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        group: int = 0,
    ) -> None:
        self.kind, self.shape = kind, shape
        num_panels = -(-shape[0] // panel)
        self.width = num_panels * panel
        dtypes = (torch.float32, torch.uint8, torch.float32)
        parts = [
            _filled(part, self.width, dtype)
            for part, dtype in zip((scales, zeros, bias), dtypes, strict=True)
        ]
        codes = in_large_pages(codes)
        self.held = (codes, *(part for part in parts if part is not None))
        at = [None if part is None else part.data_ptr() for part in parts]
        struct = LinearWeight(codes.data_ptr(), *at, num_panels, shape[1], group)
        self.reference, self.address = ctypes.byref(struct), ctypes.addressof(struct)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.held)


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """A linear layer whose product the library makes, ``x' @ weight.T + bias``.

    x' is x with its input channels in the ``order`` (int64 [in]) of the panels', each times its one of
    ``input_scales`` (float32 [in]); bias: float32 [out], beside one that the panels hold.
    """

    panels: Panels
    order: Tensor | None = None
    input_scales: Tensor | None = None
    bias: Tensor | None = None


def plain(weight: Tensor, bias: Tensor | None, panel: int) -> Panels:
    """Of a weight [out, in] on the CPU in bfloat16 or float32. Raises ValueError for others."""
    kind = PLAIN_KINDS.get(weight.dtype)
    if kind is None or weight.dim() != 2 or weight.device.type != "cpu":
        raise ValueError(
            f"weights are {weight.dtype} {list(weight.shape)} on {weight.device}, "
            "bfloat16 or float32 [out, in] on the CPU is needed"
        )
    halves = _halves(weight, panel)
    # bfloat16: both halves of a panel take turns, so that one load fetches a pair of vectors.
    order = (0, 3, 2, 1) if kind == "bf16" else (0, 3, 1, 2)
    return Panels(kind, _shape(weight), panel, halves.permute(order), bias=bias)


def int8(codes: Tensor, scales: Tensor, panel: int) -> Panels:
    """Of int8 codes [out, in] with ``scales`` [out]."""
    halves = _halves(codes, panel)
    return Panels("int8", _shape(codes), panel, halves.permute(0, 3, 1, 2), scales=scales)


def int4(codes: Tensor, scales: Tensor, zeros: Tensor, group: int, panel: int) -> Panels:
    """Of uint8 codes 0..15 [out, in]: ``(code - zero) * scale``, scales and zeros [groups, out]."""
    cols = codes.shape[1]
    halves = _halves(codes, panel)
    both = halves[:, 0] | (halves[:, 1] << 4)  # [panels, channel, in]
    # Each group in steps of `STEP` input channels, the last step of a group filled up.
    whole = F.pad(both, (0, -cols % group)).reshape(*both.shape[:2], -1, group)
    steps = F.pad(whole, (0, -group % STEP)).reshape(*both.shape[:2], -1, STEP)
    used = cols // group * -(-group // STEP) + -(-(cols % group) // STEP)
    steps = steps[:, :, :used].transpose(1, 2)  # [panels, step, channel, STEP]
    return Panels("int4", _shape(codes), panel, steps, scales=scales, zeros=zeros, group=group)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _halves(weight: Tensor, panel: int) -> Tensor:
    """[out, in] as [panels, 2, panel / 2, in], filled up with zeros."""
    out, cols = weight.shape
    num_panels = -(-out // panel)
    missing = num_panels * panel - out
    return (F.pad(weight, (0, 0, 0, missing)) if missing else weight).view(num_panels, 2, panel // 2, cols)


def _filled(values: Tensor | None, width: int, dtype: torch.dtype) -> Tensor | None:
    if values is None:
        return None
    return F.pad(values.to(dtype), (0, width - values.shape[-1])).contiguous()
