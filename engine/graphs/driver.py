"""The thin edge to CUDA: what captures a graph and replays it. Everything else is tested without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Captured(Protocol):
    """A captured graph."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that capturing it took."""
        ...

    def replay(self) -> None:
        """Launch everything that was captured, on the current stream."""
        ...


class Arrival(Protocol):
    """A copy to the host that is under way."""

    def wait(self) -> None:
        """Until it is there, and all that was launched before it is done. Any thread."""
        ...


class Driver(Protocol):
    """Captures graphs that share one pool of memory, and moves what goes into a replay and comes out."""

    def host(self, words: int) -> Tensor:
        """Zeros on the host, int64, from where and to where copies go by themselves."""
        ...

    def send(self, host: Tensor, device: Tensor) -> None:
        """Copy to the device, on the current stream. What is on the host must stay until that is done."""
        ...

    def fetch(self, device: Tensor, host: Tensor) -> Arrival:
        """Copy to the host, on the current stream."""
        ...

    def run(self, body: Callable[[], None]) -> None:
        """Launch what ``body`` launches, on the current stream."""
        ...

    def capture(self, body: Callable[[], None]) -> Captured:
        """Run ``body``, so that everything it launches is loaded, and then capture what it launches.

        All memory that it takes belongs to the graph. RuntimeError if something in it cannot be captured, or
        memory runs out, or the device is lost (see `engine.out_of_memory.kind_of`); but for the last, what
        was captured before stays good and the next capture begins anew.
        """
        ...


def probe(device: torch.device) -> str | None:
    """Why graphs cannot be captured on a device, or None."""
    return None if device.type == "cuda" else f"CUDA graphs need an NVIDIA GPU, not {device.type}"


def make_driver(device: torch.device) -> Driver:
    """The driver; ask `probe` first."""
    return _CudaDriver(device)


def stop_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """Let a pool of memory go after a capture into it that failed.

    Where it could not be ended, torch leaves the pool recording: every later capture into it would fail, and
    the allocator would give no unused memory back to the device. Source: torch's CUDAGraph.cpp,
    `capture_end`.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # which says that it does not record: it was ended
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


class _CudaDriver:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._pool = torch.cuda.graph_pool_handle()

    def host(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def send(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host, non_blocking=True)

    def fetch(self, device: Tensor, host: Tensor) -> Arrival:
        host.copy_(device, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        event.record(torch.cuda.current_stream(self._device))
        return _Arrival(event)

    def run(self, body: Callable[[], None]) -> None:
        body()

    def capture(self, body: Callable[[], None]) -> Captured:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                body()  # kernels are compiled, modules loaded, libraries set up: none of it can be captured
        finally:  # what failed half way may still write to memory that is then given to others
            current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as capturing does first: what that frees is not the graph's
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the engine may use CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                body()
        except BaseException:
            torch.cuda.set_stream(current)  # a capture that cannot be ended leaves its own stream current
            stop_recording(self._device, self._pool)
            self._begin()  # the stream goes on capturing
            raise
        # Meanwhile other threads may have given memory back, of which none was the graph's.
        return _CudaGraph(graph, max(0, torch.cuda.memory_reserved(self._device) - before))


class _Arrival:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int) -> None:
        self._graph = graph
        self.nbytes = nbytes

    def replay(self) -> None:
        self._graph.replay()
