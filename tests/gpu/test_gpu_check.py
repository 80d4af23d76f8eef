"""The check of a card, run without one: every stage on small shapes, and how the run through them behaves."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.check import knobs, serving, stages, summary
from tests.gpu.check.context import Context
from tests.gpu.check.results import Results
from tests.gpu.check.settings import LLAMA_3_8B, Settings
from tests.gpu.check.stages import Stage
from tests.gpu.check.timing import Timer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "packaging" / "gpu_check.py"
CASES = (
    "bf16, batch 1", "bf16, batch 64, 1k", "fp8 weights, batch 1", "fp8 weights and KV, batch 128, 1k",
    "prefill bf16 2k / 8k", "decode attention, batch >= 32", "fused elementwise, >= 256 tokens",
    "engine loop beyond graph replay, batch 64",
)  # fmt: skip
SOURCE = {"commit": "abc", "changed_files": 0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_dry_run_runs_every_stage(tmp_path: Path) -> None:
    """In a process of its own, for kernels either run in the interpreter or are compiled."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text("utf-8"))
    assert tuple(found["stages"]) == stages.NAMES
    for name, stage in found["stages"].items():
        assert stage["status"] == "ok", (name, stage)
        assert {"seconds", "commit", "changed_files", "result"} <= set(stage), name
    results = {name: stage["result"] for name, stage in found["stages"].items()}
    assert results["environment"]["packages"]["torch"]
    ceilings = results["ceilings"]
    assert min(ceilings["copy_bytes_per_s"], ceilings["read_bytes_per_s"], ceilings["bf16_flops_per_s"]) > 0
    assert ceilings["missing"]["graph_node_s"] == "no CUDA"
    assert results["correctness"]["failed"] == {}
    assert len(results["correctness"]["off"]) > 25
    attention = results["correctness"]["attention"]
    assert attention["sdpa"]["ran"] == "sdpa"
    assert attention["varlen"] == {"why_not": "its kernels run on an NVIDIA GPU, not on cpu"}
    assert results["rooflines"]["not_run"] == {}
    cells = results["decode"]["cells"] | results["decode_fp8"]["cells"]
    assert len(cells) == len(Settings("cpu", True, 1.0, None, out).grid)
    assert all(min(cell["floor_ms"], cell["tpot_ms"]) > 0 for cell in cells.values())
    assert any("fp8" in cell["kernels"] for cell in cells.values())
    assert results["parity"]["relative_error"] < 1e-5
    assert results["parity"]["top1_agreement_where_clear"] == 1.0
    assert set(results["serving"]["loads"]) == {"16 bits", "all on", serving.MIXED}
    assert results["serving"]["failed"] == {}
    changes = results["knobs"]
    assert changes["failed"] == {}
    assert set(changes["changes"]) | set(changes["not_run"]) == {change.name for change in knobs.CHANGES}
    assert set(changes["not_run"]) == {"cuda_graphs off", "attention flash_attn", "attention varlen"}
    assert "need an NVIDIA GPU" in changes["not_run"]["cuda_graphs off"]
    assert all(0 < row["low"] <= row["times"] <= row["high"] for row in changes["changes"].values())
    for name in ("speculation ngram", "speculation self", "speculation draft"):
        assert changes["changes"][name]["drafted_tok"] > 0, name
    assert changes["changes"]["attention sdpa"]["attention"] == ["sdpa"]
    assert results["generate"]["runs"] or results["generate"]["absent"]
    assert results["generate_batch"]["runs"] or results["generate_batch"]["absent"]
    assert tuple(row["case"] for row in found["summary"]) == CASES
    assert {row["verdict"] for row in found["summary"]} == {"not measured"}
    assert all(case in done.stdout for case in CASES)
    assert all(change.name in done.stdout for change in knobs.CHANGES)
    text = out.read_text("utf-8")
    assert not re.search(r'"/|/home|/work|/tmp|/usr', text), "a path of this machine was written down"
    assert socket.gethostname() not in text


def run_stages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Callable[[Context], Any]],
    **changes: Any,
) -> tuple[int, dict[str, Any]]:
    """These stages through the real run; the exit code and the file."""
    made = tuple(Stage(name, run, 0.0) for name, run in given.items())
    monkeypatch.setattr(stages, "STAGES", made)
    values: dict[str, Any] = {"device": "cpu", "tiny": True, "deadline_s": 60.0, "only": None}
    settings = Settings(out=tmp_path / "gpu.json", **(values | changes))
    code = stages.run(settings)
    return code, json.loads(settings.out.read_text("utf-8"))


def _fails(context: Context) -> dict[str, Any]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"first": _fails, "second": lambda context: {"figure": 3}}
    code, found = run_stages(tmp_path, monkeypatch, given)
    assert code == 1
    assert found["stages"]["first"]["status"] == "failed"
    assert "Tried to allocate 7.00 GiB" in found["stages"]["first"]["error"]
    assert str(ROOT) not in found["stages"]["first"]["error"]
    assert found["stages"]["second"]["result"] == {"figure": 3}


def test_the_deadline_ends_what_runs_and_leaves_out_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forever(context: Context) -> dict[str, Any]:
        found = context.begin(figure=7)
        try:
            time.sleep(50)
        except Exception as error:  # as stages do with what a kernel fails with
            found["taken"] = str(error)
        return found

    began = time.monotonic()
    _, found = run_stages(tmp_path, monkeypatch, {"long": forever}, deadline_s=0.5)
    assert time.monotonic() - began < 20
    assert "still running at the deadline" in found["stages"]["long"]["error"]
    assert found["stages"]["long"]["result"] == {"figure": 7}  # what it had found is kept
    late = {"late": lambda context: {"figure": 1}}
    made = Stage("late", late["late"], 30.0)
    monkeypatch.setattr(stages, "STAGES", (made,))
    settings = Settings("cpu", False, 10.0, None, tmp_path / "late.json")
    assert stages.run(settings) == 1
    stage = json.loads(settings.out.read_text("utf-8"))["stages"]["late"]
    assert stage["status"] == "skipped"
    assert "it takes 30 s at least" in stage["error"]


class Became(SystemExit):
    """Instead of the process that would be in the place of this one."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, Any]]]:
    """With which arguments, and what the file held by then."""
    heard: list[tuple[list[str], dict[str, Any]]] = []

    def instead(arguments: list[str] | None) -> None:
        heard.append((arguments or [], json.loads((tmp_path / "gpu.json").read_text("utf-8"))))
        raise Became

    monkeypatch.setattr(stages, "become", instead)
    return heard


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("last", [False, True])
def test_a_stage_that_hangs_takes_neither_its_figures_nor_the_other_stages_along(
    last: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    became: list[tuple[list[str], dict[str, Any]]],
) -> None:
    """No alarm reaches a thread that waits for a kernel: the script starts anew for what is left."""

    def hung(context: Context) -> dict[str, Any]:
        found = context.begin(figure=7)
        end = time.monotonic() + 10
        while not became and time.monotonic() < end:
            try:
                time.sleep(0.05)
            except BaseException:
                found["reached"] = True
        return found

    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    monkeypatch.setattr(stages.faulthandler, "dump_traceback", lambda file: None)
    given = {"before": lambda context: {"figure": 1}, "hung": hung}
    if not last:
        given |= {"left": lambda context: {"figure": 2}}
    run_stages(tmp_path, monkeypatch, given, deadline_s=1.0)
    arguments, file = became[0]
    assert file["stages"]["before"]["result"] == {"figure": 1}
    assert file["stages"]["hung"]["status"] == "failed"
    assert "hung" in file["stages"]["hung"]["error"]
    assert file["stages"]["hung"]["result"]["figure"] == 7
    assert bool(file["summary"]) == last  # the table is that of the last process
    assert arguments[-3:] == ([] if last else ["--only", "left", "--lost"])


def test_a_stage_whose_time_is_over_before_it_begins_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the alarm rings: who watches for stages that hang would start the script anew beside this."""

    class Slow(threading.Timer):
        def start(self) -> None:
            super().start()
            time.sleep(0.01)

    hung: list[int] = []
    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    monkeypatch.setattr(threading, "Timer", Slow)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(stages.DeadlinePassed), stages._alarm(0.0, lambda: hung.append(1)):
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is before
    time.sleep(0.2)
    assert not hung


def test_a_card_that_is_lost_is_found_again_by_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, became: list[tuple[list[str], dict[str, Any]]]
) -> None:
    """After an illegal access nothing runs in this one, not even what frees memory."""

    def lost(self: Timer) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def breaks(context: Context) -> dict[str, Any]:
        monkeypatch.setattr(Timer, "free", lost)
        return {"figure": 3}

    with pytest.raises(Became):
        run_stages(tmp_path, monkeypatch, {"breaks": breaks, "left": _fails, "too": _fails})
    arguments, file = became[0]
    assert file["stages"]["breaks"]["result"] == {"figure": 3}
    assert arguments[-3:] == ["--only", "left,too", "--lost"]
    assert arguments[: arguments.index("--deadline")] == [
        "--out", str(tmp_path / "gpu.json"), "--device", "cpu", "--tiny"
    ]  # fmt: skip
    monkeypatch.undo()
    code, _ = run_stages(tmp_path, monkeypatch, {"left": lambda context: {}}, only=("left",), lost=True)
    assert code == 1  # that it went well from then on is not all


def test_a_script_that_was_started_anew_keeps_the_deadline_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, became: list[tuple[list[str], dict[str, Any]]]
) -> None:
    """Importing torch takes seconds each time, which count as the stages do."""

    def breaks(context: Context) -> dict[str, Any]:
        monkeypatch.setattr(Context, "free", lambda self: False)
        return {}

    began_s = time.perf_counter() - 50.0
    with pytest.raises(Became):
        run_stages(tmp_path, monkeypatch, {"breaks": breaks, "left": _fails}, began_s=began_s)
    arguments = became[0][0]
    at = arguments.index("--deadline")
    assert arguments[at : at + 4] == ["--deadline", "60", "--began", f"{began_s:.3f}"]
    monkeypatch.undo()
    settled: list[Settings] = []
    monkeypatch.setattr(stages, "run", lambda settings: settled.append(settings) or 0)
    monkeypatch.setattr(stages, "NAMES", ("breaks", "left"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert runpy.run_path(str(SCRIPT))["main"](arguments) == 0
    assert (settled[0].deadline_s, settled[0].lost) == (60.0, True)
    assert settled[0].began_s == pytest.approx(began_s, abs=0.001)
    monkeypatch.undo()
    left = {"left": lambda context: {}}
    _, found = run_stages(tmp_path, monkeypatch, left, only=("left",), began_s=began_s)
    assert found["seconds"] >= 50.0


def test_the_script_takes_its_own_place() -> None:
    again = "from tests.gpu.check.become import become; become({})"
    anew = ["--out", "x", "--device", "cpu", "--deadline", "5", "--only", "left", "--lost"]
    for arguments, code, said in ((anew, 2, "needs --tiny"), (None, 1, "")):
        done = subprocess.run(
            [sys.executable, "-c", again.format(arguments)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert (done.returncode, said in done.stderr) == (code, True)


def test_a_stage_has_a_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the first that takes too long does not leave the others without any."""

    def forever(context: Context) -> dict[str, Any]:
        time.sleep(50)
        return {}

    made = (Stage("long", forever, 0.0, 0.3), Stage("next", lambda context: {"figure": 1}, 0.0))
    monkeypatch.setattr(stages, "STAGES", made)
    settings = Settings("cpu", False, 60.0, None, tmp_path / "gpu.json")
    began = time.monotonic()
    assert stages.run(settings) == 1
    assert time.monotonic() - began < 20
    found = json.loads(settings.out.read_text("utf-8"))["stages"]
    assert [found[name]["status"] for name in ("long", "next")] == ["failed", "ok"]


def test_no_stage_on_a_card_may_take_most_of_the_time() -> None:
    most = [stage.most_s for stage in stages.STAGES if stage.name != "knobs"]  # which asks what is left
    assert all(stage.least_s <= stage.most_s for stage in stages.STAGES)
    assert max(most) <= 150.0


def test_a_rerun_keeps_what_it_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"a": lambda context: {"figure": 1}, "b": lambda context: {"figure": 2}}
    run_stages(tmp_path, monkeypatch, first)
    again = {"a": lambda context: {"figure": 10}, "b": _fails}
    code, found = run_stages(tmp_path, monkeypatch, again, only=("a",))
    assert code == 0
    assert [found["stages"][name]["result"]["figure"] for name in "ab"] == [10, 2]
    settings = Settings("cpu", False, 60.0, ("a",), tmp_path / "gpu.json")
    assert stages.run(settings) == 2  # of other shapes: nothing is put together that does not belong together


def test_arguments_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for arguments, why in (
        (["--device", "cpu"], "needs --tiny"),
        (["--only", "nonsense"], "no stage nonsense"),
    ):
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "x.json"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert why in done.stderr


def held(tmp_path: Path, found: dict[str, Any]) -> Results:
    """Results of a card, stage by stage."""
    identity = {"device": "a card", "tiny": False, "config": LLAMA_3_8B}
    results = Results(tmp_path / "gpu.json", identity, SOURCE, keep=False)
    for stage, result in found.items():
        results.put(stage, "ok", 1.0, result=result)
    return results


def test_figures_are_judged_by_the_worst_of_them(tmp_path: Path) -> None:
    kernels = {
        "attention decode bf16, batch 32, 1024": {"of_roofline": 0.83},
        "attention decode e4m3, batch 128, 4096": {"of_roofline": 0.79},
        "attention decode bf16, batch 8, 1024": {"of_roofline": 0.2},  # of a batch below 32
        "silu_mul, 256 tokens": {"of_roofline": 0.9},
        "qkv to e4m3, 2048 tokens": {"of_roofline": 0.86},
        "add_rmsnorm, 64 tokens": {"of_roofline": 0.1},
    }
    cells = {"bf16, batch 1, 1024": {"of_floor": 0.8}, "bf16, batch 64, 1024": {"of_floor": 0.7}}
    loads = {"16 bits": {"beyond_forward": 0.03}, "all on": {"beyond_forward": 0.06}}
    results = held(
        tmp_path,
        {"rooflines": {"kernels": kernels}, "decode": {"cells": cells}, "serving": {"loads": loads},
         "decode_fp8": {"cells": {}, "not_run": {"fp8 weights, batch 1, 1024": "no time"}}},
    )  # fmt: skip
    rows = {row["case"]: row for row in summary.rows(results)}
    assert tuple(rows) == CASES
    verdicts = {case: (row["verdict"], row["measured"]) for case, row in rows.items()}
    assert verdicts == {
        CASES[0]: ("met", 0.8), CASES[1]: ("missed", 0.7), CASES[2]: ("not measured", None),
        CASES[3]: ("not measured", None), CASES[4]: ("not measured", None), CASES[5]: ("missed", 0.79),
        CASES[6]: ("met", 0.86), CASES[7]: ("missed", 0.06),
    }  # fmt: skip
    assert "batch 128, 4096" in rows[CASES[5]]["why"]
    assert "no time" in rows[CASES[2]]["why"]
    assert rows[CASES[4]]["why"] == "prefill was not run"
    results.data["summary"] = list(rows.values())
    assert "missed" in summary.table(results)


def test_what_a_stage_had_found_when_it_failed_counts(tmp_path: Path) -> None:
    results = held(tmp_path, {})
    ceilings = {"read_bytes_per_s": 4e12, "bf16_flops_per_s": 7e14, "fp8_flops_per_s": None}
    results.put("ceilings", "failed", 1.0, error="no launch could be timed", result=ceilings)
    cells = {"bf16, batch 1, 1024": {"of_floor": 0.9}}
    results.put("decode", "failed", 1.0, error="Traceback\nat the deadline", result={"cells": cells})
    results.put("prefill", "failed", 1.0, error="no memory", result={})
    settings = Settings("cpu", False, 1.0, None, tmp_path / "x")
    context = Context(settings, results, torch.device("cpu"), Timer(torch.device("cpu"), quick=True))
    assert context.ceilings() == ceilings
    rows = {row["case"]: row for row in summary.rows(results)}
    assert (rows[CASES[0]]["verdict"], rows[CASES[0]]["measured"]) == ("met", 0.9)
    assert rows[CASES[0]]["why"] == "decode failed: at the deadline"
    assert rows[CASES[1]]["why"] == "decode failed: at the deadline"
    assert rows[CASES[4]]["why"] == "prefill failed: no memory"
    results.put("ceilings", "failed", 1.0, error="nothing", result={"read_bytes_per_s": 4e12})
    with pytest.raises(RuntimeError, match="ceilings failed: nothing"):
        context.ceilings()


def test_the_grid_is_that_of_the_goals() -> None:
    """The cells that goals are of exist, and each precision has every batch and context."""
    grid = Settings("cuda", False, 420.0, None, Path("x")).grid
    names = {cell.name for cell in grid}
    assert len(names) == len(grid) == 5 * 2 * 3
    assert {"bf16, batch 1, 1024", "bf16, batch 64, 1024", "fp8 weights, batch 1, 1024"} <= names
    assert "fp8 weights and KV, batch 128, 1024" in names
