"""What the figures were measured on: card, driver, versions, commit. No names of machines, no paths."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from tests.gpu.check.context import Context
from tests.gpu.check.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pyzmq",
    "msgspec",
    "flash-attn",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cublas-cu13",
)
CARD = (
    "name", "driver_version", "clocks.current.sm", "clocks.current.memory", "clocks.max.sm",
    "clocks.max.memory",
    "power.limit", "power.draw", "temperature.gpu", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip


def identity(settings: Settings, device: torch.device) -> dict[str, Any]:
    """What results that are put together must share."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "tiny": settings.tiny, "config": settings.config}


def run(context: Context) -> dict[str, Any]:
    """Everything that a figure may depend on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
    }
    if context.timer.on_card:
        properties = torch.cuda.get_device_properties(context.device)
        found["card"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "l2_bytes": context.timer.cache_bytes,
            **_smi(f"GPU-{properties.uuid}"),
        }
        found["cublas_prefers"] = str(torch.backends.cuda.preferred_blas_library())
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source() -> dict[str, Any]:
    """Which source ran: the commit, and how many files differ from it."""
    return {
        "commit": _git("rev-parse", "HEAD").strip() or "unknown",
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").count("\n"),
    }


def _git(*arguments: str) -> str:
    """What git says of this checkout, "" where there is none."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _smi(uuid: str) -> dict[str, str]:
    """What the driver's own tool, which counts cards as it likes, says of this one; why it says nothing."""
    command = ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": f"cannot be asked: {type(error).__name__}"}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(CARD, values, strict=False))
