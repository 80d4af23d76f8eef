"""The headless commands, as a shell runs them."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.__main__ import main
from app.store.store import Store, default_path
from tests.app.builders import baseline


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def run(data: Path, *arguments: str) -> Result:
    """Run the command in this process, its output kept apart."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([*arguments, "--data-dir", str(data)])
        except SystemExit as stop:
            status = int(stop.code or 0)
    out.seek(0)
    return Result(status, out.read(), err.getvalue())


@pytest.fixture(autouse=True)
def _own_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODECK_DATA", "")  # the commands set it; this restores it


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data ü")
    store = Store(default_path(folder))
    store.save_baseline(baseline("one"))
    store.save_baseline(baseline("two", config={"prefix_cache": False}))
    store.close()
    return folder


def ids(data: Path) -> dict[str, str]:
    return {item["name"]: item["id"] for item in json.loads(run(data, "snapshot", "list", "--json").stdout)}


def test_help_lists_the_headless_commands(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert "snapshot" in done.stdout
    actions = run(tmp_path, "snapshot", "--help").stdout
    for action in ("list", "show", "compare", "export", "import", "delete"):
        assert action in actions


def test_headless_commands_load_neither_qt_nor_torch(data: Path) -> None:
    code = (
        "import sys; from app.__main__ import main; main(['snapshot', 'list', '--data-dir', sys.argv[1]]);"
        "print([name for name in ('PySide6', 'pyqtgraph', 'torch', 'engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(data)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_work_beside_a_run_is_told_in_the_list_and_on_its_page(data: Path) -> None:
    """As where it was saved and where it is compared: nobody remembers it a week later."""
    stats = {"steps": 3, "other_cores_mean": 1.3, "other_cores_max": 1.9, "machine_cores": 2}
    store = Store(default_path(data))
    busy = store.save_baseline(baseline("busy", step_stats=stats))
    store.close()
    rows = {line.split()[0]: line for line in run(data, "snapshot", "list").stdout.splitlines()}
    assert " ~ " in rows[busy[:8]]
    assert " ~ " not in rows[ids(data)["one"][:8]]
    why = "other processes kept 1.3 of the machine's 2 cores busy meanwhile"
    summary = next(
        item for item in json.loads(run(data, "snapshot", "list", "--json").stdout) if item["id"] == busy
    )
    assert summary["caution"] == why
    assert summary["valid"]
    page = run(data, "snapshot", "show", busy).stdout
    assert f"**Take its figures with caution:** {why}." in page
    assert "caution" not in run(data, "snapshot", "show", ids(data)["one"]).stdout


def test_list_show_and_compare(data: Path) -> None:
    found = ids(data)
    listed = run(data, "snapshot", "list").stdout
    assert found["one"][:8] in listed
    assert listed.rstrip().endswith("!: doubtful")
    shown = run(data, "snapshot", "show", found["one"][:8]).stdout
    assert shown.startswith("# one")
    compared = run(data, "snapshot", "compare", found["one"], found["two"]).stdout
    assert "prefix_cache" in compared
    assert "ttft_p50_s (s)" in compared
    assert "Model, device and versions: the same" in compared
    as_json = json.loads(run(data, "snapshot", "compare", found["one"], found["two"], "--json").stdout)
    assert {diff["key"] for diff in as_json["config"]} >= {"prefix_cache", "max_num_seqs"}


def test_export_import_and_delete(data: Path, tmp_path: Path) -> None:
    found = ids(data)
    out = tmp_path / "one.json"
    assert (
        run(data, "snapshot", "export", found["one"], "--format", "json", "--out", str(out)).returncode == 0
    )
    other = tmp_path / "other"
    assert run(other, "snapshot", "import", str(out)).stdout.strip() == f"added {found['one']}"
    assert "already there" in run(other, "snapshot", "import", str(out)).stdout
    assert run(other, "snapshot", "delete", found["one"][:8]).stdout.strip() == "deleted one"
    assert "No baselines" in run(other, "snapshot", "list").stdout


def test_a_file_is_written_in_the_form_of_its_ending(data: Path, tmp_path: Path) -> None:
    found = ids(data)
    begins = {"a.csv": "", "a.md": "# one", "a.json": "{", "a.txt": "{"}
    for name, start in begins.items():
        out = tmp_path / name
        done = run(data, "snapshot", "export", found["one"], "--out", str(out))
        assert done.returncode == 0, done.stderr
        text = out.read_text(encoding="utf-8")
        assert text.startswith(start)
        assert text.startswith("{") == (start == "{")
    out = tmp_path / "b.csv"
    run(data, "snapshot", "export", found["one"], "--format", "md", "--out", str(out))
    assert out.read_text(encoding="utf-8").startswith("# one")


def test_what_cannot_be_done_is_said_on_stderr_with_status_1(tmp_path: Path) -> None:
    done = run(tmp_path, "snapshot", "show", "abcdef12")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no baseline abcdef12" in done.stderr
    assert "Traceback" not in done.stderr
    assert run(tmp_path, "snapshot", "import", str(tmp_path / "none.json")).returncode == 1
    assert run(tmp_path, "snapshot", "frobnicate").returncode == 2
