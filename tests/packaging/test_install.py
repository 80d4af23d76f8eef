"""``pip install .``: what the wheel carries, and that it works away from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("app", "engine", "ipc", "resources")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that building leaves nothing in the source tree."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("decodeck-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with Decodeck alone in it. Its libraries are lent from this one by a .pth file."""
    folder = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, timeout=60)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def _run(installed: Path, cwd: Path, *command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_every_module_and_resource(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    for folder in FOLDERS:
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert files, f"{folder} is empty"
        assert files <= packed, f"missing in the wheel: {sorted(files - packed)}"
    top = {name.split("/")[0] for name in packed}
    assert top - set(FOLDERS) == {wheel.name.split("-py3")[0] + ".dist-info"}, (
        "the wheel installs something else"
    )
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_commands_run_away_from_the_source(installed: Path, tmp_path: Path) -> None:
    where = _run(
        installed, tmp_path, "python", "-c", "import app, engine; print(app.__file__, engine.__file__)"
    )
    assert all(path.startswith(str(installed)) for path in where.split())
    usage = _run(installed, tmp_path, "decodeck", "--help")
    assert "snapshot" in usage
    knobs = json.loads(_run(installed, tmp_path, "decodeck-engine", "--list-knobs", "--json"))
    wanted = {"id", "group", "type", "unit", "default", "apply", "lossy", "available", "reason"}
    assert knobs
    for knob in knobs:
        assert wanted <= set(knob), knob
        assert ("choices" in knob) or ("minimum" in knob), f"{knob['id']} names neither choices nor a range"


def test_the_help_of_the_console_needs_no_display(installed: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(installed / "bin" / "decodeck"), "--help"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
