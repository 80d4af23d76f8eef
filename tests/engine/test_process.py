"""How the engine process starts, fails and ends. Each test has processes of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.__main__ import main, say_ready
from engine.lifetime import ExitCode
from ipc import messages as m
from ipc.client import Client, EngineGone, EngineSilent
from ipc.endpoints import read_connection
from tests.engine.harness import ROOT, SLOW_TO_LOAD, EngineUnderTest, wait_until, write_model


@contextlib.contextmanager
def running(model: Path, *arguments: str, managed: bool = True) -> Iterator[EngineUnderTest]:
    engine = EngineUnderTest(model, *arguments, managed=managed)
    try:
        yield engine
    finally:
        engine.end()


def _files(engine: EngineUnderTest) -> list[Path]:
    path = Path(engine.ctl.removeprefix("ipc://"))
    return [each for each in path.parent.iterdir() if each.stem == path.stem]


def test_a_killed_or_frozen_engine_is_noticed_by_its_clients(tmp_path: Path) -> None:
    """F09: SIGSTOP is silence after the limit, SIGKILL an error for every open stream; no call hangs."""
    with running(write_model(tmp_path / "m")) as engine:
        engine.wait_ready()
        with engine.client() as client, engine.client(silence_s=2.0) as impatient:
            sampling = m.Sampling(max_tokens=5000, ignore_eos=True)
            streams = [client.submit(f"{n}", sampling=sampling) for n in range(5)]
            waiting = impatient.submit("waiting", sampling=sampling)
            next(streams[0])
            engine.process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineSilent, match="nothing heard"):
                list(waiting)
            engine.process.send_signal(signal.SIGCONT)
            next(streams[1])
            engine.process.kill()
            for stream in streams:
                with pytest.raises(EngineGone, match="closed the connection"):
                    list(stream)
            with pytest.raises(EngineGone):
                client.snapshot()
        assert engine.process.wait(60) == -signal.SIGKILL
        left = _files(engine)
        assert left, "kill -9 leaves files"
        assert read_connection(next(path for path in left if path.suffix == ".json")) is None
    with running(write_model(tmp_path / "m")):
        assert not _files(engine), "the next engine sweeps them away"


def test_a_stop_in_the_middle_of_loading(tmp_path: Path) -> None:
    """B10: by the lifetime pipe, by SIGTERM and by a client; each ends it with its exit code."""
    model = write_model(tmp_path / "m", SLOW_TO_LOAD)
    with running(model) as by_pipe, running(model) as by_signal, running(model) as by_client:
        with by_client.client() as client:
            assert client.snapshot().state.phase in ("starting", "loading")
            client.request(m.Shutdown(id=client.next_id()))
        by_signal.process.send_signal(signal.SIGTERM)
        assert by_pipe.process.stdin is not None
        by_pipe.process.stdin.close()
        assert by_pipe.process.wait(60) == 3
        assert by_signal.process.wait(60) == 0
        assert by_client.process.wait(60) == 0
        assert not [file for engine in (by_pipe, by_signal, by_client) for file in _files(engine)]


_CONSOLE = """
import subprocess, sys, time
engine = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(engine.stdout.readline().decode(), end="", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("phase", ["loading", "stepping"])
def test_the_engine_ends_when_its_console_is_killed(tmp_path: Path, phase: str) -> None:
    """B10: kill -9 of the parent closes the lifetime pipe, whatever the engine is doing then."""
    slow = phase == "loading"
    model = write_model(tmp_path / "m", SLOW_TO_LOAD) if slow else write_model(tmp_path / "m")
    command = [sys.executable, "-m", "engine", "--managed", "--model", str(model), "--load-format", "dummy"]
    command += ["--threads", "1", "--kv-pool-gib", "0.02"]
    console = subprocess.Popen(
        [sys.executable, "-c", _CONSOLE, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert console.stdout is not None
        ready = json.loads(console.stdout.readline())
        engine = psutil.Process(ready["pid"])
        with Client(ready["ctl"], silence_s=60.0) as client:
            client.hello(60.0)
            if slow:
                wait_until(
                    lambda: client.snapshot().state.stage == "making random weights", "it is loading", 240
                )
            else:
                client.wait_ready(240.0)
                next(client.submit("x", sampling=m.Sampling(max_tokens=8000, ignore_eos=True)))
            console.kill()
            console.wait(60)
            psutil.wait_procs([engine], timeout=30)
            assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    finally:
        console.kill()
        console.wait(60)
        console.stdout.close() if console.stdout else None


def test_a_model_that_cannot_be_loaded_leaves_an_engine_that_says_why(tmp_path: Path) -> None:
    """Its reason is readable until it is told to stop, and then is in the exit code."""
    model = write_model(tmp_path / "m", {"architectures": ["GPT9ForCausalLM"], "model_type": "gpt9"})
    with running(model) as engine:
        with engine.client() as client:
            with pytest.raises(EngineGone, match=r"failed: .*gpt9|GPT9"):
                client.wait_ready(240.0)
            state = client.snapshot().state
            assert state.phase == "failed"
            assert "Traceback" not in state.reason
            client.request(m.Shutdown(id=client.next_id()))
        assert engine.process.wait(60) == 14
        assert "Traceback" in engine.errors(), "the process's own log has it"


def test_on_a_terminal_a_wrong_model_is_one_sentence_and_how_to_end_it(tmp_path: Path) -> None:
    """No traceback: what the person gave cannot be used, and the sentence says all."""
    model = write_model(tmp_path / "m", {"architectures": ["GPT9ForCausalLM"], "model_type": "gpt9"})
    with running(model, managed=False) as engine:
        with engine.client() as client, pytest.raises(EngineGone):
            client.wait_ready(240.0)
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(60) == 14
        told = engine.errors()
        assert "gpt9" in told.lower()
        assert "Ctrl+C stops it" in told
        assert "Traceback" not in told


def test_the_line_that_says_ready_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can get in between it and its end, as the log goes to the same pipe."""
    written: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Pipe())
    say_ready({"ready": 1, "ctl": "ipc://x"})
    assert written == ['{"ready": 1, "ctl": "ipc://x"}\n']


def test_drain_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with running(write_model(tmp_path / "m"), managed=False) as engine:
        engine.wait_ready()
        with engine.client() as client:
            stream = client.submit("finish me", sampling=m.Sampling(max_tokens=300, ignore_eos=True))
            client.request(m.Shutdown(id=client.next_id(), mode="drain", timeout_ms=100_000))
            client.send(client.build_submit("too late"))
            ids, _, done = stream.result()
            assert (len(ids), done.finish) == (300, "length")
            refused = [reply for reply in client.poll(1.0) if isinstance(reply, m.Error)]
            assert [error.code for error in refused] == ["not_ready"]
        assert engine.process.wait(60) == 0


def test_twenty_engines_start_at_once(tmp_path: Path) -> None:
    """F07: each binds by itself and then says where; none takes another's place."""
    model = write_model(tmp_path / "m")
    command = [sys.executable, "-m", "engine", "--managed", "--model", str(model), "--load-format", "dummy"]
    engines = [
        subprocess.Popen(
            [*command, *(["--ctl", "tcp://127.0.0.1:0"] if n % 2 else [])],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for n in range(20)
    ]
    try:
        ready = []
        for engine in engines:
            assert engine.stdout is not None
            ready.append(json.loads(engine.stdout.readline()))
            engine.kill()  # its place is known; loading twenty models is not the point
        assert len({each["ctl"] for each in ready}) == len({each["tel"] for each in ready}) == 20
        assert all(each["ctl"].startswith(("ipc:///", "tcp://127.0.0.1:")) for each in ready)
    finally:
        for engine in engines:
            engine.kill()
            engine.wait(60)
            for stream in (engine.stdin, engine.stdout):
                if stream is not None:
                    stream.close()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_taken_port_and_a_taken_name_are_said_clearly(tmp_path: Path) -> None:
    """F07: nothing is stolen from the one who has it."""
    model = write_model(tmp_path / "m", SLOW_TO_LOAD)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = _run("--model", str(model), "--ctl", f"tcp://127.0.0.1:{port}")
        assert result.returncode == 12
        assert f"tcp://127.0.0.1:{port}" in result.stderr
    name = f"test-{os.getpid()}"
    with running(model, "--name", name) as engine:
        result = _run("--model", str(model), "--name", name)
        assert result.returncode == 13
        assert "another engine holds" in result.stderr
        with engine.client() as client:
            assert client.snapshot().state.phase in ("starting", "loading", "failed")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "--model"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "/", "--draft-model", "/no/such/draft"], "--draft-model /no/such/draft"),
        (["--model", "/", "--ctl", "tcp://*:5000"], "tcp://*:5000"),
        (["--model", "/", "--ctl", "tcp://0.0.0.0:5000"], "0.0.0.0"),
        (["--model", "/", "--ctl", "tcp://192.0.2.1:5000"], "192.0.2.1"),
        (["--model", "/", "--ctl", "ipc://" + "/x" * 70], "bytes"),
        (["--model", "/", "--ctl", "http://127.0.0.1:1"], "http"),
        (["--model", "/", "--name", "../x"], "../x"),
        (["--model", "/", "--name", "a", "--ctl", "tcp://127.0.0.1:0"], "--name a"),
        (["--model", "/", "--knob", "block_size"], "block_size"),
        (["--model", "/", "--knob", "block_size=x"], "block_size=x"),
        (["--model", "/", "--knob", "block_size=0"], "block_size=0"),
        (["--model", "/", "--knob", "policy=lifo"], "lifo"),
        (["--model", "/", "--knob", "prefix_cache=maybe"], "maybe"),
        (["--model", "/", "--knob", "attention=fast"], "fast"),
        (["--model", "/", "--knob", "nonsense=1"], "nonsense"),
        (["--model", "/", "--kv-pool-gib", "-1"], "-1"),
        (["--model", "/", "--threads", "0"], "0"),
    ],
)
def test_a_bad_start_names_its_value_and_ends_at_once(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """F01: and addresses that others could reach are never bound."""
    assert main(arguments) == 2
    assert names in capsys.readouterr().err


def test_the_list_of_knobs_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-knobs", "--device", "cpu"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["max_num_batched_tokens"].endswith("int 1 to 1048576 tokens")
    assert "varlen (its kernels run on an NVIDIA GPU, not on cpu)" in lines["attention"]
    assert lines["prefix_cache"].endswith("default on           on, off")


def test_the_list_of_knobs_is_what_an_engine_offers_on_this_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Availability, reasons, choices and defaults, as the engine that runs tells its console."""
    assert main(["--list-knobs", "--json", "--device", "cpu"]) == 0
    listed = msgspec.json.decode(capsys.readouterr().out.encode(), type=list[m.KnobInfo])
    with running(write_model(tmp_path / "m"), "--device", "cpu") as engine:
        engine.wait_ready()
        with engine.client() as client:
            offered = client.config().knobs
    told = {knob.id: (knob.available, knob.reason, knob.choice_reasons, knob.default) for knob in listed}
    assert told == {
        knob.id: (knob.available, knob.reason, knob.choice_reasons, knob.default) for knob in offered
    }
    assert not told["cuda_graphs"][0]
    assert told["cuda_graphs"][1] == "CUDA graphs need an NVIDIA GPU, not cpu"


def test_knobs_of_a_device_that_is_not_there_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-knobs", "--device", "cuda:99"]) == ExitCode.DEVICE
    out, err = capsys.readouterr()
    assert out == ""
    assert "device cuda:99 cannot be used" in err


def test_knobs_are_listed_without_torch() -> None:
    """As declared, and it says so: what can run here only torch could tell."""
    code = (
        "import sys; sys.modules['torch'] = None; from engine.__main__ import main;"
        "sys.exit(main(['--list-knobs', '--json']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "as declared for a CPU" in result.stderr
    knobs = msgspec.json.decode(result.stdout.encode(), type=list[m.KnobInfo])
    assert {"prefix_cache", "block_size", "attention"} <= {knob.id for knob in knobs}
    assert all(knob.available or knob.reason for knob in knobs)
    fields = {"id", "group", "type", "choices", "minimum", "maximum", "unit", "default", "apply", "lossy"}
    assert all(fields | {"available", "reason"} <= row.keys() for row in json.loads(result.stdout))


def test_calling_an_absent_engine_neither_hangs_nor_lingers(tmp_path: Path) -> None:
    """F06: messages that could not be sent do not hold up the end of the program."""
    code = (
        "import sys; from ipc.client import *; c = Client(sys.argv[1]);"
        "[c.send(m.Ping(id=n)) for n in range(1, 100)]\n"
        "try: c.hello(0.2)\nexcept EngineSilent as e: print(e)\n"
        "c.close(); c.close()"
    )
    address = f"ipc://{tmp_path}/absent.ctl"
    result = subprocess.run(
        [sys.executable, "-c", code, address], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "no reply to Hello" in result.stdout
