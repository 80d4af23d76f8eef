"""From a weight to a `QuantizedWeight`: scales from the largest magnitudes, codes by rounding to nearest.

fp8 and int8 have one scale an output channel, int4 a scale and a zero for each group of input channels
(asymmetric). int4 rounding can be guided by calibration, see `engine.layers.precision.awq`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.precision import awq
from engine.layers.precision.codes import E4M3_MAX, pack_nibbles
from engine.layers.precision.rounding import Rounded, in_groups, round_groups
from engine.layers.precision.weights import Fp8Weight, Int4Weight, Int8Weight, Kind, QuantizedWeight

INT8_MAX = 127
INT4_GROUP = 128


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """[out, in] as float8 e4m3, scale = amax / 448 of the row. ValueError for values that are not finite."""
    wide = _checked(weight)
    scales = _row_scales(wide, E4M3_MAX)
    codes = (wide / scales.unsqueeze(1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, scales)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """[out, in] as int8 -127..127, scale = amax / 127 of the row. ValueError for non-finite values."""
    wide = _checked(weight)
    scales = _row_scales(wide, INT8_MAX)
    codes = (wide / scales.unsqueeze(1)).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Weight(codes, scales.unsqueeze(0), wide.shape[1])


def quantize_int4(
    weight: Tensor,
    group: int = INT4_GROUP,
    *,
    importance: Tensor | None = None,
    inputs: Tensor | None = None,
    clip: bool = True,
) -> Int4Weight:
    """[out, in], ``in`` even, as 4-bit codes with a scale (bfloat16) and a zero a group and channel.

    The last group is smaller where ``group`` does not divide ``in``.
    importance: [in], the mean magnitude of each input channel over a calibration text (AWQ); without it the
    codes are rounded to nearest. inputs: [rows, in] from the same text, to measure errors of the output
    with; without them errors of the weights count, weighted with the importance. clip: also search how far
    each group's range may shrink.
    """
    wide = _checked(weight)
    cols = wide.shape[1]
    if cols % 2 or group < 2 or group % 2:
        raise ValueError(f"int4 needs even numbers of input channels, got {cols} in groups of {group}")
    if importance is None:
        if inputs is not None:
            raise ValueError("inputs only count together with importance: give both or neither")
        return _int4(wide, group, round_groups(in_groups(wide, group)), None)
    found = awq.search(wide, group, importance, inputs, clip=clip)
    return _int4(wide, group, found.rounded, found.input_scale)


def quantize(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """``weight`` in the precision ``kind``, without calibration."""
    if kind == "fp8":
        return quantize_fp8(weight)
    return quantize_int8(weight) if kind == "int8" else quantize_int4(weight)


def _int4(wide: Tensor, group: int, rounded: Rounded, input_scale: Tensor | None) -> Int4Weight:
    codes = rounded.codes.flatten(1)[:, : wide.shape[1]]
    return Int4Weight(
        pack_nibbles(codes.contiguous()),
        rounded.scales.squeeze(-1).t().contiguous(),
        group,
        zeros=rounded.zeros.squeeze(-1).t().to(torch.uint8).contiguous(),
        input_scale=input_scale,
    )


def _row_scales(wide: Tensor, largest: float) -> Tensor:
    amax = wide.abs().amax(1)
    # A row of zeros has any scale; 1 keeps it a row of zeros. Below the least normal number the quotient
    # would lose its bits.
    return torch.where(amax > 0, (amax / largest).clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def _checked(weight: Tensor) -> Tensor:
    if weight.dim() != 2:
        raise ValueError(f"a linear weight has the shape [out, in], not {list(weight.shape)}")
    wide = weight.float()
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("the weight holds values that are not finite and cannot be quantized")
    return wide
