"""From a file to a tensor on any device, through a bounded part of host memory.

A GPU reads host memory by itself if it is pinned. So there are two pinned buffers: while one is copied to the
card, the next part is read from the file into the other. However large a model is, no more of it than both
is in host memory. On a CPU what needs no conversion is read straight into place.
"""

from __future__ import annotations

from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from engine.models.reading import Meter, read_exactly
from engine.out_of_memory import allocating

STAGING_BYTES = 8 << 20  # of a buffer


class Copying(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Until what is copied from may be overwritten."""
        ...


class Lane(Protocol):
    """The edge to a device: what is copied from, and the copying."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that the device reads."""
        ...

    def send(self, source: Tensor, target: Tensor) -> Copying:
        """Begin to copy host memory of a buffer to the device, widened or narrowed there."""
        ...


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Copying:
        # Numbers in another dtype would be converted by the host first, and copied from memory not pinned.
        target.copy_(source.to(self._device, non_blocking=True), non_blocking=True)
        return _Recorded(torch.cuda.current_stream(self._device))


class _Recorded:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.synchronize()


def lane_to(device: torch.device) -> Lane | None:
    """How a device is copied to in the background; None where the host writes to it itself."""
    return _CudaLane(device) if device.type == "cuda" else None


class Staging:
    """Use it as a context: on leaving it all copies are done."""

    def __init__(self, device: torch.device) -> None:
        self._lane = lane_to(device)
        self._buffers: list[Tensor] = []
        self._begun: list[Copying | None] = [None, None]
        self._turn = 0
        if self._lane is not None:
            advice = "free host memory, or allow more of it to be locked (ulimit -l)"
            with allocating("pinned staging memory", torch.device("cpu"), 2 * STAGING_BYTES, advice):
                self._buffers = [self._lane.buffer(STAGING_BYTES) for _ in range(2)]

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        for i in range(len(self._begun)):
            self._wait(i)

    def read(self, file: BinaryIO, source: torch.dtype, target: Tensor, meter: Meter) -> None:
        """Read ``target``'s elements, stored as ``source``, from the file's position, converting as needed.

        Raises `ModelError` if the file ends early.
        """
        flat = target.view(-1)
        size = min(STAGING_BYTES, flat.numel() * source.itemsize)
        direct = self._lane is None and source == target.dtype and target.device.type == "cpu"
        own = None if direct or self._lane is not None else torch.empty(size, dtype=torch.uint8)
        per_part = STAGING_BYTES // source.itemsize
        for start in range(0, flat.numel(), per_part):
            part = flat[start : start + per_part]
            count = part.numel() * source.itemsize
            if direct:
                read_exactly(file, part.view(torch.uint8))
            elif own is not None:
                read_exactly(file, own[:count])
                part.copy_(own[:count].view(source))
            else:
                self._pass_on(file, source, part, count)
            meter.add(count)

    def put(self, values: Tensor, target: Tensor) -> None:
        """Write values of host memory to ``target``, both [n], converting as needed."""
        if self._lane is None:
            target.copy_(values)
            return
        per_part = STAGING_BYTES // target.dtype.itemsize
        for start in range(0, target.numel(), per_part):
            part = target[start : start + per_part]
            i = self._free()
            buffer = self._buffers[i][: part.nbytes].view(target.dtype)
            buffer.copy_(values[start : start + per_part])
            self._begun[i] = self._lane.send(buffer, part)

    def _pass_on(self, file: BinaryIO, source: torch.dtype, part: Tensor, count: int) -> None:
        assert self._lane is not None
        i = self._free()
        buffer = self._buffers[i][:count]
        read_exactly(file, buffer)
        self._begun[i] = self._lane.send(buffer.view(source), part)

    def _free(self) -> int:
        """Which of the buffers may be written to: the one that was used less lately, once it was copied."""
        i, self._turn = self._turn, 1 - self._turn
        self._wait(i)
        return i

    def _wait(self, i: int) -> None:
        begun, self._begun[i] = self._begun[i], None
        if begun is not None:
            begun.wait()
