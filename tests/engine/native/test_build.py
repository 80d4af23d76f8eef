"""Compiling the kernels: once, for the user alone, and told where it cannot be done."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

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


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(NotBuilt, match="others may write"):
        build(tmp_path)


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NotBuilt, match=r"install g\+\+"):
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
