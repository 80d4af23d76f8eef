"""KV blocks in host memory: arenas of blocks, and the copies to and from the pool.

A block in host memory is one row that holds its keys and values of every layer, so that on a GPU it moves in
one transfer. Copies run in the order in which they are given, in a lane of their own. The lane's fence keeps
them apart from the forward pass: a block that is copied out may belong to somebody else in the very next
step, and one that is copied in may be read there, so nothing that follows touches the pool before the fence.
On a GPU, the transfer from staging memory to the host goes on behind it.

With ``check``, each host block keeps a CRC-32 of what was copied out, and is held against it before it is
copied in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from engine.kv_cache import KVCache
from engine.out_of_memory import is_shortage, kind_of, text_of
from engine.plan import Arena, Copy
from engine.timing import Timer

STAGING_BYTES = 64 << 20  # of a GPU's memory that one transfer takes at most


class CopyFailed(RuntimeError):
    """A copy between the pool and host memory did not succeed; what the pool holds is not to be trusted."""


class Lane(Protocol):
    """Where copies run, one after the other and after all that the caller's stream has done so far."""

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task that puts its work on the current stream."""
        ...

    def host(self, task: Callable[[], None]) -> None:
        """Run a task of the host once all work submitted before it is done."""
        ...

    def mark(self) -> None:
        """Everything submitted until now uses the pool."""
        ...

    def fence(self) -> None:
        """Let the caller's stream go on only when all work before the last mark is done."""
        ...


class InlineLane:
    """A CPU's lane: a copy is done when it was submitted."""

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def host(self, task: Callable[[], None]) -> None:
        task()

    def mark(self) -> None:
        pass

    def fence(self) -> None:
        pass


class StreamLane:
    """A GPU's lane: a side stream. The fence is an event, so the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        self._marked: torch.cuda.Event | None = None

    def submit(self, task: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            task()

    def host(self, task: Callable[[], None]) -> None:
        self._stream.synchronize()
        task()

    def mark(self) -> None:
        self._marked = self._stream.record_event()

    def fence(self) -> None:
        if self._marked is not None:
            torch.cuda.current_stream(self._device).wait_event(self._marked)
            self._marked = None


class HostArena:
    """``num_blocks`` host blocks, each [2 * layers, elements of a block in a layer], pinned for a GPU."""

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        """MemoryError with the size if it does not fit."""
        parts = kv.words
        shape = (num_blocks, len(parts), parts[0].shape[1])
        self.num_blocks = num_blocks
        self.bytes_per_block = kv.bytes_per_block
        try:
            self.rows = torch.empty(shape, dtype=parts[0].dtype, pin_memory=kv.device.type == "cuda")
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            raise MemoryError(
                f"no host memory for {num_blocks} KV blocks ({num_blocks * kv.bytes_per_block / 2**30:.2f} "
                "GiB); ask for less"
            ) from error
        self._bytes = self.rows.view(torch.uint8).view(num_blocks, -1).numpy()
        self._sums: dict[int, int] = {}

    def remember(self, host_blocks: Sequence[int]) -> None:
        """Take the checksums of blocks that were just copied out."""
        for block in host_blocks:
            self._sums[block] = zlib.crc32(self._bytes[block])

    def verify(self, host_blocks: Sequence[int]) -> None:
        """Raise `CopyFailed` if a block is not what was copied out, or never was."""
        for block in host_blocks:
            found, wanted = zlib.crc32(self._bytes[block]), self._sums.get(block)
            if found != wanted:
                told = "nothing was copied out to it" if wanted is None else f"{wanted:08x} was copied out"
                raise CopyFailed(f"host block {block} has the checksum {found:08x}, but {told}")


class HostMemory:
    """The arenas of one pool, and the copies between them and it."""

    def __init__(self, device: torch.device, *, check: bool = False, lane: Lane | None = None) -> None:
        self._device = device
        self._check = check
        self._staged = device.type == "cuda"  # through staging memory, in transfers of whole blocks
        self._lane: Lane = lane or (StreamLane(device) if device.type == "cuda" else InlineLane())
        self._arenas: dict[Arena, HostArena] = {}

    def allocate(self, name: Arena, num_blocks: int, kv: KVCache) -> None:
        """Replace an arena by an empty one of ``num_blocks`` blocks, the old one being freed first; 0: none.

        MemoryError with the size if it does not fit: then there is none.
        """
        self.join()
        if self._arenas.pop(name, None) is not None:
            self._give_back()
        if num_blocks:
            self._arenas[name] = HostArena(kv, num_blocks)

    def keep_fitting(self, kv: KVCache) -> None:
        """Free the arenas whose blocks are not of this pool's shape."""
        parts, before = kv.words, len(self._arenas)
        self._arenas = {
            name: arena
            for name, arena in self._arenas.items()
            if arena.rows.shape[1:] == (len(parts), parts[0].shape[1]) and arena.rows.dtype == parts[0].dtype
        }
        if len(self._arenas) < before:
            self._give_back()

    def nbytes(self, name: Arena) -> int:
        """Bytes of an arena, 0 if there is none."""
        arena = self._arenas.get(name)
        return 0 if arena is None else arena.rows.nbytes

    def join(self) -> None:
        """Wait until no copy runs."""
        self._lane.host(lambda: None)

    def run(self, copies: Sequence[Copy], kv: KVCache, timer: Timer) -> int:
        """Start the copies in their order and fence them off from what follows. Returns the blocks copied.

        Raises `CopyFailed` naming what went wrong. Errors after which the device is lost come as they are.
        """
        total = 0
        try:
            self._lane.submit(timer.start)
            for copy in copies:
                arena = self._arena(copy, kv)
                (self._out if copy.direction == "out" else self._in)(copy, arena, kv)
                total += len(copy.blocks)
            self._lane.submit(timer.stop)
            self._lane.fence()
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            if kind_of(error) == "lost":
                raise
            self._lane.mark()  # copies that were begun go on, and what follows must not meet them
            self._lane.fence()
            if isinstance(error, CopyFailed):
                raise
            raise CopyFailed(f"copying KV blocks failed: {text_of(error)}") from error
        return total

    def _give_back(self) -> None:
        """Return the memory of arenas that are gone: torch keeps what was pinned to use it again."""
        empty = getattr(torch.accelerator.memory, "empty_host_cache", None)  # not in every torch since 2.11
        if self._device.type == "cuda" and empty is not None:
            empty()

    def _arena(self, copy: Copy, kv: KVCache) -> HostArena:
        arena = self._arenas.get(copy.arena)
        size = 0 if arena is None else arena.num_blocks
        for what, blocks, limit in (
            (f"{copy.arena} arena", copy.host_blocks, size),
            ("pool", copy.blocks, kv.num_blocks),
        ):
            beyond = next((block for block in blocks if not 0 <= block < limit), None)
            if beyond is not None:
                raise CopyFailed(f"block {beyond} is to be copied, the {what} has {limit} blocks")
        if arena is None or len(copy.blocks) != len(copy.host_blocks):
            raise CopyFailed(
                f"{len(copy.blocks)} blocks are to be copied to or from {len(copy.host_blocks)} host blocks "
                f"of the {copy.arena} arena, which has {size}"
            )
        return arena

    def _out(self, copy: Copy, arena: HostArena, kv: KVCache) -> None:
        for blocks, host_blocks in self._pieces(copy, kv):
            if self._staged:
                staging = _Staging()
                self._lane.submit(partial(staging.gather, kv, blocks))
                self._lane.mark()
                self._lane.submit(partial(staging.to_host, arena, host_blocks))
            else:
                self._lane.submit(partial(_store, kv, blocks, arena, host_blocks))
                self._lane.mark()
        if self._check:
            self._lane.host(partial(arena.remember, copy.host_blocks))

    def _in(self, copy: Copy, arena: HostArena, kv: KVCache) -> None:
        if self._check:
            self._lane.host(partial(arena.verify, copy.host_blocks))
        load = _from_host if self._staged else _load
        for blocks, host_blocks in self._pieces(copy, kv):
            self._lane.submit(partial(load, kv, blocks, arena, host_blocks))
            self._lane.mark()

    def _pieces(self, copy: Copy, kv: KVCache) -> list[tuple[list[int], list[int]]]:
        """A copy in pieces that the staging memory holds."""
        most = max(1, STAGING_BYTES // kv.bytes_per_block)
        firsts = range(0, len(copy.blocks), most)
        return [(copy.blocks[f : f + most], copy.host_blocks[f : f + most]) for f in firsts]


def _store(kv: KVCache, blocks: list[int], arena: HostArena, host_blocks: list[int]) -> None:
    """Pool to host on a CPU, a layer at a time."""
    source, target = torch.tensor(blocks), torch.tensor(host_blocks)
    for part, layer in enumerate(kv.words):
        arena.rows[:, part].index_copy_(0, target, layer.index_select(0, source))


def _load(kv: KVCache, blocks: list[int], arena: HostArena, host_blocks: list[int]) -> None:
    """Host to pool on a CPU."""
    source, target = torch.tensor(host_blocks), torch.tensor(blocks)
    for part, layer in enumerate(kv.words):
        layer.index_copy_(0, target, arena.rows[:, part].index_select(0, source))


class _Staging:
    """Blocks on their way from the pool to the host, in a GPU's memory."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def gather(self, kv: KVCache, blocks: list[int]) -> None:
        source = _sent(blocks, kv.device)
        self._rows = torch.stack([layer.index_select(0, source) for layer in kv.words], dim=1)

    def to_host(self, arena: HostArena, host_blocks: list[int]) -> None:
        for at, first, count in _runs(host_blocks):
            arena.rows[first : first + count].copy_(self._rows[at : at + count], non_blocking=True)


def _from_host(kv: KVCache, blocks: list[int], arena: HostArena, host_blocks: list[int]) -> None:
    staging = torch.empty((len(blocks), *arena.rows.shape[1:]), dtype=arena.rows.dtype, device=kv.device)
    for at, first, count in _runs(host_blocks):
        staging[at : at + count].copy_(arena.rows[first : first + count], non_blocking=True)
    target = _sent(blocks, kv.device)
    for part, layer in enumerate(kv.words):
        layer.index_copy_(0, target, staging[:, part])


def _sent(blocks: list[int], device: torch.device) -> torch.Tensor:
    """Numbers of blocks on a device, without waiting for what its current stream has to do first.

    Only from pinned memory does a copy go by itself; from any other the host waits for the stream. Torch
    gives that memory to nobody else before the copy is done.
    """
    numbers = torch.tensor(blocks)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranges of neighbours in a list of blocks: each one's place in the list, its first block, its length."""
    runs: list[tuple[int, int, int]] = []
    for at, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, block, 1))
    return runs
