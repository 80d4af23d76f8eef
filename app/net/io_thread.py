"""`EngineLink`: one thread that owns every socket to the engine, and the engine process if it is ours.

The window never touches a socket. It calls `drain` ten times a second and gets what is new, coalesced;
whatever it asks for by `send` is answered through a callback that runs inside a later `drain`, on the
caller's thread. Without Qt, so scripts and tests use it the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import zmq

from app.net.connection import Connection
from app.net.inbox import Inbox
from app.net.judge import Judge
from app.net.supervisor import EngineProcess, LaunchError
from app.net.types import Batch, LaunchSpec, LinkState, LinkStatus, OnItem, OnReply
from ipc.messages import Command, Error, KnobValue

_TURN_MS = 50
_TERM_AFTER_S, _KILL_AFTER_S = 1.5, 3.0  # of a stop, since the lifetime pipe was closed
_CLOSE_KILL_S = 0.8  # the same when the console itself is closing

Action = Callable[[], None]
log = logging.getLogger("app.net")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


class EngineLink:
    """The console's one connection to an engine. All methods are thread-safe and return at once."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._calls = itertools.count(1)
        self._inbox = Inbox()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)
        self._closing = threading.Event()
        self._judge = Judge()
        self._spec: LaunchSpec | None = None
        self._process: EngineProcess | None = None
        self._connection: Connection | None = None
        self._stop_asked_s: float | None = None
        self._after_stop: Action | None = None

    # --- called by any thread --------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. It does nothing until `launch` or `attach`."""
        self._thread.start()

    def launch(self, spec: LaunchSpec) -> None:
        """Start a managed engine (it ends with this process) and connect to it; stops the present one."""
        draft_model = None if spec.draft_model is None else _absolute(spec.draft_model)
        made = replace(spec, model=_absolute(spec.model), draft_model=draft_model)
        self._do(lambda: self._launch_anew(made))

    def attach(self, ctl: str, tel: str | None = None) -> None:
        """Connect to an engine that somebody else started; closing the link leaves it running.

        ``tel`` replaces the telemetry address that the engine names, as a tunnel needs it.
        """
        self._do(lambda: self._attach(ctl, tel))

    def restart(self, knobs: dict[str, KnobValue] | None = None) -> None:
        """Start the managed engine anew with its last good configuration, changed by ``knobs``."""
        self._do(lambda: self._restart(knobs or {}))

    def restart_with_draft(self, draft_model: str | None, knobs: dict[str, KnobValue] | None = None) -> None:
        """As `restart`, with another draft model from now on, or with none: speculation=draft is then off."""
        self._do(
            lambda: self._restart_with_draft(_absolute(draft_model) if draft_model else None, knobs or {})
        )

    def stop_engine(self) -> None:
        """Stop a managed engine, or detach from an attached one. Ends in OFFLINE."""
        self._do(self._stop)

    def send(
        self,
        command: Command,
        on_reply: OnReply | None = None,
        on_item: OnItem | None = None,
        timeout_s: float = 10.0,
    ) -> int:
        """Send one command; its ``id`` is replaced by a fresh one on the wire. Returns the call's number.

        ``on_reply`` gets exactly one reply, an `ipc.messages.Error` if the engine dies, the link closes or
        ``timeout_s`` passes. ``on_item`` gets the stream of a `Submit`, ended by Done or StreamLost. Both
        run inside `drain`.
        """
        self._do(lambda: self._send(command, on_reply, on_item, timeout_s))
        return next(self._calls)

    def drain(self) -> Batch:
        """Everything new since the last call; runs the callbacks that are due, on this thread."""
        batch, callbacks = self._inbox.take(time.monotonic())
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # Reported like any uncaught error; the batch and the other callers' replies are not lost.
                sys.excepthook(*sys.exc_info())
        return batch

    def close(self) -> None:
        """End the thread, and a managed engine with it. Returns within two seconds, whatever hangs."""
        self._closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=1.9)

    def _do(self, action: Action) -> None:
        self._actions.append(action)
        self._wake()

    def _wake(self) -> None:
        # Full: a wake-up is on its way already. Closed: there is nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"x")

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        try:
            while not self._closing.is_set():
                try:
                    self._wait()
                    while self._actions:
                        self._actions.popleft()()
                    self._turn(time.monotonic())
                except Exception as error:
                    self._failed(error)
        finally:
            self._shut_down()
            context.destroy(linger=0)

    def _failed(self, error: Exception) -> None:
        """A fault of our own: say so, drop the connection, and stay able to connect again."""
        log.exception("the link to the engine failed")
        reason = f"The console's link to the engine failed: {type(error).__name__}: {error}. Connect again."
        self._drop_connection(reason)
        self._judge.not_started(time.monotonic(), reason)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        if self._connection is not None:
            for each in self._connection.sockets:
                poller.register(each, zmq.POLLIN)
        poller.poll(_TURN_MS)
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            return

    def _turn(self, now_s: float) -> None:
        process, connection = self._process, self._connection
        if process is not None and process.ready is not None and connection is None and process.exit is None:
            self._connect(process.ready.ctl, None)
            connection = self._connection
        if connection is not None:
            connection.turn(now_s)
            self._inbox.collect(connection)
        if process is not None and process.exit is not None:
            self._ended(process, now_s)
        self._escalate(now_s)
        self._inbox.status(self._judge.status(now_s, self._spec, self._process, self._connection))

    def _ended(self, process: EngineProcess, now_s: float) -> None:
        """The process is gone: read what it had sent, fail what waits, and say why."""
        cause = process.exit
        assert cause is not None
        if self._connection is not None:
            self._connection.turn(now_s)
            self._inbox.collect(self._connection)
            self._connection.fail_all(f"The engine ended: {cause.words}.")
            self._connection.close()
            self._connection = None
        self._judge.ended(now_s, cause, process.log_tail())
        self._process, self._stop_asked_s = None, None
        if self._after_stop is not None:
            following, self._after_stop = self._after_stop, None
            following()

    def _escalate(self, now_s: float) -> None:
        if self._process is None or self._stop_asked_s is None:
            return
        waited_s = now_s - self._stop_asked_s
        if waited_s > _KILL_AFTER_S:
            self._process.kill()
        elif waited_s > _TERM_AFTER_S:
            self._process.terminate()

    def _launch_anew(self, spec: LaunchSpec) -> None:
        self._judge.forget_good()
        self._launch(spec)

    def _launch(self, spec: LaunchSpec) -> None:
        if self._process is not None:
            self._stop(then=lambda: self._launch(spec))
            return
        self._drop_connection("Another engine is being started.")
        now_s = time.monotonic()
        self._spec = spec
        self._judge.begin(now_s, managed=True)
        try:
            self._process = EngineProcess(spec.argv(sys.executable), self._wake)
        except LaunchError as error:
            self._judge.not_started(now_s, str(error))

    def _attach(self, ctl: str, tel: str | None) -> None:
        if self._process is not None:
            self._stop(then=lambda: self._attach(ctl, tel))
            return
        self._spec = None
        self._judge.forget_good()
        self._judge.begin(time.monotonic(), managed=False)
        self._connect(ctl, tel)

    def _connect(self, ctl: str, tel: str | None) -> None:
        self._drop_connection("Another engine is being connected to.")
        try:
            self._connection = Connection(self._context, ctl, tel, self._inbox.deliver)
        except zmq.ZMQError as error:
            self._judge.not_started(time.monotonic(), f"{ctl!r} is not an address to connect to: {error}.")

    def _drop_connection(self, why: str) -> None:
        if self._connection is not None:
            self._connection.fail_all(why)
            self._connection.close()
            self._connection = None

    def _restart(self, knobs: dict[str, KnobValue]) -> None:
        if self._spec is not None:
            wanted = {**self._judge.good_knobs(self._spec.knobs), **knobs}
            self._judge.note_restart(wanted)
            if self._spec.draft_model is None and wanted.get("speculation") == "draft":
                wanted["speculation"] = "off"
            self._launch(replace(self._spec, knobs=wanted))

    def _restart_with_draft(self, draft_model: str | None, knobs: dict[str, KnobValue]) -> None:
        if self._spec is not None:
            self._spec = replace(self._spec, draft_model=draft_model)
            self._restart(knobs)

    def _stop(self, then: Action | None = None) -> None:
        """Stop or leave the engine; ``then`` is done once its process has ended."""
        self._after_stop = then
        if self._process is None:
            self._drop_connection("The console has left this engine.")
            self._judge.offline(time.monotonic())
        elif self._stop_asked_s is None:
            self._stop_asked_s = time.monotonic()
            self._process.ask_to_end()

    def _send(
        self, command: Command, on_reply: OnReply | None, on_item: OnItem | None, timeout_s: float
    ) -> None:
        if self._connection is not None:
            self._connection.send(command, on_reply, on_item, time.monotonic(), timeout_s)
        elif on_reply is not None:
            error = Error(id=0, code="not_ready", message="There is no engine to send this to.")
            self._inbox.deliver(lambda: on_reply(error))

    def _shut_down(self) -> None:
        """Close everything; a managed engine that does not end by itself is killed."""
        self._drop_connection("The console is closing.")
        self._inbox.status(LinkStatus(state=LinkState.OFFLINE, reason="The link is closed."))
        process = self._process
        if process is not None:
            process.ask_to_end()
            if not process.wait(_CLOSE_KILL_S):
                process.kill()
                process.wait(_CLOSE_KILL_S)
        while self._actions:  # what was asked for meanwhile is answered too
            self._process = self._spec = None
            self._actions.popleft()()
