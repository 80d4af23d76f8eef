"""What only a card does of the check, through fakes at CUDA's edge: capture, replay, events, equal bits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.check import ceilings, correctness, timing
from tests.gpu.check.case import Case
from tests.gpu.check.context import Context
from tests.gpu.check.results import Results
from tests.gpu.check.settings import Settings
from tests.gpu.check.timing import MIN_NODES, Timer

CUDA = torch.device("cuda", 0)
NODE_S = 2e-6
LAUNCH_S = 1e-5  # until a graph is on its way, which a card waits for that has nothing else to do


class Card:
    """Counts what is launched while a graph is captured, and lets each launch take `NODE_S`."""

    def __init__(self) -> None:
        self.capturing = False
        self.nodes = 0
        self.now_s = 0.0
        self.busy = False

    def launch(self) -> None:
        if self.capturing:
            self.nodes += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()

    class Graph:
        def replay(self) -> None:
            made.now_s += made.nodes * NODE_S + (0.0 if made.busy else LAUNCH_S)
            made.busy = False

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_s = made.now_s

        def synchronize(self) -> None:
            return

        def elapsed_time(self, other: Event) -> float:
            return (other.at_s - self.at_s) * 1e3

    @contextlib.contextmanager
    def capture(graph: Graph, pool: Any, stream: Any) -> Iterator[None]:
        made.capturing, made.nodes = True, 0
        yield
        made.capturing = False

    stream = SimpleNamespace(wait_stream=lambda other: None)
    properties = SimpleNamespace(L2_cache_size=50 << 20, multi_processor_count=132)
    for name, value in {
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
        "graph": capture,
        "Event": Event,
        "_sleep": lambda cycles: setattr(made, "busy", True),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_a_kernel_is_timed_by_nodes_of_a_graph(card: Card) -> None:
    """And by nothing that the host takes: the card is busy until all is launched."""
    timer = Timer(CUDA, quick=False)
    for count in (1, 5, 40):
        assert timer.kernel_s([card.launch] * count) == pytest.approx(NODE_S)
        assert card.nodes >= MIN_NODES
        assert card.nodes % count == 0  # every buffer is used as often


def test_calls_go_around_over_more_than_the_cache_holds(card: Card) -> None:
    timer = Timer(CUDA, quick=False)
    assert timer.copies(1 << 30) == 2
    assert timer.copies(10 << 20) * (10 << 20) >= 2 * (50 << 20)
    assert timer.copies(1) == 48


def test_launches_are_counted_one_by_one(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.zeros

    def zeros(*shape: int, device: Any = None) -> torch.Tensor:
        made = real(*shape)
        made.add_ = lambda number: card.launch()  # type: ignore[method-assign, assignment]
        return made

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(ceilings, "_triton_launch_s", lambda timer, device: 1e-5)
    missing: dict[str, str] = {}
    found = ceilings._launches(Timer(CUDA, quick=True), CUDA, missing)
    assert found["graph_node_s"] == pytest.approx(NODE_S)
    assert card.nodes == ceilings.NODES
    assert missing == {}


def test_the_fastest_of_several_is_what_a_card_can_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow copy would make a ceiling that kernels pass."""
    settings = Settings("cpu", True, 60.0, None, tmp_path / "x")
    timer = Timer(torch.device("cpu"), quick=True)
    took = iter([4.0, 2.0, 8.0, 5.0, 6.0, 1.0, 1.0])  # two copiers, three readers, products
    monkeypatch.setattr(timer, "kernel_s", lambda calls: next(took))
    context = Context(settings, Results(settings.out, {}, {}, keep=False), timer.device, timer)
    found = ceilings.run(context)
    assert found["copy_bytes_per_s"] == 2 * settings.buffer_bytes / 2.0
    assert found["read_bytes_per_s"] == found["copy_bytes_per_s"]  # no reader was faster
    assert next(took, None) is None


def test_products_in_fp8_are_held_against_the_kind_that_linear_layers_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slower sums would make a ceiling that is easy to reach."""
    asked: list[dict[str, Any]] = []
    real = torch._scaled_mm

    def scaled(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return real(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    assert ceilings._fp8(Timer(torch.device("cpu"), quick=True), 32, torch.device("cpu")) > 0
    assert asked
    assert all(options["use_fast_accum"] for options in asked)


def test_a_card_is_warmed_up_before_anything_is_measured(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_S", 0.02)
    ran: list[int] = []
    began = time.perf_counter()
    Timer(CUDA, quick=False).warm_up(lambda: ran.append(1))
    assert time.perf_counter() - began >= 0.02
    assert ran


def case_of(results: list[float]) -> Case:
    """One that gives these, one each time that it runs."""
    left = iter(results)
    return Case(lambda: (torch.tensor([next(left)]),), lambda out: 0.0)


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([1.0, 1.0, 1.0, 1.0], ""),
        ([float("nan")] * 4, ""),  # the same bits, though not equal
        ([1.0, 2.0, 1.0, 1.0], "a second run differs"),
        ([1.0, 1.0, 1.0, 1.5], "a replay from a graph differs"),
    ],
)
def test_bits_are_compared_between_runs_and_with_a_replay(card: Card, results: list[float], why: str) -> None:
    settings = Settings("cuda", False, 420.0, None, None)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(settings=settings, timer=Timer(CUDA, quick=False))
    hold: Callable[[], float] = lambda: correctness._hold(context, case_of(results))  # noqa: E731
    if not why:
        assert hold() == 0.0
        return
    with pytest.raises(AssertionError, match=why):
        hold()
