"""Memory in large pages, for weights, all of which are read for every token, and for keys and values.

In pages of 4 KiB a core that reads on has to look up the next page every few hundred cycles, and what fetches
ahead of it stops at each page's end: two cores then read at 28 GB/s what they read at 34 GB/s from pages of
2 MiB. Keys and values are read block by block from all over the pool, and where many requests are read a core
has forgotten where most of their small pages are. Linux gives large ones to memory that asks for them where
it is set to, transparent huge pages being ``madvise`` or ``always``; elsewhere it is memory like any other.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sizes import size as in_words

PAGE = 2 << 20
SLAB = 32 << 20  # what is asked of the system at once: weights are smaller than a page, or end within one
LINE = 64  # of a cache, where each tensor begins


class _Slab:
    """Memory that is given out from front to back, and freed once nobody holds a part of it any more."""

    def __init__(self, size: int, what: str = "weights") -> None:
        try:  # of its own, for shared memory has settings of its own; with room to begin where a page does
            memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no memory for {what}: {in_words(size)} are needed: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._whole: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._memory = weakref.ref(memory)
        self._taken = -self._whole.data_ptr() % PAGE
        self._end = self._taken + size

    def take(self, size: int) -> Tensor | None:
        """uint8 [size], or None if there is no such room."""
        memory = self._memory()
        if memory is None or self._taken + size > self._end:
            return None
        part = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=self._taken)
        self._taken += -(-size // LINE) * LINE
        self._whole = None  # from now on the parts keep it
        return part


_lock = threading.Lock()
_slab: _Slab | None = None  # that parts are taken of


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy of a tensor on the CPU, whose memory is freed together with its neighbours'."""
    global _slab
    if not tensor.nbytes:
        return tensor.contiguous()
    with _lock:
        part = None if _slab is None else _slab.take(tensor.nbytes)
        if part is None:
            _slab = _Slab(max(SLAB, tensor.nbytes))
            part = _slab.take(tensor.nbytes)
    assert part is not None  # or a new one is too small
    copy = part.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def zeros_in_large_pages(count: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """So many tensors on the CPU, side by side, whose memory is freed with the last of them.

    Their memory is taken from the system now, not when it is first written to. MemoryError if there is none.
    """
    size = math.prod(shape) * dtype.itemsize
    slab = _Slab(count * -(-size // LINE) * LINE, "keys and values")
    tensors: list[Tensor] = []
    for _ in range(count):
        part = slab.take(size)
        assert part is not None  # or the slab is too small
        tensors.append(part.view(dtype).view(*shape).zero_())
    return tensors
