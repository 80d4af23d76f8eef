"""Linear layers, each with the implementation that is fastest here for the number of rows at hand.

A product of one row is bound by reading the weight, one of many rows by arithmetic, and which
implementation is best for each differs widely between CPUs: without bfloat16 units a bfloat16 product of
32 rows takes several times as long as one in float32, while for one row it takes half. So `choose` measures
the candidates on some of the model's own weights once, at load, and `Linear` holds what was chosen.

Forms of a weight:

- ``dense``: as loaded, through ``torch.nn.functional.linear`` in the weight's own dtype;
- ``packed``: reordered once by oneDNN for its own kernels, same dtype (CPU only);
- ``native``: in panels for the kernel of `engine.native`, same dtype, which computes in float32 (CPU only);
- ``fp32gemm`` (only for bfloat16 weights on a CPU): the same values in float32, packed where that exists.
  Widening is exact, so the weights are still the bfloat16 ones; only the arithmetic is float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.quantized import AnyRows
from engine.memory import available_bytes
from engine.native import forward_pass, kernels
from engine.native.kernels import WEIGHT_DTYPES, Kernels
from engine.native.panels import PanelProduct, Panels

Apply = Callable[[Tensor], Tensor]
AnyForm = TypeVar("AnyForm")


class LinearLayer(Protocol):
    """A weight [out, in], in whatever precision, and how x [rows, in] is multiplied with it."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all forms of the weight."""
        ...

    @property
    def own_bytes(self) -> int:
        """The part of ``nbytes`` that is not the loaded weight itself, and is gone with this layer."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """The numbers of rows from which on another form serves."""
        ...

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weight that a product of ``rows`` rows reads."""
        ...

    def kernel(self, rows: int | None = None) -> str:
        """What serves ``rows`` rows, or (None) each number of rows."""
        ...

    def takes_codes(self, rows: int) -> bool:
        """Whether so many rows may come as `QuantizedRows`, and give the same as what those were made of."""
        ...

    def native(self, rows: int) -> PanelProduct | None:
        """The product of so many rows as `engine.native` makes it, where it does."""
        ...

    def __call__(self, x: AnyRows) -> Tensor: ...


PROBE_ROWS = (1, 4, 32, 128)
"""Numbers of rows that are measured. A choice holds from its number up to the one before the next."""
PACK_ROWS = 32  # the number of rows that oneDNN lays a packed weight out for; it serves all others well
EXTRA_FORM_GAIN = 0.75  # a second copy of the weights must take at most this part of the time without it
SMALLER_FORM_LOSS = 1.25  # one that holds fewer bytes may take this many times as long for many rows
MANY_ROWS_SAMPLES = 4  # weights that are enough to measure a product of many rows
HOPELESS = 2.0  # a form that takes this many times as long as another is not measured further
MEMORY_MARGIN = 0.5  # and may take at most this part of the memory that is free


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hold and apply a weight of a given dtype."""

    name: str
    weight_dtype: torch.dtype
    layout: Literal["dense", "packed", "native"]

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype that x is brought to."""
        return torch.float32 if self.layout == "native" else self.weight_dtype

    def build(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Apply:
        """The function x [rows, in] of any dtype -> [rows, out], holding the weight in this form."""
        dtype = self.weight_dtype
        held = weight.to(dtype)
        if self.layout == "native":
            return _native(held, bias, out_dtype)
        held_bias = None if bias is None else bias.to(dtype)
        if self.layout == "dense":

            def dense(x: Tensor) -> Tensor:
                return F.linear(x.to(dtype), held, held_bias).to(out_dtype)

            return dense
        layout = torch.ops.mkldnn._reorder_linear_weight(held, PACK_ROWS)
        product = torch.ops.mkldnn._linear_pointwise

        def packed(x: Tensor) -> Tensor:
            y: Tensor = product(x.to(dtype), layout, held_bias, "none", [], "")
            return y.to(out_dtype)

        return packed


def _native(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Apply:
    native = kernels()
    assert native is not None  # or this form is no candidate
    return _Native(native, native.pack(weight, bias), out_dtype)


class _Native:
    """A product in the ``native`` layout."""

    __slots__ = ("_native", "_out_dtype", "panels")

    def __init__(self, native: Kernels, panels: Panels, out_dtype: torch.dtype) -> None:
        self._native, self.panels, self._out_dtype = native, panels, out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = self._native.linear(x, self.panels)
        return y if self._out_dtype == torch.float32 else y.to(self._out_dtype)


@dataclass(frozen=True, slots=True)
class ByRows(Generic[AnyForm]):
    """Which form serves how many rows: ``forms[i]`` from ``from_rows[i]`` rows on, ascending from 1."""

    from_rows: tuple[int, ...]
    forms: tuple[AnyForm, ...]

    def form_for(self, rows: int) -> AnyForm:
        """The form that a product of ``rows`` rows runs in."""
        chosen = self.forms[0]
        for start, form in zip(self.from_rows, self.forms, strict=True):
            if rows >= start:
                chosen = form
        return chosen

    @property
    def distinct(self) -> tuple[AnyForm, ...]:
        return tuple(dict.fromkeys(self.forms))


class Choice(ByRows[Form]):
    """Forms of a weight in the model's own precision."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Such as ``bf16`` or ``bf16:1+bf16-fp32gemm-packed:2``, each with the rows it starts from."""
        if len(self.forms) == 1:
            return self.forms[0].name
        return "+".join(f"{f.name}:{n}" for n, f in zip(self.from_rows, self.forms, strict=True))

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of the products of many rows, where nearly all arithmetic is."""
        return self.forms[-1].computes_in


class Linear:
    """``y = x @ weight.T + bias`` for x of shape [rows, in]; the form follows the number of rows.

    x may have any dtype, y has ``out_dtype``.
    """

    __slots__ = ("_by_rows", "_many", "choice", "nbytes", "own_bytes", "shape")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, choice: Choice, out_dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        built = {form: form.build(weight, bias, out_dtype) for form in choice.distinct}
        # One entry a number of rows up to where the last form begins: a look-up, not a search, each call.
        # Of any input, for whoever calls was told by `takes_codes`: to look again would take time.
        self._by_rows: tuple[Callable[[Any], Tensor], ...]
        self._many: Callable[[Any], Tensor]
        self._by_rows = tuple(built[choice.form_for(rows)] for rows in range(choice.from_rows[-1]))
        self._many = built[choice.forms[-1]]
        self.choice = choice
        self.nbytes = sum(weight.numel() * form.weight_dtype.itemsize for form in choice.distinct)
        loaded = any(form.layout == "dense" and form.weight_dtype == weight.dtype for form in choice.distinct)
        self.own_bytes = self.nbytes - (weight.nbytes if loaded else 0)

    def __call__(self, x: AnyRows) -> Tensor:
        rows = x.shape[0]
        return self._many(x) if rows >= len(self._by_rows) else self._by_rows[rows](x)

    def native(self, rows: int) -> PanelProduct | None:
        """The product of so many rows as `engine.native` makes it, where it does."""
        apply = self._many if rows >= len(self._by_rows) else self._by_rows[rows]
        return PanelProduct(apply.panels) if isinstance(apply, _Native) else None

    def takes_codes(self, rows: int) -> bool:
        """Never: the weight is in more than 8 bits."""
        return False

    @property
    def starts(self) -> tuple[int, ...]:
        """The numbers of rows from which on another form serves."""
        return self.choice.from_rows

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weight that a product of ``rows`` rows reads."""
        return self.shape[0] * self.shape[1] * self.choice.form_for(rows).weight_dtype.itemsize

    def kernel(self, rows: int | None = None) -> str:
        """What serves ``rows`` rows, or (None) each number of rows."""
        return self.choice.name if rows is None else self.choice.form_for(rows).name


class JoinedLinear:
    """Several layers over the same x whose results stand side by side: parts that cannot be one weight."""

    __slots__ = ("nbytes", "own_bytes", "parts", "shape", "starts")

    def __init__(self, parts: Sequence[LinearLayer]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.nbytes = sum(part.nbytes for part in parts)
        self.own_bytes = sum(part.own_bytes for part in parts)
        self.starts = tuple(sorted({start for part in parts for start in part.starts}))

    def __call__(self, x: AnyRows) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)

    def native(self, rows: int) -> None:
        """Never in one product."""

    def takes_codes(self, rows: int) -> bool:
        """Where all parts do."""
        return all(part.takes_codes(rows) for part in self.parts)

    def read_bytes(self, rows: int) -> int:
        """Bytes of the weights that a product of ``rows`` rows reads."""
        return sum(part.read_bytes(rows) for part in self.parts)

    def kernel(self, rows: int | None = None) -> str:
        """What serves ``rows`` rows, or (None) each number of rows, of each part that differs."""
        return "&".join(dict.fromkeys(part.kernel(rows) for part in self.parts))


def has_packing() -> bool:
    """Whether this build of torch offers oneDNN's packed linear layers."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def candidates(dtype: torch.dtype, device: torch.device) -> list[Form]:
    """The forms that can serve weights of this dtype on this device, the plain one first.

    The first call on a machine compiles kernels, which takes some seconds.
    """
    forms = [_plain(dtype)]
    if device.type != "cpu":
        return forms
    short, packing = forms[0].name, has_packing()
    if packing and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        forms.append(Form(f"{short}-packed", dtype, "packed"))
    if dtype == torch.bfloat16:
        name = "bf16-fp32gemm-packed" if packing else "bf16-fp32gemm"
        forms.append(Form(name, torch.float32, "packed" if packing else "dense"))
    if dtype in WEIGHT_DTYPES and kernels() is not None:
        forms.append(Form(f"{short}-native", dtype, "native"))
    return forms


def _plain(dtype: torch.dtype) -> Form:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return Form(short, dtype, "dense")


def plain_choice(dtype: torch.dtype) -> Choice:
    """The one form that every device has: the weight as loaded."""
    return Choice((1,), (_plain(dtype),))


def choose(
    samples: Sequence[Tensor], *, total_elements: int, device: torch.device, free_bytes: int | None = None
) -> Choice:
    """Measure the candidates on ``samples`` ([out, in] weights of one dtype) and choose by number of rows.

    A second form of all ``total_elements`` weights is only taken where it saves a quarter of the time or more
    and fits into half of the free memory (``free_bytes``, by default what the system reports). Takes some
    tenths of a second on a CPU; on other devices there is one candidate and nothing is measured.
    """
    dtype = samples[0].dtype
    forms = candidates(dtype, device)
    if len(forms) == 1:
        return Choice((1,), (forms[0],))
    if free_bytes is None:
        free_bytes = available_bytes()
    held = forms[0]  # the loaded weights are there already
    if dtype != torch.float32:
        fits = total_elements * 4 <= free_bytes * MEMORY_MARGIN
        forms = [f for f in forms if f.weight_dtype == dtype or fits]
    times = _measure(forms, samples)
    # Few rows last: what serves many rows is held anyway and only gives way to something clearly better.
    many = {form: times[form][PROBE_ROWS[2]] + times[form][PROBE_ROWS[3]] for form in forms}
    close = [form for form in forms if many[form] <= SMALLER_FORM_LOSS * min(many.values())]
    base = min(close, key=lambda f: (f.weight_dtype.itemsize, many[f]))
    chosen: list[Form] = []
    for rows in PROBE_ROWS:
        best = min(forms, key=lambda f: times[f][rows])
        worth = times[best][rows] <= EXTRA_FORM_GAIN * times[base][rows]
        extra_fits = best is held or total_elements * best.weight_dtype.itemsize <= free_bytes * MEMORY_MARGIN
        chosen.append(best if worth and extra_fits else base)
    return Choice(*merged(PROBE_ROWS, chosen))


def merged(probe_rows: Sequence[int], best: Sequence[AnyForm]) -> tuple[tuple[int, ...], tuple[AnyForm, ...]]:
    """``from_rows`` and ``forms`` of a choice, from what is best for each number of rows that was measured.

    Between two probes the later one holds: 2 and 3 rows go with 4, as more than one row does.
    """
    starts, forms = [1], [best[0]]
    for previous, form in zip(probe_rows, best[1:], strict=False):
        if form is not forms[-1]:
            starts.append(previous + 1)
            forms.append(form)
    return tuple(starts), tuple(forms)


def _measure(forms: Sequence[Form], samples: Sequence[Tensor]) -> dict[Form, dict[int, float]]:
    """Seconds of one pass over samples for each form and number of rows, the best of some passes.

    Few rows pass over all samples, which shall not fit into caches, for the whole model does not; many rows
    pass over the first ones only. A form that is hopeless for 32 rows is not measured for more: its time is
    infinite there.
    """
    built = {form: [(w.shape[1], form.build(w, None, torch.float32)) for w in samples] for form in forms}
    times: dict[Form, dict[int, float]] = {form: {} for form in forms}
    few, some, many = PROBE_ROWS[:2], PROBE_ROWS[2], PROBE_ROWS[3]
    for rows in (some, many, *few):
        inputs = {w.shape[1]: torch.ones(rows, w.shape[1]) for w in samples}
        best = float("inf")
        used = slice(None) if rows in few else slice(MANY_ROWS_SAMPLES)
        # The last form is the likeliest winner, and lets the others be dropped early.
        for form in reversed(forms):
            if rows == many and times[form][some] > HOPELESS * min(t[some] for t in times.values()):
                times[form][rows] = float("inf")
                continue
            took = min(_pass_s(built[form][used], inputs) for _ in range(2))
            if took < HOPELESS * best:
                took = min(took, *(_pass_s(built[form][used], inputs) for _ in range(2)))
            times[form][rows] = took
            best = min(best, took)
    return times


def _pass_s(products: Sequence[tuple[int, Apply]], inputs: dict[int, Tensor]) -> float:
    with forward_pass():
        start = time.perf_counter()
        for cols, apply in products:
            apply(inputs[cols])
        return time.perf_counter() - start
