"""Who measured, on what: the console's side of a baseline's identity."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

from app.store.records import BaselineData, Environment
from app.version import ROOT, app_version

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "triton", "pyzmq", "msgspec",
    "PySide6-Essentials", "pyqtgraph", "sqlite-utils", "nvidia-ml-py",
)  # fmt: skip

# Variables that change how an engine computes. An allow-list: whatever else is set stays private.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND",
    "OMP_PLACES", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET", "MALLOC_ARENA_MAX",
)  # fmt: skip


@cache
def _commit() -> tuple[str, bool | None]:
    """The source's git commit and whether it was changed since; empty and None where there is no git."""
    if not (ROOT / ".git").exists():
        return "", None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return "", None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {platform.release()}"


@cache
def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """This console's environment. Takes up to some seconds the first time (git); never on the window's
    thread."""
    commit, dirty = _commit()
    return Environment(
        app_version=app_version(),
        git_commit=commit,
        git_dirty=dirty,
        python=platform.python_version(),
        os=_os_name(),
        kernel=platform.release(),
        cpu=_cpu_name(),
        cores=psutil.cpu_count(logical=True),
        memory_bytes=int(psutil.virtual_memory().total),
        packages=dict(_installed()),
        variables={name: variables[name] for name in VARIABLES if name in variables},
    )


def with_environment(data: BaselineData) -> BaselineData:
    """``data`` with this console's environment, unless it carries one."""
    if data.identity.environment.app_version:
        return data
    identity = msgspec.structs.replace(data.identity, environment=environment())
    return msgspec.structs.replace(data, identity=identity)
