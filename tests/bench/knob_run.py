"""Runs a workload on a live engine and keeps all that both sides saw of it.

One `Session` is one client of one engine process. It flips knobs and waits until the engine says that they
are applied, sends requests on a schedule, and collects when tokens arrived here, the engine's own row of each
request, its step rows and the memory it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ipc import messages as m
from ipc.client import Client, EngineError

REPLY_S = 60.0
GIB = 1 << 30
GREEDY = m.Sampling()
MEMORY = ("kv_bytes", "host_kv_bytes", "swap_bytes", "result_bytes")


class KnobRefused(RuntimeError):
    """The engine did not take a change of knobs, or took it back. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One request of a workload: ``out`` tokens exactly, unless it is cancelled after ``cancel_after``.

    ``kind`` groups requests for the figures. It is sent ``at_s`` after its wave was handed over and once the
    wave's requests have ``after`` tokens together: places in the work of others do not depend on how fast the
    machine is, as times do.
    """

    prompt: list[int] | str
    out: int
    kind: str = ""
    at_s: float = 0.0
    after: int = 0
    priority: int = 0
    cancel_after: int | None = None
    sampling: m.Sampling = GREEDY  # but for the number of tokens


Waves = Sequence[Sequence[Send]]  # a wave begins when everything of the one before has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What workloads must know of the model."""

    vocab_size: int
    max_model_len: int
    kv_bytes_per_token: int

    def pool_gib(self, tokens: int) -> float:
        """A pool of this many tokens in the model's own precision, as the value of ``kv_pool_gib``."""
        return (tokens + 0.5) * self.kv_bytes_per_token / GIB


class Answer(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are seconds since the run began; ``row`` is the engine's."""

    kind: str
    intended_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    messages: int = 0
    finish: str = ""
    row: m.RequestRow | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """One run of one arm. Memory is the most that was held while it ran, in bytes."""

    arm: str
    pair: int
    wall_s: float
    answers: list[Answer]
    steps: list[m.StepRow]
    block_size: int
    memory: dict[str, int]
    flip_us: int | None = None  # None: the engine ran with these knobs already


class Session:
    """A client and what it has learned of its engine."""

    def __init__(self, client: Client) -> None:
        self.client = client
        client.subscribe(["step", "state", "event"])
        self.welcome = client.hello()
        state = client.wait_ready()
        if state.model is None:
            raise RuntimeError("the engine is ready but names no model")
        self.model = state.model
        self.setup = Setup(
            vocab_size=state.model.vocab_size,
            max_model_len=state.model.max_model_len,
            kv_bytes_per_token=state.model.kv_bytes_per_token,
        )
        self.device = state.device
        config = client.config()
        self.knobs = {info.id: info for info in config.knobs}
        self.defaults = {info.id: info.default for info in config.knobs if info.available}
        self._steps: list[m.StepRow] = []
        self._applies: dict[int, m.ApplyEvent] = {}
        self._step_seq = 0
        self._lost = 0
        self._memory: dict[str, int] = {}
        self._idle = True  # what the newest state says
        self._rev = 0  # and the configuration that it is of

    # --- knobs -----------------------------------------------------------------------------------

    def why_not(self, knob: str, *values: m.KnobValue) -> str:
        """Why a knob cannot take these values here, or "" if it can."""
        info = self.knobs.get(knob)
        if info is None:
            return "this engine does not have it"
        if not info.available:
            return info.reason
        return "; ".join(
            f"{value}: {info.choice_reasons[str(value)]}"
            for value in values
            if str(value) in info.choice_reasons
        )

    def flip(self, values: dict[str, m.KnobValue]) -> m.ApplyEvent | None:
        """Make the engine run with these values; None if it does already. Raises `KnobRefused`."""
        config = self.client.config()
        patch = {knob: value for knob, value in values.items() if config.values[knob] != value}
        if not patch:
            return None
        try:
            accepted = self.client.configure(patch, expect_rev=config.rev)
        except EngineError as error:
            raise KnobRefused(f"{patch} was refused: {error}") from error
        deadline = time.monotonic() + REPLY_S
        while accepted.apply_id not in self._applies:
            if time.monotonic() > deadline:
                raise KnobRefused(f"{patch} was not applied within {REPLY_S:g} s")
            self._listen(0.1)
        event = self._applies.pop(accepted.apply_id)
        if event.result != "ok":
            raise KnobRefused(f"{patch} was rolled back: {event.why}")
        while self._rev < event.to_rev:  # what is held from now on is told right after the change
            if time.monotonic() > deadline:
                raise KnobRefused(f"{patch} was applied, but no state of the engine followed")
            self._listen(0.1)
        return event

    # --- telemetry -------------------------------------------------------------------------------

    def _listen(self, timeout_s: float = 0.0) -> None:
        for topic, seq, message in self.client.telemetry(timeout_s):
            if topic == "step":
                if self._step_seq and seq != self._step_seq + 1:
                    self._lost += seq - self._step_seq - 1
                self._step_seq = seq
            match message:
                case m.StepRows():
                    self._steps += message.rows
                case m.EngineState():
                    self._idle = not message.running and not message.waiting
                    self._rev = message.cfg_rev
                    self.note_memory(message)
                case m.ApplyEvent():
                    self._applies[message.apply_id] = message
                case m.Heartbeat():
                    self._memory["rss_bytes"] = max(self._memory.get("rss_bytes", 0), message.rss_bytes)

    def note_memory(self, state: m.EngineState) -> None:
        """Take in what the engine says that it holds."""
        for name in MEMORY:
            self._memory[name] = max(self._memory.get(name, 0), getattr(state, name))

    def begin(self) -> None:
        """Forget what was heard before."""
        self._listen()
        rss_bytes = self._memory.get("rss_bytes", 0)  # told four times a second, so it may not come again
        self._steps, self._memory, self._lost = [], {"rss_bytes": rss_bytes}, 0

    def steps(self) -> list[m.StepRow]:
        """All step rows since `begin`, once those of the last step have come. Raises if some were lost."""
        time.sleep(0.05)  # rows are published together, at most 33 ms late
        snapshot = self.client.snapshot()
        self.note_memory(snapshot.state)
        deadline = time.monotonic() + REPLY_S
        while self._step_seq < snapshot.seq.get("step", 0):
            if time.monotonic() > deadline:
                raise RuntimeError("step rows that were published did not arrive")
            self._listen(0.1)
        self._listen()
        if self._lost:
            raise RuntimeError(f"{self._lost} messages of step rows were lost; run with less beside it")
        return self._steps

    # --- requests --------------------------------------------------------------------------------

    def run(self, waves: Waves, *, arm: str, pair: int, salt: str, flip_us: int | None = None) -> Outcome:
        """Send the waves one after the other; returns when all has ended. ``salt`` parts the prefix caches.

        Raises when a request is refused, fails or generates another number of tokens than asked for.
        """
        self.begin()
        start = time.perf_counter()
        answers: list[Answer] = []
        for wave in waves:
            answers += _Wave(self, wave, salt, start).run()
        wall_s = time.perf_counter() - start
        steps = self.steps()
        return Outcome(
            arm=arm,
            pair=pair,
            wall_s=wall_s,
            answers=answers,
            steps=steps,
            block_size=self.block_size,
            memory=dict(self._memory),
            flip_us=flip_us,
        )

    def submit(self, send: Send, salt: str) -> int:
        """Send one request without waiting; returns the command's id."""
        text = isinstance(send.prompt, str)
        command = m.Submit(
            id=self.client.next_id(),
            prompt=send.prompt if isinstance(send.prompt, str) else None,
            tokens=None if text else list(send.prompt),  # type: ignore[arg-type]
            sampling=msgspec.structs.replace(send.sampling, max_tokens=send.out, ignore_eos=True),
            priority=send.priority,
            cache_salt=salt,
        )
        self.client.send(command)
        return command.id

    def pump(self, following: Callable[[], Send], salt: str, until: Callable[[], bool]) -> None:
        """Let a load run on until ``until()`` is true: each request that ends is followed by another."""
        while not until():
            self._listen(0.01)
            for reply in self.client.poll(0.0):
                if isinstance(reply, m.Error):
                    raise EngineError(reply)
                if isinstance(reply, m.Done):
                    self.submit(following(), salt)

    def cancel_all(self) -> None:
        """End all requests of this client and wait until the engine is idle."""
        self.client.request(m.Cancel(id=self.client.next_id(), all=True))
        self._idle = False
        deadline = time.monotonic() + REPLY_S
        while not self._idle:
            self.client.poll(0.0)
            self._listen(0.1)
            if time.monotonic() > deadline:
                raise RuntimeError(f"requests still run {REPLY_S:g} s after they were cancelled")

    @property
    def block_size(self) -> int:
        """Tokens of a block as the engine runs now."""
        return int(self.client.config().values["block_size"] or 0)

    @property
    def memory(self) -> dict[str, int]:
        """The most memory heard of since `begin`, in bytes by kind."""
        return dict(self._memory)

    @property
    def heard(self) -> list[m.StepRow]:
        """The step rows since `begin`, as far as they have come; `pump` lets them grow."""
        return self._steps


class _Wave:
    """Requests on a schedule, gathered until the last has ended."""

    def __init__(self, session: Session, sends: Sequence[Send], salt: str, start: float) -> None:
        self._session = session
        self._salt = salt
        self._start = start
        self._begin = time.perf_counter() - start
        self._todo = sorted(sends, key=lambda send: (send.at_s, send.after))
        self._tokens = 0  # of all its requests so far
        self._sends: list[Send] = []
        self._answers: list[Answer] = []
        self._by_command: dict[int, int] = {}
        self._by_rid: dict[int, int] = {}
        self._early: list[m.Tokens | m.Done] = []
        self._open = len(self._todo)

    def run(self, timeout_s: float = 600.0) -> list[Answer]:
        deadline = time.monotonic() + timeout_s
        while self._open:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._open} requests did not end within {timeout_s:g} s")
            wait_s = self._send_due()
            replies = self._session.client.poll(wait_s)
            now = time.perf_counter() - self._start
            early, self._early = self._early, []
            for reply in [*early, *replies]:
                self._take(reply, now)
            self._session._listen()
        for send, answer in zip(self._sends, self._answers, strict=True):
            if answer.tokens != send.out and send.cancel_after is None:
                raise RuntimeError(
                    f"a request of kind {send.kind!r} has {answer.tokens} tokens, not {send.out}"
                )
        return self._answers

    def _send_due(self) -> float:
        """Send what is due; returns how long nothing else will be, at most a tenth of a second."""
        while self._todo and self._tokens >= self._todo[0].after:
            now = time.perf_counter() - self._start
            due_in = self._begin + self._todo[0].at_s - now
            if due_in > 0:
                return min(due_in, 0.1)
            send = self._todo.pop(0)
            intended_s = now if send.after else self._begin + send.at_s
            self._by_command[self._session.submit(send, self._salt)] = len(self._sends)
            self._sends.append(send)
            self._answers.append(Answer(kind=send.kind, intended_s=intended_s))
        return 0.1

    def _take(self, reply: m.Reply, now: float) -> None:
        match reply:
            case m.Accepted(id=command) if command in self._by_command:
                self._by_rid[reply.rid] = self._by_command[command]
            case m.Error():
                raise EngineError(reply)
            case m.Tokens() | m.Done():
                index = self._by_rid.get(reply.rid)
                if index is None:
                    self._early.append(reply)
                else:
                    self._note(index, reply, now)

    def _note(self, index: int, item: m.Tokens | m.Done, now: float) -> None:
        answer, limit = self._answers[index], self._sends[index].cancel_after
        answer.messages += 1
        if item.ids:
            answer.first_s = now if answer.first_s is None else answer.first_s
            answer.last_s = now
            before, answer.tokens = answer.tokens, answer.tokens + len(item.ids)
            self._tokens += len(item.ids)
            if limit is not None and before < limit <= answer.tokens and isinstance(item, m.Tokens):
                client = self._session.client
                client.send(m.Cancel(id=client.next_id(), rid=item.rid))
        if isinstance(item, m.Done):
            if item.finish == "error":
                raise RuntimeError(f"a request failed: {item.message}")
            answer.finish, answer.row = item.finish, item.row
            self._open -= 1
