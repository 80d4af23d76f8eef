"""The log as an operator reads it after an incident: what happened, when, in one order, whole."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
from PySide6.QtCore import QEvent, QPoint, QRect
from PySide6.QtGui import QHelpEvent
from PySide6.QtWidgets import QApplication, QStyleOptionViewItem, QToolTip

from app import application, i18n
from app.console import Console
from app.lab.load_run import LoadProgress
from app.lab.workload import WorkloadSpec
from app.main_window import MainWindow
from app.net.types import LinkState, LinkStatus
from ipc.messages import CANCELLED, CfgSet, Error, LogLine
from tests.app.gui.conftest import beat, discard
from tests.app.gui.feed import FeedLink

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  ")
DEAD = LinkStatus(
    state=LinkState.DEAD, reason="The engine's process has ended: it was killed by SIGKILL.", managed=True,
    can_restart=True, exit_signal=9, log_tail=("loading weights", "Traceback: a last word"),
)  # fmt: skip


def shown(window: MainWindow) -> list[str]:
    """The lines without stamp, level and source."""
    texts = [str(window.log.filter.index(i, 0).data()) for i in range(window.log.filter.rowCount())]
    assert all(STAMP.match(text) for text in texts)
    assert texts == sorted(texts, key=lambda text: text[:23])
    return [re.split(r"  +", text, maxsplit=3)[3] for text in texts]


def incident(window: MainWindow, link: FeedLink) -> None:
    """An engine starts, is changed, put under load, and killed."""
    link.status = LinkStatus(state=LinkState.STARTING, managed=True, command_line=("python", "-m", "engine"))
    beat(window, 1)
    link.status = LinkStatus(state=LinkState.LOADING, managed=True, pid=4711)
    beat(window, 1)
    link.ready()
    beat(window, 1)
    window.console.change({"prefix_cache": False})
    link.apply(*link.last(CfgSet))
    beat(window, 2)
    window.console.change({"max_num_seqs": 8})
    link.apply(*link.last(CfgSet), ok=False, why=CANCELLED, rev=2)
    beat(window, 2)
    window.console.change({"block_size": 32})
    number, _ = link.last(CfgSet)
    link.answer(number, Error(id=number, code="invalid", message="no", keys={"block_size": "too large"}))
    beat(window, 2)
    window.console.change({"batching": "static"})
    beat(window, 1)
    link.status = DEAD
    beat(window, 2)


ENGLISH = [
    "Starting the engine: python -m engine",
    "The engine loads its model: process 4711.",
    "The engine is ready: process 4711 at ipc:///nowhere.",
    "Asked for Prefix cache: on → off.",
    "Applied Prefix cache: on → off in 1.50 ms.",
    "Asked for Running requests: 64 → 8.",
    "Running requests: 8 was cancelled; the configuration is as it was before.",
    "Asked for Block size: 16 → 32.",
    "Block size was not changed: too large",
    "Asked for Batching: continuous → static.",
    "The engine has stopped: The engine's process has ended: it was killed by SIGKILL.",
    "The last it printed: loading weights Traceback: a last word",
    "Batching was not changed: The engine ended before it was applied.",
]
CHINESE = [
    "正在启动引擎：python -m engine",
    "引擎正在加载模型：进程 4711。",
    "已请求更改：前缀缓存：开 → 关。",
    "引擎已停止：引擎进程已结束：被 SIGKILL 终止。",
    "“批处理方式”未更改：引擎在应用之前已结束。",
]


def test_an_incident_can_be_read_from_start_to_end(window: MainWindow, link: FeedLink) -> None:
    """Also by somebody who opens the log only afterwards."""
    incident(window, link)
    window.show_panel("log")
    beat(window, 2)
    texts = [text.replace("\u00a0", " ") for text in shown(window)]
    assert texts == ENGLISH


def test_another_language_keeps_the_log_and_says_it_again(
    qapp: QApplication, console: Console, link: FeedLink
) -> None:
    made = application.Application(qapp, console, application.parser().parse_args([]))
    made.window.show()
    incident(made.window, link)
    first = made.window
    console.settings.language = "zh_CN"
    made._replace_window()
    assert made.window is not first
    made.window.show_panel("log")
    beat(made.window, 2)
    texts = shown(made.window)
    assert len(texts) == len(ENGLISH)
    assert not [text for text in CHINESE if text not in texts]
    made.window.keep_console = True
    discard(made.window)
    i18n.use("en")


def test_lines_stand_in_the_order_of_their_time_whenever_they_came(
    window: MainWindow, link: FeedLink
) -> None:
    window.show_panel("log")
    link.ready()
    beat(window, 2)
    now = round(time.time() * 1000)
    late = [
        LogLine(n=n, level="info", unix_ms=now + after, source="engine", message=f"at {after}")
        for n, after in enumerate((-60_000, 30_000, -90_000))
    ]
    link.push(logs=late[:2])
    beat(window, 2)
    link.push(logs=late[2:])
    beat(window, 2)
    texts = shown(window)
    assert texts[:2] == ["at -90000", "at -60000"]
    assert texts[-1] == "at 30000"


@pytest.mark.parametrize(("progress", "level", "text"), [
    (LoadProgress(phase="done", done=7), "info", "The load has ended: 7 requests done, 0 failed."),
    (LoadProgress(phase="done", done=7, failed=1), "warning",
     "The load has ended: 7 requests done, 1 failed."),
    (LoadProgress(phase="done", failed=2, common_error="too_long: 600"), "warning",
     "The load has ended: 0 requests done, 2 failed. Most frequent failure: too_long: 600"),
    (LoadProgress(phase="failed", valid=False, message="no engine"), "error", "The load failed: no engine"),
])  # fmt: skip
def test_a_load_is_logged_from_start_to_end(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch, progress: LoadProgress, level: str,
    text: str,
) -> None:  # fmt: skip
    """A load with requests that failed ends with a warning that says why, never with good news."""
    told_as: list[str] = []
    window.console.noticed.connect(lambda notice: told_as.append(notice.level))
    run = window.console.load_run
    running = [False]
    monkeypatch.setattr(run, "start", lambda *_: running.__setitem__(0, True))
    monkeypatch.setattr(run, "stop", lambda *_: running.__setitem__(0, False))
    monkeypatch.setattr(run, "poll", lambda: progress)
    monkeypatch.setattr(type(run), "running", property(lambda _: running[0]))
    link.ready()
    beat(window, 1)
    window.console.start_load(WorkloadSpec(name="chat", arrival="concurrency", concurrency=4, duration_s=60))
    beat(window, 1)
    window.console.stop_load()
    beat(window, 1)
    window.show_panel("log")
    told = [line.replace("\u00a0", " ") for line in shown(window)][-3:]
    assert told == [
        "Load started: Chat · Concurrency 4 · 1 min",
        "The load was told to send nothing more.",
        text,
    ]
    assert told_as == [level]


def test_attached_engines_come_go_and_hang_in_the_log(window: MainWindow, link: FeedLink) -> None:
    at = "tcp://127.0.0.1:7750"
    there = LinkStatus(state=LinkState.READY, session="s1", pid=9, endpoint=at)
    for status in (
        LinkStatus(state=LinkState.CONNECTING, endpoint=at), there,
        dataclasses.replace(there, state=LinkState.UNRESPONSIVE, reason="not for 1.2 s"),
        dataclasses.replace(there, state=LinkState.UNRESPONSIVE, reason="not for 1.3 s"),
        there, dataclasses.replace(there, session="s2", pid=10), LinkStatus(),
    ):  # fmt: skip
        link.status = status
        beat(window, 1)
    window.show_panel("log")
    assert shown(window) == [
        f"Connecting to the engine at {at}.",
        f"Attached to the engine at {at}, process 9.",
        "The engine does not respond: not for 1.2 s",
        "The engine answers and makes progress again.",
        f"Attached to the engine at {at}, process 10.",
        f"Detached from the engine at {at}.",
    ]


def test_a_long_line_is_read_whole(window: MainWindow, link: FeedLink) -> None:
    """It is wrapped to the width there is; its tooltip has its line breaks; it is copied whole."""
    window.show_panel("log")
    link.ready()
    words = "first line\n" + " ".join(f"word{i}" for i in range(80)) + " /a/path" * 20 + "\nthe reason"
    now = round(time.time() * 1000) + 5000
    link.push(logs=[LogLine(n=1, level="error", unix_ms=now, source="engine", message=words)])
    beat(window, 3)
    view, panel = window.log.view, window.log
    index = panel.filter.index(panel.filter.rowCount() - 1, 0)
    box = view.visualRect(index)
    assert box.width() <= view.viewport().width()
    assert box.height() > 3 * view.fontMetrics().height()
    assert box.bottom() <= view.viewport().height() + 4, "the newest is in view"
    before = box.height()
    window.resize(1120, 900)
    beat(window, 3)
    assert view.visualRect(index).height() > before
    event = QHelpEvent(QEvent.Type.ToolTip, box.center(), view.mapToGlobal(box.center()))
    view.itemDelegate().helpEvent(event, view, QStyleOptionViewItem(), index)
    assert QToolTip.text().count("<br>") == 2
    QToolTip.showText(QPoint(), "", view, QRect(), 1)
    panel.copy()
    assert QApplication.clipboard().text().endswith("the reason")
