"""The smoke run's promise: what does not work is named, and the exit status is not 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_that_cannot_be_read_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "app",
        "--smoke",
        "--out",
        str(out),
        "--model",
        str(broken),
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "the smoke run failed at: engine" in done.stderr
    assert len(done.stdout.splitlines()) == 10
    report = json.loads((out / "smoke.json").read_text("utf-8"))
    assert (report["ok"], report["failed"]) == (False, "engine")
    assert "broken.gguf" in report["why"]
    engines = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(broken) in (process.info["cmdline"] or [])
    ]
    assert not engines
