"""Addresses, the private directory, the lock and the connection file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc import endpoints
from ipc.endpoints import (
    Connection,
    EndpointError,
    InstanceLock,
    LockHeld,
    check_address,
    default_address,
    read_connection,
    running_engines,
    runtime_dir,
    start_ticks,
    sweep,
    telemetry_address,
    write_connection,
)


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's own, with a path short enough for sockets."""
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(endpoints.tempfile, "tempdir", None)
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://*:5000",
        "tcp://0.0.0.0:5000",
        "tcp://[::]:5000",
        "tcp://127.0.0.1:*",
        "tcp://10.0.0.1:5000",
        "tcp://example.com:5000",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1",
        "ipc://relative/path",
        "ipc://*",
        "inproc://x",
        "",
    ],
)
def test_addresses_that_others_could_reach_or_nobody_are_refused(url: str) -> None:
    """F01: nothing is bound to a wildcard, nor beyond this machine without encryption."""
    with pytest.raises(EndpointError):
        check_address(url)


def test_other_machines_need_encryption_and_permission() -> None:
    for curve, allowed in ((True, False), (False, True), (False, False)):
        with pytest.raises(EndpointError, match="SSH tunnel"):
            check_address("tcp://10.0.0.1:5000", curve=curve, allow_remote=allowed)
    assert check_address("tcp://10.0.0.1:5000", curve=True, allow_remote=True).encrypt
    with pytest.raises(EndpointError):
        check_address("tcp://*:5000", curve=True, allow_remote=True)
    for url in ("tcp://127.0.0.1:0", "tcp://[::1]:5000", "tcp://localhost:5000"):
        assert not check_address(url).encrypt


def test_the_runtime_directory_is_private_or_refused(private: Path) -> None:
    """F01: sockets lie where only their user can enter."""
    directory = runtime_dir()
    assert directory == private / "decodeck"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(EndpointError, match="chmod 700"):
        runtime_dir()
    directory.rmdir()
    directory.symlink_to(private)
    with pytest.raises(EndpointError, match="not a directory"):
        runtime_dir()


def test_a_path_too_long_for_sockets_is_avoided_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    address = default_address("engine-1")
    assert len(os.fsencode(str(address.path))) <= 107
    with pytest.raises(EndpointError, match=r"path has \d+ bytes"):
        check_address(f"ipc://{deep}/engine.ctl")


def test_directories_of_any_alphabet_serve(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E12: socket paths may hold spaces and any alphabet, measured in bytes."""
    folder = private / "обзор ü 空"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    address = default_address("engine-1")
    assert address.path is not None
    assert address.path.parent.parent == folder
    tel = telemetry_address(address)
    assert tel.path is not None
    assert tel.path.name == "engine-1.tel"
    assert telemetry_address(check_address("tcp://127.0.0.1:5000")).url == "tcp://127.0.0.1:0"


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65, ".hidden"])
def test_engine_names_cannot_leave_the_directory(name: str) -> None:
    with pytest.raises(EndpointError):
        default_address(name)


def test_a_lock_has_one_holder_and_is_freed_by_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "e.lock"
    code = (
        "import sys, time; from ipc.endpoints import *; InstanceLock(Path(sys.argv[1]));"
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(LockHeld):
            InstanceLock(path)
        sweep(tmp_path)
        assert path.exists(), "a living engine's files stay"
    finally:
        holder.kill()
        holder.wait(60)
        holder.stdout.close() if holder.stdout else None
    for suffix in (".ctl", ".tel", ".json"):
        path.with_suffix(suffix).touch()
    (tmp_path / "other.txt").touch()
    sweep(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["other.txt"]
    InstanceLock(path).release()
    assert not path.exists()


def test_a_start_outwaits_somebody_who_sweeps_up(tmp_path: Path) -> None:
    """F07: engines that start together do not take each other's brief look at a lock for its holder."""
    stop = threading.Event()

    def sweep_all_the_time() -> None:
        while not stop.is_set():
            sweep(tmp_path)

    sweeper = threading.Thread(target=sweep_all_the_time)
    sweeper.start()
    try:
        for n in range(1000):
            InstanceLock(tmp_path / f"e{n % 7}.lock", wait_s=60.0).release()
    finally:
        stop.set()
        sweeper.join()


def test_a_connection_file_counts_only_while_its_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks
    connection = Connection(ctl="ipc:///c", tel="ipc:///t", session="s", pid=child.pid, start_ticks=ticks)
    write_connection(path, connection)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_connection(path) == connection
    assert running_engines(tmp_path) == [connection]
    write_connection(
        tmp_path / "reused.json",
        Connection(ctl="c", tel="t", session="s", pid=child.pid, start_ticks=ticks + 1),
    )
    assert read_connection(tmp_path / "reused.json") is None, "another process has its pid now"
    child.communicate(b"\n")
    assert read_connection(path) is None
    assert not path.exists()
    path.write_text('{"pid": 1')
    assert read_connection(path) is None
