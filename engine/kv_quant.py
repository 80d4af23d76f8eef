"""Storing keys and values in 8 bits, and reading them back.

A stored number is ``quantize(x / scale)`` and stands for itself times the scale of its layer and head. As all
keys of a head share it, no key needs a multiplication of its own: their scale goes into the queries, and that
of the values into what attention returns.

int8 is rounded to nearest and symmetric. e4m3 is held as bytes, for torch has no indexed writes of float8 on
a CPU, and is read there by moving its bits into a wider float, ten times as fast as torch's own conversion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_scales import LARGEST, KVScales

_HALF_GAIN = 2.0**8  # e4m3 bits in a float16 stand for a 2^8th: exponent biases are 7 and 15
_BFLOAT_GAIN = 2.0**120  # and in a bfloat16, whose bias is 127, for a 2^120th


@dataclass(frozen=True, slots=True)
class KVQuantizer:
    """Quantization of one pool.

    ``before[layer]`` [heads + 2 * kv_heads, 1] is what queries, keys and values are multiplied by before they
    are used or stored, ``after[layer]`` [heads, 1] what attention's output is. ``k_scale``, ``v_scale``: the
    scales themselves, float32 [layers, kv_heads], for whoever reads the codes in another way.
    """

    storage: torch.dtype
    compute: torch.dtype
    before: Tensor
    after: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def of(
        cls, scales: KVScales, *, group: int, storage: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> KVQuantizer:
        """For ``group`` query heads a KV head; attention computes in ``compute``."""
        gain = _HALF_GAIN if _reads_as_half(storage, compute, device) else 1.0
        k, v = scales.k.to(device), scales.v.to(device)
        before = torch.cat(((k * gain).repeat_interleave(group, dim=1), 1 / k, 1 / v), dim=1)
        after = (v * gain).repeat_interleave(group, dim=1)
        return cls(storage, compute, before.unsqueeze(-1), after.unsqueeze(-1), k, v)

    def encode(self, scaled: Tensor) -> Tensor:
        """Numbers of ``scaled`` (float32, overwritten) as they are stored: int8, or the bytes of e4m3."""
        largest = LARGEST[self.storage]
        if self.storage == torch.int8:
            return scaled.round_().clamp_(-largest, largest).to(torch.int8)
        return scaled.clamp_(-largest, largest).to(self.storage).view(torch.uint8)

    @property
    def needs_scratch(self) -> bool:
        """Whether `decode` works in memory of its own."""
        return self.storage == torch.float8_e4m3fn and self.before.device.type == "cpu"

    def decode(self, stored: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Read numbers as they are stored into ``out``, which has their shape and ``compute`` dtype.

        On a CPU e4m3 may come out divided by a power of two, which is in ``before`` and ``after``. There
        ``scratch``, int16 and at least as long, is written over.
        """
        if self.storage == torch.int8:
            out.copy_(stored)
        elif stored.device.type != "cpu":
            out.copy_(stored.view(self.storage))
        else:
            bits = scratch[: stored.numel()].view(stored.shape)
            bits.copy_(stored.view(torch.int8))  # extends the sign; a product is a faster shift
            if self.compute == torch.bfloat16:
                bits.mul_(1 << 4).bitwise_and_(-0x8000 | 0x07F0)
                torch.mul(bits.view(torch.bfloat16), _BFLOAT_GAIN, out=out)
            else:
                bits.mul_(1 << 7).bitwise_and_(-0x8000 | 0x3F80)
                out.copy_(bits.view(torch.float16))


def _reads_as_half(storage: torch.dtype, compute: torch.dtype, device: torch.device) -> bool:
    return storage == torch.float8_e4m3fn and device.type == "cpu" and compute != torch.bfloat16
