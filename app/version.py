"""The version of the console, from the installed package or from the project file beside it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def app_version() -> str:
    """The version of this source: the project file's where there is one, else the installed package's."""
    project = ROOT / "pyproject.toml"
    try:
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        pass
    try:
        return version("decodeck")
    except PackageNotFoundError:
        return "unknown"
