"""A blocking client without Qt: for scripts, the load generator, the command line and tests.

One thread owns a `Client`; ZeroMQ sockets are not thread-safe. There is no reconnecting: when the engine
goes away every open stream and every call fails with a sentence that says so, and a new `Client` is made.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc import codec
from ipc import messages as m

if TYPE_CHECKING:
    from ipc.security import KeyPair

R = TypeVar("R", bound=m.Reply)

_POLL_MS = 100


class EngineError(RuntimeError):
    """The engine refused a command. ``code``, ``keys`` and ``retry_after_ms`` are those of the `Error`."""

    def __init__(self, error: m.Error) -> None:
        reasons = [f"{key}: {why}" for key, why in error.keys.items()]
        told = "; ".join([error.message, *(reason for reason in reasons if reason not in error.message)])
        super().__init__(f"{told} ({error.code})")
        self.code = error.code
        self.keys = error.keys
        self.retry_after_ms = error.retry_after_ms


class EngineGone(ConnectionError):
    """The connection to the engine was lost: its process has ended, or its machine cannot be reached."""


class EngineSilent(TimeoutError):
    """The engine neither answered nor gave a heartbeat for too long."""


class Stream:
    """The items of one submitted request, ended by `Done`. Iterating reads the client's sockets.

    Each stream has its own queue, so streams of one client may be read at different speeds, or never.
    """

    def __init__(self, client: Client, accepted: m.Accepted) -> None:
        self._client = client
        self.rid = accepted.rid
        self.prompt_tokens = accepted.prompt_tokens
        self.done: m.Done | None = None
        self._items: deque[m.StreamItem] = deque()

    def __iter__(self) -> Iterator[m.StreamItem]:
        return self

    def __next__(self) -> m.StreamItem:
        while not self._items:
            if self.done is not None:
                raise StopIteration
            self._client.pump(_POLL_MS / 1000)
        return self._items.popleft()

    def feed(self, item: m.StreamItem) -> None:
        """Queue an item; called by the client."""
        self._items.append(item)
        if isinstance(item, m.Done):
            self.done = item

    def result(self) -> tuple[list[int], str, m.Done]:
        """Read to the end: all output ids, the whole text, and the `Done`."""
        ids: list[int] = []
        text: list[str] = []
        for item in self:
            ids += item.ids or []
            text.append(item.text)
        if self.done is None:
            raise EngineGone(f"request {self.rid} ended without its last message")
        return ids, "".join(text), self.done

    def cancel(self) -> None:
        """Ask the engine to end it; its `Done` still follows."""
        self._client.request(m.Cancel(id=self._client.next_id(), rid=self.rid))


class Client:
    """A connection to one engine. Use it as a context manager, or call `close`.

    ``silence_s``: how long the engine may be silent while something is awaited before `EngineSilent` is
    raised; an engine that is loading a model can be silent for seconds. ``curve``: this client's keys and
    the engine's public key, see `ipc.security`.
    """

    def __init__(
        self,
        ctl: str,
        *,
        name: str = "client",
        tel: str | None = None,
        silence_s: float = 10.0,
        curve: tuple[KeyPair, bytes] | None = None,
    ) -> None:
        self._curve = curve
        self._context = zmq.Context()
        self._ids = itertools.count(1)
        self._name = name
        self._tel_override = tel
        self._silence_s = silence_s
        self._address = ctl
        self._gone: str | None = None
        self._replies: dict[int, m.Reply] = {}
        self._awaited: set[int] = set()
        self._streams: dict[int, Stream] = {}
        self._inbox: deque[m.Reply] = deque()
        self._telemetry: deque[tuple[m.Topic, int, m.Telemetry]] = deque(maxlen=100_000)
        self._topics: set[str] = {"hb"}
        self.bad_frames = 0
        self.welcome: m.Welcome | None = None
        self.ctl = self._socket(zmq.DEALER)
        self.ctl.setsockopt(zmq.SNDHWM, 4096)
        self.ctl.setsockopt(zmq.RCVHWM, 4096)
        self.tel = self._socket(zmq.SUB)
        self._monitor = self.ctl.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.ctl.connect(ctl)
        self._poller = zmq.Poller()
        for socket in (self.ctl, self.tel, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._last_heard = time.monotonic()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_ENGINE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if self._curve is not None:
            from ipc.security import protect_client

            protect_client(socket, *self._curve)
        return socket

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close at once; nothing unsent is waited for. May be called twice."""
        if self._context.closed:
            return
        self.ctl.disable_monitor()
        self._context.destroy(linger=0)

    def next_id(self) -> int:
        """A fresh command id of this client."""
        return next(self._ids)

    # --- calls -----------------------------------------------------------------------------------

    def hello(self, timeout_s: float = 10.0) -> m.Welcome:
        """Say hello and connect telemetry (heartbeats; see `subscribe`). The first call of a client."""
        command = m.Hello(
            id=self.next_id(),
            proto_min=m.PROTOCOL,
            proto_max=m.PROTOCOL,
            client=self._name,
            version=str(m.PROTOCOL),
            pid=os.getpid(),
        )
        welcome = self.call(command, m.Welcome, timeout_s)
        self.welcome = welcome
        for topic in self._topics:
            self.tel.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.tel.connect(self._tel_override or welcome.tel_endpoint)
        return welcome

    def request(self, command: m.Command, timeout_s: float = 10.0) -> m.Reply:
        """Send a command and wait for its reply. Raises `EngineError` if it is refused."""
        self._awaited.add(command.id)
        try:
            self.send(command)
            deadline = time.monotonic() + timeout_s
            while command.id not in self._replies:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    name = type(command).__name__
                    raise EngineSilent(f"no reply to {name} from {self._address} within {timeout_s:g} s")
                self.pump(min(remaining, _POLL_MS / 1000))
        finally:
            self._awaited.discard(command.id)
        reply = self._replies.pop(command.id)
        if isinstance(reply, m.Error):
            raise EngineError(reply)
        return reply

    def call(self, command: m.Command, expected: type[R], timeout_s: float = 10.0) -> R:
        """`request`, for a reply of a known type."""
        reply = self.request(command, timeout_s)
        if not isinstance(reply, expected):
            raise TypeError(f"{type(command).__name__} was answered by {type(reply).__name__}")
        return reply

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[m.ChatMessage],
        *,
        sampling: m.Sampling | None = None,
        stream: bool = True,
        tag: str = "",
        priority: int = 0,
        timeout_s: float = 60.0,
    ) -> Stream:
        """Submit raw text, token ids or chat messages; returns when the engine has accepted it."""
        command = self.build_submit(prompt, sampling=sampling, stream=stream, tag=tag, priority=priority)
        return self.submit_command(command, timeout_s)

    def build_submit(
        self,
        prompt: str | Sequence[int] | Sequence[m.ChatMessage],
        *,
        sampling: m.Sampling | None = None,
        stream: bool = True,
        tag: str = "",
        priority: int = 0,
    ) -> m.Submit:
        """The command of `submit`, for use with `send`."""
        command = m.Submit(
            id=self.next_id(), sampling=sampling or m.Sampling(), stream=stream, tag=tag, priority=priority
        )
        if isinstance(prompt, str):
            return msgspec.structs.replace(command, prompt=prompt)
        tokens = [item for item in prompt if isinstance(item, int)]
        messages = [item for item in prompt if isinstance(item, m.ChatMessage)]
        if messages:
            return msgspec.structs.replace(command, messages=messages)
        return msgspec.structs.replace(command, tokens=tokens)

    def submit_command(self, command: m.Submit, timeout_s: float = 60.0) -> Stream:
        """`submit` with a ready command."""
        stream = Stream(self, self.call(command, m.Accepted, timeout_s))
        self._streams[stream.rid] = stream
        waiting, self._inbox = self._inbox, deque()
        for item in waiting:  # its first tokens may have come with the acceptance
            self._route(item)
        return stream

    def snapshot(self, timeout_s: float = 10.0) -> m.SnapshotReply:
        """The engine's whole present state."""
        return self.call(m.Snapshot(id=self.next_id()), m.SnapshotReply, timeout_s)

    def config(self, timeout_s: float = 10.0) -> m.Cfg:
        """The knobs and their present values."""
        return self.call(m.CfgGet(id=self.next_id()), m.Cfg, timeout_s)

    def configure(
        self, patch: dict[str, m.KnobValue], *, expect_rev: int | None = None, timeout_s: float = 10.0
    ) -> m.CfgAccepted:
        """Queue a change of knobs. Without ``expect_rev`` the present revision is asked for first."""
        rev = self.config(timeout_s).rev if expect_rev is None else expect_rev
        return self.call(m.CfgSet(id=self.next_id(), expect_rev=rev, patch=patch), m.CfgAccepted, timeout_s)

    def wait_ready(self, timeout_s: float = 600.0) -> m.EngineState:
        """Wait until the model is loaded. Raises `EngineGone` with the reason if loading fails."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.snapshot(timeout_s=max(1.0, self._silence_s)).state
            if state.phase == "ready":
                return state
            if state.phase in ("failed", "stopping"):
                raise EngineGone(f"the engine is {state.phase}: {state.reason}")
            if time.monotonic() > deadline:
                raise EngineSilent(f"the engine is still {state.phase} ({state.stage}) after {timeout_s:g} s")
            self.pump(_POLL_MS / 1000)

    # --- without waiting -------------------------------------------------------------------------

    def send(self, command: m.Command) -> None:
        """Send a command without waiting; its reply comes out of `poll`. Never blocks."""
        if self._gone is not None:
            raise EngineGone(self._gone)
        try:
            self.ctl.send(codec.encode(command), zmq.DONTWAIT)
        except zmq.Again:
            raise EngineSilent(f"the engine at {self._address} takes no more commands") from None

    def poll(self, timeout_s: float = 0.0) -> list[m.Reply]:
        """Replies and stream items that nobody else awaits, waiting up to ``timeout_s`` for the first."""
        if not self._inbox:
            self.pump(timeout_s)
        items, self._inbox = list(self._inbox), deque()
        return items

    def subscribe(self, topics: Iterable[m.Topic]) -> None:
        """Also receive these topics. Messages come out of `telemetry`."""
        for topic in topics:
            if topic not in self._topics:
                self._topics.add(topic)
                self.tel.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def telemetry(self, timeout_s: float = 0.0) -> list[tuple[m.Topic, int, m.Telemetry]]:
        """Telemetry since the last call, at most the newest 100,000: (topic, sequence number, message)."""
        if not self._telemetry:
            self.pump(timeout_s)
        items = list(self._telemetry)
        self._telemetry.clear()
        return items

    def pump(self, timeout_s: float) -> None:
        """Read whatever has arrived, waiting up to ``timeout_s`` for something.

        Raises `EngineGone` once the connection is lost and everything received before was read, and
        `EngineSilent` after too long a silence.
        """
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self.ctl in ready:
            self._drain_ctl()
        if self.tel in ready:
            self._drain_tel()
        now = time.monotonic()
        if self.ctl in ready or self.tel in ready:
            self._last_heard = now
        elif self._gone is not None:
            raise EngineGone(self._gone)
        elif self._monitor in ready:
            recv_monitor_message(self._monitor)
            if self.welcome is not None:
                self._gone = (
                    f"the engine at {self._address} closed the connection; its process has probably ended"
                )
        elif self.welcome is not None and now - self._last_heard > self._silence_s:
            raise EngineSilent(f"nothing heard from {self._address} for {now - self._last_heard:.1f} s")

    def _drain_ctl(self) -> None:
        while True:
            try:
                frames = self.ctl.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._route(codec.decode_reply(frames))
            except codec.BadMessage:
                self.bad_frames += 1

    def _drain_tel(self) -> None:
        for _ in range(1000):
            try:
                self._telemetry.append(codec.unpack_telemetry(self.tel.recv_multipart(zmq.DONTWAIT)))
            except zmq.Again:
                return
            except codec.BadMessage:
                self.bad_frames += 1

    def _route(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Probe):
            return
        if isinstance(reply, m.Tokens | m.Done):
            stream = self._streams.get(reply.rid)
            if stream is None:
                self._inbox.append(reply)
                return
            stream.feed(reply)
            if isinstance(reply, m.Done):
                del self._streams[reply.rid]
        elif reply.id in self._awaited:
            self._replies[reply.id] = reply
        else:
            self._inbox.append(reply)
