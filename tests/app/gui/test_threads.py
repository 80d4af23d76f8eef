"""Threads and the window: nothing foreign touches Qt, and closing never hangs."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from pathlib import Path

import pytest
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication, QLabel

from app.console import Console, Notice
from app.errors import ErrorHub
from app.jobs import Jobs
from app.main_window import MainWindow
from app.model.chat import ChatModel
from tests.app.gui.conftest import beat, discard
from tests.app.gui.feed import FeedLink

APP = Path(sys.modules["app"].__file__ or "").parent


def test_none_keeps_its_references(qapp: QApplication) -> None:
    """PySide6 6.12.0 on Python 3.11 loses a reference to None in each call that returns nothing."""
    label = QLabel()
    before = sys.getrefcount(None)
    for _ in range(200):
        label.setText("x")
    assert sys.getrefcount(None) - before > -50


def test_e14_errors_of_plain_threads_reach_the_window_in_order(window: MainWindow) -> None:
    """E14: signals from a foreign thread segfault; 100,000 records from plain threads must not."""
    faulthandler.enable()
    hub = window.console.errors
    taken: list[str] = []
    window.console.noticed.connect(lambda notice: taken.append(notice.text))
    threads = [
        threading.Thread(target=lambda n=n: [hub.put(f"{n}:{i}") for i in range(25_000)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        beat(window, 1)
    beat(window, 2)
    assert hub.total == 100_000
    for n in range(4):
        numbers = [int(text.split(":")[1]) for text in taken if text.startswith(f"{n}:")]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("value", [2**31, 2**40, 2**63 - 1])
def test_e09_signals_carry_large_numbers(window: MainWindow, value: int) -> None:
    """E09: Signal(int) overflows above 2 GiB; every signal that carries a number takes it whole."""
    got: list[object] = []
    for signal in (window.console.selected, window.kv_map.map.picked, window.view.link.moved):
        signal.connect(got.append)
        signal.emit(value)
    assert got.count(value) >= 3


def test_e09_no_signal_of_ours_is_declared_with_an_int() -> None:
    """E09: an index of a tab is the one exception, and it is small."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in APP.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "Signal(int" in line
    ]
    assert found == ["dock.py: chosen = Signal(int)"]


def test_e07_closing_while_workers_are_loud_ends(console: Console, link: FeedLink) -> None:
    """E07: a worker and the window waited for each other at exit."""
    window = MainWindow(console)
    window.show()
    stop = threading.Event()

    def shout() -> None:
        while not stop.is_set():
            console.errors.put("loud")
            time.sleep(0.001)

    workers = [threading.Thread(target=shout) for _ in range(4)]
    for worker in workers:
        worker.start()
    beat(window, 5)
    closer = threading.Timer(30, faulthandler.dump_traceback, kwargs={"all_threads": True})
    closer.start()
    discard(window)
    closer.cancel()
    stop.set()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()
    assert link.calls[-1] == "close"


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_e06_closing_while_jobs_run_waits_for_the_one_and_drops_the_rest(
    console: Console, wait_s: float
) -> None:
    """E06: 'destroyed while running'. A job that runs ends; those behind it never begin; nobody is called."""
    window = MainWindow(console)
    window.show()
    ran: list[int] = []
    told: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.2)
        ran.append(number)
        return number

    for number in range(5):
        console.jobs.submit("job", lambda n=number: work(n), told.append, lambda error: None)
    time.sleep(wait_s)
    discard(window)
    assert len(ran) <= 2
    assert told == []
    assert not [t for t in threading.enumerate() if t.name.startswith("decodeck-jobs")]


def test_jobs_tell_results_and_errors_on_the_polling_thread() -> None:
    jobs = Jobs()
    told: list[object] = []
    here = threading.get_ident()

    def on_done(ident: int) -> None:
        told.append((ident != here, threading.get_ident() == here))

    jobs.submit("a", threading.get_ident, on_done, told.append)
    jobs.submit("b", lambda: 1 / 0, told.append, lambda error: told.append(type(error).__name__))
    while jobs.titles:
        jobs.poll()
        time.sleep(0.005)
    assert told == [(True, True), "ZeroDivisionError"]
    jobs.close()


def test_an_uncaught_exception_of_a_thread_becomes_a_notice(
    window: MainWindow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = ErrorHub(tmp_path / "errors.log")
    window.console.errors = hub
    seen: list[Notice] = []
    window.console.noticed.connect(seen.append)
    try:
        raise ValueError("der Fehler ü")
    except ValueError as error:
        hub.put_error(error)
    beat(window, 1)
    assert seen[0].level == "error"
    assert "der Fehler ü" in seen[0].text
    assert "Traceback" in seen[0].detail
    assert "der Fehler ü" in (tmp_path / "errors.log").read_text(encoding="utf-8")
    assert "Traceback" in capsys.readouterr().err


def test_the_middle_knows_no_qt() -> None:
    for part in ("units.py", "i18n.py", "jobs.py", "status.py", "knob_text.py", "model/chat.py"):
        assert "PySide6" not in (APP / part).read_text(encoding="utf-8"), part
    assert not issubclass(ChatModel, QObject)
