"""Time spent on a device: spans of a step, and the parts of its forward pass.

On a CPU the host's clock tells, for operations run where they are called. On a GPU they only are put into a
queue there, so events go into the same queue and are read once the host has waited for the step anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch


class Timer:
    """A span on the current stream of a device, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._host_s = 0.0

    def start(self) -> None:
        """The span begins here in the current stream."""
        if self._events is None:
            self._host_s = time.perf_counter()
        else:
            self._events[0].record(_stream(self._device))

    def stop(self) -> None:
        """The span ends here in the current stream."""
        if self._events is None:
            self._host_s = time.perf_counter() - self._host_s
        else:
            self._events[1].record(_stream(self._device))

    def elapsed_s(self) -> float:
        """Seconds between `start` and `stop`. Waits for the device to have reached `stop`."""
        if self._events is None:
            return self._host_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class Part(IntEnum):
    """What a stretch of the forward pass is spent on.

    ATTENTION: from the product of queries, keys and values to what attention returns: norms of heads,
    rotation, writing to the cache, attending, what quantization of the cache costs included. LINEAR: the
    projections and the feed-forward layers. HEAD: the last norm and the product with the vocabulary. OTHER:
    embedding, additions and norms between layers.
    """

    OTHER = 0
    ATTENTION = 1
    LINEAR = 2
    HEAD = 3


Mark = Callable[[Part], None]


def no_mark(part: Part) -> None:
    """The mark of a forward pass that is not timed."""


class PartTimer:
    """Splits one forward pass after another into its parts: what lies between two marks goes to one part."""

    def __init__(self, device: torch.device) -> None:
        self._sums = [0.0] * len(Part)
        self._device = device
        self._cuda = device.type == "cuda"
        self._last = 0.0
        self._events: list[torch.cuda.Event] = []  # kept for the next pass
        self._parts: list[Part] = []

    def begin(self) -> Mark:
        """Start a pass. The returned function ends a stretch: it names the part that it was."""
        self._sums = [0.0] * len(Part)
        if self._cuda:
            self._parts = []
            self._record()
            return self._mark_event
        self._last = time.perf_counter()
        return self._mark_host

    def add(self, seconds: Sequence[float]) -> None:
        """What the parts of this pass took that somebody else has timed, in the order of `Part`.

        On a CPU only. What lies between the last mark and now is of no part.
        """
        self._sums = [had + more for had, more in zip(self._sums, seconds, strict=True)]
        self._last = time.perf_counter()

    def seconds(self, part: Part) -> float:
        """Of the last pass. Waits for the device to have finished it."""
        if self._parts:
            self._events[len(self._parts)].synchronize()
            for i, at in enumerate(self._parts):
                self._sums[at] += float(self._events[i].elapsed_time(self._events[i + 1])) / 1e3
            self._parts = []
        return self._sums[part]

    def _mark_host(self, part: Part) -> None:
        now = time.perf_counter()
        self._sums[part] += now - self._last
        self._last = now

    def _mark_event(self, part: Part) -> None:
        self._parts.append(part)
        self._record()

    def _record(self) -> None:
        at = len(self._parts)
        if at == len(self._events):
            self._events.append(_event())
        self._events[at].record(_stream(self._device))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of this device: a thread's current one may be another, whose streams have nothing to do with it."""
    return torch.cuda.current_stream(device)
