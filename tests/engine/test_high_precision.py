"""Which layers are in which precision for each ``high_precision``, and what that takes of memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import converter
from engine.layers.precision import KINDS, precision_forms
from engine.models.linears import HEAD, PARTS, Place
from engine.models.loader import LoadedModel, load_model
from engine.runner import ModelRunner
from engine.weight_precision import High, WeightPrecision
from tests.engine.core_harness import Engine, tiny_folder
from tests.engine.driving import CPU

LAYERS, HIDDEN, VOCAB = 4, 256, 320
SHAPES = {"qkv": (512, 256), "out": (256, 256), "gate_up": (1024, 256), "down": (256, 512)}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": LAYERS,
}
KEPT: dict[High, set[int]] = {
    "none": set(), "head": {HEAD.layer}, "ends": {HEAD.layer, 0, LAYERS - 1}, "sensitive": {HEAD.layer, 2},
}  # fmt: skip
REST = 4 * HIDDEN * (2 * LAYERS + 1) + 2 * 4 * 512 * 32  # norms, and the table of rotary embeddings
CASES = [
    (kind, method, high)
    for kind, method in (("int8", ""), ("fp8", ""), ("int4", "rtn"), ("int4", "awq"))
    for high in KEPT
    if method != "awq" or high in ("none", "sensitive")  # which takes seconds to search
]


def fresh() -> LoadedModel:
    """A model that nobody else holds. Its third layer errs most: a large weight makes rows coarse."""
    folder = tiny_folder("llama", **SIZES)
    loaded = load_model(folder, dtype=torch.float32, device=CPU, progress=lambda *_: None)
    loaded.weights["layers.2.down_proj.weight"][:, 7] = 20.0
    return loaded


def precision_of(kind: str, method: str, high: High) -> WeightPrecision:
    return WeightPrecision(kind, method, high)  # type: ignore[arg-type]


def tensor_bytes() -> int:
    """Bytes of all tensors that there are; what shares memory counts once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def arithmetic(kind: str, kept: set[int]) -> int:
    """Bytes of embedding, head and linear layers, from their shapes alone."""
    total = 4 * VOCAB * HIDDEN
    places = [(layer, shape) for layer in range(LAYERS) for shape in SHAPES.values()]
    for layer, (rows, cols) in [*places, (HEAD.layer, (VOCAB, HIDDEN))]:
        if kind == "model" or layer in kept:
            total += 4 * rows * cols
        elif kind == "int4":
            total += rows * cols // 2 + rows * (cols // 128) * 3  # a scale in 16 bits, a zero in 8
        else:
            total += rows * cols + 4 * rows
    return total


@pytest.mark.parametrize(("kind", "method", "high"), CASES)
def test_layers_are_in_the_precision_that_was_chosen(kind: str, method: str, high: High) -> None:
    """By what each layer of a running engine computes with: its kernel, and its error."""
    loaded = fresh()
    exact = {place: _multiplied(loaded, place) for place in _places()}
    engine = Engine(
        loaded, weight_dtype=kind, high_precision=high, **({"int4_method": method} if method else {})
    )
    linears = engine.core.runner.decoder.linears
    assert set(linears) == set(exact)
    plain = {p for p, linear in linears.items() if not linear.kernel().startswith(kind)}
    kept = KEPT[high]
    if (kind, high) == ("fp8", "sensitive"):  # the step of a float is no larger beside a large weight
        kept = {place.layer for place in plain}
        assert len(kept) == len(KEPT[high])
        assert HEAD.layer in kept
    assert plain == {place for place in linears if place.layer in kept}
    for place, linear in linears.items():
        with torch.inference_mode():
            off = (linear(torch.eye(linear.shape[1])).t() - exact[place]).norm() / exact[place].norm()
        if place in plain:
            assert off < 1e-6, place.name
        else:
            assert 1e-4 < off < 0.3, place.name


@pytest.mark.parametrize(("kind", "method", "high"), CASES)
def test_bytes_are_what_arithmetic_says(
    monkeypatch: pytest.MonkeyPatch, kind: str, method: str, high: High
) -> None:
    """Within 3 %: what is told, and what memory really holds, before and after, without the originals."""
    monkeypatch.setattr(converter, "KEEP_SHARE", 0.0)  # so that they are not kept
    for each in KINDS:
        precision_forms(each, CPU)  # which are tried once, and leave scratch memory behind
    empty = tensor_bytes()

    def held(precision: WeightPrecision) -> tuple[int, int]:
        runner = ModelRunner(
            fresh(), device=CPU, dtype=torch.float32, measure=False, consume=True, precision=precision,
            calibration_ids=range(4, 99),
        )  # fmt: skip
        assert runner.original_bytes == 0
        return runner.weight_bytes, tensor_bytes() - empty

    told_before, before = held(WeightPrecision())
    told, after = held(precision_of(kind, method, high))
    plain, low = arithmetic("model", set()), arithmetic(kind, KEPT[high])
    assert told_before == pytest.approx(plain, rel=0.03)
    assert told == pytest.approx(low, rel=0.03)
    assert before == pytest.approx(plain + REST, rel=0.03)
    assert after == pytest.approx(low + REST, rel=0.03)


def _places() -> list[Place]:
    return [HEAD, *(Place(layer, part) for layer in range(LAYERS) for part in PARTS)]


def _multiplied(loaded: LoadedModel, place: Place) -> Tensor:
    """The weight [out, in] of a place as it was loaded."""
    if place == HEAD:
        return loaded.weights["head"].clone()
    names = [f"layers.{place.layer}.{name}.weight" for name in PARTS[place.part]]
    return torch.cat([loaded.weights[name] for name in names])
