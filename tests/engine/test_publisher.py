"""What goes out on telemetry."""

from __future__ import annotations

import numpy as np

from engine.block_pool import BlockView
from engine.publisher import Publisher
from ipc import codec
from ipc import messages as m


def test_a_reason_that_is_no_text_is_told_all_the_same() -> None:
    """An error may name a file whose name no message can carry; the phase must be published with it."""
    sent: list[list[bytes]] = []
    publisher = Publisher(sent.append)
    publisher.set_state(m.EngineState(phase="failed", since_ns=1, cfg_rev=0, reason="no file caf\udce9"))
    state = codec.unpack_telemetry(sent[0])[2]
    assert isinstance(state, m.EngineState)
    assert (state.phase, state.reason) == ("failed", "no file caf?")


def test_the_block_map_says_which_blocks_are_host_memory() -> None:
    """Without it a client draws, and counts, host memory as part of the pool."""
    sent: list[list[bytes]] = []
    publisher = Publisher(sent.append)
    state = np.array([m.BLOCK_USED, m.BLOCK_FREE, m.BLOCK_HOST, m.BLOCK_SWAPPED], np.uint8)
    fill, owner = np.array([16, 0, 16, 5], np.uint16), np.array([7, 0, 0, 8], np.uint32)
    publisher.block_view(BlockView(1, 16, state, fill, owner, num_host=2))
    publisher.tick(100.0)
    told = codec.unpack_telemetry(sent[0])[2]
    snapshot = publisher.snapshot(1, m.Cfg(id=1, rev=0, values={}, knobs=[]), None, None)
    for key in (told, snapshot.blocks):
        assert isinstance(key, m.BlockKeyframe)
        assert (key.num_blocks, key.num_host, key.state) == (4, 2, state.tobytes())
