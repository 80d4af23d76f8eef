"""`EngineLink`: one thread that owns every socket to the engine, and the engine process if it is ours.

The window never touches a socket. It calls `drain` ten times a second and gets what is new, coalesced;
whatever it asks for by `send` is answered through a callback that runs inside a later `drain`, on the
caller's thread. Without Qt, so scripts and tests use it the same way.
"""

from __future__ import annotations

from app.net.types import Batch, LaunchSpec, OnItem, OnReply
from ipc.messages import Command, KnobValue


class EngineLink:
    """The console's one connection to an engine. All methods are thread-safe and return at once."""

    def start(self) -> None:
        """Start the thread. It does nothing until `launch` or `attach`."""
        raise NotImplementedError

    def launch(self, spec: LaunchSpec) -> None:
        """Start a managed engine (it ends with this process) and connect to it."""
        raise NotImplementedError

    def attach(self, ctl: str) -> None:
        """Connect to an engine that somebody else started; closing the link leaves it running."""
        raise NotImplementedError

    def restart(self, knobs: dict[str, KnobValue] | None = None) -> None:
        """Start the managed engine anew with its last good configuration, changed by ``knobs``."""
        raise NotImplementedError

    def stop_engine(self) -> None:
        """Stop a managed engine, or detach from an attached one. Ends in OFFLINE."""
        raise NotImplementedError

    def send(
        self,
        command: Command,
        on_reply: OnReply | None = None,
        on_item: OnItem | None = None,
        timeout_s: float = 10.0,
    ) -> int:
        """Send one command; its ``id`` is replaced by a fresh one, which is returned.

        ``on_reply`` gets exactly one reply, an `ipc.messages.Error` if the engine dies, the link closes or
        ``timeout_s`` passes. ``on_item`` gets the stream of a `Submit`, ended by Done or StreamLost.
        """
        raise NotImplementedError

    def drain(self) -> Batch:
        """Everything new since the last call; runs the callbacks that are due, on this thread."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, and a managed engine with it. Returns within two seconds, whatever hangs."""
        raise NotImplementedError
