"""`Connection`: the sockets to one engine address, and the protocol spoken over them.

Used by the I/O thread only. It says hello whenever the transport is up, joins (subscribe, wait for a first
heartbeat, then ask for a snapshot), keeps the `Mirror`, matches replies to commands and items to streams.
Commands are only handed to an established connection: nothing queues up for a later engine to find.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from app.net.types import LOADING, OnItem, OnReply, StreamLost
from ipc import codec
from ipc import messages as m
from ipc.mirror import Mirror

SNAPSHOT_EVERY_S = 1.0
JOIN_WAIT_S = 0.3  # for the first heartbeat, which proves the subscription
PING_EVERY_S = 1.0
_CLOCK_SAMPLES = 16
_READS_PER_TURN = 2000
_EARLY_ITEMS = 1000

_LOST = "The connection to the engine was lost."
_LOST_AFTER_S = 0.15

Deliver = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Pending:
    """A command on its way, and whom to tell."""

    name: str
    on_reply: OnReply | None
    on_item: OnItem | None
    deadline_s: float


class Connection:
    """See the module. ``deliver`` takes a ready-to-run callback to the thread that drains."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], ctl: str, tel: str | None, deliver: Deliver
    ) -> None:
        self.address = ctl
        self.mirror = Mirror(max_steps=2048, max_ended=4096)
        self.welcome: m.Welcome | None = None
        self.refused = ""  # why the engine does not want us
        self.connected = False
        self.lost_at_s: float | None = None  # when the transport broke, None while it holds
        self.last_heard_s: float | None = None
        self.bad_frames = 0
        self.rtt_s: float | None = None
        self._offsets: deque[tuple[float, int]] = deque(maxlen=_CLOCK_SAMPLES)
        self._tel_override = tel
        self._tel_address = ""
        self._deliver = deliver
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._streams: dict[int, OnItem] = {}
        self._early: deque[m.StreamItem] = deque(maxlen=_EARLY_ITEMS)
        self._joined_at_s: float | None = None
        self._asked_at_s = -SNAPSHOT_EVERY_S
        self._pinged_at_s = 0.0
        self._was_loading = False
        self._own: dict[int, Callable[[m.Reply], None]] = {}
        self.ctl = self._socket(context, zmq.DEALER)
        self.ctl.setsockopt(zmq.IMMEDIATE, 1)
        self.tel = self._socket(context, zmq.SUB)
        self.monitor = self.ctl.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.ctl.connect(ctl)

    @staticmethod
    def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, 10_000)
        made.setsockopt(zmq.SNDHWM, 1000)
        made.setsockopt(zmq.MAXMSGSIZE, codec.MAX_ENGINE_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return made

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return self.ctl, self.tel, self.monitor

    @property
    def clock_offset_ns(self) -> int:
        """The engine's monotonic clock minus ours, by the quickest of the last pings; 0 on one machine."""
        local = self.welcome is not None and self.welcome.engine.host == socket.gethostname()
        if local or not self._offsets:
            return 0
        return min(self._offsets)[1]

    # --- sending ---------------------------------------------------------------------------------

    def send(
        self,
        command: m.Command,
        on_reply: OnReply | None,
        on_item: OnItem | None,
        now_s: float,
        timeout_s: float,
    ) -> None:
        """Send, or answer with an error at once."""
        wire_id = next(self._ids)
        name = type(command).__name__
        waiting = Pending(name, on_reply, on_item, now_s + timeout_s)
        if self.welcome is None:
            self._answer(
                waiting, m.Error(id=wire_id, code="not_ready", message="The engine has not answered yet.")
            )
            return
        try:
            self.ctl.send(codec.encode(msgspec.structs.replace(command, id=wire_id)), zmq.DONTWAIT)
        except zmq.Again:
            message = f"The engine at {self.address} takes no commands now."
            self._answer(waiting, m.Error(id=wire_id, code="not_ready", message=message))
        except codec.BadMessage as error:
            self._answer(waiting, m.Error(id=wire_id, code="invalid", message=error.message))
        else:
            self._pending[wire_id] = waiting

    def _answer(self, waiting: Pending, reply: m.Reply) -> None:
        callback = waiting.on_reply
        if callback is not None:
            self._deliver(lambda: callback(reply))

    def _ask(self, command: m.Command, handle: Callable[[m.Reply], None], now_s: float) -> None:
        """Send a command of our own; its reply is handled here, on this thread."""
        wire_id = next(self._ids)
        try:
            self.ctl.send(codec.encode(msgspec.structs.replace(command, id=wire_id)), zmq.DONTWAIT)
        except zmq.Again:
            return
        self._own[wire_id] = handle

    # --- receiving -------------------------------------------------------------------------------

    def turn(self, now_s: float) -> None:
        """Read what has arrived, and do what is due."""
        for event in self._monitor_events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet(now_s)
            else:
                self._transport_lost(now_s)
        self._read_ctl(now_s)
        self._read_tel(now_s)
        self._look_for_model()
        self._due(now_s)

    def _look_for_model(self) -> None:
        """Once the model is loaded, have the knobs told again: only now it is known which can be used."""
        state = self.mirror.state
        loading = state is not None and state.phase in LOADING
        if self._was_loading and not loading:
            self.mirror.expect_snapshot()
        self._was_loading = loading

    def _monitor_events(self) -> Iterator[int]:
        while self.monitor.poll(0):
            yield int(recv_monitor_message(self.monitor)["event"])

    def _greet(self, now_s: float) -> None:
        """The transport is up (again): say hello; the welcome tells whether it is the same engine."""
        self.fail_all(_LOST)
        self.connected, self.lost_at_s, self.last_heard_s = True, None, now_s
        hello = m.Hello(
            id=1,
            proto_min=m.PROTOCOL,
            proto_max=m.PROTOCOL,
            client="decodeck console",
            version=str(m.PROTOCOL),
            pid=os.getpid(),
        )
        self._ask(hello, self._welcomed, now_s)

    def _transport_lost(self, now_s: float) -> None:
        self.connected, self.welcome = False, None
        self.lost_at_s = now_s
        self._own.clear()

    def fail_all(self, message: str) -> None:
        """End every command and stream that waits, since nobody will answer them."""
        for wire_id, waiting in self._pending.items():
            self._answer(waiting, m.Error(id=wire_id, code="cancelled", message=message))
        for rid, callback in self._streams.items():
            self._end_stream(callback, StreamLost(rid, message))
        self._pending.clear()
        self._streams.clear()
        self._early.clear()

    def _end_stream(self, callback: OnItem, lost: StreamLost) -> None:
        self._deliver(lambda: callback(lost))

    def _read_ctl(self, now_s: float) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                frames = self.ctl.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.last_heard_s = now_s
            try:
                self._reply(codec.decode_reply(frames))
            except codec.BadMessage:
                self.bad_frames += 1

    def _read_tel(self, now_s: float) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                frames = self.tel.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.last_heard_s = now_s
            try:
                self.mirror.frame(*codec.unpack_telemetry(frames))
            except codec.BadMessage:
                self.bad_frames += 1

    def _reply(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Probe):
            return
        if isinstance(reply, m.Tokens | m.Done):
            self._item(reply)
            return
        own = self._own.pop(reply.id, None)
        if own is not None:
            own(reply)
            return
        waiting = self._pending.pop(reply.id, None)
        if waiting is None:
            return
        self._answer(waiting, reply)
        if isinstance(reply, m.Accepted) and waiting.on_item is not None:
            self._streams[reply.rid] = waiting.on_item
            early, self._early = self._early, deque(maxlen=_EARLY_ITEMS)
            for item in early:
                self._item(item)

    def _item(self, item: m.StreamItem) -> None:
        callback = self._streams.get(item.rid)
        if callback is None:
            self._early.append(item)  # it may have overtaken its acceptance
            return
        self._deliver(lambda: callback(item))
        if isinstance(item, m.Done):
            del self._streams[item.rid]

    # --- joining, keeping time -------------------------------------------------------------------

    def _welcomed(self, reply: m.Reply) -> None:
        if not isinstance(reply, m.Welcome):
            self.refused = reply.message if isinstance(reply, m.Error) else f"It answered {reply!r}."
            return
        self.refused = ""
        if self.welcome is None or self.welcome.session != reply.session:
            self._offsets.clear()
        self.welcome = reply
        self.mirror.begin(reply.session)
        tel = self._tel_override or reply.tel_endpoint
        if self._tel_address != tel:
            if self._tel_address:
                self.tel.disconnect(self._tel_address)
            else:
                for topic in m.TOPICS:
                    self.tel.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self.tel.connect(tel)
            self._tel_address = tel
        self._joined_at_s = None
        self._asked_at_s = -SNAPSHOT_EVERY_S
        self.mirror.heartbeat = None

    def _due(self, now_s: float) -> None:
        """Timeouts of commands, pings, and the snapshot that a join or a gap needs."""
        for wire_id in [w for w, p in self._pending.items() if p.deadline_s <= now_s]:
            waiting = self._pending.pop(wire_id)
            message = f"The engine did not answer {waiting.name} in time."
            self._answer(waiting, m.Error(id=wire_id, code="timeout", message=message))
        # A moment's patience: of our own child's death its exit code soon says more than "lost".
        if self.lost_at_s is not None and now_s - self.lost_at_s > _LOST_AFTER_S:
            self.fail_all(_LOST)
        if self.welcome is None:
            return
        if self._joined_at_s is None:
            self._joined_at_s = now_s
        subscribed = self.mirror.heartbeat is not None or now_s - self._joined_at_s > JOIN_WAIT_S
        if self.mirror.needs_snapshot and subscribed and now_s - self._asked_at_s >= SNAPSHOT_EVERY_S:
            self._asked_at_s = now_s
            self._ask(m.Snapshot(id=1), self._snapshot, now_s)
        if now_s - self._pinged_at_s >= PING_EVERY_S:
            self._pinged_at_s = now_s
            sent_ns = time.monotonic_ns()
            self._ask(m.Ping(id=1), lambda reply: self._pong(reply, sent_ns), now_s)

    def _snapshot(self, reply: m.Reply) -> None:
        if isinstance(reply, m.SnapshotReply):
            self.mirror.snapshot(reply)

    def _pong(self, reply: m.Reply, sent_ns: int) -> None:
        if isinstance(reply, m.Pong):
            now_ns = time.monotonic_ns()
            self.rtt_s = (now_ns - sent_ns) * 1e-9
            self._offsets.append((self.rtt_s, reply.mono_ns - (sent_ns + now_ns) // 2))

    def close(self) -> None:
        """Close the sockets at once; what was not sent is dropped."""
        self.ctl.disable_monitor()
        for each in self.sockets:
            each.close(linger=0)
