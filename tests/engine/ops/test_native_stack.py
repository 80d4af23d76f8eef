"""All layers in one call against the same parts called one by one: equal bit for bit, and never stale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.linear import Choice, candidates, plain_choice
from engine.models import linears
from engine.models.linears import HEAD, Place
from engine.models.loader import LoadedModel
from engine.ops import native_stack
from engine.ops.choice import FUSED
from engine.runner import ModelRunner
from engine.timing import Part
from engine.weight_precision import WeightPrecision
from tests.engine.driving import CPU, Driver, prompt, tiny
from tests.engine.native_forms import only_native_forms

ON = dict.fromkeys(FUSED, True)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def native_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    only_native_forms(monkeypatch)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass
class Served:
    """How many passes ran in one call, and how many did not."""

    whole: int = 0
    parts: int = 0


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def compared(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Have each pass of a driver run in one call and in many, and hold it to the same logits, pool and word
    on what is finite."""
    decoder, served, real = driver.runner.decoder, Served(), native_stack.Stacks.of
    forward = decoder.forward

    def both(*args: Any) -> Tensor:
        found: list[Any] = []

        def of(*given: Any) -> Any:
            found.append(real(*given))
            return found[-1]

        monkeypatch.setattr(native_stack.Stacks, "of", of)
        logits, finite = forward(*args), decoder.finite
        pool = [each.clone() for each in (*args[4].k, *args[4].v)]
        monkeypatch.setattr(native_stack.Stacks, "of", lambda *_: None)
        want = forward(*args)
        if found[0] is None:
            served.parts += 1
        else:
            served.whole += 1
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        same(logits, want)
        assert finite is not None
        assert decoder.finite is not None
        assert torch.equal(finite, decoder.finite)
        for each, then in zip((*args[4].k, *args[4].v), pool, strict=True):
            same(each, then)
        return logits

    monkeypatch.setattr(decoder, "forward", both)
    return served


def made(
    loaded: LoadedModel, *, dtype: torch.dtype = torch.float32, precision: WeightPrecision | None = None
) -> ModelRunner:
    runner = ModelRunner(
        loaded, device=CPU, dtype=dtype, attention="paged", precision=precision or WeightPrecision(),
        calibration_ids=prompt(60, 5),
    )  # fmt: skip
    runner.set_fused(ON)
    return runner


def steps(driver: Driver) -> None:
    """Chunks of prompts, single tokens behind a block's end, several rows, rows without logits."""
    first, second, third = (driver.request(prompt(n, n)) for n in (37, 5, 18))
    driver.step((first, 20))
    driver.step((second, 5), (first, 17))
    for _ in range(3):
        driver.step((first, 1), (second, 1))
    driver.step((first, 1), (second, 1), (third, 7))
    driver.step((first, 1), (third, 11))
    for _ in range(12):
        driver.step((third, 1))


MODELS: dict[str, Callable[[], LoadedModel]] = {
    "llama": lambda: tiny("llama")[0],
    "untied": lambda: tiny("llama", tie_word_embeddings=False, vocab_size=331, **SIZES)[0],
    "window": lambda: tiny("mistral", sliding_window=24)[0],
    "biases": lambda: tiny("qwen2")[0],
    "head norms": lambda: tiny("qwen3")[0],
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_model(
    model: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped queries, an odd number of heads, tied and own heads that end beside a panel, windows."""
    driver = Driver(MODELS[model](), runner=made(MODELS[model](), dtype=dtype), block_size=16)
    served = compared(driver, monkeypatch)
    steps(driver)
    assert (served.whole, served.parts) == (19, 0)


@pytest.mark.parametrize("model", ["llama", "biases", "head norms"])
def test_activations_in_bfloat16(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where products of many rows are fastest in bfloat16, and only few rows are the library's."""

    def choose(samples: Any, **_: Any) -> Choice:
        native, many = candidates(torch.bfloat16, CPU)[-1], plain_choice(torch.bfloat16).forms[0]
        return Choice((1, 6), (native, many))

    monkeypatch.setattr(linears, "choose", choose)
    runner = made(MODELS[model](), dtype=torch.bfloat16)
    assert runner.decoder.activation_dtype == torch.bfloat16
    driver = Driver(MODELS[model](), runner=runner, block_size=16)
    served = compared(driver, monkeypatch)
    steps(driver)
    assert (served.whole, served.parts) == (15, 4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("model", ["biases", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_low_precision(
    kind: str, model: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scales of inputs that AWQ finds, and biases beside the panels."""
    precision = (
        WeightPrecision("int8", "", "head") if kind == "int8" else WeightPrecision("int4", "awq", "none")
    )
    driver = Driver(MODELS[model](), runner=made(MODELS[model](), dtype=dtype, precision=precision))
    products = [linear.native(1) for linear in driver.runner.decoder.linears.values()]
    assert {product.panels.kind for product in products[:-1] if product} == {kind}
    assert any(product.input_scales is not None for product in products if product) == (kind == "int4")
    served = compared(driver, monkeypatch)
    steps(driver)
    assert (served.whole, served.parts) == (19, 0)


def test_input_channels_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As codes of packages with `desc_act` have them."""
    runner = made(tiny("llama")[0], precision=WeightPrecision("int4", "rtn", "none"))
    decoder = runner.decoder
    for place in decoder.linears:
        product = decoder.linear(place)._many  # type: ignore[attr-defined]
        product._order = torch.randperm(decoder.linear(place).shape[1])
    driver = Driver(tiny("llama")[0], runner=runner)
    served = compared(driver, monkeypatch)
    steps(driver)
    assert (served.whole, served.parts) == (19, 0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_in_8_bits(
    kv_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny("qwen3")[0], runner=made(tiny("qwen3")[0], dtype=dtype))
    driver.runner.allocate_kv(40, 16, kv_dtype)
    driver.free = list(range(40))
    served = compared(driver, monkeypatch)
    steps(driver)
    assert (served.whole, served.parts) == (19, 0)


def test_what_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    compared(driver, monkeypatch)
    driver.runner.decoder.embed = driver.runner.decoder.embed.clone()
    driver.runner.decoder.embed[9, 3] = float("inf")
    good, bad = driver.request([5, 6, 7]), driver.request([5, 9, 7])
    out = driver.step((good, 3), (bad, 3))
    assert out.nonfinite == [False, True]
    assert driver.runner.decoder.finite is not None
    assert driver.runner.decoder.finite.tolist() == [True] * 3 + [True, False, False]


# --- when something else is switched on ----------------------------------------------------------


def both_ways(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Some steps more, of a request of their own."""
    with monkeypatch.context() as patch:
        served = compared(driver, patch)
        driver.generate(prompt(9, 3), 3)
    return served


@pytest.mark.parametrize("knob", FUSED)
def test_each_part_by_itself_switches_it_off(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    for wanted, expected in ((ON, (3, 0)), (ON | {knob: False}, (0, 3)), (ON, (3, 0))):
        driver.runner.set_fused(wanted)
        served = both_ways(driver, monkeypatch)
        assert (served.whole, served.parts) == expected


def test_another_attention_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    for name, expected in (("paged", (3, 0)), ("sdpa", (0, 3)), ("naive", (0, 3)), ("paged", (3, 0))):
        driver.runner.set_attention(name)
        served = both_ways(driver, monkeypatch)
        assert (served.whole, served.parts) == expected


def test_other_weights_are_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place of them, and what was there before is not kept."""
    loaded = tiny("llama", tie_word_embeddings=False)[0]
    driver = Driver(loaded, runner=made(loaded))
    decoder = driver.runner.decoder
    both_ways(driver, monkeypatch)
    gone = list[Callable[[], Tensor | None]]()
    for place in list(decoder.linears):  # not the layers themselves, which would be kept
        old = decoder.linear(place)
        product = old.native(1)
        assert product is not None
        gone.append(weakref.ref(product.panels.held[0]))
        maker = driver.runner._converter._maker
        weight = torch.randn(old.shape) * 0.1
        with monkeypatch.context() as patch:
            patch.setattr(maker.store, "plain", lambda _, weight=weight: weight)
            decoder.set_linear(place, maker.plain(place))
        served = both_ways(driver, monkeypatch)
        assert served.whole == 3
        del old, product
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_a_weight_that_is_not_the_librarys_is_multiplied_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    decoder, maker = driver.runner.decoder, driver.runner._converter._maker
    for place in (HEAD, Place(1, "down")):
        native = decoder.linear(place)
        with monkeypatch.context() as patch:
            patch.setattr(maker, "choice", plain_choice(torch.float32))
            decoder.set_linear(place, maker.plain(place))
        assert both_ways(driver, monkeypatch).parts == 3
        decoder.set_linear(place, native)
        assert both_ways(driver, monkeypatch).whole == 3


def test_another_pool_is_used_at_once_and_the_old_one_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    for kv_dtype in ("model", "int8", "model"):
        driver.runner.allocate_kv(20, 16, kv_dtype)
        driver.free = list(range(20))
        served = both_ways(driver, monkeypatch)
        assert (served.whole, served.parts) == (3, 0)
        assert driver.runner.kv is not None
        gone = weakref.ref(driver.runner.kv.k[1])
        driver.runner.free_kv()
        gc.collect()
        assert gone() is None


def test_a_decoder_that_shares_weights_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    both_ways(driver, monkeypatch)
    ours = driver.runner.decoder
    lighter = driver.runner.lighter("int8", lambda *_: None)
    driver.runner.decoder = ours.sharing(lighter)
    assert both_ways(driver, monkeypatch).whole == 3
    driver.runner.decoder = ours
    assert both_ways(driver, monkeypatch).whole == 3


def test_its_parts_are_timed_as_those_of_other_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama")[0]
    driver = Driver(loaded, runner=made(loaded))
    driver.runner.set_forward_timing(on=True)
    served = compared(driver, monkeypatch)
    out = driver.step((driver.request(prompt(40)), 40))
    assert served.parts == 0
    parts = (out.attention_s, out.linear_s, out.head_s)
    assert all(part is not None and part > 0 for part in parts)
    assert sum(part for part in parts if part) < out.forward_s
    timer = driver.runner.decoder.timer
    assert timer is not None
    assert all(timer.seconds(part) > 0 for part in Part)
