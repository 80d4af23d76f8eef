"""The real window on a real engine process with a tiny model: load, chat, a knob, a kill, a restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from PySide6.QtWidgets import QApplication

from app import application
from app.application import Application
from app.lab.workload import WorkloadSpec
from app.model.knobs import KnobStatus
from app.net.judge import GOOD_AFTER_S
from app.net.types import LinkState
from app.units import NONE
from tests.app.engines import write_tiny_model

LIMIT_S = 90.0


@pytest.fixture
def others() -> frozenset[psutil.Process]:
    """Processes that were there before the window: those of tests that ran earlier in this process."""
    return frozenset(psutil.Process().children(recursive=True))


@pytest.fixture
def decodeck(qapp: QApplication, tmp_path: Path, others: frozenset[psutil.Process]) -> Iterator[Application]:
    """E12: model and data folders have spaces and letters of every kind in their names."""
    model = write_tiny_model(tmp_path / "Модели ü 空 x" / "tiny")
    argv = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--kv-pool-gib", "0.02"]
    argv += ["--engine-arg=--load-format", "--engine-arg=dummy"]
    argv += ["--data-dir", str(tmp_path / "данные 空 #1"), "--size", "1440x900", "--lang", "en"]
    made = application.build(argv)
    yield made
    made.window.close()
    made.window.deleteLater()


def started(others: frozenset[psutil.Process]) -> list[psutil.Process]:
    """Processes that the window has started. Python's own, which outlives its pools, is none of them."""
    children = psutil.Process().children(recursive=True)
    return [
        child
        for child in children
        if child not in others and "multiprocessing.resource_tracker" not in " ".join(child.cmdline())
    ]


def wait(made: Application, so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not so():
        link = made.console.session.link
        story = f"{what} did not come; {link.state}: {link.reason} {link.log_tail[-5:]}"
        assert time.monotonic() < end, story
        assert link.state is not LinkState.FAILED, story
        QApplication.processEvents()
        time.sleep(0.01)


def test_a_session_from_start_to_end(
    decodeck: Application, others: frozenset[psutil.Process], tmp_path: Path
) -> None:
    window, console = decodeck.window, decodeck.console
    assert window.isVisible(), "the window is there before the model"
    assert not console.engine_ready
    wait(decodeck, lambda: console.engine_ready, "the engine")
    wait(decodeck, lambda: window.optimizations.rows, "the registry")

    console.start_load(
        WorkloadSpec(
            arrival="concurrency", concurrency=4, duration_s=60.0, input_tok=(16, 48), output_tok=(8, 24)
        )
    )
    wait(decodeck, lambda: console.load_progress.done >= 8, "eight answers")
    wait(decodeck, lambda: window.kpis.tiles["ttft"].quantity.value != NONE, "a TTFT")
    wait(decodeck, lambda: window.kv_map.map.num_blocks > 0, "the KV map")

    switch = window.optimizations.rows["prefix_cache"].editor
    assert switch.isChecked()  # type: ignore[union-attr]
    switch.click()  # type: ignore[union-attr]
    wait(decodeck, lambda: console.knobs.view("prefix_cache").applied is False, "the change")
    assert console.knobs.view("prefix_cache").status is KnobStatus.APPLIED
    done = console.load_progress.done
    wait(decodeck, lambda: console.load_progress.done > done + 2, "answers after the change")

    window.show_panel("playground")
    console.chat.max_tokens = 12
    console.chat.ask("Hello")
    wait(decodeck, lambda: not console.chat.busy, "the reply")
    assert console.chat.turns[-1].state == "done", console.chat.turns[-1].error
    assert console.chat.turns[-1].ttft_s is not None

    console.stop_load()
    wait(decodeck, lambda: not console.load_run.running, "the end of the load")
    saved: list[str] = []
    console.shelf.save(console.shelf.data("after", "", "load", None), saved.append)
    wait(decodeck, lambda: saved, "the baseline")

    # A restart trusts a configuration that has run for a while; this one must not count as what killed it.
    trusted_s = time.monotonic() + GOOD_AFTER_S + 1.0
    wait(decodeck, lambda: time.monotonic() > trusted_s, "trust in the configuration")
    pid = console.session.link.pid
    assert pid is not None
    rows = window.requests.model.rowCount()
    os.kill(pid, signal.SIGKILL)
    wait(decodeck, lambda: window.banner.title.text() == "The engine has stopped", "word of its death")
    assert "SIGKILL" in window.banner.text.full_text
    assert window.requests.model.rowCount() >= rows - 1
    window.banner.restart.click()
    wait(decodeck, lambda: console.engine_ready and console.session.link.pid != pid, "the restart")
    wait(decodeck, lambda: console.knobs.view("prefix_cache").applied is False, "the last configuration")
    window.grab_to(tmp_path / "end.png")

    processes = started(others)
    assert processes
    window.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_e06_closing_in_the_middle_of_starting_leaves_nothing(
    decodeck: Application, others: frozenset[psutil.Process]
) -> None:
    """E06: close 50 ms after the start, while engine, store and window are all on their way."""
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        QApplication.processEvents()
    decodeck.window.close()
    assert decodeck.console.link.drain().link.state in (LinkState.OFFLINE, LinkState.DEAD)
    _, alive = psutil.wait_procs(started(others), timeout=20)
    assert not alive


def test_e06_closing_while_a_load_runs_leaves_nothing(
    decodeck: Application, others: frozenset[psutil.Process]
) -> None:
    """E06: a load run is its own process; it ends with the window."""
    wait(decodeck, lambda: decodeck.console.engine_ready, "the engine")
    decodeck.console.start_load(WorkloadSpec(arrival="constant", rate_rps=20.0, duration_s=60.0))
    wait(decodeck, lambda: decodeck.console.load_progress.sent > 3, "some requests")
    children = started(others)
    assert len(children) >= 2
    decodeck.window.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
