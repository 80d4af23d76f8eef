"""The program in the READMEs that sends traffic of its own does so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.app.engines import ROOT, Console


def snippet(name: str) -> str:
    """The one Python program in a README."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)
    assert len(found) == 1, name
    return str(found[0])


def test_the_program_of_the_readmes_sends_traffic_that_the_window_shows(
    live: Console, tmp_path: Path
) -> None:
    assert snippet("README.md") == snippet("README.zh.md")
    program = tmp_path / "traffic.py"
    program.write_text(snippet("README.md"), encoding="utf-8")
    before = {view.key for view in live.session.request_rows()}
    done = subprocess.run(
        [sys.executable, str(program), live.session.link.endpoint],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
    live.until(
        lambda: any(v.key not in before and v.row.output_tok for v in live.session.request_rows()),
        "its request",
    )
