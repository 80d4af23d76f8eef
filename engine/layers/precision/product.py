"""One weight in one form, ready to multiply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.precision.codes import E4M3_MAX
from engine.layers.precision.weights import QuantizedWeight
from engine.layers.quantized import AnyRows, QuantizedRows
from engine.native.panels import PanelProduct, Panels

Activations = Literal["kept", "bfloat16", "fp8"]
# Bounds of |y - exact| / (|x| |w|), by what happens to x on the way.
ERRORS: dict[Activations, float] = {"kept": 1e-5, "bfloat16": 2.0**-7, "fp8": 0.06}


@dataclass(frozen=True, slots=True)
class Multiply:
    """``apply(x)``: x [rows, in], rows >= 1, in the order of the codes, of any float dtype -> [rows, out].

    held: every tensor that is kept. of_codes: the same from x as ``apply`` would quantize it, where it does.
    panels: what `engine.native` multiplies with, where it does.
    """

    apply: Callable[[Tensor], Tensor]
    held: tuple[Tensor, ...]
    of_codes: Callable[[QuantizedRows], Tensor] | None = None
    panels: Panels | None = None


Builder = Callable[[QuantizedWeight, dict[str, Tensor]], Multiply]
"""Makes a `Multiply` of a weight; the dict holds what several forms of the same weight share."""


def never(_: QuantizedWeight) -> str | None:
    """Refuses no weight."""
    return None


@dataclass(frozen=True, slots=True)
class Offer:
    """A form that torch has for a kind of device; `engine.layers.precision.forms.PrecisionForm` says more."""

    name: str
    activations: Activations
    layout: str
    builder: Builder
    refuses: Callable[[QuantizedWeight], str | None] = never
    error: float | None = None  # None: as `ERRORS` says
    exact_only: bool = False


class Product:
    """``y = x @ weight.T + bias``: puts x into the order and scale of the codes, y into its dtype."""

    __slots__ = (
        "_apply", "_bias", "_input_scale", "_of_codes", "_order", "_panels", "held", "out_dtype", "shape",
    )  # fmt: skip

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype, multiply: Multiply
    ) -> None:
        self.shape = weight.shape
        self.out_dtype = out_dtype
        self._apply = multiply.apply
        self._of_codes = multiply.of_codes
        self._panels = multiply.panels
        self._order = weight.order
        self._input_scale = None if weight.input_scale is None else weight.input_scale.float()
        self._bias = None if bias is None else bias.to(device=weight.device, dtype=torch.float32)
        ours = (self._order, self._input_scale, self._bias)
        self.held = (*multiply.held, *(part for part in ours if part is not None))

    @property
    def takes_codes(self) -> bool:
        """Whether x may come as `QuantizedRows`. They would have to be those of x in the codes' order."""
        return self._of_codes is not None and self._order is None and self._input_scale is None

    @property
    def native(self) -> PanelProduct | None:
        """The same as `engine.native` makes it, where it does."""
        if self._panels is None:
            return None
        return PanelProduct(self._panels, self._order, self._input_scale, self._bias)

    def __call__(self, x: AnyRows) -> Tensor:
        if isinstance(x, QuantizedRows):
            assert self._of_codes is not None  # as `takes_codes` told
            y = self._of_codes(x)
        else:
            if not x.shape[0]:
                return x.new_empty((0, self.shape[0]), dtype=self.out_dtype)
            if self._order is not None:
                x = x.index_select(1, self._order)
            if self._input_scale is not None:
                x = x * self._input_scale
            y = self._apply(x)
        if self._bias is not None:
            y = y + self._bias
        return y if y.dtype == self.out_dtype else y.to(self.out_dtype)


def held_bytes(products: tuple[Product, ...]) -> int:
    """Bytes that these products keep together; a tensor that several hold counts once."""
    tensors = {(t.data_ptr(), t.nbytes): t.nbytes for product in products for t in product.held}
    return sum(tensors.values())


def reference(weight: QuantizedWeight, _: dict[str, Tensor]) -> Multiply:
    """Expand the whole weight at each call and multiply in float32."""
    plain = without_inputs(weight)

    def apply(x: Tensor) -> Tensor:
        return F.linear(x.float(), plain())

    return Multiply(apply, tensors_of(weight))


def without_inputs(weight: QuantizedWeight) -> Callable[[], Tensor]:
    """The weight in the order and scale of its codes, since `Product` reorders and scales x."""
    if weight.order is None and weight.input_scale is None:
        return weight.dequantize

    def expand() -> Tensor:
        whole = weight.dequantize()
        if weight.order is not None:
            whole = whole.index_select(1, weight.order)
        return whole if weight.input_scale is None else whole / weight.input_scale.float()

    return expand


def tensors_of(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Codes, scales and zeros of any kind of weight."""
    named = (getattr(weight, name, None) for name in ("codes", "scales", "zeros"))
    return tuple(part for part in named if part is not None)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as float8 e4m3 with a scale [rows, 1] for each token: amax / 448."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(E4M3_MAX)
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
