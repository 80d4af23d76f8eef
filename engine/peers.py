"""The clients of the engine's ``ctl`` socket: what each may send, and what is still to be sent to it.

A slow reader must not hold up anyone. So a message that its socket does not take is queued here, and
tokens of one request that are waiting are merged into one message; the queue is bounded by what the
client's own requests may generate. A client that lets it grow further loses the requests that it has, but
not their ends: it learns of each that it was cancelled once it reads again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import zmq

from ipc import codec
from ipc import messages as m

RATE_PER_S = 200.0
BURST = 1200.0  # a thousand streams may start at once
REPLY_CACHE = 256
PROBE_BUSY_S = 1.0
PROBE_IDLE_S = 5.0
MAX_QUEUED_TOKENS = 1 << 20
MAX_QUEUED_MESSAGES = 20_000
MAX_MERGED_TOKENS = 16_384  # tokens and characters that are merged into one message, so that
MAX_MERGED_CHARS = 1 << 18  # it stays far below what a client takes, whatever comes with each token
MAX_QUEUED_BYTES = 64 << 20  # of whole replies: a snapshot can have a megabyte, and be asked for many times


class TokenBucket:
    """A rate limit: ``rate`` commands a second, ``burst`` at once."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at_s = now_s

    def take(self, now_s: float) -> int:
        """0 if one more command is allowed now, else the milliseconds until it will be."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0
        return max(1, round((1.0 - self._tokens) / self._rate * 1000))


@dataclass(slots=True)
class _Waiting:
    """Tokens of one request that its client has not taken yet."""

    rid: int
    index: int
    ids: list[int]
    text: list[str]
    t_ns: list[int]
    logprobs: list[m.TokenLogprob] | None
    chars: int

    def takes(self, tokens: m.Tokens) -> bool:
        """Whether there is room for these."""
        return (
            len(self.ids) + len(tokens.ids) <= MAX_MERGED_TOKENS
            and self.chars + len(tokens.text) <= MAX_MERGED_CHARS
        )

    def add(self, tokens: m.Tokens) -> None:
        self.ids += tokens.ids
        self.text.append(tokens.text)
        self.chars += len(tokens.text)
        self.t_ns += tokens.t_ns
        if self.logprobs is not None and tokens.logprobs is not None:
            self.logprobs += tokens.logprobs

    def message(self) -> m.Tokens:
        return m.Tokens(
            rid=self.rid,
            index=self.index,
            ids=self.ids,
            text="".join(self.text),
            t_ns=self.t_ns,
            logprobs=self.logprobs,
        )


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request on its way into the engine, and its route back."""

    peer: Peer
    command: m.Submit
    arrive_ns: int
    rid: int = 0
    prompt_tokens: int = 0
    accepted: bool = False
    cancelled: bool = False
    send_ns: int = 0  # spent on encoding and sending its messages


class Peer:
    """One client that said hello."""

    def __init__(self, identity: bytes, name: str, now_s: float) -> None:
        self.identity = identity
        self.name = name
        self.bucket = TokenBucket(RATE_PER_S, BURST, now_s)
        self.entering: dict[int, Job] = {}  # by command id: submitted, not in the engine yet
        self.live: dict[int, Job] = {}  # by rid
        self.gone_since_s: float | None = None
        self.overrun = False  # too much waited: the muted requests are to be cancelled
        self.muted: set[int] = set()  # requests whose tokens are thrown away
        self.sent_at_s = now_s
        self._replies: OrderedDict[int, bytes] = OrderedDict()
        self._queue: OrderedDict[tuple[str, int], bytes | _Waiting] = OrderedDict()
        self._queued_tokens = 0
        self._queued_bytes = 0  # of the entries that are encoded already
        self._serial = 0

    # --- answers kept, so that a command sent twice is carried out once ---------------------------

    def cached(self, command_id: int) -> bytes | None:
        """The answer already given to a command of this id."""
        return self._replies.get(command_id)

    def remember(self, command_id: int, body: bytes) -> None:
        """Keep an answer; the oldest of more than 256 is forgotten."""
        self._replies[command_id] = body
        while len(self._replies) > REPLY_CACHE:
            self._replies.popitem(last=False)

    def is_gone(self) -> bool:
        """Whether its connection was found closed, and nothing came from it since."""
        return self.gone_since_s is not None

    # --- sending ---------------------------------------------------------------------------------

    @property
    def blocked(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queue)

    def send(
        self, socket: zmq.Socket[bytes], message: m.Reply, now_s: float, body: bytes | None = None
    ) -> None:
        """Send, or queue if the client does not keep up. ``body`` is the encoded message if known."""
        if self.is_gone() or (isinstance(message, m.Tokens) and message.rid in self.muted):
            return
        if isinstance(message, m.Done) and message.rid in self.muted:
            self.muted.discard(message.rid)
            if message.finish in ("stop", "length"):  # it was faster than its cancel, but is not whole
                why = "tokens were thrown away, for its client reads nothing"
                message, body = msgspec.structs.replace(message, finish="cancelled", message=why), None
        if not self._queue:
            if self._try(socket, body if body is not None else codec.encode(message), now_s):
                return
            if self.is_gone():
                return
        self._enqueue(message, body)

    def flush(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """Send what waits, as far as the client takes it."""
        while self._queue:
            key, entry = next(iter(self._queue.items()))
            body = entry if isinstance(entry, bytes) else codec.encode(entry.message())
            if not self._try(socket, body, now_s):
                if self.is_gone():
                    self._drop()
                return
            del self._queue[key]
            if isinstance(entry, _Waiting):
                self._queued_tokens -= len(entry.ids)
            else:
                self._queued_bytes -= len(entry)

    def probe(self, socket: zmq.Socket[bytes], mono_ns: int, now_s: float) -> None:
        """Find out whether the client is still connected; of one that has gone, that is known already."""
        if not self._queue and not self.is_gone():
            self._try(socket, codec.encode(m.Probe(mono_ns=mono_ns)), now_s)

    def _try(self, socket: zmq.Socket[bytes], body: bytes, now_s: float) -> bool:
        try:
            socket.send_multipart((self.identity, body), zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.gone_since_s = now_s
            return False
        self.sent_at_s = now_s
        return True

    def _enqueue(self, message: m.Reply, body: bytes | None) -> None:
        if isinstance(message, m.Tokens):
            self._queued_tokens += len(message.ids)
            waiting = self._queue.get(("tokens", message.rid))
            if isinstance(waiting, _Waiting) and not waiting.takes(message):
                self._serial += 1  # it is full: its place is before that of the next
                self._queue["full", self._serial] = self._queue.pop(("tokens", message.rid))
                waiting = None
            if isinstance(waiting, _Waiting):
                waiting.add(message)
            else:
                logprobs = None if message.logprobs is None else list(message.logprobs)
                self._queue["tokens", message.rid] = _Waiting(
                    message.rid,
                    message.index,
                    list(message.ids),
                    [message.text],
                    list(message.t_ns),
                    logprobs,
                    len(message.text),
                )
        else:
            self._serial += 1
            entry = self._queue["other", self._serial] = body if body is not None else codec.encode(message)
            self._queued_bytes += len(entry)
        if self._queued_tokens > MAX_QUEUED_TOKENS or self._asks_without_reading:
            self._mute()

    @property
    def _asks_without_reading(self) -> bool:
        return len(self._queue) > MAX_QUEUED_MESSAGES or self._queued_bytes > MAX_QUEUED_BYTES

    def _mute(self) -> None:
        """Throw away the tokens of live requests, those that wait and those to come."""
        self.overrun = True
        self.muted.update(self.live)
        for key, waiting in list(self._queue.items()):
            if isinstance(waiting, _Waiting) and waiting.rid in self.muted:
                del self._queue[key]
                self._queued_tokens -= len(waiting.ids)
        if self._asks_without_reading:  # not even its answers can be kept for it
            self._drop()

    def _drop(self) -> None:
        self._queue.clear()
        self._queued_tokens = self._queued_bytes = 0


class PeerTable(dict[bytes, Peer]):
    """The clients that said hello, by identity."""

    def probe(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """Ask those from whom nothing was learnt for a while whether they are still there."""
        for peer in self.values():
            busy = bool(peer.live or peer.entering)
            if now_s - peer.sent_at_s >= (PROBE_BUSY_S if busy else PROBE_IDLE_S):
                peer.probe(socket, time.monotonic_ns(), now_s)

    def take_lost(self, now_s: float, grace_s: float) -> list[Peer]:
        """Remove and return those gone for longer than ``grace_s``."""
        lost = [
            peer
            for peer in self.values()
            if peer.gone_since_s is not None and now_s - peer.gone_since_s >= grace_s
        ]
        for peer in lost:
            del self[peer.identity]
        return lost

    def make_room(self, socket: zmq.Socket[bytes], now_s: float, most: int) -> Peer | None:
        """Remove clients that have gone and have nothing running, so that fewer than ``most`` are left.

        If that is not enough, the one that has been gone longest is removed too, and returned: its requests
        are to be ended. Who is still there keeps its place.
        """
        for peer in list(self.values()):
            peer.probe(socket, time.monotonic_ns(), now_s)
            if peer.is_gone() and not peer.live and not peer.entering:
                del self[peer.identity]
        if len(self) < most:
            return None
        gone = [(peer.gone_since_s, peer.identity) for peer in self.values() if peer.gone_since_s is not None]
        return self.pop(min(gone)[1]) if gone else None


def ready(done: m.Done, job: Job) -> m.Done:
    """The end of a request, ready to be sent.

    Its row says what sending its messages has taken, as far as that can be known before it is sent itself: an
    answer that is sent whole is encoded once more than needed, for that is nearly all of it. Its message is
    made fit to be sent: errors of libraries can be very long.
    """
    send_ns = job.send_ns
    if done.ids is not None:
        began = time.monotonic_ns()
        codec.encode(done)
        send_ns += time.monotonic_ns() - began
    message = codec.clip(done.message)
    row = msgspec.structs.replace(done.row, message=message, send_us=send_ns // 1000)
    return msgspec.structs.replace(done, message=message, row=row)
