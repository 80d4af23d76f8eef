"""Requests on their way in: what happens to them while the text thread still has them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import entrance
from engine.bringup import bring_up
from engine.chat import ChatTemplate
from engine.config import EngineConfig
from engine.lifetime import Lifetime
from engine.server import EngineServer
from ipc import messages as m
from ipc.client import Client, EngineError
from ipc.endpoints import check_address, private_dir, telemetry_address
from tests.engine.harness import wait_until, write_model


class _Lifetime(Lifetime):
    """An end that leaves this process alone."""

    def exit(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    """A server with a real core, both in this process."""
    directory = private_dir(Path("/tmp") / f"decodeck-entrance-{os.getpid()}")
    ctl = check_address(f"ipc://{directory}/e.ctl")
    lifetime = _Lifetime()
    info = m.EngineInfo(version="1", pid=os.getpid(), host="h", started_unix_ms=1)
    server = EngineServer(ctl, telemetry_address(ctl), info, lifetime, session="s")
    lifetime.on_stop(server.inbox.wake)
    server.start()
    model = write_model(tmp_path / "m")
    config = EngineConfig(model=model, load_format="dummy", device="cpu", kv_pool_bytes=1 << 22)
    core, knobs, tokenizer = bring_up(config, server.sink, server.loading, server.gpu.follow)
    lifetime.on_stop(core.wake)
    server.attach(core, knobs, tokenizer)
    loop = threading.Thread(target=core.run, args=(lifetime.stop,))
    loop.start()
    yield server
    lifetime.end(0, "the test is over", grace_s=60.0)
    server.join(30.0)
    loop.join(30.0)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


class _Gate:
    """Lets calls of a function through once it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.reached.set()
        assert self.open.wait(60.0)
        return self._function(*args, **options)


def _end_of(client: Client) -> list[m.Reply]:
    """What is said about a request, up to its end or refusal."""
    heard: list[m.Reply] = []
    while not any(isinstance(reply, m.Done | m.Error) for reply in heard):
        heard += [reply for reply in client.poll(1.0) if not isinstance(reply, m.Tokens)]
    return heard


@pytest.mark.parametrize("where", ["encode", "submit"])
def test_a_cancel_finds_a_request_wherever_it_is(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While it is tokenized, and between its being known to the server and to the core."""
    assert server.core is not None
    owner: Any = server.tokenizer if where == "encode" else server.core
    gate = _Gate(getattr(owner, where))
    monkeypatch.setattr(owner, where, gate)
    with Client(server.ctl_url) as client:
        client.hello()
        client.send(client.build_submit("go", sampling=m.Sampling(max_tokens=5000, ignore_eos=True)))
        assert gate.reached.wait(60.0)
        if where == "submit":
            wait_until(lambda: bool(server.jobs), "it is registered")
        assert client.call(m.Cancel(id=client.next_id(), all=True), m.Cancelled).n == 1
        gate.open.set()
        last = _end_of(client)[-1]
        assert (last.code if isinstance(last, m.Error | m.Done) else last) == "cancelled"
        client.snapshot()
    wait_until(lambda: not server.jobs, "nothing is left")


def test_draining_waits_for_what_is_still_being_tokenized(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _Gate(server.tokenizer.encode)  # type: ignore[union-attr]
    monkeypatch.setattr(server.tokenizer, "encode", gate)
    with Client(server.ctl_url) as client:
        client.hello()
        client.send(client.build_submit("go", sampling=m.Sampling(max_tokens=3, ignore_eos=True)))
        assert gate.reached.wait(60.0)
        client.call(m.Shutdown(id=client.next_id(), mode="drain", timeout_ms=60_000), m.Ok)
        with pytest.raises(EngineError, match="stopping"):
            client.submit("too late")
        assert not server.lifetime.stop.wait(1.2), "it is not finished"
        gate.open.set()
        last = _end_of(client)[-1]
        assert isinstance(last, m.Done)
        assert last.finish == "length"
        assert server.lifetime.stop.wait(30.0)


def test_a_client_that_read_nothing_for_too_long_hears_of_each_end(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A36: no reader waits for ever, not even one that let more wait than is kept."""
    monkeypatch.setattr("engine.peers.MAX_QUEUED_TOKENS", 50)
    with Client(server.ctl_url) as client:
        client.hello()
        sampling = m.Sampling(max_tokens=8000, ignore_eos=True)
        for n in range(3):
            client.send(client.build_submit([n, 1, 2], sampling=sampling))
        wait_until(lambda: any(peer.muted for peer in server.peers.values()), "too much waits", 120.0)
        wait_until(lambda: not server.jobs, "they are cancelled")
        ends: list[m.Done] = []
        while len(ends) < 3:
            ends += [reply for reply in client.poll(1.0) if isinstance(reply, m.Done)]
        assert {(done.finish, done.message) for done in ends} == {("cancelled", "its client reads nothing")}
        assert client.submit("again", sampling=m.Sampling(max_tokens=3, ignore_eos=True)).result()[0]


def test_a_panic_of_the_tokenizer_fails_one_request_and_not_those_that_follow(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic in Rust arrives as an exception that is no `Exception`; the text thread outlives it."""

    class Panic(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> list[int]:
        raise Panic("index out of bounds")

    with Client(server.ctl_url) as client:
        client.hello()
        client.wait_ready()
        with monkeypatch.context() as patched:
            patched.setattr(server.tokenizer, "encode", panic)
            with pytest.raises(EngineError) as refused:
                client.submit("x")
        assert refused.value.code == "internal"
        assert client.submit("x", sampling=m.Sampling(max_tokens=2, ignore_eos=True)).result()[0]


# --- several prompts at once ------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if 'no' in m['content'] %}{{ raise_exception('not this one') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)
FEW = m.Sampling(max_tokens=2, ignore_eos=True)


class _Batches:
    """Notes how many texts are encoded together."""

    def __init__(self, server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
        assert server.tokenizer is not None
        self.sizes: list[int] = []
        self._function = server.tokenizer.encode_batch
        monkeypatch.setattr(server.tokenizer, "encode_batch", self)

    def __call__(self, texts: list[tuple[str, bool]]) -> list[list[int]]:
        self.sizes.append(len(texts))
        return self._function(texts)


def _answers(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, client: Client, submits: list[m.Submit]
) -> dict[int, list[m.Reply]]:
    """What each command is answered, all of them having waited behind one that was being tokenized."""
    with monkeypatch.context() as patched:
        gate = _Gate(server.tokenizer.encode)  # type: ignore[union-attr]
        patched.setattr(server.tokenizer, "encode", gate)
        first = client.build_submit("first", sampling=FEW)
        client.send(first)
        assert gate.reached.wait(60.0)
        for command in submits:
            client.send(command)
        wait_until(lambda: sum(len(p.entering) for p in server.peers.values()) > len(submits), "they wait")
        patched.undo()
        gate.open.set()
        heard: list[m.Reply] = []
        while sum(isinstance(reply, m.Done | m.Error) for reply in heard) <= len(submits):
            heard += client.poll(1.0)
    rids = {reply.rid: reply.id for reply in heard if isinstance(reply, m.Accepted)}
    sorted_out: dict[int, list[m.Reply]] = {command.id: [] for command in (first, *submits)}
    for reply in heard:
        command_id = rids[reply.rid] if isinstance(reply, m.Tokens | m.Done) else getattr(reply, "id", 0)
        sorted_out.get(command_id, []).append(reply)
    return sorted_out


def _mixed(client: Client) -> list[m.Submit]:
    chat = [m.ChatMessage(role="user", content="hello")]
    return [
        m.Submit(id=client.next_id(), prompt="the second", sampling=FEW),
        m.Submit(id=client.next_id(), messages=chat, sampling=FEW),
        m.Submit(id=client.next_id(), tokens=[1, 2, 3], sampling=FEW),
        m.Submit(id=client.next_id(), prompt="", sampling=FEW),
        m.Submit(id=client.next_id(), prompt="the last \u00e9\U0001f642", sampling=FEW),
    ]


def _switch(server: EngineServer, client: Client, *, batched: bool) -> None:
    assert server.knobs is not None
    client.wait_ready()
    client.configure({"batched_tokenize": batched})
    wait_until(lambda: server.knobs is not None and server.knobs["batched_tokenize"] is batched, "it is so")


@pytest.mark.parametrize("batched", [False, True])
def test_prompts_that_wait_are_encoded_together_if_asked_and_answered_alike(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    assert server.tokenizer is not None
    server.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    with Client(server.ctl_url) as client:
        client.hello()
        _switch(server, client, batched=batched)
        batches = _Batches(server, monkeypatch)
        submits = _mixed(client)
        answers = _answers(server, monkeypatch, client, submits)
        assert batches.sizes == ([1, 4] if batched else [1, 1, 1, 1, 1])
        sizes = {
            command.id: [a.prompt_tokens for a in answers[command.id] if isinstance(a, m.Accepted)]
            for command in submits
        }
        assert list(sizes.values()) == [
            [10],
            [len("user: hello\n")],
            [3],
            [],
            [len(b"the last ") + 6],
        ]
        refused = answers[submits[3].id]
        assert [type(reply) for reply in refused] == [m.Error], "an empty prompt, which no tokenizer refuses"
        rids = [a.rid for replies in answers.values() for a in replies if isinstance(a, m.Accepted)]
        assert rids == sorted(rids), "in the order they came"
        for command in submits:
            for done in [reply for reply in answers[command.id] if isinstance(reply, m.Done)]:
                assert done.finish == "length"
                assert (done.row.tokenize_us > 0) == (command.tokens is None)


def test_a_prompt_that_cannot_be_encoded_fails_alone_in_its_batch(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.tokenizer is not None
    server.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    with Client(server.ctl_url) as client:
        client.hello()
        _switch(server, client, batched=True)
        bad = [m.ChatMessage(role="user", content="no")]
        submits = [*_mixed(client), m.Submit(id=client.next_id(), messages=bad, sampling=FEW)]
        submits.insert(2, submits.pop())
        answers = _answers(server, monkeypatch, client, submits)
        [error] = answers[submits[2].id]
        assert isinstance(error, m.Error)
        assert (error.code, "not this one" in error.message) == ("invalid", True)
        ended = [command.id for command in submits if isinstance(answers[command.id][-1], m.Done)]
        assert ended == [submits[n].id for n in (0, 1, 3, 5)]


def test_a_panic_in_a_batch_fails_the_prompt_that_causes_it(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    assert server.tokenizer is not None
    encode = server.tokenizer.encode_batch

    def panic(texts: list[tuple[str, bool]]) -> list[list[int]]:
        if any(text == "bad" for text, _ in texts):
            raise Panic("index out of bounds")
        return encode(texts)

    monkeypatch.setattr(server.tokenizer, "encode_batch", panic)
    with Client(server.ctl_url) as client:
        client.hello()
        _switch(server, client, batched=True)
        submits = [client.build_submit(text, sampling=FEW) for text in ("good", "bad", "good too")]
        answers = _answers(server, monkeypatch, client, submits)
        kinds = [type(answers[command.id][-1]) for command in submits]
        assert kinds == [m.Done, m.Error, m.Done]


def test_a_batch_is_bounded_so_that_its_first_prompt_does_not_wait_for_ever(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "BATCH_CHARS", 40)
    with Client(server.ctl_url) as client:
        client.hello()
        _switch(server, client, batched=True)
        batches = _Batches(server, monkeypatch)
        submits = [client.build_submit("x" * 15, sampling=FEW) for _ in range(8)]
        answers = _answers(server, monkeypatch, client, submits)
        assert batches.sizes == [1, 3, 3, 2]
        assert all(isinstance(answers[command.id][-1], m.Done) for command in submits)


def test_one_of_a_batch_is_cancelled_before_it_is_queued(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.tokenizer is not None
    with Client(server.ctl_url) as client:
        client.hello()
        _switch(server, client, batched=True)
        first = _Gate(server.tokenizer.encode)
        monkeypatch.setattr(server.tokenizer, "encode", first)
        client.send(client.build_submit("first", sampling=FEW, tag="kept"))
        assert first.reached.wait(60.0)
        batch = _Gate(server.tokenizer.encode_batch)
        client.send(client.build_submit("second", sampling=FEW, tag="gone"))
        client.send(client.build_submit("third", sampling=FEW, tag="kept"))
        wait_until(lambda: sum(len(p.entering) for p in server.peers.values()) == 3, "they wait")
        monkeypatch.setattr(server.tokenizer, "encode_batch", batch)
        first.open.set()
        assert batch.reached.wait(60.0)
        assert client.call(m.Cancel(id=client.next_id(), tag="gone"), m.Cancelled).n == 1
        batch.open.set()
        ends: list[m.Reply] = []
        while len(ends) < 3:
            ends += [reply for reply in client.poll(1.0) if isinstance(reply, m.Done | m.Error)]
        assert sorted(end.row.tag if isinstance(end, m.Done) else end.code for end in ends) == [
            "cancelled", "kept", "kept"
        ]  # fmt: skip


# --- answers that are sent whole --------------------------------------------------------------------


def test_a_whole_answer_that_might_not_fit_into_a_message_is_refused_with_advice(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.door.MAX_WHOLE_CHARS", 500)
    with Client(server.ctl_url) as client:
        client.hello()
        client.wait_ready()
        assert server.tokenizer is not None
        most = 500 // server.tokenizer.max_token_chars
        fits, large = (m.Sampling(max_tokens=n, ignore_eos=True) for n in (most, most + 1))
        with pytest.raises(EngineError, match=f"{most + 1} tokens may not fit.*{most}.*streamed") as refused:
            client.submit("x", sampling=large, stream=False)
        assert refused.value.code == "invalid"
        assert len(client.submit("x", sampling=fits, stream=False).result()[0]) == most
        assert len(client.submit("x", sampling=large).result()[0]) == most + 1


@pytest.mark.parametrize("stream", [True, False])
def test_what_sending_takes_is_told_of_each_request_and_in_all(server: EngineServer, stream: bool) -> None:
    with Client(server.ctl_url) as client:
        client.hello()
        client.wait_ready()
        before = server.meters.send_ns
        sampling = m.Sampling(max_tokens=40, ignore_eos=True)
        done = client.submit("x", sampling=sampling, stream=stream).result()[2]
        assert done.row.send_us > 0
        wait_until(lambda: server.meters.send_ns - before >= done.row.send_us * 1000, "it is in the sum")

        def published() -> list[m.RequestRow]:
            return [row for row in client.snapshot().requests if row.rid == done.rid and row.end_ns]

        wait_until(lambda: bool(published()), "its row is published")
        assert published() == [done.row]
        assert done.row.detokenize_us > 0
        assert done.row.tokenize_us > 0


def test_refused_requests_are_told_to_every_client_with_their_reason(server: EngineServer) -> None:
    with Client(server.ctl_url, name="somebody") as client, Client(server.ctl_url, name="console") as other:
        other.subscribe(["req"])
        other.hello()
        wait_until(lambda: bool(other.telemetry(0.05)), "a heartbeat: it hears everything from now on")
        client.hello()
        with pytest.raises(EngineError, match="9000 tokens"):
            client.submit([5] * 9000, tag="long")
        with pytest.raises(EngineError, match="exactly one"):
            client.call(m.Submit(id=client.next_id(), tag="none"), m.Accepted)
        told: list[m.Refusal] = []
        total = 0

        def heard() -> bool:
            nonlocal total
            for _, _, message in other.telemetry(0.05):
                if isinstance(message, m.Refusals):
                    told.extend(message.rows)
                    total = message.total
            return total == 2

        wait_until(heard, "both are told of")
    assert [(row.client, row.tag, row.code) for row in told] == [
        ("somebody", "long", "too_long"),
        ("somebody", "none", "invalid"),
    ]
    assert "9000 tokens" in told[0].message
    assert [row.prompt_tok for row in told] == [9000, None]
