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


def test_of_a_flood_of_refusals_the_newest_are_told_and_all_counted() -> None:
    """A client that is refused as fast as it can send must not fill the telemetry."""
    sent: list[list[bytes]] = []
    publisher = Publisher(sent.append)
    for i in range(500):
        refusal = m.Refusal(t_ns=i, client="c", tag=str(i), code="rate_limited", message="too many")
        publisher.refused(refusal, now_s=1.0)
    assert sent == []
    assert publisher.due_s is not None
    publisher.tick(publisher.due_s)
    publisher.tick(publisher.due_s or 9.0)
    told = [codec.unpack_telemetry(frames)[2] for frames in sent]
    assert len(told) == 1
    assert isinstance(told[0], m.Refusals)
    assert told[0].total == 500
    assert [row.tag for row in told[0].rows] == [str(i) for i in range(500 - 64, 500)]
