"""Compiles the C++ sources of this folder into a shared library, once for each machine, and keeps it.

The library lies in the user's cache folder under the hash of all that it depends on (sources, compiler, flags
and the CPU) and its own: one that is not what the compiler left is made again. Nobody else may be able to
write there, for what lies there is run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

log = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-pthread", "-fPIC", "-shared")
SUFFIX, UNFINISHED = ".so", ".unfinished"
COMPILE_TIMEOUT_S = 900.0  # on a busy machine some seconds of work take minutes


class NotBuilt(Exception):
    """The library cannot be had; the text says why and what would help."""


def _silent() -> None:
    """Nobody wants to hear that it takes a while."""


def build(cache: Path | None = None, announce: Callable[[], None] = _silent) -> Path:
    """The library's file, compiled now if there is none yet, or none that is whole.

    cache: where it is kept, by default decodeck's folder in the user's cache. Compiling takes some seconds;
    ``announce`` is called before that. Of several processes at once one compiles and the others wait for it.
    Raises NotBuilt.
    """
    compiler = _compiler()
    folder = _private(cache or user_cache_path("decodeck") / "native")
    key = _key(compiler)
    found = _whole(folder, key)
    if found is not None:
        return found
    announce()
    with _alone(folder) as lock:
        return _whole(folder, key) or _compile(compiler, folder, key, lock)


def _compiler() -> str:
    if platform.system() != "Linux":
        raise NotBuilt(f"kernels in C++ are only built on Linux, and this is {platform.system()}")
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    if wanted:
        raise NotBuilt(
            f"the environment variable CXX names {wanted!r}, which is no program that can be run: name a C++ "
            f"compiler without options, or unset it"
        )
    raise NotBuilt("there is no C++ compiler: install g++, or name one in the environment variable CXX")


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise NotBuilt(f"the folder {folder} for compiled kernels cannot be made: {error}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(
            f"others may write to {folder}, so what lies there is not run: make it yours alone "
            f"(chown and chmod 700) or delete it"
        )
    return folder


def _key(compiler: str) -> str:
    """What the library depends on, as a hash."""
    parts = [compiler, _run([compiler, "--version"]), *FLAGS, platform.machine(), _cpu_flags()]
    parts += [source.read_text("utf-8") for source in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu_flags() -> str:
    """The first CPU's instruction sets, as Linux tells them (proc(5), /proc/cpuinfo)."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise NotBuilt(f"which instructions this CPU has cannot be read: {error}") from error
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _whole(folder: Path, key: str) -> Path | None:
    """The library that was compiled for ``key``, if its content still has the hash that its name tells."""
    for found in sorted(folder.glob(f"{key}-*{SUFFIX}")):
        try:
            content = found.read_bytes()
        except OSError as error:
            raise NotBuilt(f"the compiled kernels in {found} cannot be read: {error}") from error
        if found.name == _name(key, content):
            return found
        log.warning("compiled kernels were damaged and are made again: %s", found)
        found.unlink(missing_ok=True)
    return None


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:32]}{SUFFIX}"


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """No other process compiles meanwhile. The system lets go of the lock, whose descriptor this is, once
    this process and the compiler, which gets it too, have ended.
    """
    import fcntl  # not everywhere, but where kernels are built

    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotBuilt(f"the folder {folder} for compiled kernels cannot be opened: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _compile(compiler: str, folder: Path, key: str, lock: int) -> Path:
    """Compile while no other process does."""
    log.info("compiling kernels for this CPU with %s; this happens once", compiler)
    started = time.perf_counter()
    for left in folder.glob(f"*{UNFINISHED}"):  # by processes that were killed while they compiled
        left.unlink(missing_ok=True)
    unfinished = folder / f"{key}{UNFINISHED}"
    try:
        _run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(unfinished)], keeps=(lock,))
        library = folder / _name(key, unfinished.read_bytes())
        unfinished.replace(library)
    except OSError as error:
        raise NotBuilt(f"the compiled kernels could not be written to {folder}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    log.info("compiled kernels in %.1f s: %s", time.perf_counter() - started, library)
    return library


def _run(command: list[str], keeps: tuple[int, ...] = ()) -> str:
    """What it says. It has the descriptors ``keeps``, and ends after them where this process is killed."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_TIMEOUT_S,
            pass_fds=keeps,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        told = [line for line in said if "error:" in line][:3] or said[-3:]  # what follows only shows where
        raise NotBuilt(f"{command[0]} failed ({done.returncode}): {' | '.join(told) or 'it said nothing'}")
    return done.stdout
