"""The launcher's own behaviour: what it says, what it refuses, and when it has nothing to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import PySide6
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("packaging/launch.sh", "packaging/test.sh", "packaging/setup.sh", ".ci/run")


def _bash(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The launcher in a folder of its own, whose name has a space and letters beyond ASCII."""
    root = tmp_path / "ein Ordner 中文"
    shutil.copytree(ROOT / "packaging", root / "packaging", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_sound_bash(script: str) -> None:
    assert _bash("-n", script).returncode == 0
    text = (ROOT / script).read_text("utf-8")
    assert script == "packaging/setup.sh" or "set -euo pipefail" in text
    assert os.access(ROOT / script, os.X_OK) or script == "packaging/setup.sh"
    assert "\r" not in text


@pytest.mark.parametrize("script", ["launch.sh", "test.sh"])
def test_help_installs_nothing(tree: Path, script: str) -> None:
    done = _bash(f"packaging/{script}", "--help", cwd=tree)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: bash packaging/")
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_a_model_that_is_not_there_is_refused_before_anything_is_installed(tree: Path, option: str) -> None:
    assert option in _bash("packaging/launch.sh", "--help", cwd=tree).stdout
    done = _bash("packaging/launch.sh", option, "no/such.gguf", cwd=tree)
    assert done.returncode == 1
    assert f"{option} no/such.gguf: there is no such file or folder" in done.stderr
    assert not (tree / ".venv").exists()


def test_no_fitting_python_is_told_with_what_to_do(tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "readlink", "cat", "sha256sum", "flock", "id", "uname", "rm"):
        found = shutil.which(name)
        assert found, f"{name} is missing on this machine"
        (tools / name).symlink_to(found)
    old = tools / "python3"
    old.write_text('#!/usr/bin/env bash\n[[ "$1" == -V ]] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)
    done = _bash("packaging/launch.sh", "--setup", cwd=tree, PATH=str(tools))
    assert done.returncode == 1
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert "Python 3.9.2" in done.stderr


def test_no_display_is_told_before_anything_is_installed(tree: Path) -> None:
    done = _bash("packaging/launch.sh", cwd=tree, DISPLAY="", WAYLAND_DISPLAY="", QT_QPA_PLATFORM="")
    assert done.returncode == 1
    assert "no display" in done.stderr
    assert "--smoke" in done.stderr
    assert not (tree / ".venv").exists()


def test_without_root_or_sudo_the_exact_line_is_printed(tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("id", "echo 1000"), ("apt-get", "touch called; exit 1")):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or "")
    script = "source packaging/setup.sh; apt_install 'Qt lacks 2 system libraries' libxcb-cursor0 libegl1"
    done = _bash("-c", script, cwd=tree, PATH=str(tools))
    assert done.returncode == 1
    line = "sudo apt-get update && sudo apt-get install -y --no-install-recommends libxcb-cursor0 libegl1"
    assert line in done.stderr
    assert not (tree / "called").exists()


def _function(tree: Path, script: str) -> subprocess.CompletedProcess[str]:
    return _bash("-c", f"set -euo pipefail; source packaging/setup.sh; {script}", cwd=tree)


def test_a_start_installs_only_when_something_changed(tree: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tree / ".venv")], check=True)
    run = '"$ROOT/packaging/requirements.txt"'
    assert _function(tree, f"installed {run}").returncode == 1, "nothing was recorded yet"
    assert _function(tree, f'wanted {run} >"$VENV/.decodeck-1"').returncode == 0
    assert _function(tree, f"installed {run}").returncode == 0

    busy = tree / ".venv" / ".decodeck-busy"
    busy.touch()
    assert _function(tree, f"installed {run}").returncode == 1, "an install was cut off"
    busy.unlink()

    moved = tree.with_name("moved")
    tree.rename(moved)
    assert _function(moved, f"installed {run}").returncode == 1, "the folder moved"
    moved.rename(tree)
    with (tree / "packaging" / "requirements.txt").open("a") as file:
        file.write("six==1.17.0\n")
    assert _function(tree, f"installed {run}").returncode == 1, "a requirement was added"


def _owned(folder: Path, owner: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".decodeck-1").write_text(f"{owner}\n/usr/bin/python3\nhash\n")


@pytest.mark.parametrize("stamped", [True, False])
def test_an_environment_of_another_checkout_is_not_installed_into(
    tree: Path, tmp_path: Path, stamped: bool
) -> None:
    theirs = tmp_path / "other checkout"
    if stamped:
        _owned(theirs / ".venv", theirs)
    else:
        (theirs / ".venv").mkdir(parents=True)
    before = sorted(theirs.rglob("*"))
    (tree / ".venv").symlink_to(theirs / ".venv")
    done = _bash("packaging/launch.sh", "--setup", cwd=tree)
    assert done.returncode == 1
    assert f"is a link to {theirs / '.venv'}, which was not set up for this folder" in done.stderr
    assert (f"but for {theirs}" in done.stderr) == stamped
    assert f"rm '{tree / '.venv'}'" in done.stderr
    assert sorted(theirs.rglob("*")) == before
    assert (tree / ".venv").is_symlink()


def test_a_checkout_whose_environment_another_one_took_over_says_so(tree: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "other checkout"
    theirs.mkdir()
    _owned(tree / ".venv", theirs)
    (theirs / ".venv").symlink_to(tree / ".venv")
    done = _bash("packaging/launch.sh", "--setup", cwd=tree)
    assert done.returncode == 1
    assert f"was set up for {theirs}, whose .venv is the same folder" in done.stderr
    assert f"rm '{theirs / '.venv'}'" in done.stderr


@pytest.mark.parametrize("where", ["here", "on another disk", "copied", "new"])
def test_an_environment_of_this_checkout_alone_is_installed_into(
    tree: Path, tmp_path: Path, where: str
) -> None:
    if where == "copied":  # with its environment, from a checkout that is still there
        _owned(tmp_path / "origin" / ".venv", tmp_path / "origin")
        _owned(tree / ".venv", tmp_path / "origin")
    elif where == "on another disk":
        _owned(tmp_path / "disk", tree)
        (tree / ".venv").symlink_to(tmp_path / "disk")
    elif where == "here":
        _owned(tree / ".venv", tree)
    done = _function(tree, "refuse_shared; echo goes on")
    assert (done.stdout, done.stderr) == ("goes on\n", "")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump to read what Qt links to")
def test_every_system_library_of_qt_has_its_package() -> None:
    qt = Path(PySide6.__file__).parent
    files = [
        qt / "Qt/plugins/platforms/libqxcb.so",
        qt / "QtWidgets.abi3.so",
        *(qt / "Qt/lib").glob("libQt6[GWSXDC]*.so.6"),
    ]
    own = {path.name for path in qt.rglob("*.so*")} | {
        path.name for path in (qt.parent / "shiboken6").glob("*.so*")
    }
    always = re.compile(r"^(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux.*)\.so")
    needed: set[str] = set()
    for file in files:
        if not re.search(r"libqxcb|QtWidgets|libQt6(Gui|Widgets|Svg|XcbQpa|DBus|Core)\.so", file.name):
            continue
        listing = subprocess.run(
            ["objdump", "-p", str(file)], capture_output=True, text=True, check=True
        ).stdout
        needed |= set(re.findall(r"NEEDED\s+(\S+)", listing))
    foreign = {name for name in needed if name not in own and not always.match(name)}
    assert "libxcb-cursor.so.0" in foreign
    loop = 'source packaging/setup.sh; for f in "$@"; do qt_package "$f" >/dev/null || echo "$f"; done'
    done = _bash("-c", loop, "bash", *sorted(foreign))
    assert done.returncode == 0
    assert done.stdout.split() == [], "Qt needs these and setup.sh knows no package for them"
