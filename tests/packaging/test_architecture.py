"""Borders between the folders, and constructs that must not appear in the product."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("app", "engine", "ipc", "resources", "packaging")
QT = frozenset({"PySide6", "PyQt6", "PyQt5", "pyqtgraph", "qtpy", "shiboken6"})
SQLITE = frozenset({"sqlite3", "sqlite_utils"})
HEAVY = frozenset({"torch", "transformers", "tokenizers", "gguf", "safetensors"})


def _files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names of everything a file imports, inside functions too, with their lines."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("engine", {"app", "resources", "tests"} | QT | SQLITE),
        ("app", {"engine", "tests"} | HEAVY),
        ("ipc", {"app", "engine", "resources", "tests"} | QT | SQLITE | HEAVY),
        ("app/net", QT | SQLITE),
        ("app/lab", QT | SQLITE),
        ("app/store", QT),
    ],
)
def test_a_folder_imports_only_what_it_may(folder: str, forbidden: set[str]) -> None:
    files = _files(folder)
    assert files, f"{folder} holds no Python file: the check would say nothing"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for name, line in _imports(path)
        if name in forbidden
    ]
    assert not wrong, "\n".join(wrong)


def _modules_after(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_protocol_loads_neither_torch_nor_qt_nor_either_side() -> None:
    modules = [f"ipc.{path.stem}" for path in _files("ipc") if path.stem != "__init__"]
    loaded = _modules_after(*modules)
    assert "ipc" in loaded
    assert not loaded & (QT | HEAVY | SQLITE | {"app", "engine"})


def test_the_console_comes_up_without_the_engines_libraries() -> None:
    loaded = _modules_after("app.__main__", "app.net.io_thread", "app.lab.load_run", "app.store.store")
    assert not loaded & (QT | HEAVY | {"engine"})


FORBIDDEN_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
FORBIDDEN_CALLS = frozenset(
    {"eval", "exec", "torch.load", "os.system", "os.popen", "yaml.load", "numpy.load", "np.load"}
)


def _dangers(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FORBIDDEN_CALLS:
            yield f"{called}() in line {node.lineno}"
        for keyword in node.keywords:
            literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and literal is not False:
                yield f"{keyword.arg}={ast.unparse(keyword.value)} in line {node.lineno}"
    for name, line in _imports(path):
        if name in FORBIDDEN_MODULES:
            yield f"import {name} in line {line}"


def test_the_product_runs_nothing_that_came_as_data() -> None:
    files = [path for folder in PRODUCT for path in _files(folder)]
    assert len(files) > 20
    wrong = [f"{path.relative_to(ROOT)}: {danger}" for path in files for danger in _dangers(path)]
    assert not wrong, "\n".join(wrong)


def test_the_check_for_dangers_finds_them(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle, torch, subprocess\ntorch.load('x')\neval('1')\n"
        "subprocess.run('ls', shell=True)\nf(trust_remote_code=True)\nf(trust_remote_code=False)\n"
    )
    assert len(list(_dangers(bad))) == 5


def test_no_folder_of_ours_shadows_a_library() -> None:
    assert not (ROOT / "packaging" / "__init__.py").exists()
    code = "import packaging.version as v; print(v.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.startswith(str(ROOT / "packaging"))


def test_every_package_says_what_lives_in_it() -> None:
    inits = [
        path for folder in ("app", "engine", "ipc") for path in _files(folder) if path.name == "__init__.py"
    ]
    silent = [
        str(path.relative_to(ROOT))
        for path in inits
        if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not silent, f"without a docstring: {silent}"
