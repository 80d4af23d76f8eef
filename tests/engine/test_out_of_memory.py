"""Running out of memory: the figures that are told, and going on with what was held given back."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import out_of_memory
from engine.bringup import explain
from engine.kv_cache import KVCache
from engine.lifetime import ExitCode
from engine.models.loader import LoadedModel
from engine.models.reading import allocate
from engine.out_of_memory import allocating, recover, shortage, text_of, watch
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.fake_card import GIB, FakeCard, card

__all__ = ["card"]

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FIGURES = "50.00 GiB of the card's 80.00 GiB are free; torch holds 20.00 GiB, of which 18.00 GiB are in use"
ADVICE = "CUDA out of memory. Tried to allocate 3 llamas."  # torch's text, which may say anything

PROMPT, GREEDY = [5, 6, 7, 8, 9], Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "_told", None)


def test_what_was_asked_for_is_told_by_the_allocator(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment itself: later, what failed has given its memory back."""
    observers: list[Callable[[int, int, int, int], None]] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    watch(CPU)
    assert observers == []
    watch(CUDA)
    observers[0](0, 3 * GIB, card.total, card.free)
    card.free = 60 * GIB
    error = torch.OutOfMemoryError(ADVICE)
    text = text_of(error)
    assert text == f"out of device memory: 3.00 GiB were asked for, {FIGURES}"
    code, told = explain(error, running=False)
    assert (code, told) == (ExitCode.OUT_OF_MEMORY, f"out of memory while loading: {text}")


@pytest.mark.parametrize("dealt_with", ["told", "recovered", "allocating", "long ago"])
def test_what_was_asked_for_once_is_not_told_of_another_error(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, dealt_with: str
) -> None:
    out_of_memory._note(0, 70 * GIB, card.total, card.free)
    first = torch.OutOfMemoryError(ADVICE)
    if dealt_with == "told":
        text_of(first)
    elif dealt_with == "recovered":
        recover(first, CPU)
        assert "70.00 GiB were asked for" in text_of(first)
    elif dealt_with == "allocating":
        with pytest.raises(MemoryError), allocating("w", CPU, 1, "ask for less"):
            raise first
    else:
        later = time.monotonic() + out_of_memory.RECENT_S
        monkeypatch.setattr(out_of_memory.time, "monotonic", lambda: later)
    assert text_of(torch.OutOfMemoryError(ADVICE)) == f"out of device memory: {FIGURES}"


def test_an_allocator_that_tells_nothing_does_not_end_the_start(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync."""

    def refuse(observer: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.\nC++ frames")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    with caplog.at_level(logging.INFO, "engine.out_of_memory"):
        watch(CUDA)
    assert "only what there was: cudaMallocAsync does not yet support" in caplog.text
    assert text_of(torch.OutOfMemoryError(ADVICE)) == f"out of device memory: {FIGURES}"


def test_without_an_observer_what_there_is_is_told(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer", raising=False)
    watch(CUDA)
    assert text_of(torch.OutOfMemoryError(ADVICE)) == f"out of device memory: {FIGURES}"


def test_an_observer_that_fails_does_not_hide_the_error(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: object) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    out_of_memory._note(0, GIB, card.total, card.free)
    monkeypatch.undo()
    assert text_of(torch.OutOfMemoryError(ADVICE)) == ADVICE


def test_other_errors_say_what_they_say() -> None:
    assert text_of(MemoryError("no pool")) == "no pool"
    assert text_of(MemoryError()) == "MemoryError"
    assert text_of(ValueError("x")) == "x"


def test_what_is_needed_is_told_where_it_is_known(card: FakeCard) -> None:
    assert shortage(CUDA, 2 * GIB) == f"2.00 GiB are needed, {FIGURES}"
    with pytest.raises(
        MemoryError, match=r"no memory for w \[\d+, 8\] in .* on cpu: .* GiB are needed, .* GiB can"
    ):
        allocate("w", (1 << 50, 8), torch.float32, CPU)
    spec = load(tiny_folder("llama")).spec
    with pytest.raises(MemoryError, match=r"GiB on cpu\): .* GiB are needed, .* ask for fewer blocks"):
        KVCache.allocate(spec, num_blocks=10**12, block_size=128, dtype=torch.float32, device=CPU)


def test_a_lost_device_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(torch, "empty", lost)
    with pytest.raises(torch.AcceleratorError):
        allocate("w", (1,), torch.float32, CPU)


def test_what_failed_holds_nothing_any_more(card: FakeCard) -> None:
    """The frames of an error hold tensors: without letting go of them there is nothing to give back."""
    held: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        large = torch.ones(1000)
        held.append(weakref.ref(large))
        try:
            raise torch.OutOfMemoryError(ADVICE)
        except RuntimeError as error:
            raise MemoryError("no pool") from error

    try:
        work()
    except MemoryError as error:
        assert held[0]() is not None
        recover(error, CPU)
        assert held[0]() is None
        assert card.emptied == 0
        recover(error, CUDA)
    assert card.emptied == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_without_memory_ends_its_requests_and_gives_back_what_it_held(
    model: LoadedModel, overlap: bool, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(model).generate([PROMPT], GREEDY)
    engine = Engine(model, overlap=overlap, max_num_seqs=1)
    forward = engine.core.runner.forward
    held: list[weakref.ref[torch.Tensor]] = []

    def scarce(prepared: object, wanted: object) -> torch.Tensor:
        activations = torch.ones(1000)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(ADVICE)

    monkeypatch.setattr(engine.core.runner, "forward", scarce)
    monkeypatch.setattr(logging.getLogger("engine.pipeline"), "disabled", True)  # pytest keeps what is logged
    first, second = (engine.submit(PROMPT, GREEDY) for _ in range(2))
    while first not in engine.heard.done:
        engine.core.step()
    assert held[0]() is None
    monkeypatch.setattr(engine.core.runner, "forward", forward)
    engine.run()
    done = engine.heard.done[first]
    assert (done.finish, done.code, done.message) == ("error", "oom", f"out of device memory: {FIGURES}")
    assert [engine.ids(second)] == expected
    assert engine.core.phase == "ready"


def test_a_pool_that_does_not_fit_leaves_room_for_the_one_before(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half allocated pool must be gone before the old one is made again."""
    engine = Engine(model)
    expected = engine.generate([PROMPT], GREEDY)
    zeros, made = torch.zeros, list[Callable[[], object]]()

    def scarce(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        """Room for keys and values of both layers, and the last of the new ones does not fit."""
        if len(made) == 3 or sum(each() is not None for each in made) == 4:
            made.append(lambda: None)
            raise torch.OutOfMemoryError(ADVICE)
        tensor = zeros(shape, **options)
        made.append(weakref.ref(tensor))
        return tensor

    def one_by_one(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """As on a card."""
        return [scarce(shape, dtype=dtype, device=device) for _ in range(count)]

    monkeypatch.setattr("engine.kv_cache._zeros", one_by_one)
    engine.set(block_size=4)
    engine.run()
    [apply] = engine.heard.applies
    assert apply.result == "rolled_back"
    assert "no memory for a KV pool" in apply.why
    monkeypatch.undo()
    assert engine.generate([PROMPT], GREEDY) == expected


def test_a_device_that_is_lost_during_a_change_ends_the_engine(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no way back on a dead device, and no going on."""
    engine = Engine(model)

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(engine.core.runner, "allocate_kv", lost)
    engine.set(block_size=4)
    with pytest.raises(torch.AcceleratorError):
        engine.run()
    assert engine.core.phase == "failed"
