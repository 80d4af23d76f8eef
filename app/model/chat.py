"""`ChatModel`: one conversation with the model, as the Playground shows it. No Qt.

Each reply is an ordinary request of the engine. Its TTFT and rate come from the engine's own stamps, so the
10 Hz beat of the window is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.net.types import OnItem, OnReply, StreamLost
from ipc.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Command,
    Done,
    Error,
    Reply,
    RequestRow,
    Sampling,
    Submit,
    Tokens,
)

Send = Callable[[Command, OnReply | None, OnItem | None], int]
TAG = "playground"


@dataclass(slots=True)
class Turn:
    """One message. ``state`` of a reply: waiting, streaming, done, stopped, failed."""

    role: str  # "user" or "assistant"
    text: str = ""
    state: str = "done"
    error: str = ""
    rid: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    tokens: int = 0
    ttft_s: float | None = None
    tok_per_s: float | None = None  # after the first token
    finish: str = ""
    cached_tok: int = 0
    drafted_tok: int = 0
    accepted_tok: int = 0
    prompt_tok: int | None = None
    unwanted: bool = False  # to be stopped


@dataclass(slots=True)
class ChatModel:
    """All methods belong to the thread that drains the link."""

    send: Send
    turns: list[Turn] = field(default_factory=list)
    version: int = 0  # grows with every visible change
    temperature: float = 0.0
    max_tokens: int = 256

    @property
    def busy(self) -> bool:
        return bool(self.turns) and self.turns[-1].state in ("waiting", "streaming")

    def ask(self, text: str) -> None:
        """Send ``text`` with the conversation so far. Raises ValueError while a reply is on its way."""
        if self.busy:
            raise ValueError("A reply is on its way; stop it first or wait for its end.")
        messages = [*self._answered(), ChatMessage(role="user", content=text)]
        self.turns.append(Turn("user", text))
        reply = Turn("assistant", state="waiting")
        self.turns.append(reply)
        self.version += 1
        sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens)
        command = Submit(id=1, messages=messages, sampling=sampling, tag=TAG)
        self.send(
            command, lambda answer: self._on_reply(reply, answer), lambda item: self._on_item(reply, item)
        )

    def _answered(self) -> Iterator[ChatMessage]:
        """The conversation so far, without questions that got no answer.

        The engine would refuse again what it has refused, and templates may refuse two questions in a row.
        """
        for question, reply in zip(self.turns[::2], self.turns[1::2], strict=True):
            if reply.text and reply.state != "failed":
                yield ChatMessage(role="user", content=question.text)
                yield ChatMessage(role="assistant", content=reply.text)

    def stop(self) -> None:
        """Ask the engine to end the reply that is on its way; what came stays."""
        if self.busy:
            self.turns[-1].unwanted = True
            self._cancel_unwanted(self.turns[-1])

    def _cancel_unwanted(self, turn: Turn) -> None:
        if turn.unwanted and turn.rid is not None:  # else it is cancelled as soon as the engine has named it
            self.send(Cancel(id=1, rid=turn.rid), None, None)

    def clear(self) -> None:
        """Begin anew."""
        self.stop()
        self.turns = []
        self.version += 1

    def _on_reply(self, turn: Turn, answer: Reply) -> None:
        if isinstance(answer, Accepted):
            turn.rid, turn.prompt_tok = answer.rid, answer.prompt_tokens
            self._cancel_unwanted(turn)
        elif isinstance(answer, Error):
            turn.state, turn.error = "failed", answer.message
        self.version += 1

    def _on_item(self, turn: Turn, item: Tokens | Done | StreamLost) -> None:
        if isinstance(item, Tokens):
            turn.state = "streaming"
            turn.text += item.text
            turn.tokens += len(item.ids)
            if item.t_ns:
                turn.first_ns = item.t_ns[0] if turn.first_ns is None else turn.first_ns
                turn.last_ns = item.t_ns[-1]
        elif isinstance(item, Done):
            turn.text += item.text
            turn.finish = item.finish
            turn.state = {"error": "failed", "cancelled": "stopped"}.get(item.finish, "done")
            turn.error = item.message if item.finish == "error" else ""
            self._take_row(turn, item.row)
        else:
            turn.state, turn.error = "failed", item.message
        self._measure(turn)
        self.version += 1

    @staticmethod
    def _take_row(turn: Turn, row: RequestRow) -> None:
        turn.tokens, turn.cached_tok, turn.prompt_tok = row.output_tok, row.cached_tok, row.prompt_tok
        turn.drafted_tok, turn.accepted_tok = row.drafted_tok, row.accepted_tok
        turn.first_ns, turn.last_ns = row.first_ns, row.last_ns
        if row.first_ns is not None:
            turn.ttft_s = (row.first_ns - row.arrive_ns) / 1e9

    @staticmethod
    def _measure(turn: Turn) -> None:
        if turn.first_ns is None or turn.last_ns is None or turn.tokens < 2:
            return
        span_s = (turn.last_ns - turn.first_ns) / 1e9
        turn.tok_per_s = (turn.tokens - 1) / span_s if span_s > 0 else None
