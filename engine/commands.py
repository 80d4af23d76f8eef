"""What each command of a client does. Runs on the I/O thread; tokenizing has a thread of its own."""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

from engine.entrance import Entrance
from engine.knob_store import PatchRefused
from engine.knobs import KNOBS, list_knobs
from engine.lifetime import ExitCode
from engine.peers import Job, Peer
from ipc import codec
from ipc import messages as m

if TYPE_CHECKING:
    from engine.server import EngineServer

log = logging.getLogger("engine.server")

MAX_CLIENTS = 16
MAX_OUTSTANDING = 10_000
NOT_READY_RETRY_MS = 500


class Commands:
    """Takes frames from clients and has them carried out or refused."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._entrance = Entrance(server)
        self._bad_logged_s = 0.0

    def take(self, identity: bytes, frames: list[bytes]) -> None:
        """One message of the client ``identity``: carried out, refused with a reason, or counted."""
        server = self._server
        peer = server.peers.get(identity)
        now_s = time.monotonic()
        try:
            command = codec.decode_command(frames)
        except codec.BadMessage as bad:
            self._bad(identity, peer, bad, now_s)
            return
        if isinstance(command, m.Hello):
            self._hello(identity, command, now_s)
        elif peer is None:
            error = m.Error(id=command.id, code="unauthorized", message="say hello first")
            server.send_stranger(identity, error)
        else:
            self._from_peer(peer, command, now_s)

    def _bad(self, identity: bytes, peer: Peer | None, bad: codec.BadMessage, now_s: float) -> None:
        self._server.bad_frames += 1
        if now_s - self._bad_logged_s > 1.0:
            self._bad_logged_s = now_s
            log.warning("a message was refused (%d so far): %s", self._server.bad_frames, bad.message)
        if peer is None:
            self._server.send_stranger(identity, bad.reply())
        elif peer.bucket.take(now_s) == 0:
            self._server.send(peer, bad.reply())

    def _hello(self, identity: bytes, hello: m.Hello, now_s: float) -> None:
        server = self._server
        if not hello.proto_min <= m.PROTOCOL <= hello.proto_max:
            message = (
                f"this engine speaks protocol {m.PROTOCOL}, the client {hello.proto_min} to "
                f"{hello.proto_max}; install the same version of both"
            )
            server.send_stranger(identity, m.Error(id=hello.id, code="proto_mismatch", message=message))
            return
        peer = server.peers.get(identity)
        if peer is None:
            if len(server.peers) >= MAX_CLIENTS:
                server.make_room(MAX_CLIENTS)
            if len(server.peers) >= MAX_CLIENTS:
                message = f"{MAX_CLIENTS} clients are connected already; close one"
                error = m.Error(id=hello.id, code="busy", message=message, retry_after_ms=5000)
                server.send_stranger(identity, error)
                return
            peer = server.peers[identity] = Peer(identity, codec.clip(hello.client, 64), now_s)
        peer.gone_since_s = None
        welcome = m.Welcome(
            id=hello.id,
            proto=m.PROTOCOL,
            session=server.session,
            engine=server.info,
            tel_endpoint=server.tel_url,
            mono_ns=time.monotonic_ns(),
            unix_ms=time.time_ns() // 1_000_000,
            max_frame_bytes=codec.MAX_SUBMIT_BYTES,
        )
        server.send(peer, welcome)

    def _from_peer(self, peer: Peer, command: m.Command, now_s: float) -> None:
        server = self._server
        peer.gone_since_s = None
        wait_ms = peer.bucket.take(now_s)
        if wait_ms:
            message = "too many commands; send fewer a second"
            error = m.Error(id=command.id, code="rate_limited", message=message, retry_after_ms=wait_ms)
            server.send(peer, error)
            if isinstance(command, m.Submit):
                server.note_refused(peer, command, error)
            return
        known = peer.cached(command.id)
        if known is not None:
            server.send(peer, codec.decode_reply([known]), known)
            return
        if command.id in peer.entering:
            return  # a repetition; its answer is on its way
        try:
            self._carry_out(peer, command)
        except PatchRefused as refused:
            server.answer(peer, _error(command.id, refused.code, refused.message, keys=refused.keys))
        except codec.BadMessage as bad:
            server.answer(peer, _error(command.id, bad.code, bad.message))
        except Exception:
            fault = secrets.token_hex(4)
            log.exception("%s failed (error %s)", type(command).__name__, fault)
            message = f"the engine met an error; its log says more under {fault}"
            server.answer(peer, _error(command.id, "internal", message))

    def _carry_out(self, peer: Peer, command: m.Command) -> None:
        server = self._server
        match command:
            case m.Ping():
                server.send(peer, m.Pong(id=command.id, mono_ns=time.monotonic_ns()))
            case m.Snapshot():
                state = server.publisher.state
                reply = server.publisher.snapshot(
                    command.id, self._cfg(command.id), state.model, state.device
                )
                server.send(peer, reply)
            case m.CfgGet():
                server.send(peer, self._cfg(command.id))
            case m.CfgSet():
                server.answer(peer, self._configure(command))
            case m.CfgCancel():
                server.answer(peer, self._give_up(command))
            case m.Submit():
                self._submit(peer, command)
            case m.Cancel():
                server.answer(peer, m.Cancelled(id=command.id, n=self._cancel(peer, command)))
            case m.LogTail():
                lines = [line for line in server.publisher.log if line.n > command.after]
                server.send(peer, m.LogLines(id=command.id, lines=lines[-command.max :]))
            case m.Shutdown():
                server.answer(peer, m.Ok(id=command.id))
                self._shutdown(peer, command)

    def _cfg(self, command_id: int) -> m.Cfg:
        """The knobs; before there is a model, with the values that it will start with."""
        knobs = self._server.knobs
        if knobs is not None:
            return m.Cfg(id=command_id, rev=knobs.rev, values=dict(knobs.values), knobs=knobs.infos())
        values = {knob.id: knob.default for knob in KNOBS} | self._server.initial_knobs
        return m.Cfg(id=command_id, rev=0, values=values, knobs=list_knobs())

    def _configure(self, command: m.CfgSet) -> m.Reply:
        core = self._server.core
        if core is None:
            return self._not_ready(command.id)
        proposal = core.propose(command.patch, command.expect_rev, dry_run=command.dry_run)
        return m.CfgAccepted(
            id=command.id,
            apply_id=proposal.apply_id,
            mode=proposal.mode,
            changed=dict(proposal.changed),
            running=core.state().running,
        )

    def _give_up(self, command: m.CfgCancel) -> m.Reply:
        knobs = self._server.knobs
        if knobs is not None and knobs.cancel(command.apply_id):
            return m.Ok(id=command.id)
        return _error(command.id, "not_found", f"change {command.apply_id} is not being applied")

    def _submit(self, peer: Peer, command: m.Submit) -> None:
        server = self._server
        given = sum(part is not None for part in (command.prompt, command.messages, command.tokens))
        refusal: m.Error | None = None
        if given != 1:
            message = f"exactly one of prompt, messages and tokens must be given, not {given}"
            refusal = _error(command.id, "invalid", message)
            server.answer(peer, refusal)
        elif server.core is None or server.drain_until_s is not None:
            # Not kept as the answer to this id: the same command may be sent again later.
            refusal = self._not_ready(command.id)
            server.send(peer, refusal)
        elif len(server.jobs) + sum(len(p.entering) for p in server.peers.values()) >= MAX_OUTSTANDING:
            message = f"{MAX_OUTSTANDING} requests are outstanding, which is the limit"
            refusal = _error(command.id, "busy", message, retry_after_ms=1000)
            server.send(peer, refusal)
        else:
            job = Job(peer, command, time.monotonic_ns())
            peer.entering[command.id] = job
            self._entrance.put(job)
        if refusal is not None:
            server.note_refused(peer, command, refusal)

    def _not_ready(self, command_id: int) -> m.Error:
        state = self._server.state()
        if state.phase == "failed":
            return _error(command_id, "not_ready", f"the engine has failed: {state.reason}")
        if self._server.drain_until_s is not None or state.phase == "stopping":
            return _error(command_id, "not_ready", "the engine is stopping")
        message = f"the model is still being loaded: {state.stage or 'starting'}"
        return _error(command_id, "not_ready", message, retry_after_ms=NOT_READY_RETRY_MS)

    def _cancel(self, peer: Peer, command: m.Cancel) -> int:
        server = self._server
        if command.rid is None and command.tag is None and not command.all:
            raise codec.BadMessage("invalid", "name what to cancel: rid, tag or all")

        def meant(job: Job) -> bool:
            mine = command.all and job.peer is peer
            return (
                mine or job.rid == command.rid or (command.tag is not None and job.command.tag == command.tag)
            )

        live = [job for job in server.jobs.values() if meant(job)]
        if live and server.core is not None:
            server.core.cancel([job.rid for job in live])
        entering = [job for each in server.peers.values() for job in each.entering.values() if meant(job)]
        fresh = [job for job in entering if not job.cancelled and job.rid not in server.jobs]
        # Of a live one the core may not have heard yet: then it is cancelled again when it is accepted.
        for job in (*live, *fresh):
            job.cancelled = True
        return len(live) + len(fresh)

    def _shutdown(self, peer: Peer, command: m.Shutdown) -> None:
        server = self._server
        log.info("%s asked the engine to stop (%s)", peer.name, command.mode)
        if command.mode == "drain" and server.core is not None:
            server.drain_until_s = time.monotonic() + command.timeout_ms / 1000
        else:
            grace_s = 3.0 if server.core is not None else 0.3
            server.lifetime.end(ExitCode.OK, "shutdown asked for", grace_s=grace_s)


def _error(
    command_id: int,
    code: m.ErrorCode,
    message: str,
    *,
    keys: dict[str, str] | None = None,
    retry_after_ms: int | None = None,
) -> m.Error:
    reasons = {key[:128]: codec.clip(why, m.MAX_REASON) for key, why in (keys or {}).items()}
    return m.Error(
        id=command_id, code=code, message=codec.clip(message), keys=reasons, retry_after_ms=retry_after_ms
    )
