"""The protocol as one connection speaks it, without an engine at the other end."""

from __future__ import annotations

import zmq

from app.net.connection import Connection
from tests.app.builders import state


def test_once_the_model_is_loaded_the_knobs_are_asked_for_again() -> None:
    """Which choices there are depends on the model, and the revision of the configuration does not change."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = Connection(context, "inproc://nobody", None, lambda call: call())
    mirror = connection.mirror
    try:
        mirror.needs_snapshot, mirror.state = False, state(phase="loading")
        connection.turn(1.0)
        assert not mirror.needs_snapshot
        mirror.state = state()
        connection.turn(1.1)
        assert mirror.needs_snapshot
        mirror.needs_snapshot, mirror.state = False, state(phase="applying")
        connection.turn(1.2)
        mirror.state = state()
        connection.turn(1.3)
        assert not mirror.needs_snapshot, "a change of knobs tells of itself"
    finally:
        connection.close()
        context.destroy(linger=0)
