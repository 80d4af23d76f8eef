"""The I/O thread: it owns both sockets, answers clients, routes token streams and publishes telemetry.

It answers before the model is loaded and while it is changed, and nothing it does waits for a client or
for the step thread. Other threads reach it through its `Inbox` only.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.commands import Commands
from engine.inbox import Inbox
from engine.lifetime import ExitCode, Lifetime
from engine.metrics import Meters
from engine.monitor import GpuMonitor, ProcessSampler
from engine.peers import Job, Peer, PeerTable, ready
from engine.publisher import Publisher
from engine.sizes import counted
from ipc import codec
from ipc import messages as m
from ipc.endpoints import Address

if TYPE_CHECKING:
    from engine.knob_store import KnobStore
    from engine.loop import EngineCore, Event
    from engine.text import Tokenizer
    from ipc.security import Guard, KeyPair

log = logging.getLogger("engine.server")

HEARTBEAT_S = 0.25
STATE_S = 1.0
GPU_S = 1.0
RETRY_S = 0.01
PROGRESS_S = 0.1
_BURST = 256  # items of one kind taken before the others get their turn


class EngineServer:
    """Binds in the constructor (raises `zmq.ZMQError`), serves from `start` on.

    ``grace_s``: how long a vanished client's requests go on. ``curve``: this engine's keys and the public
    keys that may connect; without it there is no encryption. Public methods are for any thread.
    """

    def __init__(
        self,
        ctl: Address,
        tel: Address,
        info: m.EngineInfo,
        lifetime: Lifetime,
        *,
        session: str,
        knob_values: dict[str, m.KnobValue] | None = None,
        grace_s: float = 10.0,
        curve: tuple[KeyPair, frozenset[bytes]] | None = None,
    ) -> None:
        self.lifetime = lifetime
        self.info = info
        self.session = session
        self.initial_knobs = dict(knob_values or {})
        self.grace_s = grace_s
        self.inbox = Inbox()
        self.core: EngineCore | None = None
        self.knobs: KnobStore | None = None
        self.tokenizer: Tokenizer | None = None
        self.meters = Meters()
        self.peers = PeerTable()
        self.jobs: dict[int, Job] = {}  # live requests by rid
        self.bad_frames = 0
        self.drain_until_s: float | None = None
        self._load_state = m.EngineState(phase="loading", since_ns=time.monotonic_ns(), cfg_rev=0)
        self._stage = ""
        self._progress_s = 0.0
        self._context = zmq.Context()
        self._guard: Guard | None = None
        if curve is not None:
            from ipc.security import Guard

            self._guard = Guard(self._context, *curve)
        self._ctl = self._bind(zmq.ROUTER, ctl, SNDHWM=1000, RCVHWM=1000, ROUTER_MANDATORY=1)
        self._tel = self._bind(zmq.PUB, tel, SNDHWM=256)
        self.ctl_url = self._ctl.get_string(zmq.LAST_ENDPOINT)
        self.tel_url = self._tel.get_string(zmq.LAST_ENDPOINT)
        self.publisher = Publisher(lambda frames: self._tel.send_multipart(frames, zmq.DONTWAIT))
        self._sampler = ProcessSampler()
        self.gpu = GpuMonitor()
        self._commands = Commands(self)
        self._next_s = dict.fromkeys(("hb", "state", "gpu", "peers"), 0.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)

    def _bind(self, kind: int, address: Address, **options: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_SUBMIT_BYTES)
        if self._guard is not None:
            self._guard.protect(socket)
        socket.bind(address.url)
        return socket

    # --- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the sockets are closed, which follows ``lifetime.stop``."""
        self._closed.wait(timeout_s)

    def loading(self, stage: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Say how far loading is."""
        state = msgspec.structs.replace(
            self._load_state,
            phase="loading",
            stage=codec.clip(stage),
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        self._load_state = state
        now_s = time.monotonic()
        if stage != self._stage or now_s - self._progress_s >= PROGRESS_S:
            self._stage, self._progress_s = stage, now_s
            self.inbox.call(self._publish_state)

    def failed(self, reason: str) -> None:
        """Loading or the step loop has failed. The reason stays readable until the engine is stopped."""
        now = time.monotonic_ns()
        rev = self.knobs.rev if self.knobs is not None else 0
        self._load_state = m.EngineState(phase="failed", since_ns=now, cfg_rev=rev, reason=codec.clip(reason))
        self.inbox.call(self._detach, reason)

    def attach(self, core: EngineCore, knobs: KnobStore, tokenizer: Tokenizer) -> None:
        """The model is loaded: requests are taken from now on."""
        self.knobs, self.tokenizer, self.meters = knobs, tokenizer, core.text_meters
        self.core = core
        self.inbox.call(self._publish_state)

    def sink(self, events: list[Event]) -> None:
        """Takes events on the step thread, the delivery thread and the one that loads weights."""
        self.inbox.events(events)

    # --- I/O thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ctl, zmq.POLLIN)
        poller.register(self.inbox.fd, zmq.POLLIN)
        self.gpu.start()
        while not self.lifetime.stop.is_set():
            try:
                ready = dict(poller.poll(self._timeout_ms()))
                if self.inbox.fd in ready:
                    self._take_signals(self.inbox.acknowledge())
                self._take_inbox()
                if self._ctl in ready:
                    self._take_commands()
                self._tick(time.monotonic())
            except Exception:
                log.exception("the I/O thread met an error and goes on")
        self._stop()

    def _stop(self) -> None:
        self._load_state = m.EngineState(
            phase="stopping",
            since_ns=time.monotonic_ns(),
            cfg_rev=self.publisher.state.cfg_rev,
            reason=codec.clip(self.lifetime.reason),
        )
        self.core = None
        deadline = time.monotonic() + 1.0
        while self.jobs and time.monotonic() < deadline:  # the step thread ends them as cancelled
            self._take_inbox()
            time.sleep(0.005)
        self._take_inbox()
        self.publisher.flush()
        self._publish_state()
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=100)
        self._closed.set()

    def _take_signals(self, numbers: bytes) -> None:
        asked = {int(signal.SIGTERM), int(signal.SIGINT)}.intersection(numbers)
        if asked:
            self.lifetime.end(ExitCode.OK, f"signal {max(asked)}", grace_s=3.0 if self.core else 0.3)

    def _timeout_ms(self) -> int:
        due = min(self._next_s.values())
        if self.publisher.due_s is not None:
            due = min(due, self.publisher.due_s)
        wait_s = max(0.0, due - time.monotonic())
        if any(peer.blocked for peer in self.peers.values()):
            wait_s = min(wait_s, RETRY_S)
        return int(wait_s * 1000) + 1

    def _take_inbox(self) -> None:
        now = time.monotonic()
        for _ in range(_BURST):
            item = self.inbox.take()
            if item is None:
                break
            for work in (item,) if callable(item) else item:
                try:  # each by itself: one that fails must not take the others' tokens with it
                    if callable(work):
                        work()
                    else:
                        self._event(work, now)
                except Exception:
                    log.exception("the I/O thread met an error in %s and goes on", type(work).__name__)
        else:
            self.inbox.wake()
        while (line := self.inbox.take_log()) is not None:
            self.publisher.log_line(line)

    def _event(self, event: Event, now_s: float) -> None:
        match event:
            case m.Tokens() | m.Done():
                self._route(event, now_s)
            case m.StepRow():
                self.publisher.step(event, now_s)
            case m.RequestRow():
                if event.state != "finished" or event.rid not in self.jobs:
                    self.publisher.request(event, now_s)  # else with its end, which is the next event
            case m.EngineState():
                self._publish_state()
            case m.ApplyEvent():
                self.publisher.apply(event)
                self._publish_state()  # a change may have taken memory or given some back
            case m.Preempted():
                self.publisher.preempted(event)
            case _:
                self.publisher.block_view(event)

    def _route(self, item: m.Tokens | m.Done, now_s: float) -> None:
        """Send an item to its client, and with an end publish its row."""
        job = self.jobs.get(item.rid)
        if job is None:
            return
        if not job.accepted:
            self.accept(job)
        began = time.monotonic_ns()
        if isinstance(item, m.Done):
            item = ready(item, job)
        job.peer.send(self._ctl, item, now_s)
        took_ns = time.monotonic_ns() - began
        job.send_ns += took_ns
        self.meters.send_ns += took_ns
        if isinstance(item, m.Done):
            del self.jobs[item.rid]
            job.peer.live.pop(item.rid, None)
            self.publisher.request(item.row, now_s)

    def _take_commands(self) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = self._ctl.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._commands.take(identity, frames)

    def _tick(self, now_s: float) -> None:
        for peer in self.peers.values():
            if peer.blocked:
                began = time.monotonic_ns()
                peer.flush(self._ctl, now_s)
                self.meters.send_ns += time.monotonic_ns() - began
        self.publisher.tick(now_s)
        if self._due("hb", HEARTBEAT_S, now_s):
            self.publisher.heartbeat(self._heartbeat())
        if self._due("state", STATE_S, now_s):
            self._publish_state()
        if self._due("gpu", GPU_S, now_s):
            for row in self.gpu.rows():
                self.publisher.publish(row)
        if self._due("peers", 0.5, now_s):
            self._check_peers(now_s)
            self._check_drain(now_s)

    def _due(self, what: str, every_s: float, now_s: float) -> bool:
        if now_s < self._next_s[what]:
            return False
        self._next_s[what] = now_s + every_s
        return True

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> m.EngineState:
        """The engine's phase now."""
        return self.core.state() if self.core is not None else self._load_state

    def _publish_state(self) -> None:
        self.publisher.set_state(self.state())

    def _heartbeat(self) -> m.Heartbeat:
        core, state = self.core, self.state()
        now_ns = time.monotonic_ns()
        if state.phase in ("starting", "loading", "warming"):
            busy: str = "load"
        elif state.phase == "applying":
            busy = "apply"
        else:
            busy = "step" if state.running or state.waiting else "idle"
        sample = self._sampler.sample()
        return m.Heartbeat(
            mono_ns=now_ns,
            step=core.step_count if core is not None else 0,
            busy=busy,  # type: ignore[arg-type]
            last_step_age_us=max(0, now_ns - core.last_step_ns) // 1000 if core is not None else 0,
            rss_bytes=sample.rss_bytes,
            device_bytes=self.gpu.process_bytes(),
            cpu_percent=sample.cpu_percent,
            dropped=dict(self.inbox.dropped),
            bad_frames=self.bad_frames,
        )

    # --- clients ---------------------------------------------------------------------------------

    def send(self, peer: Peer, reply: m.Reply, body: bytes | None = None) -> None:
        """Send to a client that said hello; never waits."""
        peer.send(self._ctl, reply, time.monotonic(), body)

    def send_stranger(self, identity: bytes, reply: m.Reply) -> None:
        """Answer someone who has not said hello; lost if it cannot be sent at once."""
        try:
            self._ctl.send_multipart((identity, codec.encode(reply)), zmq.DONTWAIT)
        except zmq.Again:
            self.inbox.dropped["replies"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def accept(self, job: Job) -> None:
        """Tell the client that its request is in the engine, once, and before its first token."""
        if job.accepted:
            return
        job.accepted = True
        job.peer.entering.pop(job.command.id, None)
        reply = m.Accepted(id=job.command.id, rid=job.rid, prompt_tokens=job.prompt_tokens)
        self.answer(job.peer, reply)
        if job.cancelled and self.core is not None:  # while it was on its way in
            self.core.cancel([job.rid])

    def answer(self, peer: Peer, reply: m.Reply) -> None:
        """Send a reply and keep it in case the command comes again."""
        body = codec.encode(reply)
        if not isinstance(reply, m.Tokens | m.Done | m.Probe):
            peer.remember(reply.id, body)
        self.send(peer, reply, body)

    def note_refused(
        self, peer: Peer, command: m.Submit, error: m.Error, prompt_tok: int | None = None
    ) -> None:
        """Tell all clients that a request was refused, as its own is told."""
        refusal = m.Refusal(
            t_ns=time.monotonic_ns(),
            client=peer.name,
            tag=codec.clip(command.tag or "", 64),
            code=error.code,
            message=codec.clip(error.message, m.MAX_REASON),
            prompt_tok=prompt_tok,
        )
        self.publisher.refused(refusal, time.monotonic())

    def _check_peers(self, now_s: float) -> None:
        self.peers.probe(self._ctl, now_s)
        for peer in self.peers.take_lost(now_s, self.grace_s):
            self._end_requests(peer, "its client has gone")
        for peer in self.peers.values():
            if peer.overrun:
                peer.overrun = False
                self._give_up(peer, list(peer.muted), "its client reads nothing")

    def make_room(self, most: int) -> None:
        """Forget clients that have gone, so that fewer than ``most`` are left if that can be."""
        peer = self.peers.make_room(self._ctl, time.monotonic(), most)
        if peer is not None:
            self._end_requests(peer, "its client has gone, and another one took its place")

    def _end_requests(self, peer: Peer, why: str) -> None:
        """Cancel what a client asked for, but for what was to go on without it."""
        self._give_up(peer, [rid for rid, job in peer.live.items() if not job.command.detach], why)
        for job in peer.entering.values():
            job.cancelled = job.cancelled or not job.command.detach

    def _give_up(self, peer: Peer, rids: list[int], why: str) -> None:
        if rids:
            log.warning("cancelled %s of %s: %s", counted(len(rids), "request"), peer.name, why)
            if self.core is not None:
                self.core.cancel(rids, why)

    def _check_drain(self, now_s: float) -> None:
        if self.drain_until_s is None:
            return
        state = self.state()
        entering = any(peer.entering for peer in self.peers.values())
        live = state.running or state.waiting or self.jobs or entering
        if not live or now_s >= self.drain_until_s:
            self.lifetime.end(ExitCode.OK, "shutdown after draining", grace_s=3.0)

    def _detach(self, reason: str) -> None:
        """End every live request with an error: its step loop is no more."""
        self.core = None
        for rid, job in list(self.jobs.items()):
            row = self.publisher.live.get(rid) or m.RequestRow(
                rid=rid, tag="", state="waiting", arrive_ns=job.arrive_ns, prompt_tok=job.prompt_tokens
            )
            message = codec.clip(reason)
            row = msgspec.structs.replace(
                row,
                state="finished",
                end_ns=time.monotonic_ns(),
                finish="error",
                code="internal",
                message=message,
            )
            self._route(
                m.Done(rid=rid, finish="error", row=row, code="internal", message=message), time.monotonic()
            )
        self._publish_state()

    def run_on_io(self, function: Callable[..., None], *args: object) -> None:
        """Have a function called on the I/O thread."""
        self.inbox.call(function, *args)
