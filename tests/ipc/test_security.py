"""Keys and who gets in with them, against a real server (which needs no model to answer)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.__main__ import main
from engine.lifetime import Lifetime
from engine.server import EngineServer
from ipc import messages as m
from ipc.client import Client, EngineSilent
from ipc.endpoints import EndpointError, check_address, telemetry_address
from ipc.security import KeyFileError, KeyPair, authorize, authorized, fingerprint, key_pair


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def console(folder: Path) -> KeyPair:
    return key_pair(folder / "console", "console")


@pytest.fixture
def server(folder: Path, console: KeyPair) -> Iterator[EngineServer]:
    """A server that lets one console in."""
    authorize(folder / "engine", "desk", console.public)
    keys = key_pair(folder / "engine", "engine")
    lifetime = Lifetime()
    ctl = check_address("tcp://127.0.0.1:0")
    running = EngineServer(
        ctl,
        telemetry_address(ctl),
        m.EngineInfo(version="1", pid=os.getpid(), host="h", started_unix_ms=1),
        lifetime,
        session="s",
        curve=(keys, authorized(folder / "engine")),
    )
    lifetime.on_stop(running.inbox.wake)
    running.start()
    yield running
    lifetime.stop.set()
    running.inbox.wake()
    running.join(30.0)


def _server_key(folder: Path) -> bytes:
    return key_pair(folder / "engine", "engine").public


def test_the_listed_key_gets_replies_and_telemetry(
    folder: Path, console: KeyPair, server: EngineServer
) -> None:
    with Client(server.ctl_url, curve=(console, _server_key(folder))) as client:
        assert client.hello(30.0).session == "s"
        beats = []
        while not beats:
            beats = [each for topic, _, each in client.telemetry(1.0) if topic == "hb"]
        assert client.snapshot().state.phase == "loading"


def test_everyone_else_hears_nothing_on_either_socket(
    folder: Path, console: KeyPair, server: EngineServer
) -> None:
    """F01: no key, a key that is not listed, a listed key towards an impostor: none gets an answer."""
    stranger = KeyPair(*zmq.curve_keypair())
    impostor, _ = zmq.curve_keypair()
    for curve in (None, (stranger, _server_key(folder)), (console, impostor)):
        with Client(server.ctl_url, curve=curve) as client:
            client.subscribe(m.TOPICS)
            client.tel.setsockopt(zmq.SUBSCRIBE, b"")
            client.tel.connect(server.tel_url)
            with pytest.raises(EngineSilent):
                client.hello(0.8)
            assert client.telemetry() == []
    with Client(server.ctl_url, curve=(console, _server_key(folder))) as client:
        client.hello(30.0)  # and the listed one still gets in


def test_an_empty_list_lets_nobody_in(folder: Path) -> None:
    assert authorized(folder / "none") == frozenset()


def test_keys_are_private_and_kept(folder: Path) -> None:
    old = os.umask(0)
    try:
        keys = key_pair(folder / "k", "engine")
    finally:
        os.umask(old)
    path = folder / "k" / "engine.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert key_pair(folder / "k", "engine") == keys
    assert keys.secret.decode() not in repr(keys)
    assert fingerprint(keys.public) in repr(keys)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(
    folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = key_pair(folder / "k", "engine")
    path = folder / "k" / "engine.key"
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        key_pair(folder / "k", "engine")
    assert main(["--model", str(folder), "--curve", str(folder / "k")]) == 2
    printed = capsys.readouterr()
    assert "chmod 600" in printed.err
    assert keys.secret.decode() not in printed.err + printed.out


def test_damaged_and_foreign_files_are_refused(folder: Path) -> None:
    keys = key_pair(folder / "k", "a")
    other = key_pair(folder / "k", "b")
    path = folder / "k" / "a.key"
    for content in (b"", keys.public, keys.public + b"\n" + other.secret, b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(KeyFileError):
            key_pair(folder / "k", "a")
    path.unlink()
    path.symlink_to(folder / "k" / "b.key")
    with pytest.raises(OSError):
        key_pair(folder / "k", "a")
    (folder / "k").chmod(0o755)
    with pytest.raises(EndpointError):
        key_pair(folder / "k", "b")
    with pytest.raises(KeyFileError):
        authorize(folder / "e", "x", b"short")


def test_encryption_alone_does_not_open_other_addresses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(folder), "--curve", str(folder / "k"), "--ctl", "tcp://192.0.2.1:5000"]) == 2
    assert "--allow-remote" in capsys.readouterr().err
