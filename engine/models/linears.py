"""A decoder's linear layers: where they stand, the weights that were loaded for them, and how each is made.

Query, key and value projections are one layer, and so are gate and up, since they share their input.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layers.linear import Choice, JoinedLinear, Linear, LinearLayer, choose, plain_choice
from engine.layers.precision import (
    Kind,
    PrecisionChoice,
    QuantizedLinear,
    QuantizedWeight,
    choose_precision,
    fuse,
)
from engine.models.spec import ModelSpec

SAMPLE_ELEMENTS = 16 << 20  # of weights, for measuring linear layers: more than fits into caches
NO_LAYER = -1


class Place(NamedTuple):
    """Where a linear layer stands. The head belongs to no layer."""

    layer: int
    part: str  # qkv, out, gate_up, down; head

    @property
    def name(self) -> str:
        return self.part if self.layer == NO_LAYER else f"layers.{self.layer}.{self.part}"


HEAD = Place(NO_LAYER, "head")
PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class TakesCodes(NamedTuple):
    """Whether layers' products take what norms give, and what the activation gives, as `QuantizedRows`.

    Both values where layers differ, in the order of the layers.
    """

    norm: tuple[bool, ...]
    mlp: tuple[bool, ...]


NO_CODES = TakesCodes((False,), (False,))
"""Nobody takes them."""


@dataclass(frozen=True, slots=True)
class LinearTable:
    """All linear layers of a model for numbers of rows from ``starts[i]`` on, ascending from 1.

    ``layer_bytes``, ``head_bytes``: bytes of weights that one pass reads. ``kernels``: what runs.
    """

    starts: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    head_bytes: tuple[int, ...]
    kernels: tuple[str, ...]
    takes_codes: tuple[TakesCodes, ...]

    def index(self, rows: int) -> int:
        """The entry that holds for ``rows`` rows."""
        return max(0, bisect_right(self.starts, rows) - 1)


class WeightStore:
    """The weights as they were loaded: a model's originals.

    ``weights`` and ``quantized`` hold them by canonical name; the parts of fused layers become views of the
    whole in ``weights``, so that nothing is held twice. ``consume``: quantized ones are handed out once, and
    then belong to whoever took them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: MutableMapping[str, Tensor],
        quantized: MutableMapping[str, QuantizedWeight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        consume: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.is_quantized = bool(quantized)  # some linear layers were loaded in a low precision
        self._weights = weights
        self._quantized = quantized
        self._consume = consume
        self._whole: dict[Place, Tensor] = {}
        shapes = spec.weight_shapes()
        self.shapes: dict[Place, tuple[int, int]] = {}
        for layer in range(spec.num_layers):
            for part, names in PARTS.items():
                own = [shapes[f"layers.{layer}.{name}.weight"] for name in names]
                self.shapes[Place(layer, part)] = (sum(shape[0] for shape in own), own[0][1])
        self.shapes[HEAD] = (spec.vocab_size, spec.hidden_size)

    def __call__(self, name: str) -> Tensor:
        """A tensor by its canonical name, in the model's dtype and on its device."""
        return self._weights[name].to(device=self.device, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the linear layers' weights in the model's dtype; a tied head is the embedding."""
        places = (place for place in self.shapes if place != HEAD or not self.spec.tie_word_embeddings)
        return sum(map(self.bytes_of, places))

    def bytes_of(self, place: Place) -> int:
        """Bytes of a place's weight in the model's dtype."""
        rows, cols = self.shapes[place]
        return rows * cols * self.dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Bytes of weights that lie in host memory while the model runs on another device."""
        if self.device.type == "cpu":
            return 0
        # Any thread may ask while weights are being moved.
        return sum(whole.nbytes for whole in self._whole.copy().values() if whole.device.type == "cpu")

    def names(self, place: Place) -> list[str]:
        """Canonical names of the weights of a layer."""
        if place == HEAD:
            return ["embed" if self.spec.tie_word_embeddings else "head"]
        return [f"layers.{place.layer}.{name}.weight" for name in PARTS[place.part]]

    def plain(self, place: Place) -> Tensor:
        """The weight [out, in] of a place that was not loaded quantized. KeyError once it was dropped."""
        found = self._whole.get(place)
        if found is None:
            found = self._whole[place] = self._fused(self.names(place))
        return found.to(self.device)

    def bias(self, place: Place) -> Tensor | None:
        """The bias of a place, or None."""
        spec = self.spec
        has = {"qkv": spec.qkv_bias, "out": spec.o_bias, "head": False}.get(place.part, spec.mlp_bias)
        if not has:
            return None
        return self._fused([name.removesuffix("weight") + "bias" for name in self.names(place)])

    def layout(self, place: Place) -> tuple[object, ...]:
        """What decides which forms can serve a place, beside its weights' shapes."""
        return tuple(_layout(self._quantized.get(name)) for name in self.names(place))

    def as_loaded(self, place: Place, *, look: bool = False) -> list[Tensor | QuantizedWeight]:
        """What a place's layer is made of: one weight, or several that cannot be one.

        ``look``: nothing is handed out for good, whatever ``consume`` says.
        """
        names = self.names(place)
        if not any(name in self._quantized for name in names):
            return [self.plain(place)]
        parts = [self._quantized.get(name) or self(name) for name in names]
        if self._consume and not look:
            for name in names:
                self._quantized.pop(name, None)
        only = [part for part in parts if not isinstance(part, Tensor)]
        whole = fuse(only) if len(only) == len(parts) else None
        return [*parts] if whole is None else [whole]

    def to_host(self, place: Place) -> None:
        """Move the weight of a place to host memory, if it is elsewhere."""
        tied = place == HEAD and self.spec.tie_word_embeddings  # the embedding, which stays
        if self.device.type == "cpu" or place not in self._whole or tied:
            return
        whole = self._whole[place]
        for name in self.names(place):
            self._weights.pop(name, None)
        self._whole[place] = whole.cpu()

    def forget(self, place: Place) -> None:
        """Let go of the weight of a place: what no layer holds is freed. An embedding stays."""
        self._whole.pop(place, None)
        if place != HEAD or not self.spec.tie_word_embeddings:
            for name in self.names(place):
                self._weights.pop(name, None)

    def drop(self) -> None:
        """Forget all weights: what no layer holds is freed."""
        self._weights.clear()
        self._quantized.clear()
        self._whole.clear()

    def _fused(self, names: Sequence[str]) -> Tensor:
        """Tensors one below the other, as one, of which they become views."""
        parts = [self(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        whole = torch.cat(parts)
        for name, view in zip(names, torch.split(whole, [len(part) for part in parts]), strict=True):
            held = self._weights[name]
            if held.dtype == whole.dtype and held.device == whole.device:
                self._weights[name] = view
        return whole


def _layout(weight: QuantizedWeight | None) -> object:
    if weight is None:
        return None
    group, zeros = getattr(weight, "group", None), getattr(weight, "zeros", None)
    ordered, scaled = weight.order is not None, weight.input_scale is not None
    return type(weight), weight.shape, group, zeros is None, ordered, scaled


class LinearMaker:
    """Makes linear layers in the forms that are fastest here.

    ``measure`` chooses forms by measuring; without it the first one is used. A model in float32 only gets
    forms that compute in float32 throughout.
    """

    def __init__(self, store: WeightStore, *, measure: bool) -> None:
        self.store = store
        self._measure = measure
        self._precisions: dict[Kind, PrecisionChoice] = {}
        self.choice = self._choose() if measure else plain_choice(store.dtype)
        cpu = store.device.type == "cpu"
        self.activation_dtype = self.choice.computes_in if cpu else store.dtype

    def plain(self, place: Place) -> LinearLayer:
        """A layer in the model's own precision."""
        return Linear(self.store.plain(place), self.store.bias(place), self.choice, self.out_dtype(place))

    def quantized(self, place: Place, weight: QuantizedWeight) -> LinearLayer:
        """A layer with this weight, of a kind that `learn` has seen."""
        bias = self.store.bias(place)
        return QuantizedLinear(weight, bias, self._precisions[weight.kind], self.out_dtype(place))

    def as_loaded(self, place: Place) -> LinearLayer:
        """A layer of a model that was loaded quantized; `learn` must have seen its kinds."""
        parts, bias = self.store.as_loaded(place), self.store.bias(place)
        if len(parts) == 1 and isinstance(parts[0], Tensor):
            return self.plain(place)
        out, start, made = self.out_dtype(place), 0, list[LinearLayer]()
        for part in parts:
            own = None if bias is None else bias[start : start + part.shape[0]]
            if isinstance(part, Tensor):
                made.append(Linear(part, own, self.choice, out))
            else:
                made.append(QuantizedLinear(part, own, self._precisions[part.kind], out))
            start += part.shape[0]
        return made[0] if len(made) == 1 else JoinedLinear(made)

    def out_dtype(self, place: Place) -> torch.dtype:
        return torch.float32 if place == HEAD else self.activation_dtype

    def learn(self, kind: Kind, samples: Sequence[QuantizedWeight]) -> None:
        """Choose the forms for a kind of weights. See `engine.layers.precision.choose_precision`."""
        device, exact = self.store.device, self.store.dtype == torch.float32
        # Weights in fp8 of our own making meet activations in fp8, as the hardware that has it wants.
        dynamic = kind == "fp8" and not self.store.is_quantized
        self._precisions[kind] = choose_precision(
            kind,
            samples,
            device,
            dynamic=dynamic,
            exact=exact,
            timed=self._measure,
            dtype=self.activation_dtype,
        )

    def holds_codes(self, kind: Kind) -> bool:
        """Whether layers of this kind hold a weight's own tensors, not only a layout made of them."""
        choice = self._precisions.get(kind)
        return choice is not None and any(form.layout == "plain" for form in choice.distinct)

    def layouts(self, kind: Kind) -> int:
        """In how many layouts a weight of this kind is held; 1 as long as `learn` has not seen any."""
        choice = self._precisions.get(kind)
        return 1 if choice is None else len({form.layout for form in choice.distinct})

    def learn_loaded(self) -> None:
        """Choose the forms for a model that was loaded quantized, by weights of each layout in it."""
        seen, elements = set[object](), 0
        samples: dict[Kind, list[QuantizedWeight]] = {}
        for place, (rows, cols) in self.store.shapes.items():
            layout = (rows, cols, self.store.layout(place))
            if layout in seen and elements >= SAMPLE_ELEMENTS:
                continue
            seen.add(layout)
            for part in self.store.as_loaded(place, look=True):
                if not isinstance(part, Tensor):
                    samples.setdefault(part.kind, []).append(part)
                    elements += part.shape[0] * part.shape[1]
        for kind, found in samples.items():
            self.learn(kind, found)

    def sample_places(self) -> Iterator[Place]:
        """Places whose weights are enough to measure with: of every shape, and too many for caches."""
        elements = 0
        for place, (rows, cols) in self.store.shapes.items():
            if place != HEAD and (elements < SAMPLE_ELEMENTS or place.layer == 0):
                elements += rows * cols
                yield place

    def _choose(self) -> Choice:
        store, samples, elements = self.store, list[Tensor](), 0
        if store.is_quantized:  # what is left to be chosen for is mostly the head
            samples = [store("embed")[: SAMPLE_ELEMENTS // store.spec.hidden_size + 1]]
        for place in () if store.is_quantized else self.sample_places():
            room = max(1, (SAMPLE_ELEMENTS - elements) // store.shapes[place][1])
            samples.append(store.plain(place)[:room])
            elements += samples[-1].numel()
        return choose(samples, total_elements=store.spec.num_params, device=store.device)
