"""The ways in which a product with a quantized weight can be computed here.

The first form of each kind is the reference: expand the weight, multiply in float32. The others use torch's
low-precision kernels, or expand part by part. Each is tried on small weights, typical and extreme ones,
before it is offered: kernels differ between machines, and some are wrong on some (integer dot products that
saturate without VNNI), so that a form whose products leave its stated error is refused with the reason.

What a form does to activations is part of its name's meaning and stated in ``activations``:

- ``kept``: x stays float32;
- ``bfloat16``: x is rounded to bfloat16, sums are float32, y is rounded to bfloat16;
- ``fp8``: x is quantized for each token (row), scale = amax / 448.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.current_device import make_current
from engine.layers.precision import forms_cpu, forms_cuda
from engine.layers.precision.product import ERRORS, Activations, Builder, Offer, Product, reference
from engine.layers.precision.quantize import quantize
from engine.layers.precision.weights import Kind, QuantizedWeight
from engine.out_of_memory import kind_of

log = logging.getLogger(__name__)

TRIED = (96, 256)  # the shape of the weights that a form is tried on
NARROW = (16, 2048)  # and of another one
REFERENCE = Offer("reference", "kept", "plain", reference)


@dataclass(frozen=True, slots=True)
class PrecisionForm:
    """One way to compute products with weights of one kind.

    error: the bound of ``|y - exact| / (|x| |w|)`` with the Euclidean norms of the row of x and of the row
    of the weight, both as `QuantizedWeight.dequantize` gives it. layout: forms with the same layout hold the
    same tensors, and do so only once when they serve one weight together. exact_only: another form does the
    same faster where the last bits do not matter.
    """

    name: str
    kind: Kind
    activations: Activations
    layout: str
    error: float
    builder: Builder
    refuses: Callable[[QuantizedWeight], str | None]
    exact_only: bool

    def build(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        shared: dict[str, Tensor] | None = None,
    ) -> Product:
        """The function x [rows, in] of any dtype -> [rows, out] of ``out_dtype``.

        ``shared`` holds what forms of one weight have in common; give the same dict to all of them.
        ValueError with the reason if this form cannot serve the weight.
        """
        why = self.refuses(weight)
        if why is not None:
            raise ValueError(f"{self.name} cannot serve this {weight.kind} weight: {why}")
        return Product(weight, bias, out_dtype, self.builder(weight, {} if shared is None else shared))


def precision_forms(kind: Kind, device: torch.device) -> list[PrecisionForm]:
    """The forms that work for this kind on this device, the reference first."""
    return list(_probed(kind, str(device))[0])


def refused_forms(kind: Kind, device: torch.device) -> dict[str, str]:
    """The forms that exist for this kind but not here, each with the reason, as the log had it once."""
    return dict(_probed(kind, str(device))[1])


@functools.cache
def _probed(kind: Kind, device: str) -> tuple[tuple[PrecisionForm, ...], tuple[tuple[str, str], ...]]:
    first, *others = _all_forms(kind, torch.device(device).type)
    working, refused = [first], []
    sample = quantize(torch.ones(TRIED), kind).to(torch.device(device))
    for form in others:
        why, level = form.refuses(sample), logging.INFO  # what the machine lacks, as it says itself
        if why is None:
            why, level = probe(form, torch.device(device)), logging.WARNING
        if why is None:
            working.append(form)
            continue
        log.log(level, "%s weights are not multiplied with by %s on %s: %s", kind, form.name, device, why)
        refused.append((form.name, why))
    return tuple(working), tuple(refused)


def _all_forms(kind: Kind, device_type: str) -> list[PrecisionForm]:
    offered = forms_cuda.OFFERED if device_type == "cuda" else forms_cpu.OFFERED
    return [form_of(kind, offer) for offer in (REFERENCE, *offered[kind])]


def form_of(kind: Kind, offer: Offer) -> PrecisionForm:
    """What is offered for a kind of weights as a form of it."""
    return PrecisionForm(
        name=offer.name,
        kind=kind,
        activations=offer.activations,
        layout=offer.layout,
        error=ERRORS[offer.activations] if offer.error is None else offer.error,
        builder=offer.builder,
        refuses=offer.refuses,
        exact_only=offer.exact_only,
    )


def probe(form: PrecisionForm, device: torch.device) -> str | None:
    """Why ``form`` must not be used on this device, or None if its products are right.

    MemoryError or torch's own if there is no memory to try it with, and what a lost device raises: neither
    says anything of the form.
    """
    make_current(device)
    generator = torch.Generator().manual_seed(0)
    typical = torch.randn(TRIED, generator=generator)
    x = torch.randn(37, 256, generator=generator)
    extreme = torch.ones(TRIED)
    extreme[::2] *= -1
    # Of few output channels and many input channels, which kernels share among programs.
    narrow = torch.randn(NARROW, generator=generator)
    tried = [(typical, x), (extreme, torch.ones(5, 256)), (extreme, -torch.ones(1, 256))]
    for weight, inputs in (*tried, (narrow, torch.randn(5, NARROW[1], generator=generator))):
        quantized = quantize(weight, form.kind).to(device)
        inputs = inputs.to(device)
        try:
            worst = error_of(form, quantized, inputs)
        except Exception as error:  # a kernel's compiler raises what it likes
            if kind_of(error) != "own":
                raise
            return f"it does not run here: {(str(error).splitlines() or [type(error).__name__])[0]}"
        if not worst <= form.error:
            return f"its products are off by {worst:.2g} of |x| |w|, more than the stated {form.error:.2g}"
    return None


def error_of(form: PrecisionForm, weight: QuantizedWeight, x: Tensor) -> float:
    """The largest ``|y - exact| / (|x| |w|)`` of the form's products, as `PrecisionForm.error` bounds it."""
    exact_weight = weight.dequantize().double()
    exact = x.double() @ exact_weight.t()
    got = form.build(weight, None, torch.float32)(x).double()
    norms = x.double().norm(dim=1, keepdim=True) * exact_weight.norm(dim=1)
    worst = ((got - exact).abs() / norms.clamp(min=1e-30)).max()
    return float(worst) if bool(torch.isfinite(got).all()) else float("inf")
