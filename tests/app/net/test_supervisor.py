"""The engine's process: environment, output, ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from app.net.supervisor import LOG_LINES, EngineProcess, LaunchError, child_environment
from app.net.types import LaunchSpec


def finished(process: EngineProcess) -> EngineProcess:
    end_s = time.monotonic() + 60
    while process.exit is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return process


def python(code: str) -> EngineProcess:
    return EngineProcess([sys.executable, "-c", code], lambda: None)


def test_the_shells_secrets_are_not_handed_on() -> None:
    given = {
        "PATH": "/bin", "HF_TOKEN": "a", "OPENAI_API_KEY": "b", "AWS_SECRET_ACCESS_KEY": "c", "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "TORCH_AUTH_TOKEN": "d", "RANDOM": "e",
        "LD_LIBRARY_PATH": "/lib",
    }  # fmt: skip
    made = child_environment(given)
    kept = set(made) & set(given)
    assert kept == {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"}
    assert made["HF_HUB_OFFLINE"] == "1"
    assert not {"a", "b", "c", "d", "e"} & set(made.values())


def test_a_working_directory_cannot_stand_in_for_the_engine(tmp_path: Path) -> None:
    spec = LaunchSpec(model="/m; touch x", knobs={"prefix_cache": False, "share": 0.5, "none": None})
    argv = spec.argv("python3")
    assert argv[:4] == ["python3", "-P", "-m", "engine"]
    assert "/m; touch x" in argv  # one argument: no shell ever reads it
    assert "--draft-model" not in argv
    with_draft = LaunchSpec(model="/m", draft_model="/small; rm x").argv("python3")
    assert with_draft[with_draft.index("--draft-model") + 1] == "/small; rm x"
    assert [a for a in argv if "=" in a] == ["none=none", "prefix_cache=false", "share=0.5"]


def test_only_the_last_lines_are_kept_clean_of_escapes() -> None:
    code = "import sys\nfor i in range(1000): print(f'\\x1b[31mline {i}\\x1b[0m')\nprint('x' * 200_000)"
    process = finished(python(code))
    tail = process.log_tail()
    assert len(tail) == LOG_LINES
    assert not any("\x1b" in line for line in tail)
    assert any("line 999" in line for line in tail)
    assert max(map(len, tail)) <= 4096


def test_the_ready_line_is_read_and_other_braces_are_output() -> None:
    code = (
        'print(\'{not json}\'); print(\'{"ready": 1, "ctl": "ipc:///a", "tel": "ipc:///b", '
        '"session": "s", "pid": 7, "more": 1}\'); print(\'{"later": 1}\')'
    )
    process = finished(python(code))
    assert process.ready is not None
    assert (process.ready.ctl, process.ready.session) == ("ipc:///a", "s")
    assert process.log_tail() == ("{not json}", '{"later": 1}')


@pytest.mark.parametrize(
    ("code", "exit_code", "number", "said"),
    [
        ("raise SystemExit(0)", 0, None, "ended by itself"),
        ("raise SystemExit(2)", 2, None, "configuration was refused"),
        ("raise SystemExit(77)", 77, None, "exit code 77"),
        ("import os; os.kill(os.getpid(), 11)", None, signal.SIGSEGV, "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL, "SIGKILL"),
    ],
)
def test_every_end_has_its_words(code: str, exit_code: int | None, number: int | None, said: str) -> None:
    cause = finished(python(code)).exit
    assert cause is not None
    assert (cause.code, cause.signal, cause.asked_for) == (exit_code, number, False)
    assert said in cause.words


def test_the_end_of_its_lifetime_pipe_ends_it() -> None:
    process = python("import sys; sys.stdin.read(); print('bye')")
    process.ask_to_end()
    cause = finished(process).exit
    assert cause is not None
    assert cause.asked_for
    assert process.log_tail() == ("bye",)


def test_whatever_it_started_ends_with_it() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    process = python(code)
    end_s = time.monotonic() + 60
    while not process.log_tail():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    grandchild = int(process.log_tail()[0])
    os.kill(process.pid, signal.SIGKILL)
    finished(process)
    while Path(f"/proc/{grandchild}").exists():
        state = Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_program_that_is_not_there_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="could not be started"):
        EngineProcess([str(tmp_path / "none")], lambda: None)
