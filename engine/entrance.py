"""The text thread: turns submitted prompts into token ids and hands the requests to the engine core.

Tokenizing a long prompt takes too long for the I/O thread and must not be done on the step thread.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.peers import Job
from ipc import codec
from ipc import messages as m

if TYPE_CHECKING:
    from engine.server import EngineServer
    from engine.text import Tokenizer

log = logging.getLogger("engine.text")

BATCH_CHARS = 1 << 18
"""Text of one batch, some tenths of a second of work: its first prompt waits until its last one is done."""

Ids = list[int] | BaseException
"""A prompt's ids, or why there are none."""


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
            jobs = self._take()
            began = time.monotonic_ns()
            all_ids = self._tokenize([job.command for job in jobs])
            took_ns = time.monotonic_ns() - began
            self._server.meters.tokenize_ns += took_ns
            sizes = [_size(job, ids) for job, ids in zip(jobs, all_ids, strict=True)]
            total = sum(sizes) or 1
            for job, ids, size in zip(jobs, all_ids, sizes, strict=True):
                self._let_in(job, ids, took_ns * size // total)

    def _take(self) -> list[Job]:
        """The next job, with all that wait behind it if they are to be tokenized together."""
        jobs = [self._jobs.get()]
        core = self._server.core
        if core is not None and core.knobs["batched_tokenize"]:
            chars = _chars(jobs[0].command)
            while chars < BATCH_CHARS and not self._jobs.empty():
                jobs.append(self._jobs.get())
                chars += _chars(jobs[-1].command)
        return jobs

    def _let_in(self, job: Job, ids: Ids, tokenize_ns: int) -> None:
        try:
            refusal = self._enter(job, ids, tokenize_ns)
        except BaseException:  # a panic of the tokenizers library is no Exception, and must not end us
            fault = secrets.token_hex(4)
            log.exception("a request could not be taken in (error %s)", fault)
            message = f"the engine met an error; its log says more under {fault}"
            refusal = m.Error(id=job.command.id, code="internal", message=message)
        if refusal is None:
            self._server.run_on_io(self._server.accept, job)
        else:
            self._server.run_on_io(self._refuse, job, refusal)

    def _enter(self, job: Job, ids: Ids, tokenize_ns: int) -> m.Error | None:
        """Submit a request; the refusal if that is what it comes to."""
        from engine.loop import RequestRefused  # imports torch, which is loaded once there is a core
        from engine.request import Request
        from engine.text import TextError

        server, command = self._server, job.command
        core = server.core
        if core is None:
            return m.Error(id=command.id, code="not_ready", message="the engine is stopping")
        try:
            if isinstance(ids, BaseException):
                raise ids
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
            request.tokenize_ns = tokenize_ns
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

    # --- text to ids -----------------------------------------------------------------------------

    def _tokenize(self, commands: Sequence[m.Submit]) -> list[Ids]:
        """The ids of each command, or the error that it alone has met."""
        if len(commands) == 1:
            return [self._try_alone(commands[0])]
        try:
            texts = [self._text(command) for command in commands]
            encoded = iter(self._tokenizer.encode_batch([text for text in texts if text is not None]))
        except BaseException:  # the whole batch fails with one of its prompts: each gets its own answer
            return [self._try_alone(command) for command in commands]
        return [
            command.tokens or [] if text is None else next(encoded)
            for command, text in zip(commands, texts, strict=True)
        ]

    def _try_alone(self, command: m.Submit) -> Ids:
        try:
            if command.tokens is not None:
                return command.tokens
            text, add_special = self._text(command) or ("", True)
            return self._tokenizer.encode(text, add_special=add_special)
        except BaseException as error:
            return error

    def _text(self, command: m.Submit) -> tuple[str, bool] | None:
        """What is to be encoded, and whether with special tokens in front. None if ids were given."""
        if command.tokens is not None:
            return None
        if command.messages is not None:
            messages = [(each.role, each.content) for each in command.messages]
            return self._tokenizer.render_chat(messages), False  # the template writes the special tokens
        return command.prompt or "", True

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._server.tokenizer is None:
            raise RuntimeError("there is no tokenizer before there is a core")
        return self._server.tokenizer

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
        if error.code != "cancelled":
            self._server.note_refused(job.peer, job.command, error, job.prompt_tokens or None)
        if error.retry_after_ms is None:
            self._server.answer(job.peer, error)
        else:
            self._server.send(job.peer, error)  # the same command may be sent again later


def _chars(command: m.Submit) -> int:
    """Characters to tokenize."""
    if command.messages is not None:
        return sum(len(each.content) for each in command.messages)
    return len(command.prompt or "")


def _size(job: Job, ids: Ids) -> int:
    """Tokens made of a prompt."""
    return 0 if isinstance(ids, BaseException) or job.command.tokens is not None else len(ids)
