"""The KV block map on the wire: keyframes and deltas made from numpy arrays, and applied to them.

One entry a block: ``state`` u8 (the ``BLOCK_*`` constants), ``fill`` u16 (tokens held), ``owner`` u32 (one
owning request's id modulo 2^32, 0: none). Keyframes and deltas are numbered in one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ipc import messages as m

StateArray = npt.NDArray[np.uint8]
FillArray = npt.NDArray[np.uint16]
OwnerArray = npt.NDArray[np.uint32]

_STATE, _FILL, _OWNER, _INDEX = (np.dtype(code) for code in ("<u1", "<u2", "<u4", "<u4"))
_BLOCK_BYTES = 7
_CHANGE_BYTES = 11


class BlockMapError(ValueError):
    """A keyframe or delta that contradicts itself or the map it is to change."""


def _empty_state() -> StateArray:
    return np.zeros(0, np.uint8)


def _empty_fill() -> FillArray:
    return np.zeros(0, np.uint16)


def _empty_owner() -> OwnerArray:
    return np.zeros(0, np.uint32)


@dataclass(slots=True)
class BlockMap:
    """A map as of frame ``frame``. Arrays have one entry a block; a reader must not write to them.

    The last ``num_host`` entries are blocks of host memory.
    """

    frame: int = 0
    t_ns: int = 0
    block_size: int = 0
    num_host: int = 0
    state: StateArray = field(default_factory=_empty_state)
    fill: FillArray = field(default_factory=_empty_fill)
    owner: OwnerArray = field(default_factory=_empty_owner)

    @property
    def num_blocks(self) -> int:
        """Blocks in the map, those of host memory included."""
        return len(self.state)

    def keyframe(self) -> m.BlockKeyframe:
        """The whole map as a message."""
        return m.BlockKeyframe(
            frame=self.frame,
            t_ns=self.t_ns,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host=self.num_host,
            state=self.state.astype(_STATE, copy=False).tobytes(),
            fill=self.fill.astype(_FILL, copy=False).tobytes(),
            owner=self.owner.astype(_OWNER, copy=False).tobytes(),
        )

    def load(self, key: m.BlockKeyframe) -> None:
        """Replace the map by a keyframe. Raises `BlockMapError` and changes nothing if its parts disagree."""
        state, fill, owner = _columns(key.state, key.fill, key.owner, key.num_blocks)
        if key.num_host > key.num_blocks:
            raise BlockMapError(f"{key.num_host} of {key.num_blocks} blocks cannot be in host memory")
        self.num_host = key.num_host
        self.frame, self.t_ns, self.block_size = key.frame, key.t_ns, key.block_size
        self.state, self.fill, self.owner = state.copy(), fill.copy(), owner.copy()

    def apply(self, delta: m.BlockDelta) -> None:
        """Advance the map by one delta. Raises `BlockMapError` and changes nothing if it does not follow."""
        if delta.frame != self.frame + 1:
            raise BlockMapError(f"delta {delta.frame} does not follow frame {self.frame}")
        if len(delta.index) % _INDEX.itemsize:
            raise BlockMapError(f"an index of {len(delta.index)} bytes is not a list of u32")
        index = np.frombuffer(delta.index, _INDEX)
        state, fill, owner = _columns(delta.state, delta.fill, delta.owner, len(index))
        if len(index) and int(index.max()) >= self.num_blocks:
            raise BlockMapError(f"delta names block {int(index.max())} of {self.num_blocks}")
        self.state[index], self.fill[index], self.owner[index] = state, fill, owner
        self.frame, self.t_ns = delta.frame, delta.t_ns


def _columns(state: bytes, fill: bytes, owner: bytes, count: int) -> tuple[StateArray, FillArray, OwnerArray]:
    sizes = (len(state), len(fill), len(owner))
    if sizes != (count, 2 * count, 4 * count):
        raise BlockMapError(f"columns of {sizes} bytes do not hold {count} blocks")
    return np.frombuffer(state, _STATE), np.frombuffer(fill, _FILL), np.frombuffer(owner, _OWNER)


class BlockEncoder:
    """The sender's side: compares each view with the last one sent and makes the smaller message."""

    def __init__(self) -> None:
        self.sent = BlockMap()

    def encode(
        self,
        state: StateArray,
        fill: FillArray,
        owner: OwnerArray,
        *,
        t_ns: int,
        block_size: int,
        num_host: int = 0,
        force_key: bool = False,
    ) -> m.BlockKeyframe | m.BlockDelta | None:
        """The message that brings a reader from the last view to this one, or None if they are equal.

        A keyframe is made when forced, when the number of blocks or their size changed, and when the
        changes would take more than a third of a keyframe's bytes. The arrays are copied.
        """
        old = self.sent
        shape, old_shape = (len(state), num_host, block_size), (old.num_blocks, old.num_host, old.block_size)
        same_shape = old.frame > 0 and shape == old_shape
        changed = np.empty(0, np.intp)
        if same_shape and not force_key:
            changed = np.flatnonzero((state != old.state) | (fill != old.fill) | (owner != old.owner))
            if not len(changed):
                return None
        new = BlockMap(old.frame + 1, t_ns, block_size, num_host, state.copy(), fill.copy(), owner.copy())
        self.sent = new
        if force_key or not same_shape or 3 * _CHANGE_BYTES * len(changed) > _BLOCK_BYTES * len(state):
            return new.keyframe()
        return m.BlockDelta(
            frame=new.frame,
            t_ns=t_ns,
            index=changed.astype(_INDEX).tobytes(),
            state=new.state[changed].astype(_STATE, copy=False).tobytes(),
            fill=new.fill[changed].astype(_FILL, copy=False).tobytes(),
            owner=new.owner[changed].astype(_OWNER, copy=False).tobytes(),
        )
