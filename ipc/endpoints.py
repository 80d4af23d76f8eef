"""Where an engine listens and how a console finds it.

By default two ``ipc://`` sockets in a directory only this user can enter, on Windows loopback TCP. Any
other address than loopback is refused unless it is encrypted and was allowed by name. Beside the sockets
lie a lock (one engine a name; the kernel frees it whatever kills the engine) and a connection file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ipc import messages as m

_LOCK_RETRY_S = 0.01
MAX_IPC_PATH_BYTES = 107  # sockaddr_un.sun_path without its NUL, as libzmq checks it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d{1,5}|\*)")


class EndpointError(ValueError):
    """An address or directory that will not be used, and what to do about it."""


class LockHeld(RuntimeError):
    """Another engine of that name is running."""


class Connection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a connection file says. ``start_ticks`` tells the process from a later one with its pid."""

    ctl: m.Text
    tel: m.Text
    session: m.Name
    pid: m.Pos
    start_ticks: m.UInt = 0
    model: m.Text = ""


@dataclass(frozen=True, slots=True)
class Address:
    """A checked address. ``encrypt`` is whether it may only be used with CURVE."""

    url: str
    encrypt: bool = False

    @property
    def path(self) -> Path | None:
        """The socket's file of an ``ipc://`` address."""
        return Path(self.url[6:]) if self.url.startswith("ipc://") else None


def runtime_dir() -> Path:
    """The private directory for sockets, made if absent: mode 0700 and owned by this user, or refused.

    ``$XDG_RUNTIME_DIR/decodeck`` where that exists and is short enough, else one in the temporary folder.
    """
    candidates: list[Path] = []
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base) and os.access(base, os.W_OK):
        candidates.append(Path(base) / "decodeck")
    private = f"decodeck-{_uid()}"
    candidates += [Path(tempfile.gettempdir()) / private, Path("/tmp") / private]
    for path in candidates:
        if len(os.fsencode(path)) + 1 + 40 <= MAX_IPC_PATH_BYTES:
            return private_dir(path)
    raise EndpointError(f"no short enough directory for sockets among {', '.join(map(str, candidates))}")


def private_dir(path: Path) -> Path:
    """``path`` as a directory that only this user can enter. Raises `EndpointError` if it is another's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise EndpointError(f"{path} is not a directory; remove it")
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise EndpointError(f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own")
    if os.name == "posix" and info.st_mode & 0o077:
        raise EndpointError(f"{path} is open to other users; run: chmod 700 '{path}'")
    return path


def default_address(name: str) -> Address:
    """Where an engine of that name listens for commands if nothing else was said."""
    if not _NAME.fullmatch(name):
        raise EndpointError(f"the engine name {name!r} may hold only letters, digits, dot, dash, underscore")
    if sys.platform == "win32":
        return Address("tcp://127.0.0.1:0")
    return check_address(f"ipc://{runtime_dir() / f'{name}.ctl'}")


def check_address(url: str, *, curve: bool = False, allow_remote: bool = False) -> Address:
    """An address to bind, checked. Raises `EndpointError` for one that others could reach unprotected."""
    if url.startswith("ipc://"):
        return _check_ipc(url)
    match = _TCP.fullmatch(url)
    if match is None:
        raise EndpointError(f"the address {url!r} is neither ipc://PATH nor tcp://HOST:PORT")
    host, port = match[1].strip("[]"), match[2]
    if host in ("*", "0.0.0.0", "::") or port == "*":
        raise EndpointError(f"{url} listens everywhere; name one address (port 0 takes any free port)")
    if int(port) > 65535:
        raise EndpointError(f"{url}: a port is at most 65535")
    if _is_loopback(host):
        return Address(url, encrypt=False)
    if not (curve and allow_remote):
        raise EndpointError(
            f"{url} can be reached from other machines: that needs encryption keys and --allow-remote; "
            "an SSH tunnel to the ipc sockets needs neither"
        )
    return Address(url, encrypt=True)


def _check_ipc(url: str) -> Address:
    path = Path(url[6:])
    if not path.is_absolute():
        raise EndpointError(f"{url}: the path of an ipc address must be absolute")
    # The telemetry socket's file ends in .tel where this one ends in .ctl, so it is no longer.
    size = len(os.fsencode(path))
    if size > MAX_IPC_PATH_BYTES:
        raise EndpointError(
            f"{url}: the path has {size} bytes, sockets allow {MAX_IPC_PATH_BYTES}; use a shorter one"
        )
    if not path.parent.is_dir():
        raise EndpointError(f"{url}: the directory {path.parent} does not exist")
    private_dir(path.parent)
    return Address(url)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def telemetry_address(ctl: Address) -> Address:
    """The address of ``tel`` that goes with one of ``ctl``: the file beside it, or a free port."""
    path = ctl.path
    if path is not None:
        stem = path.name[:-4] if path.name.endswith(".ctl") else path.name
        return _check_ipc(f"ipc://{path.parent / stem}.tel")
    return Address(ctl.url.rpartition(":")[0] + ":0", ctl.encrypt)


def _uid() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


# --- lock and connection file --------------------------------------------------------------------


class InstanceLock:
    """An advisory lock on the file ``path``, held until `release` or the end of the process."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        """Raises `LockHeld` if somebody else holds it, and still does after ``wait_s``."""
        import fcntl

        self._path = path
        deadline_s = time.monotonic() + wait_s
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._fd)
                if time.monotonic() < deadline_s:
                    time.sleep(_LOCK_RETRY_S)
                    continue
                raise LockHeld(f"another engine holds {path}; attach to it or choose another name") from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), path.stat()):
                    return
            os.close(self._fd)  # its holder removed the file between our two calls

    def release(self) -> None:
        """Remove the file and give the lock back."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def sweep(directory: Path) -> None:
    """Remove what engines that were killed left in ``directory``: sockets, connection files and locks."""
    for path in directory.glob("*.lock"):
        try:
            lock = InstanceLock(path)
        except (LockHeld, OSError):
            continue
        for suffix in (".json", ".ctl", ".tel"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        lock.release()


def write_connection(path: Path, connection: Connection) -> None:
    """Write a connection file readable by this user only, all or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(connection))
    partial.replace(path)


def read_connection(path: Path) -> Connection | None:
    """What ``path`` says if the engine that wrote it still runs, else None. A stale file is removed."""
    try:
        connection = msgspec.json.decode(path.read_bytes(), type=Connection)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        connection = None
    if connection is not None and _is_running(connection):
        return connection
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return None


def running_engines(directory: Path | None = None) -> list[Connection]:
    """Engines of this user that run now, by their connection files."""
    found = (read_connection(path) for path in sorted((directory or runtime_dir()).glob("*.json")))
    return [connection for connection in found if connection is not None]


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; 0 where that cannot be known, None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        has_proc = Path("/proc/self/stat").exists()
        return 0 if not has_proc and _pid_exists(pid) else None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_running(connection: Connection) -> bool:
    ticks = start_ticks(connection.pid)
    return ticks is not None and (0 in (ticks, connection.start_ticks) or ticks == connection.start_ticks)
