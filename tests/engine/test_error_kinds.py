"""What CUDA answers by code 2 is a lack of memory wherever it is met, and other codes a lost device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from engine import kernels
from engine.bringup import explain
from engine.kernels import availability
from engine.layers.precision.forms import precision_forms, probe
from engine.lifetime import ExitCode
from engine.memory_profile import profile
from engine.models.loader import LoadedModel
from engine.models.staging import Staging
from engine.out_of_memory import allocating, kind_of, text_of
from engine.plan import Copy
from engine.swap import CopyFailed, HostArena, HostMemory
from engine.timing import Timer
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.fake_card import FakeCard, card
from tests.engine.test_swap import pool

__all__ = ["card"]

CPU = torch.device("cpu")
PROMPT, GREEDY = [5, 6, 7, 8, 9], Sampling(max_tokens=6, ignore_eos=True)
FIGURES = "50.00 GiB of the card's 80.00 GiB are free; torch holds 20.00 GiB, of which 18.00 GiB are in use"

BY_TRITON = "Triton Error [CUDA]: an illegal memory access was encountered"


def of_cuda(code: int | None, text: str) -> torch.AcceleratorError:
    """As torch raises it for what the CUDA runtime answers."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be reported later")
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]  # set by torch beside its own stub
    return error


def no_memory(*_: Any, **__: Any) -> NoReturn:
    raise of_cuda(2, "out of memory")


def lost(*_: Any, **__: Any) -> NoReturn:
    raise of_cuda(700, "an illegal memory access was encountered")


def mistaken(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("shape mismatch: a fault of the engine")


@pytest.fixture
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_cuda(2, "out of memory"), "memory"),
        (of_cuda(None, "out of memory"), "memory"),
        (of_cuda(None, "unspecified launch failure"), "lost"),
        (of_cuda(700, "an illegal memory access was encountered"), "lost"),
        (of_cuda(719, "unspecified launch failure: out of memory"), "lost"),
        (of_cuda(721, "tensor memory not completely freed"), "lost"),
        (of_cuda(1, "invalid argument"), "own"),
        (of_cuda(9, "invalid configuration argument"), "own"),
        (of_cuda(209, "no kernel image is available for execution on the device"), "own"),
        (of_cuda(701, "too many resources requested for launch"), "own"),
        (of_cuda(801, "operation not supported"), "own"),
        (of_cuda(900, "operation not permitted when stream is capturing"), "own"),
        (of_cuda(908, "operation failed: wrong thread"), "own"),
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (MemoryError(), "memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "memory",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "memory"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "lost"),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), "lost"),
        (RuntimeError("Triton Error [CUDA]: unknown error"), "lost"),
        (RuntimeError("CUDA driver error: unspecified launch failure"), "lost"),
        (RuntimeError("torch.compile could not compile x: CUDA error: misaligned address"), "lost"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "own"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"), "own"),
        (RuntimeError("unknown error"), "own"),
        (CopyFailed("copying KV blocks failed: out of memory"), "own"),
        (ValueError("out of memory"), "own"),
    ],
)
def test_errors_are_told_apart(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("Triton Error [CUDA]: the operation cannot be performed in the present state"),
        of_cuda(400, "invalid resource handle"),
        of_cuda(None, "of a later version"),
    ],
)
def test_where_an_error_does_not_tell_the_device_is_asked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries report a fault of the device and one of their own alike."""
    answers: list[Exception | None] = [None, of_cuda(900, "operation not permitted when stream is capturing")]
    answers += [of_cuda(700, "an illegal memory access was encountered"), of_cuda(400, "invalid handle")]

    def synchronize() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert kind_of(error) == "own", "no device was used that could be lost"
    assert len(answers) == 4
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert [kind_of(error) for _ in range(4)] == ["own", "own", "lost", "lost"]
    assert kind_of(RuntimeError("shapes do not match")) == "own", "which nobody has to be asked about"


def test_the_allocator_of_the_cpu_is_known_by_its_text() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)
    assert kind_of(caught.value) == "memory"


@pytest.mark.parametrize(
    "told",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_its_text_says_what_the_card_has_and_what_to_do(card: FakeCard, told: str) -> None:
    """What CUDA and its libraries do not tell is not made up; torch's advice on debugging is left out."""
    errors = [torch.AcceleratorError, RuntimeError] if told.startswith("CUDA error: out") else [RuntimeError]
    for error in errors:
        assert text_of(error(f"{told}\nCUDA kernel errors might be reported later")) == (
            f"out of device memory: {told}, which does not say how much was asked for; {FIGURES}; it is "
            "taken beside what torch holds: end other programs on the card, or give the KV pool less "
            "(kv_pool_gib, gpu_memory_utilization)"
        )


def test_the_allocator_of_the_cpu_says_itself_what_it_lacks(card: FakeCard) -> None:
    said = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 12 bytes"
    assert text_of(RuntimeError(said)) == said


def test_an_engine_that_ends_by_it_says_so() -> None:
    code, why = explain(of_cuda(2, "out of memory"), running=True)
    assert (code, why) == (ExitCode.OUT_OF_MEMORY, "out of memory while running: CUDA error: out of memory")
    for lost in (of_cuda(700, "an illegal memory access"), RuntimeError(BY_TRITON)):
        assert explain(lost, running=True)[0] == ExitCode.DEVICE


def test_pinned_memory_that_cannot_be_had_comes_with_its_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        buffer = staticmethod(no_memory)

    monkeypatch.setattr("engine.models.staging.lane_to", lambda device: Card())
    with pytest.raises(MemoryError, match=r"no memory for pinned staging memory: .*ulimit -l"):
        Staging(CPU)


@pytest.mark.parametrize("take", [lost, mistaken, lambda: torch.empty(-1)])
def test_where_memory_is_taken_only_a_lack_of_it_is_called_so(take: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError), allocating("w", CPU, 1, "ask for less"):
        take()


@pytest.mark.parametrize("size", [(1 << 52,), (1 << 62, 8)])  # the latter are more bytes than 64 bits count
def test_more_than_can_be_counted_is_more_than_there_is(size: tuple[int, ...]) -> None:
    told = pytest.raises(MemoryError, match=r"no memory for w: .* ask for less")
    with told, allocating("w", CPU, 1, "ask for less"):
        torch.empty(size)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_meets_it_ends_its_requests_alone(
    model: LoadedModel, overlap: bool, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, overlap=overlap, max_num_seqs=1)
    expected, forward = Engine(model).generate([PROMPT], GREEDY), engine.core.runner.forward
    monkeypatch.setattr(engine.core.runner, "forward", no_memory)
    monkeypatch.setattr(logging.getLogger("engine.pipeline"), "disabled", True)
    first, second = (engine.submit(PROMPT, GREEDY) for _ in range(2))
    while first not in engine.heard.done:
        engine.core.step()
    monkeypatch.setattr(engine.core.runner, "forward", forward)
    engine.run()
    assert (engine.heard.done[first].finish, engine.heard.done[first].code) == ("error", "oom")
    assert [engine.ids(second)] == expected
    assert engine.core.phase == "ready"


def test_a_step_whose_device_is_lost_ends_the_engine(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is Triton that met it: every later step would fail too."""
    made = Engine(model)

    def failing(*_: Any) -> NoReturn:
        raise RuntimeError(BY_TRITON)

    monkeypatch.setattr(made.core.runner, "forward", failing)
    made.submit(PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.run()
    assert made.core.phase == "failed"


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"])
def test_libraries_without_memory_end_requests_for_the_same_reason(model: LoadedModel, text: str) -> None:
    engine = Engine(model)
    emptied: list[BaseException | None] = []

    def scarce(*_: Any) -> NoReturn:
        raise RuntimeError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core.runner, "forward", scarce)
        patch.setattr("engine.out_of_memory.recover", lambda error, device: emptied.append(error))
        rid = engine.submit(PROMPT, GREEDY)
        engine.run()
    assert engine.heard.done[rid].code == "oom"
    assert len(emptied) == 1


def test_a_change_that_meets_it_is_rolled_back(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model)
    expected = engine.generate([PROMPT], GREEDY)
    allocate, calls = engine.core.runner.allocate_kv, list[int]()

    def scarce(*args: Any) -> Any:
        calls.append(1)
        return no_memory() if len(calls) == 1 else allocate(*args)

    monkeypatch.setattr(engine.core.runner, "allocate_kv", scarce)
    engine.set(block_size=4)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, len(calls)) == ("rolled_back", 2)
    assert "out of memory" in apply.why
    assert engine.generate([PROMPT], GREEDY) == expected


def test_copies_that_meet_it_fail_and_a_lost_device_ends_everything() -> None:
    class Lane:
        """Fails at the first task, as staging memory of a card would."""

        def __init__(self, fail: Any) -> None:
            self.submit, self.fenced = fail, 0

        def host(self, task: Any) -> None:
            task()

        def mark(self) -> None:
            pass

        def fence(self) -> None:
            self.fenced += 1

    kv, copy = pool(), Copy("out", "swap", [0], [0])
    for fail, error, fenced in ((no_memory, CopyFailed, 1), (lost, torch.AcceleratorError, 0)):
        lane = Lane(fail)
        host = HostMemory(CPU, lane=lane)
        host.allocate("swap", 2, kv)
        with pytest.raises(error, match="CUDA error"):
            host.run([copy], kv, Timer(CPU))
        assert lane.fenced == fenced


def test_an_arena_that_meets_it_says_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = pool()
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(MemoryError, match="no host memory for 3 KV blocks"):
        HostArena(kv, 3)
    for error in (lost, mistaken):
        monkeypatch.setattr(torch, "empty", error)
        with pytest.raises(RuntimeError, match=r"illegal memory access|shape mismatch"):
            HostArena(kv, 3)


def test_the_largest_step_that_meets_it_does_not_fit(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(load(tiny_folder("llama")), max_num_batched_tokens=96, max_num_seqs=8)
    engine.core.runner.free_kv()
    monkeypatch.setattr(engine.core.runner, "forward", no_memory)
    with pytest.raises(MemoryError, match="the largest step, 96 tokens of 8 requests, does not fit"):
        profile(engine.core.runner, engine.core.knobs.values, 0.9)
    monkeypatch.setattr(engine.core.runner, "forward", lost)
    with pytest.raises(torch.AcceleratorError):
        profile(engine.core.runner, engine.core.knobs.values, 0.9)


def test_drafting_that_meets_it_is_given_up(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, speculation="self", spec_adaptive=False)
    drafter = engine.core.speculator._drafter
    assert drafter is not None
    expected = Engine(model).generate([PROMPT], GREEDY)
    monkeypatch.setattr(drafter, "propose", no_memory)
    assert engine.generate([PROMPT], GREEDY) == expected
    assert (
        "was given up because drafting failed: CUDA error: out of memory" in engine.core.state().speculation
    )


@pytest.mark.parametrize("error", [no_memory, lost])
def test_a_product_that_meets_it_is_not_called_wrong(error: Any) -> None:
    right = precision_forms("int8", CPU)[1]
    with pytest.raises(torch.AcceleratorError):
        probe(replace(right, builder=error), CPU)


def test_kernels_are_not_called_impossible_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    availability._cannot_launch.cache_clear()
    monkeypatch.setattr(kernels, "trial", SimpleNamespace(run=lost), raising=False)
    with pytest.raises(torch.AcceleratorError):
        availability._cannot_launch(CPU)
