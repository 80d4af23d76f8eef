"""The block map's keyframes and deltas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import codec
from ipc import messages as m
from ipc.blockmap import BlockEncoder, BlockMap, BlockMapError


def _view(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        rng.integers(0, 6, n, dtype=np.uint8),
        rng.integers(0, 1 << 16, n, dtype=np.uint16),
        rng.integers(0, 1 << 32, n, dtype=np.uint32),
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=20),
)
def test_a_reader_of_every_frame_has_the_senders_map(
    seed: int, sizes: list[int], changes: list[tuple[int, bool]]
) -> None:
    rng = np.random.default_rng(seed)
    encoder, reader = BlockEncoder(), BlockMap()
    for n in sizes:
        state, fill, owner = _view(rng, n)
        for t_ns, (count, force) in enumerate(changes):
            where = rng.integers(0, n, min(count, n)) if n else np.zeros(0, np.intp)
            new = _view(rng, len(where))
            state[where], fill[where], owner[where] = new
            message = encoder.encode(state, fill, owner, t_ns=t_ns, block_size=16, force_key=force)
            assert message is not None or not force
            match message and codec.unpack_telemetry(codec.pack_telemetry(1, message))[2]:
                case m.BlockKeyframe() as key:
                    reader.load(key)
                case m.BlockDelta() as delta:
                    reader.apply(delta)
            assert np.array_equal(reader.state, state)
            assert np.array_equal(reader.fill, fill)
            assert np.array_equal(reader.owner, owner)
            assert reader.frame == encoder.sent.frame


def test_small_changes_travel_as_deltas_and_large_ones_as_keyframes() -> None:
    n = 16_384
    encoder = BlockEncoder()
    state, fill, owner = np.zeros(n, np.uint8), np.zeros(n, np.uint16), np.zeros(n, np.uint32)
    args = {"t_ns": 1, "block_size": 16}
    assert isinstance(encoder.encode(state, fill, owner, **args), m.BlockKeyframe)
    assert encoder.encode(state, fill, owner, **args) is None
    state[: n // 100] = 2
    delta = encoder.encode(state, fill, owner, **args)
    assert isinstance(delta, m.BlockDelta)
    assert len(codec.encode(delta)) < 2000
    state[:] = 3
    assert isinstance(encoder.encode(state, fill, owner, **args), m.BlockKeyframe)


def test_what_contradicts_itself_changes_nothing() -> None:
    block_map = BlockMap()
    good = m.BlockKeyframe(
        frame=4, t_ns=1, num_blocks=2, block_size=16, state=b"\1\2", fill=b"\1\0\2\0", owner=b"\0" * 8
    )
    block_map.load(good)
    with pytest.raises(BlockMapError):
        block_map.load(
            m.BlockKeyframe(frame=9, t_ns=1, num_blocks=3, block_size=16, state=b"", fill=b"", owner=b"")
        )
    for changes in (
        {"frame": 6},  # one is missing
        {"frame": 4},
        {"index": b"\2\0\0\0"},  # no such block
        {"index": b"\1\0\0"},
        {"index": b"\1\0\0\0" * 2},
        {"fill": b"\1"},
    ):
        values = {
            "frame": 5,
            "t_ns": 2,
            "index": b"\1\0\0\0",
            "state": b"\3",
            "fill": b"\1\0",
            "owner": b"\0" * 4,
        }
        with pytest.raises(BlockMapError):
            block_map.apply(m.BlockDelta(**{**values, **changes}))
        assert block_map.keyframe() == good
