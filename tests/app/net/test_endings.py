"""How engines and consoles end, and what the other side makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.actions import ACTIONS
from app.lab.load_run import LoadRun
from app.lab.workload import WorkloadSpec
from app.net import judge
from app.net.types import LinkState, StreamLost
from ipc.messages import Error, Ping, Reply, Submit
from tests.app.engines import ROOT, Console, ended, spec


@pytest.fixture
def console() -> Iterator[Console]:
    made = Console()
    try:
        yield made
    finally:
        made.close()


def alive(pid: int) -> bool:
    """The process runs (one that is dead and not yet reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> None:
    end_s = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < end_s, f"process {pid} still runs"
        time.sleep(0.02)


def test_a_frozen_and_then_a_killed_engine_are_told_apart_and_restarted(
    console: Console, tiny_model: Path
) -> None:
    """F09: SIGSTOP is "unresponsive" and heals; kill -9 ends five streams and a load with the cause, keeps
    the data, and a restart goes back to the configuration before the change that came just before the end."""
    console.link.launch(spec(tiny_model, knobs={"max_num_seqs": 8}))
    console.until_state(LinkState.READY)
    assert console.session.cfg is not None
    pid = console.session.link.pid
    assert pid is not None

    os.kill(pid, signal.SIGSTOP)
    console.until_state(LinkState.UNRESPONSIVE)
    assert "nothing heard" in console.session.link.reason
    os.kill(pid, signal.SIGCONT)
    console.until_state(LinkState.READY)

    load = LoadRun()
    load.start(
        WorkloadSpec(arrival="concurrency", concurrency=2, output_tok=(4000, 4000), ignore_eos=True),
        console.session.link.endpoint,
    )
    console.until(lambda: load.poll().in_flight == 2, "the load's requests")
    streams = [console.submit(f"stream {i}", max_tokens=4000) for i in range(5)]
    console.until(lambda: all(len(items) > 1 for items in streams), "tokens of all streams")
    guest = Console()  # somebody else, attached to the same engine
    guest.link.attach(console.session.link.endpoint)
    guest.until_state(LinkState.READY)
    console.knobs.set({"max_num_seqs": 9})
    console.until(lambda: not console.knobs.pending, "the change")
    os.kill(pid, signal.SIGKILL)
    console.until(lambda: all(ended(items) for items in streams), "the end of all streams")
    for items in streams:
        last = items[-1]
        assert isinstance(last, StreamLost)
        assert "SIGKILL" in last.message
    console.until_state(LinkState.DEAD)
    link = console.session.link
    assert (link.exit_signal, link.exit_code, link.can_restart) == (signal.SIGKILL, None, True)
    assert "SIGKILL" in link.reason
    assert "goes back to the one before" in link.reason
    assert link.log_tail
    assert len(console.session.request_rows()) == 7
    console.until(lambda: load.poll().phase == "failed", "the load's end")
    assert [row.error_class for row in load.rows()] == ["engine", "engine"]
    assert not load.poll().valid
    load.close()
    replies: list[Reply] = []
    console.link.send(Ping(id=1), replies.append)
    console.until(lambda: replies, "an answer though there is no engine")
    assert isinstance(replies[0], Error)

    guest.until_state(LinkState.DEAD)
    assert "closed the connection" in guest.session.link.reason
    assert not guest.session.link.can_restart
    guest.close()

    first = console.session.link.session
    console.link.restart()
    console.until(lambda: console.session.link.session not in (None, first), "another engine process")
    assert "max_num_seqs=8" in console.session.link.command_line
    console.until_state(LinkState.READY)
    assert console.session.cfg.values["max_num_seqs"] == 8
    assert console.session.link.left_out == {"max_num_seqs": 9}
    assert {view.row.finish for view in console.session.request_rows()} == {"error"}

    second = console.session.link.pid
    assert second is not None
    console.link.stop_engine()
    console.until_state(LinkState.OFFLINE)
    assert not alive(second)


def test_closing_the_console_ends_an_engine_that_is_still_loading(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E12: the temporary folder's path holds spaces and letters of several scripts, too."""
    odd = tmp_path / "врем ü 空 x"
    odd.mkdir()
    monkeypatch.setenv("TMPDIR", str(odd))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    made = Console()
    made.link.launch(spec(tiny_model))
    made.until_state(LinkState.LOADING, LinkState.READY)
    pid = made.session.link.pid
    assert pid is not None
    made.close()
    assert not made.link._thread.is_alive()
    wait_gone(pid)


_SCRIPT = """
import sys, time
from tests.app.engines import Console, spec
from app.net.types import LinkState
from pathlib import Path
console = Console()
console.link.launch(spec(Path(sys.argv[1])))
console.until_state(LinkState.LOADING, LinkState.READY)
print(console.session.link.pid, flush=True)
time.sleep(300)
"""


def test_a_console_killed_with_kill_9_leaves_no_engine(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.wait()
    wait_gone(pid)


def test_an_engine_that_refuses_its_configuration_is_dead_with_its_own_words(
    console: Console, tiny_model: Path
) -> None:
    console.link.launch(spec(tiny_model, knobs={"no_such_knob": 1}))
    console.until_state(LinkState.DEAD, LinkState.FAILED)
    link = console.session.link
    assert "no_such_knob" in " ".join((link.reason, *link.log_tail))


def test_a_model_that_is_not_there_is_named(console: Console, tmp_path: Path) -> None:
    console.link.launch(spec(tmp_path / "nothing here"))
    console.until_state(LinkState.DEAD, LinkState.FAILED)
    link = console.session.link
    assert "nothing here" in " ".join((link.reason, *link.log_tail))


def test_an_absent_engine_hangs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F06: connect to an address where nobody is, send, close: every call is answered, the thread ends."""
    made = Console()
    made.link.attach(f"ipc://{tmp_path}/nobody.ctl")
    made.until_state(LinkState.CONNECTING)
    replies: list[Reply] = []
    made.link.send(Submit(id=1, prompt="x"), replies.append, replies.append)  # type: ignore[arg-type]
    made.until(lambda: replies, "a refusal")
    assert isinstance(replies[0], Error)
    assert replies[0].code == "not_ready"
    made.until(lambda: "No engine answers" in made.session.link.reason, "the explanation")
    monkeypatch.setattr(judge, "_ASK_AFTER_S", 0.0)
    menu = next(spec.text for spec in ACTIONS if spec.id == "stop_engine")  # it names what there is
    made.until(lambda: f"“{menu}” in the Engine menu" in made.session.link.reason, "what to look at")
    made.link.stop_engine()
    made.until_state(LinkState.OFFLINE)
    made.close()
    assert not made.link._thread.is_alive()


def test_an_address_that_is_none_is_told(console: Console) -> None:
    console.link.attach("carrier-pigeon://coop")
    console.until_state(LinkState.DEAD)
    assert "carrier-pigeon" in console.session.link.reason


def test_a_change_on_its_way_when_the_engine_is_stopped_is_refused(
    console: Console, tiny_model: Path
) -> None:
    console.link.launch(spec(tiny_model))
    console.until(lambda: console.session.cfg is not None, "its configuration")
    console.knobs.set({"prefix_cache": False})
    console.link.stop_engine()
    console.until_state(LinkState.OFFLINE)
    console.until(lambda: not console.knobs.pending, "the refusal")


def test_attaching_elsewhere_stops_the_managed_engine_first(
    console: Console, live: Console, tiny_model: Path
) -> None:
    console.link.launch(spec(tiny_model))
    console.until_state(LinkState.LOADING, LinkState.READY)
    pid = console.session.link.pid
    assert pid is not None
    live.pump()
    console.link.attach(live.session.link.endpoint)
    console.until(lambda: console.session.link.session == live.session.link.session, "the other engine")
    console.until_state(LinkState.READY)
    wait_gone(pid)
    assert not console.session.link.managed
    assert not console.session.link.can_restart


def test_closing_twice_and_sending_after_closing_do_no_harm(console: Console) -> None:
    console.link.close()
    console.link.close()
    console.link.send(Ping(id=1), lambda reply: None)
    console.pump()
    assert console.session.link.state is LinkState.OFFLINE
