"""Compiling the kernels: once, for the user alone, and told where it cannot be done."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from engine.native import build as build_module
from engine.native.build import NotBuilt, build


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source in the place of the kernels, which take a while to compile."""
    made = tmp_path / "small.cpp"
    made.write_text('#include "small.h"\nextern "C" int panel_width() { return WIDTH; }')
    header = tmp_path / "small.h"
    header.write_text("constexpr int WIDTH = 1;")
    monkeypatch.setattr(build_module, "SOURCES", (made,))
    monkeypatch.setattr(build_module, "HEADERS", (header,))
    return made


def test_it_is_compiled_once_and_nobody_else_may_write_there(tmp_path: Path, source: Path) -> None:
    first = build(tmp_path / "kernels")
    made = first.stat()
    assert build(tmp_path / "kernels") == first
    assert first.stat().st_mtime_ns == made.st_mtime_ns
    assert stat.S_IMODE((tmp_path / "kernels").stat().st_mode) == 0o700
    assert list((tmp_path / "kernels").iterdir()) == [first]


def test_one_that_is_damaged_or_cut_off_is_compiled_again(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a full disk, or a file system that lost what a machine wrote before its power failed."""
    made = build(tmp_path)
    whole = made.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        made.unlink()  # for it is loaded
        made.write_bytes(content)
        found = build(tmp_path)
        assert int(ctypes.CDLL(str(found)).panel_width()) == 1
        assert hashlib.sha256(found.read_bytes()).hexdigest()[:32] in found.name
        assert "damaged" in caplog.text
        caplog.clear()
        made = found


def test_the_library_of_another_cpu_is_not_used(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be shared by machines, and a machine may be moved."""
    here = build(tmp_path)
    monkeypatch.setattr(build_module, "_cpu_flags", lambda: "flags: sse2")
    there = build(tmp_path)
    assert there != here
    assert here.exists()


def killed_while_it_compiles(tmp_path: Path, source: Path, then: str = "") -> Path:
    """The cache folder of a process that its compiler kills; what that does ``then``."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n'
        f'for last in "$@"; do :; done\nprintf half > "$last"\nkill -9 $PPID\n{then}\n'
    )
    compiler.chmod(0o700)
    cache = tmp_path / "kernels"
    script = (  # by its path: importing the package takes torch, and seconds
        "import importlib.util as u; from pathlib import Path; "
        f"spec = u.spec_from_file_location('build', {build_module.__file__!r}); "
        "b = u.module_from_spec(spec); spec.loader.exec_module(b); "
        f"b.SOURCES, b.HEADERS = (Path({str(source)!r}),), (); b.build(Path({str(cache)!r}))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "CXX": str(compiler)}, stderr=subprocess.DEVNULL
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(cache.iterdir())) == 1
    return cache


def test_a_process_that_was_killed_while_it_compiled_leaves_nothing_that_is_used(
    tmp_path: Path, source: Path
) -> None:
    cache = killed_while_it_compiles(tmp_path, source)
    found = build(cache)
    assert int(ctypes.CDLL(str(found)).panel_width()) == 1
    assert list(cache.iterdir()) == [found]


def test_a_compiler_that_outlives_its_process_is_waited_for(tmp_path: Path, source: Path) -> None:
    """Or it would still write to the file that the next one compiles to."""
    ended = tmp_path / "ended"
    cache = killed_while_it_compiles(tmp_path, source, f"sleep 2; : > {ended}")
    assert not ended.exists()
    assert int(ctypes.CDLL(str(build(cache))).panel_width()) == 1
    assert ended.exists()


def test_of_several_at_once_one_compiles(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, announced, built = [], [], []
    real = build_module._compile

    def compile_slowly(*arguments: Any) -> Path:
        compiled.append(arguments)
        time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(build_module, "_compile", compile_slowly)
    engines = [
        threading.Thread(target=lambda: built.append(build(tmp_path, lambda: announced.append(1))))
        for _ in range(3)
    ]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert len(compiled) == 1
    assert len(built) == 3
    assert len(set(built)) == 1
    build(tmp_path, lambda: announced.append(1))
    assert len(announced) == 3  # the three that had to wait, and no later one


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(NotBuilt, match="others may write"):
        build(tmp_path)


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NotBuilt, match=r"install g\+\+"):
        build(tmp_path / "kernels")


def test_a_compiler_of_the_user_that_cannot_be_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wanted in ("nosuch", "g++ -O1"):
        monkeypatch.setenv("CXX", wanted)
        with pytest.raises(NotBuilt, match=re.escape(f"CXX names {wanted!r}")):
            build(tmp_path / "kernels")


def test_of_what_a_compiler_says_the_error_is_told(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n'
        'printf "small.cpp:1: fatal error: error writing to x: No space left on device\\n'
        '  307 | }\\n      | ^\\ncompilation terminated.\\n" >&2\nexit 1\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NotBuilt, match=r"failed \(1\): small.cpp:1: fatal error: .*No space left on device$"):
        build(tmp_path / "kernels")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f() { return nothing_of_that_name; }")
    monkeypatch.setattr(build_module, "SOURCES", (broken,))
    with pytest.raises(NotBuilt, match="nothing_of_that_name"):
        build(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_another_source_or_header_is_another_library(tmp_path: Path, source: Path) -> None:
    built = {build(tmp_path / "kernels")}
    source.with_suffix(".h").write_text("constexpr int WIDTH = 2;")
    built.add(build(tmp_path / "kernels"))
    source.write_text('extern "C" int panel_width() { return 1; }')
    built.add(build(tmp_path / "kernels"))
    assert len(built) == 3


def test_the_kernels_and_all_that_they_include_are_there() -> None:
    """In an installed copy too: they are no Python modules, which are installed without being asked for."""
    names = {path.name for path in (*build_module.SOURCES, *build_module.HEADERS)}
    assert {"linear.cpp", "threads.h"} <= names
    for source in build_module.SOURCES:
        included = re.findall(r'#include "(.*)"', source.read_text("utf-8"))
        assert set(included) <= names, source.name
    project = Path(__file__).parents[3] / "pyproject.toml"
    patterns = tomllib.loads(project.read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    assert {"native/*.cpp", "native/*.h"} <= set(patterns["engine"])
