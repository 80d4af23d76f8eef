"""Who may import whom: both processes speak through `ipc`, and neither knows the other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QT = {"PySide6", "pyqtgraph"}
STORE = {"sqlite3", "sqlite_utils"}
TORCH = {"torch", "transformers", "tokenizers", "safetensors", "gguf"}


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("ipc", {"engine", "app"} | QT | STORE | TORCH),
        ("engine", {"app"} | QT | STORE),
        ("app", {"engine"} | TORCH),
        ("app/net", QT | STORE),
        ("app/lab", QT),
        ("app/store", QT),
    ],
)
def test_no_module_imports_what_its_folder_may_not(package: str, forbidden: set[str]) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [f"{path.relative_to(ROOT)}: {name}" for path in files for name in _imports(path) & forbidden]
    assert not found


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names
