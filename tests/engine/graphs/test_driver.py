"""The driver for CUDA, over a stand-in of torch's functions that fails as they do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.graphs.driver import make_driver

DEVICE = torch.device("cuda", 1)


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.capturing = False
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        assert not other.capturing
        self.waited_for.append(other)


class Cuda:
    """As torch 2.11 to 2.13: a capture whose end fails leaves its stream current and its pool recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.first = Stream()
        self.recording: set[tuple[int, int]] = set()
        self.released: list[tuple[int, int]] = []
        self._pools = iter(range(1, 99))
        self.reserved: Iterator[int] = itertools.repeat(0)
        for name in ("graph", "stream", "current_stream", "set_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(self.reserved))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self._pools)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: object, *, pool: tuple[int, int], stream: Stream, **_: Any) -> Iterator[None]:
        if stream.capturing:
            raise RuntimeError("cannot begin: the stream is capturing")
        if self.recording:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {pool}")
        before, self.current = self.current, stream
        stream.capturing = True
        self.recording.add(pool)
        try:
            yield
        except RuntimeError as error:  # the capture is invalidated, and so its end fails too
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error") from error
        self.recording.remove(pool)
        stream.capturing = False
        self.current = before

    def end_allocate(self, index: int, pool: tuple[int, int]) -> None:
        assert index == DEVICE.index
        if pool not in self.recording:
            raise RuntimeError(f"endAllocatePool: not currently recording to mempool_id {pool}")
        self.recording.remove(pool)

    def release(self, index: int, pool: tuple[int, int]) -> None:
        self.released.append(pool)


def test_a_capture_that_cannot_be_ended_spoils_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    driver = make_driver(DEVICE)
    runs = 0

    def fails_while_captured() -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(torch.AcceleratorError):
        driver.capture(fails_while_captured)
    assert cuda.current is cuda.first
    assert not cuda.recording
    assert cuda.released == [(0, 1)]
    driver.capture(lambda: None)
    assert cuda.current is cuda.first
    assert cuda.released == [(0, 1)]  # what was ended is the graph's to release


def test_what_fails_before_it_is_captured_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it launched on the side may still write to memory that is given to others by then."""
    cuda = Cuda(monkeypatch)

    def scarce() -> None:
        raise torch.OutOfMemoryError("no memory for the logits")

    driver = make_driver(DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        driver.capture(scarce)
    assert len(cuda.first.waited_for) == 1
    assert cuda.current is cuda.first


@pytest.mark.parametrize(("reserved", "nbytes"), [((100, 140), 40), ((100, 90), 0)])
def test_a_graph_takes_what_was_reserved_for_it(
    reserved: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than nothing it never takes: meanwhile others may have given memory back."""
    cuda = Cuda(monkeypatch)
    cuda.reserved = iter(reserved)
    assert make_driver(DEVICE).capture(lambda: None).nbytes == nbytes
