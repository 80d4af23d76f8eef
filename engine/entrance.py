"""The text thread: turns submitted prompts into token ids and hands the requests to the engine core.

Tokenizing a long prompt takes too long for the I/O thread and must not be done on the step thread.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from typing import TYPE_CHECKING

from engine.peers import Job
from ipc import codec
from ipc import messages as m

if TYPE_CHECKING:
    from engine.server import EngineServer

log = logging.getLogger("engine.text")


class Entrance:
    """Requests enter the engine here, in the order they came."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queue a job; called on the I/O thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="text", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                refusal = self._enter(job)
            except BaseException:  # a panic of the tokenizers library is no Exception, and must not end us
                fault = secrets.token_hex(4)
                log.exception("a request could not be taken in (error %s)", fault)
                message = f"the engine met an error; its log says more under {fault}"
                refusal = m.Error(id=job.command.id, code="internal", message=message)
            if refusal is None:
                self._server.run_on_io(self._server.accept, job)
            else:
                self._server.run_on_io(self._refuse, job, refusal)

    def _enter(self, job: Job) -> m.Error | None:
        """Tokenize and submit; the refusal if that is what it comes to."""
        from engine.loop import RequestRefused  # imports torch, which is loaded once there is a core
        from engine.request import Request
        from engine.text import TextError

        server, command = self._server, job.command
        core = server.core
        if core is None:
            return m.Error(id=command.id, code="not_ready", message="the engine is stopping")
        try:
            ids = self._ids(command)
            if job.cancelled:
                return m.Error(id=command.id, code="cancelled", message="cancelled before it was queued")
            job.rid, job.prompt_tokens = core.new_rid(), len(ids)
            request = Request(
                job.rid,
                ids,
                command.sampling,
                priority=command.priority,
                tag=command.tag,
                stream=command.stream,
                cache_salt=command.cache_salt,
                arrive_ns=job.arrive_ns,
            )
            # Its tokens may come before `submit` returns, so they must find their way already.
            server.run_on_io(self._register, job)
            core.submit(request)
        except TextError as error:
            return m.Error(id=command.id, code="invalid", message=codec.clip(str(error)))
        except RequestRefused as refused:
            return m.Error(
                id=command.id,
                code=refused.code,
                message=codec.clip(refused.message),
                retry_after_ms=refused.retry_after_ms,
            )
        return None

    def _ids(self, command: m.Submit) -> list[int]:
        tokenizer = self._server.tokenizer
        if command.tokens is not None:
            return command.tokens
        if tokenizer is None:
            raise RuntimeError("there is a core but no tokenizer")
        if command.messages is not None:
            return tokenizer.apply_chat_template([(each.role, each.content) for each in command.messages])
        return tokenizer.encode(command.prompt or "", add_special=True)

    # --- I/O thread ------------------------------------------------------------------------------

    def _register(self, job: Job) -> None:
        self._server.jobs[job.rid] = job
        job.peer.live[job.rid] = job

    def _refuse(self, job: Job, error: m.Error) -> None:
        if job.accepted:
            return  # the loop failed meanwhile, and its end was sent with the reason
        self._server.jobs.pop(job.rid, None)
        job.peer.live.pop(job.rid, None)
        job.peer.entering.pop(job.command.id, None)
        if error.retry_after_ms is None:
            self._server.answer(job.peer, error)
        else:
            self._server.send(job.peer, error)  # the same command may be sent again later
