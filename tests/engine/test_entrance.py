"""Requests on their way in: what happens to them while the text thread still has them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.bringup import bring_up
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
