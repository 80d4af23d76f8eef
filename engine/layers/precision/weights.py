"""Linear weights in a low precision: what is held, and the float32 matrix that it stands for.

Every class describes ``y = x @ dequantize().T`` exactly; how the product is computed is the affair of
`engine.layers.precision.forms`. Codes may be held with their input channels in another order (``order``,
GPTQ's ``desc_act``) or scaled (``input_scale``, AWQ): x is then reordered and multiplied before the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from engine.layers.precision.codes import has_e4m3_nan, unpack_nibbles

Kind = Literal["fp8", "int8", "int4"]
KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")


@runtime_checkable
class QuantizedWeight(Protocol):
    """One linear weight of shape [out, in] in a low precision."""

    @property
    def kind(self) -> Kind: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all parts: codes, scales, zeros, order."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def order(self) -> Tensor | None:
        """int64 [in]: the input channel that column i of the codes belongs to. None: channel i."""
        ...

    @property
    def input_scale(self) -> Tensor | None:
        """[in], by column of the codes: what x is multiplied by before the product."""
        ...

    def dequantize(self) -> Tensor:
        """The weight as float32 [out, in], channels in their usual order: the reference."""
        ...

    def to(self, device: torch.device) -> Self: ...


@dataclass(frozen=True, eq=False)
class _Parts:
    """What all kinds share: their tensors are their fields."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._tensors().values())

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: part.to(device) for name, part in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class _Plain(_Parts):
    """Codes in the usual order of the input channels, not scaled by them."""

    @property
    def order(self) -> None:
        return None

    @property
    def input_scale(self) -> None:
        return None


@dataclass(frozen=True, eq=False)
class Fp8Weight(_Plain):
    """float8 e4m3 with one scale an output channel: ``codes [out, in] * scales [out]``."""

    codes: Tensor
    scales: Tensor
    kind: ClassVar[Kind] = "fp8"

    def __post_init__(self) -> None:
        _expect_e4m3(self.codes)
        _expect_scales("scales", self.scales, (self.codes.shape[0],))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.scales.float().unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Fp8BlockWeight(_Plain):
    """float8 e4m3 with one scale a block of ``block = (rows, cols)``; edge blocks may be smaller.

    scales: [ceil(out / rows), ceil(in / cols)], multiplied with the codes (HF names them
    ``weight_scale_inv``).
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    kind: ClassVar[Kind] = "fp8"

    def __post_init__(self) -> None:
        _expect_e4m3(self.codes)
        if min(self.block) < 1:
            raise ValueError(f"blocks of {self.block}: both sides must be at least 1")
        tiles = tuple(-(-size // side) for size, side in zip(self.codes.shape, self.block, strict=True))
        _expect_scales("scales", self.scales, tiles)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self) -> Tensor:
        rows, cols = self.shape
        scales = self.scales.float().repeat_interleave(self.block[0], 0)[:rows]
        return self.codes.float() * scales.repeat_interleave(self.block[1], 1)[:, :cols]


@dataclass(frozen=True, eq=False)
class _Grouped(_Parts, ABC):
    """Integers in groups of ``group`` input channels: ``(code - zero) * scale``.

    scales, zeros: [ceil(in / group), out]; the last group may be smaller.
    """

    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    order: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def groups(self) -> int:
        return self.scales.shape[0]

    def _check(self, zero_range: tuple[int, int]) -> None:
        out, cols = self.shape
        if self.group < 1:
            raise ValueError(f"groups of {self.group} input channels: at least 1 is needed")
        shape = (-(-cols // self.group), out)
        _expect_scales("scales", self.scales, shape)
        if self.zeros is not None:
            if tuple(self.zeros.shape) != shape or self.zeros.is_floating_point():
                raise ValueError(
                    f"zeros are {self.zeros.dtype} {list(self.zeros.shape)}, "
                    f"integers {list(shape)} are needed"
                )
            low, high = zero_range
            if bool(((self.zeros < low) | (self.zeros > high)).any()):
                raise ValueError(f"a zero lies outside {low}..{high}: the tensor is damaged")
        if self.order is not None:
            _expect_permutation(self.order, cols)
        if self.input_scale is not None:
            _expect_scales("input_scale", self.input_scale, (cols,))

    def _expand(self, codes: Tensor, zero: int) -> Tensor:
        """The float32 weight from codes [out, in]; ``zero`` holds where there are no zeros."""
        cols = self.shape[1]
        scales = self.scales.t().float().repeat_interleave(self.group, 1)[:, :cols]
        if self.zeros is None:
            weight = (codes.float() - zero) * scales
        else:
            zeros = self.zeros.t().float().repeat_interleave(self.group, 1)[:, :cols]
            weight = (codes.float() - zeros) * scales
        if self.input_scale is not None:
            weight = weight * self.input_scale.float()
        if self.order is None:
            return weight
        usual = torch.empty_like(weight)
        usual[:, self.order] = weight
        return usual


@dataclass(frozen=True, eq=False)
class Int8Weight(_Grouped):
    """codes: int8 [out, in]. With one group (``group >= in``) and no zeros: one scale a channel.

    zeros: int16, in units of the codes (-128..128), None for 0.
    """

    kind: ClassVar[Kind] = "int8"

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.int8 or self.codes.dim() != 2:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}, int8 [out, in] is needed"
            )
        self._check((-128, 128))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def per_channel(self) -> bool:
        return self.groups == 1 and self.zeros is None

    def dequantize(self) -> Tensor:
        return self._expand(self.codes, 0)


@dataclass(frozen=True, eq=False)
class Int4Weight(_Grouped):
    """codes: uint8 [out, in / 2], two codes 0..15 a byte as `pack_nibbles` packs them; ``in`` is even.

    zeros: uint8, in units of the codes (0..16), None for 8.
    """

    kind: ClassVar[Kind] = "int4"

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}, uint8 [out, in / 2] is needed"
            )
        self._check((0, 16))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self) -> Tensor:
        return self._expand(unpack_nibbles(self.codes), 8)


def _expect_e4m3(codes: Tensor) -> None:
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}, float8_e4m3fn [out, in] is needed")
    if has_e4m3_nan(codes):
        raise ValueError("the weight holds NaN codes: it is damaged or was quantized from NaN")


def _expect_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    """Scales of that shape, finite and not 0: a weight whose scales are lost computes fluent nonsense."""
    if tuple(scales.shape) != shape or not scales.is_floating_point():
        raise ValueError(
            f"{name} are {scales.dtype} {list(scales.shape)}, floating point {list(shape)} is needed"
        )
    wide = scales.float()
    bad = ~torch.isfinite(wide) | (wide == 0)
    if bool(bad.any()):
        first = wide[bad][0].item()
        raise ValueError(f"{name} hold {int(bad.sum())} values that are 0 or not finite, such as {first}")


def _expect_permutation(order: Tensor, size: int) -> None:
    counted = order.dtype == torch.int64 and tuple(order.shape) == (size,)
    if not counted or not torch.equal(order.sort().values, torch.arange(size, device=order.device)):
        raise ValueError(f"order must hold each of the {size} input channels once, as int64")
