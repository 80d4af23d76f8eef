"""What the measured times of products are times of: through a fake at CUDA's edge, where there is no card."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.precision import PrecisionForm, measuring, precision_forms, quantize
from engine.layers.precision.measuring import FEW, PROBE_ROWS, measure
from engine.layers.precision.product import Multiply
from engine.models import linears
from engine.models.linears import LinearMaker, WeightStore
from tests.engine.driving import CPU, tiny

CARD = torch.device("cuda", 0)
LAUNCH_S = 0.002  # of the host, for each product, such as a kernel that takes many arguments has


class Card:
    """A card whose clock only goes on by what is launched, with a cache that an overwritten one is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.events: list[str] = []
        self.recorded: list[float] | None = None
        self.seen: list[tuple[str, torch.dtype]] = []
        self.broken = ""  # a form that cannot be captured
        self._any = precision_forms("int8", CPU)[0]
        card, real = self, torch.empty

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                card.events.append("mark")
                self.at_s = card.now_s

            def elapsed_time(self, other: Event) -> float:
                return (other.at_s - self.at_s) * 1e3

        def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Any:
            assert shape[0] >= 2 * 4096
            return SimpleNamespace(zero_=lambda: card.events.append("flush"))

        def ones(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            assert device == CARD
            return real(*shape, dtype=dtype).fill_(1)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(L2_cache_size=4096)
        )
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(measuring, "make_driver", lambda device: self)

    def capture(self, body: Callable[[], None]) -> Any:
        body()
        self.recorded = []
        try:
            body()
            nodes = self.recorded
        finally:
            self.recorded = None

        def replay() -> None:
            self.events.append("replay")
            self.now_s += sum(nodes)

        return SimpleNamespace(replay=replay)

    def form(self, name: str, seconds: float) -> PrecisionForm:
        """A form whose products take ``seconds`` of the card, and the host much longer."""

        def build(weight: Any, _: Any) -> Multiply:
            def apply(x: Tensor) -> Tensor:
                self.seen.append((name, x.dtype))
                time.sleep(LAUNCH_S)
                if self.recorded is None:
                    self.now_s += LAUNCH_S
                elif name == self.broken:
                    raise RuntimeError("operation not permitted when stream is capturing")
                else:
                    self.recorded.append(seconds)
                return x.new_zeros((x.shape[0], weight.shape[0]))

            return Multiply(apply, ())

        return replace(self._any, name=name, builder=build)


@pytest.fixture
def samples() -> list[Any]:
    return [quantize(torch.ones(16, 32), "int8") for _ in range(2)]


def test_a_card_is_measured_and_not_the_host(samples: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes as long for each form: by its clock none would be better than another. Activations have
    the dtype that steps will bring, and no pass finds weights of the one before in the cache."""
    card = Card(monkeypatch)
    forms = [card.form("slow", 5e-6), card.form("fast", 2e-6)]
    times = measure(forms, samples, CARD, torch.bfloat16)
    for form, seconds in zip(forms, (5e-6, 2e-6), strict=True):
        assert times[form] == pytest.approx(dict.fromkeys(PROBE_ROWS, 2 * seconds))
    assert {dtype for _, dtype in card.seen} == {torch.bfloat16}
    assert card.events == ["flush", "mark", "replay", "mark"] * (len(card.events) // 4)


def test_a_form_that_cannot_be_captured_is_timed_as_it_is_launched(
    samples: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so; what a device that is lost says ends the measuring."""
    card = Card(monkeypatch)
    card.broken = "waits"
    forms = [card.form("waits", 1e-6), card.form("fast", 2e-3)]
    times = measure(forms, samples, CARD)
    assert times[forms[0]][1] == pytest.approx(2 * LAUNCH_S)
    assert times[forms[1]][1] == pytest.approx(2 * 2e-3)
    assert "products by waits cannot be captured in a CUDA graph: operation not permitted" in caplog.text

    def lost(body: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(card, "capture", lost)
    with pytest.raises(torch.AcceleratorError):
        measure(forms, samples, CARD)


def test_a_form_that_is_hopeless_is_measured_no_further(
    samples: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)
    forms = [card.form("slow", 7e-6), card.form("fast", 2e-6)]
    times = measure(forms, samples, CARD)
    assert [n for n in PROBE_ROWS if times[forms[0]][n] < float("inf")] == [n for n in PROBE_ROWS if n <= FEW]


def test_products_are_measured_with_the_activations_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def choose(*_: Any, dtype: torch.dtype, **__: Any) -> Any:
        asked.append(dtype)

    monkeypatch.setattr(linears, "choose_precision", choose)
    loaded = tiny("llama")[0]
    store = WeightStore(loaded.spec, dict(loaded.weights), {}, dtype=torch.bfloat16, device=CPU)
    maker = LinearMaker(store, measure=False)
    maker.learn("int8", [])
    assert asked == [maker.activation_dtype] == [torch.bfloat16]
