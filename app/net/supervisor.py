"""`EngineProcess`: starts the engine as our child, reads what it prints, and says why it ended.

The child lives exactly as long as its stdin pipe: whatever kills the console, even ``kill -9``, closes the
pipe, and a managed engine ends at its end of file. It leads a process group of its own, so that stopping it
takes along whatever it started. Its environment is an allow-list: tokens and keys of the user's shell are
not handed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipc.codec import clip

LOG_LINES = 200
_LINE_BYTES = 1 << 16

_ENV_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "SHELL", "TERM",
    "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT", "APPDATA",
    "LOCALAPPDATA", "USERPROFILE", "NUMBER_OF_PROCESSORS", "COVERAGE_PROCESS_START", "MALLOC_ARENA_MAX",
})  # fmt: skip
_ENV_PREFIXES = (
    "LC_", "XDG_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "ATEN_", "DECODECK_",
)  # fmt: skip
_ENV_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "APIKEY", "API_KEY")

EXIT_WORDS = {
    1: "it stopped with an error",
    2: "its configuration was refused",
    3: "its console was gone",
    10: "the device ran out of memory",
    11: "the device failed",
    12: "it could not listen on its address",
    13: "another engine of that name is running",
    14: "its model could not be loaded",
    15: "its step loop failed",
}


class Ready(msgspec.Struct, frozen=True):
    """The line an engine prints once it listens. Unknown fields are left for later engines to add."""

    ready: int
    ctl: str
    tel: str
    session: str
    pid: int


@dataclass(frozen=True, slots=True)
class ExitCause:
    """How a process ended: a code, or a signal, and the same in words."""

    code: int | None
    signal: int | None
    words: str
    asked_for: bool  # we stopped it


class LaunchError(Exception):
    """The process could not be started at all."""


def child_environment(source: Mapping[str, str]) -> dict[str, str]:
    """The allowed part of ``source``, and what every engine gets: unbuffered, offline, our packages."""
    kept = {
        name: value
        for name, value in source.items()
        if (name in _ENV_NAMES or name.startswith(_ENV_PREFIXES))
        and not any(word in name for word in _ENV_SECRET)
    }
    root = str(Path(__file__).resolve().parents[2])
    kept |= {
        "PYTHONPATH": root,
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return kept


def _oom_kills() -> int | None:
    """How often the kernel killed something of our control group for memory; None where unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        text = (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.isdigit():
            return int(count)
    return None


class EngineProcess:
    """One engine process. ``notify`` is called, from threads of this object, on whatever is new."""

    def __init__(self, argv: Sequence[str], notify: Callable[[], None]) -> None:
        """Start it. Raises `LaunchError` with the reason if that fails."""
        self.argv = tuple(argv)
        self.ready: Ready | None = None
        self.exit: ExitCause | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._lock = threading.Lock()
        self._notify = notify
        self._asked = False
        self._oom_before = _oom_kills()
        try:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ),
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise LaunchError(f"The engine could not be started: {error}. Command: {argv[0]}") from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name="engine-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name="engine-wait", daemon=True).start()

    def log_tail(self) -> tuple[str, ...]:
        """The last lines it printed, at most `LOG_LINES`, without control characters."""
        with self._lock:
            return tuple(self._log)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while chunk := stream.readline(_LINE_BYTES):
            if self.ready is None and chunk.lstrip().startswith(b"{"):
                try:
                    self.ready = msgspec.json.decode(chunk, type=Ready)
                    self._notify()
                    continue
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    pass  # an ordinary line that begins with a brace
            line = clip(chunk.decode("utf-8", "replace").rstrip())
            if line:
                with self._lock:
                    self._log.append(line)

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # Learn of the end without reaping: the dead leader still reserves its group's number, so
            # killing what is left of the group cannot hit a stranger.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        self._reader.join(timeout=0.2)  # its last words are in the pipe still
        self.exit = self._cause(code)
        self._notify()

    def _cause(self, code: int) -> ExitCause:
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            words = f"it was killed by {name}"
            if -code == signal.SIGKILL and not self._asked:
                after = _oom_kills()
                if self._oom_before is not None and after is not None and after > self._oom_before:
                    words += "; the kernel ended a process for lack of memory in that time, probably this one"
            return ExitCause(None, -code, words, self._asked)
        if code == 0:
            return ExitCause(0, None, "it ended by itself", self._asked)
        return ExitCause(code, None, f"{EXIT_WORDS.get(code, 'it failed')} (exit code {code})", self._asked)

    def _signal_group(self, number: int) -> None:
        if sys.platform == "win32":
            self._process.terminate()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """Close its lifetime pipe: a managed engine ends by itself now. Returns at once."""
        self._asked = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def terminate(self) -> None:
        """SIGTERM to its group; for one that ignores the closed pipe."""
        self._asked = True
        if self.exit is None:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its group; what nothing can ignore."""
        self._asked = True
        if self.exit is None:
            self._signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended and was reaped; False if it has not within ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
