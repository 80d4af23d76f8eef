"""What goes out on telemetry."""

from __future__ import annotations

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
