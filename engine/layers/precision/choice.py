"""Which form serves how many rows, found by measuring, and the linear layer that follows it.

As `engine.layers.linear` does for plain weights: one row is bound by reading the weight, many rows by
arithmetic, and which kernel is best for each differs widely between CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from engine.current_device import make_current
from engine.layers.linear import ByRows, merged
from engine.layers.precision.forms import PrecisionForm, precision_forms, refused_forms
from engine.layers.precision.measuring import PROBE_ROWS, measure
from engine.layers.precision.product import ERRORS, Product, held_bytes
from engine.layers.precision.weights import Kind, QuantizedWeight
from engine.layers.quantized import AnyRows
from engine.native.panels import PanelProduct

SAME_LAYOUT_GAIN = 0.9  # a form that holds nothing more must take at most this part of the time
EXTRA_LAYOUT_GAIN = 0.75  # and one that holds the weight a second time, this part
NATIVE = "native"  # a layout that serves every number of rows or none, so that nothing is held twice


@dataclass(frozen=True, slots=True)
class PrecisionChoice(ByRows[PrecisionForm]):
    """Forms of weights of one kind."""

    kind: Kind

    @property
    def name(self) -> str:
        """Such as ``int4:int4pack:1+dequant-fp32gemm:17``, each form with the rows it starts from."""
        if len(self.forms) == 1:
            return f"{self.kind}:{self.forms[0].name}"
        parts = (f"{form.name}:{start}" for start, form in zip(self.from_rows, self.forms, strict=True))
        return f"{self.kind}:{'+'.join(parts)}"


class QuantizedLinear:
    """``y = x @ weight.T + bias`` for x [rows, in] of any dtype; y has ``out_dtype``.

    ``nbytes``: what is held, each tensor once however many forms share it; ``own_bytes`` is the same, for
    nothing of it is the loaded weight.
    """

    __slots__ = ("_by_rows", "_many", "choice", "nbytes", "own_bytes", "shape")

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        choice: PrecisionChoice,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = weight.shape
        shared: dict[str, Tensor] = {}
        built = {form: form.build(weight, bias, out_dtype, shared) for form in choice.distinct}
        self._by_rows = tuple(built[choice.form_for(rows)] for rows in range(choice.from_rows[-1]))
        self._many = built[choice.forms[-1]]
        self.choice = choice
        self.nbytes = self.own_bytes = held_bytes(tuple(built.values()))

    def __call__(self, x: AnyRows) -> Tensor:
        rows = x.shape[0]
        return self._many(x) if rows >= len(self._by_rows) else self._by_rows[rows](x)

    def native(self, rows: int) -> PanelProduct | None:
        """The product of so many rows as `engine.native` makes it, where it does."""
        return self._product(rows).native

    def takes_codes(self, rows: int) -> bool:
        """Whether the form that serves so many rows takes them quantized. No rows are no launch."""
        return rows > 0 and self._product(rows).takes_codes

    @property
    def starts(self) -> tuple[int, ...]:
        """The numbers of rows from which on another form serves."""
        return self.choice.from_rows

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weight that a product of ``rows`` rows reads."""
        return held_bytes((self._product(rows),))

    def kernel(self, rows: int | None = None) -> str:
        """What serves ``rows`` rows, or (None) each number of rows, such as ``int4:int4pack``."""
        return self.choice.name if rows is None else f"{self.choice.kind}:{self.choice.form_for(rows).name}"

    def _product(self, rows: int) -> Product:
        return self._many if rows >= len(self._by_rows) else self._by_rows[rows]


def usable_forms(
    kind: Kind,
    weights: Sequence[QuantizedWeight],
    device: torch.device,
    *,
    dynamic: bool = False,
    exact: bool = False,
) -> list[PrecisionForm]:
    """The forms that work here and can serve every one of the weights; the reference only if no other can.

    dynamic: forms that quantize activations, and only those; without it only forms that do not, so that one
    model never mixes the two. exact: only forms that leave activations and scales as they are, so that a
    row's product is that of the dequantized weight but for the rounding of float32 sums, however many rows
    there are; with ``dynamic`` the activations are rounded nevertheless.
    """
    wanted: tuple[str, ...] = ("kept",) if exact else ("kept", "bfloat16")
    if dynamic:
        wanted = ("fp8",)
    reference, *forms = precision_forms(kind, device)
    usable = [
        form
        for form in forms
        if form.activations in wanted
        and (form.error <= ERRORS["kept"] if exact and not dynamic else not form.exact_only)
        and all(form.refuses(weight) is None for weight in weights)
    ]
    return usable or ([] if dynamic else [reference])


def choose_precision(
    kind: Kind,
    samples: Sequence[QuantizedWeight],
    device: torch.device,
    *,
    dynamic: bool = False,
    exact: bool = False,
    timed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> PrecisionChoice:
    """Measure the usable forms on ``samples`` (on ``device``) and choose by the number of rows.

    ``dtype``: of the activations that the products will have, in and out.

    Samples must hold a weight of every shape and layout that the choice shall serve. ValueError if no form
    fits, such as ``dynamic`` for int4. See `usable_forms` for the flags. Not ``timed``, the first form
    serves all.
    """
    if not samples or any(sample.kind != kind for sample in samples):
        raise ValueError(f"at least one sample is needed, and all of them {kind}")
    forms = usable_forms(kind, samples, device, dynamic=dynamic, exact=exact)
    if not forms:
        how = "quantized activations" if dynamic else "weights alone quantized"
        why = "; ".join(f"{name}: {reason}" for name, reason in _reasons(kind, samples, device).items())
        raise ValueError(f"no form computes {kind} weights with {how} on {device.type} ({why})"[:1000])
    if not timed or len(forms) == 1:
        return PrecisionChoice((1,), (forms[0],), kind)
    make_current(device)
    times = measure(forms, samples, device, dtype)
    native = [form for form in forms if form.layout == NATIVE]
    others = [form for form in forms if form.layout != NATIVE]
    found = _by_rows(others, times, kind) if others else None
    # What it takes of the others' time, all numbers of rows counting the same.
    gains = (
        [times[native[0]][n] / times[found.form_for(n)][n] for n in PROBE_ROWS] if native and found else []
    )
    if found is None or (gains and math.prod(gains) < 1):
        return PrecisionChoice((1,), (native[0],), kind)
    return found


def _by_rows(
    forms: Sequence[PrecisionForm], times: Mapping[PrecisionForm, Mapping[int, float]], kind: Kind
) -> PrecisionChoice:
    held = _layouts(forms, times)
    forms = [form for form in forms if form.layout in held]
    # What serves many rows only gives way to something clearly better.
    base = min(forms, key=lambda form: times[form][PROBE_ROWS[-2]] + times[form][PROBE_ROWS[-1]])
    chosen = []
    for rows in PROBE_ROWS:
        best = min(forms, key=lambda form: times[form][rows])
        chosen.append(best if times[best][rows] <= SAME_LAYOUT_GAIN * times[base][rows] else base)
    return PrecisionChoice(*merged(PROBE_ROWS, chosen), kind)


def _layouts(
    forms: Sequence[PrecisionForm], times: Mapping[PrecisionForm, Mapping[int, float]]
) -> tuple[str, ...]:
    """What is worth its memory: the layouts that together take the least time, all numbers of rows counting
    the same, where each is needed. One is needed if for some number of rows it takes at most
    `EXTRA_LAYOUT_GAIN` of the time that the best form in another layout of them does.
    """
    took: dict[str, list[float]] = {}
    for form in forms:
        so_far = took.get(form.layout, [math.inf] * len(PROBE_ROWS))
        took[form.layout] = list(map(min, so_far, (times[form][rows] for rows in PROBE_ROWS)))

    def best(layouts: Sequence[str]) -> list[float]:
        return [min(each) for each in zip(*(took[layout] for layout in layouts), strict=True)]

    def needed(layout: str, layouts: Sequence[str]) -> bool:
        others = best([other for other in layouts if other != layout])
        return any(
            own <= EXTRA_LAYOUT_GAIN * other and own < math.inf
            for own, other in zip(took[layout], others, strict=True)
        )

    sets = (each for size in range(1, len(took) + 1) for each in combinations(took, size))
    worth = [each for each in sets if len(each) == 1 or all(needed(layout, each) for layout in each)]
    return min(worth, key=lambda each: math.prod(best(each)))


def _reasons(kind: Kind, samples: Sequence[QuantizedWeight], device: torch.device) -> dict[str, str]:
    """Why forms cannot be used: they do not work here, cannot serve a weight, or do other things to x."""
    reasons = refused_forms(kind, device)
    for form in precision_forms(kind, device):
        refusals = (form.refuses(weight) for weight in samples)
        reasons[form.name] = next(filter(None, refusals), f"its activations are {form.activations}")
    return reasons
