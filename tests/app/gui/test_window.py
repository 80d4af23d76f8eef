"""The whole window over a written link: what it says in each state, and that it remembers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QByteArray, QRect, QSize, Qt
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QAbstractButton, QAbstractSpinBox, QApplication, QComboBox, QLineEdit, QWidget
from pytestqt.qtbot import QtBot

from app import application, i18n
from app.actions import ACTIONS, CONDITIONS, MENUS
from app.console import Console
from app.lab.load_run import LoadProgress
from app.main_window import PANELS, MainWindow
from app.net.types import BlockView, LinkState, LinkStatus
from app.panels.bandwidth import describe_gpu
from app.settings import LAYOUT_VERSION, MIN_SIZE
from app.units import NONE
from ipc.messages import CfgSet, GpuRow, Preempted
from tests.app import builders as b
from tests.app.gui.conftest import beat, discard, until
from tests.app.gui.feed import FeedLink, block_view


def tile(window: MainWindow, name: str) -> str:
    shown = window.kpis.tiles[name]
    return f"{shown.quantity.value}|{shown.note}"


# --- states --------------------------------------------------------------------------------------------


def test_without_an_engine_it_says_what_to_do(window: MainWindow) -> None:
    beat(window)
    assert window.banner.isVisible()
    assert window.banner.title.text() == "No engine"
    assert "Open a model" in window.banner.text.full_text
    assert not window.load_bar.button.isEnabled()
    assert not window.playground.send.isEnabled()
    for name in window.kpis.tiles:
        value, note = tile(window, name).split("|")
        assert value == NONE, name
        assert note, name
    for panel in (window.kv_map, window.requests, window.optimizations):
        assert panel.empty.isVisible()
        assert panel.empty.text.text()


def test_loading_shows_progress_and_the_window_is_already_there(window: MainWindow, link: FeedLink) -> None:
    link.status = LinkStatus(state=LinkState.LOADING, managed=True)
    link.push(state=b.state(phase="loading", stage="reading weights", done_bytes=2**33, total_bytes=2**34))
    beat(window)
    assert window.banner.title.text() == "Loading the model"
    assert "50\u00a0%" in window.banner.text.full_text
    assert "8.00\u00a0GiB of 16.0\u00a0GiB" in window.banner.text.full_text
    assert window.banner.progress.value() == 500
    assert not window.banner.restart.isVisible()


def test_with_traffic_every_figure_has_value_unit_and_basis(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    assert not window.banner.isVisible()
    assert tile(window, "ttft").startswith("50.0|n=")
    assert tile(window, "ttft").endswith("30\u00a0s")
    assert window.kpis.tiles["ttft"].quantity.unit == "ms"
    assert tile(window, "tpot").startswith("20.0|n=")
    assert tile(window, "hits").startswith("60|")
    assert tile(window, "kv").startswith("20|")
    until(window, lambda: window.ttft.header.legend.values["p50"] == "50.0\u00a0ms")
    assert window.ttft.header.note.full_text.startswith("n=")
    assert window.ttft.y_range[1] >= 0.05
    assert window.kv_map.map.num_blocks == 640
    assert window.requests.model.rowCount() == 153
    for shown in window.kpis.tiles.values():
        assert shown.toolTip()


def test_a_quiet_engine_says_no_traffic_and_never_zero_or_nan(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    assert tile(window, "ttft") == f"{NONE}|no traffic"
    assert window.ttft.header.note.full_text == "no traffic"
    assert window.ttft.header.legend.values == dict.fromkeys(("p50", "p95", "p99"), NONE)
    texts = [w.text() for w in window.findChildren(QWidget) if hasattr(w, "text") and callable(w.text)]
    assert not [text for text in texts if isinstance(text, str) and re.search(r"\bnan\b|None", text, re.I)]


@pytest.mark.parametrize(
    "state", [LinkState.DEAD, LinkState.UNRESPONSIVE, LinkState.STALLED, LinkState.FAILED]
)
def test_f09_a_lost_engine_is_told_with_its_cause_and_the_data_stay(
    window: MainWindow, link: FeedLink, state: LinkState, qtbot: QtBot
) -> None:
    """F09: the engine is killed or hangs: said at once, with a way back, and nothing is lost."""
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    rows = window.requests.model.rowCount()
    link.status = dataclasses.replace(
        link.status,
        state=state,
        reason="It was killed by SIGKILL.",
        can_restart=True,
        data_age_s=3.0,
        exit_signal=9,
    )
    beat(window)
    assert window.banner.isVisible()
    assert "It was killed by SIGKILL." in window.banner.text.full_text
    assert window.status_line.pill.level in ("alarm", "warning")
    assert window.requests.model.rowCount() == rows
    assert window.kpis.tiles["kv"].note == "stale"
    assert not window.optimizations.rows["prefix_cache"].editor.isEnabled()
    window.show_panel("log")
    window.set_theme("light")
    qtbot.mouseClick(window.banner.restart, Qt.MouseButton.LeftButton)
    assert link.calls[-1] == "restart"


def test_d04_without_nvml_the_panel_says_so_and_models(window: MainWindow, link: FeedLink) -> None:
    """D04: no NVML library: no traceback, the CPU's figures stand."""
    link.ready()
    beat(window, 1)
    link.traffic()
    none = GpuRow(t_ns=1, uuid="", name="", error="NVML Shared Library Not Found")
    assert describe_gpu(none) == none.error
    link.push(gpu=[none])
    beat(window)
    panel = window.bandwidth
    assert panel.source.text() == "No NVIDIA driver found: traffic is modelled."
    assert "NVML Shared Library" in panel.source.toolTip()
    assert panel._values["bandwidth"].text().endswith("%")
    assert panel._values["peak"].text() == "10.0\u00a0GB/s"
    assert panel.verdict.text()
    assert window.console.errors.total == 0


@pytest.mark.parametrize("size", [MIN_SIZE, QSize(1280, 800), QSize(1440, 900)])
def test_no_words_are_cut_below_the_bandwidth(window: MainWindow, link: FeedLink, size: QSize) -> None:
    """What has no room is in the verdict's tooltip instead."""
    link.ready()
    window.resize(size)
    beat(window, 1)
    link.traffic()
    beat(window)
    panel = window.bandwidth
    for words in (panel.verdict, panel.explanation, panel.source):
        if words.isVisible():
            assert words.height() >= words.heightForWidth(words.width()), words.text()
    assert panel.explanation.text() in panel.verdict.toolTip()
    assert panel.explanation.isVisible() or size == MIN_SIZE


def test_a_card_is_described_by_what_nvml_tells(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    row = GpuRow(
        t_ns=1, uuid="GPU-1", name="H200", utilization_percent=87.0, memory_used_bytes=2**36,
        memory_total_bytes=141 * 2**30, power_w=612.4, temperature_c=None, dram_read_write_percent=71.0,
    )  # fmt: skip
    link.push(gpu=[row])
    beat(window)
    text = window.bandwidth.source.text()
    for part in ("memory busy 71", "64.0\u00a0GiB / 141\u00a0GiB", "612 W"):
        assert part in text
    assert "°C" not in text


# --- panels --------------------------------------------------------------------------------------------


def preemption(now_s: float, reason: str) -> Preempted:
    return Preempted(t_ns=round(now_s * 1e9), rid=3, by=0, reason=reason, mode="recompute", lost_tok=5)


@pytest.mark.parametrize(
    ("reason", "note", "level"),
    [("blocks", "KV pool too small", "warning"), ("priority", "for priority", "warning"),
     ("rebuild", "KV pool rebuilt", "ok")],
)  # fmt: skip
def test_the_preempted_tile_tells_the_reason(
    window: MainWindow, link: FeedLink, reason: str, note: str, level: str
) -> None:
    link.ready()
    beat(window, 1)
    now = window.session.now_s
    steps = [b.step_row(i, now - 5 + i * 0.05, recompute_us=900) for i in range(90)]
    link.push(steps=steps, preemptions=[preemption(now - 1, reason)])
    beat(window)
    shown = window.kpis.tiles["preempted"]
    assert (shown.quantity.value, shown.note, shown.level) == ("1", note, level)
    assert "Recompute tax: 10" in shown.toolTip()


def test_answers_left_out_are_counted_in_the_tooltip(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    now = window.session.now_s
    rows = [b.request_row(i, now - 2, tokens=5, result_cached=i > 3, itl_us=[]) for i in range(1, 8)]
    link.push(requests=rows)
    beat(window)
    shown = window.kpis.tiles["ttft"]
    assert shown.note.startswith("n=3")
    assert "4 answers came from the result cache" in shown.toolTip()
    assert "4 answers" in shown.accessibleDescription()
    assert window.requests.model.index(0, 1).data() == "result cache"


def test_host_memory_is_a_map_of_its_own(window: MainWindow, link: FeedLink) -> None:
    """What contiguous allocation reserves counts as places; a swapped block leads to its request."""
    link.ready()
    link.push(state=b.state(kv_dtype="int8", kv_bytes=3 << 20, host_kv_bytes=1 << 20, swap_bytes=2 << 20))
    pool = block_view(64)
    pool.state[48:56] = 4
    state = np.concatenate((pool.state, np.array([5, 5, 6, 0], np.uint8)))
    fill = np.concatenate((pool.fill, np.array([16, 16, 9, 0], np.uint16)))
    owner = np.concatenate((pool.owner, np.array([0, 0, 77, 0], np.uint32)))
    link.push(blocks=BlockView(window.session.now_s, 16, state, fill, owner, num_host=4))
    beat(window)
    panel = window.kv_map
    assert panel.host.isVisible()
    assert (panel.map.num_blocks, panel.host_map.num_blocks) == (64, 4)
    assert [panel.host_legend.counts[kind].text() for kind in (5, 6, 0)] == ["2", "1", "1"]
    assert panel.legend.counts[4].text() == "8"
    assert panel.figures["places"].text() == "640\u00a0tokens"
    assert panel.figures["waste"].text() == "128 · 20\u00a0%"
    assert panel.owner.full_text == "keys and values in int8 · pool 3.00\u00a0MiB"
    assert panel.host_bytes.text() == "prefixes 1.00\u00a0MiB · swap space 2.00\u00a0MiB"
    assert "Host block 2: swapped out" in panel.host_map.describe(2)
    panel.host_map.picked.emit(2)
    assert window.console.selected_rid == 77
    assert panel.host_map._chosen is not None
    assert panel.host_map._chosen.tolist() == [False, False, True, False]
    assert panel.map._chosen is not None
    assert not panel.map._chosen.any()
    link.push(blocks=block_view(64))
    beat(window)
    assert not panel.host.isVisible()


def test_clicking_a_request_shows_its_blocks_and_a_block_its_request(
    window: MainWindow, link: FeedLink
) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    line = window.requests.model.line_of(1000)
    assert line is not None
    window.requests.table.selectRow(line)
    assert window.console.selected_rid == 1000
    assert window.kv_map.map._chosen is not None
    assert window.kv_map.map._chosen.sum() == 160
    assert "Request 1000 owns 160 blocks" in window.kv_map.owner.full_text
    assert "Block 3: used" in window.kv_map.describe(3)
    assert "owner: request 1000" in window.kv_map.describe(3)
    window.kv_map.map.picked.emit(639)
    assert window.console.selected_rid is None
    assert window.kv_map.map._chosen is None
    window.kv_map.map.picked.emit(3)
    assert window.console.selected_rid == 1000


def test_waste_is_token_places_without_tokens(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    view = block_view(64)
    view.fill[:16] = 8
    link.push(blocks=view)
    beat(window)
    shown = {key: value.text().replace("\u00a0", " ") for key, value in window.kv_map.figures.items()}
    assert shown == {"places": "512 tokens", "held": "384 tokens", "waste": "128 · 25 %"}
    assert window.kv_map.legend.counts[2].text() == "16"
    assert not window.kv_map.host.isVisible()


def test_hidden_panels_cost_nothing(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    window.docks["map"].close()
    beat(window, 1)
    link.traffic()
    beat(window)
    assert window.kv_map.map.num_blocks == 0
    window.show_panel("kv_map")
    beat(window)
    assert window.kv_map.map.num_blocks == 640


def test_paused_charts_stand_still_while_data_come_in(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    window.action("pause").trigger()
    at = window.view.now_s
    beat(window, 4)
    assert window.view.now_s == at
    assert window.session.now_s > at
    window.action("pause").trigger()
    beat(window, 2)
    assert window.view.now_s > at


def test_a_failing_panel_is_told_and_does_not_stop_the_others(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link.ready()
    beat(window)
    monkeypatch.setattr(window.kv_map.map, "set_blocks", lambda *_: 1 / 0)
    link.traffic()
    beat(window)
    assert window.requests.model.rowCount() == 153
    assert any("ZeroDivisionError" in toast.text for toast in window.toasts.toasts)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_charts_show_a_change_as_a_marked_line(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    window.knobs.set({"prefix_cache": False})
    link.apply(*link.last(CfgSet))
    for chart in (window.ttft, window.tpot, window.throughput, window.bandwidth.chart):
        until(window, lambda c=chart: sum(line.isVisible() for line in c._lines) == 1)
    assert [t.toPlainText() for t in window.ttft._texts if t.isVisible()] == ["Prefix cache: off"]


# --- keyboard, names, layout ---------------------------------------------------------------------------


def test_everything_can_be_reached_by_keyboard(window: MainWindow) -> None:
    keys = [
        action.shortcut().toString()
        for action in (*window.actions_by_id.by_id.values(), *window.panel_actions)
    ]
    used = [key for key in keys if key]
    assert len(used) == len(set(used))
    assert {spec.menu for spec in ACTIONS} <= set(MENUS)
    assert all(spec.needs in CONDITIONS for spec in ACTIONS if spec.needs)
    assert all(callable(getattr(window, spec.run)) for spec in ACTIONS)


def test_every_control_has_a_name_for_a_screen_reader(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    nameless = []
    for kind in (QAbstractButton, QComboBox, QAbstractSpinBox, QLineEdit):
        for widget in window.findChildren(kind):
            inner = isinstance(
                widget.parent(), QAbstractSpinBox | QComboBox | QLineEdit
            ) or widget.objectName().startswith("qt_")
            named = widget.accessibleName() or (isinstance(widget, QAbstractButton) and widget.text())
            foreign = (
                type(widget).__module__.startswith(("pyqtgraph", "PySide6")) and widget.window() is not window
            )
            if not (inner or named or foreign):
                nameless.append(f"{type(widget).__name__} {widget.objectName()}")
    assert not nameless


def test_shortcuts_open_panels(window: MainWindow) -> None:
    for name, action in zip(PANELS, window.panel_actions, strict=True):
        action.trigger()
        dock = next(d for d in window.docks.values() if name in d.ids)
        assert dock.current == name
        assert dock.isVisible()


def test_the_layout_comes_back(console: Console, qtbot: QtBot) -> None:
    first = MainWindow(console)
    first.resize(1500, 950)
    first.show()
    first.docks["traffic"].close()
    first.docks["left"].setFloating(True)
    first.load_bar.rate.setValue(7.5)
    first.keep_console = True
    first.close()
    second = MainWindow(console)
    second.show()
    assert not second.docks["traffic"].isVisible()
    assert second.docks["left"].isFloating()
    assert second.load_bar.rate.value() == 7.5
    second.action("reset_layout").trigger()
    QApplication.processEvents()
    assert second.docks["traffic"].isVisible()
    assert not second.docks["left"].isFloating()
    assert second.console.settings.rect is None
    second.keep_console = True
    discard(first)
    discard(second)


@pytest.mark.parametrize("blob", [b"", b"\x00\x01garbage", b"\xff" * 4000])
def test_e11_a_damaged_layout_gives_the_default(console: Console, blob: bytes) -> None:
    """E11: settings with nonsense in them never keep the window from opening in reach."""
    console.settings.window_state = QByteArray(blob)
    console.settings.splitter_state = QByteArray(blob)
    console.settings.rect = QRect(9000, -5000, 1300, 800)
    window = MainWindow(console)
    window.show()
    screen = QApplication.primaryScreen().availableGeometry()
    assert screen.contains(window.geometry().topLeft())
    assert all(dock.isVisible() for dock in window.docks.values())
    assert window.restoreState(window.saveState(LAYOUT_VERSION), LAYOUT_VERSION)
    window.keep_console = True
    discard(window)


@pytest.mark.parametrize("theme_name", ["dark", "light"])
@pytest.mark.parametrize("language", ["en", "zh_CN"])
@pytest.mark.parametrize("size", [(1440, 900), (1280, 800)])
def test_pictures_of_every_variant_are_whole(
    console: Console, link: FeedLink, tmp_path: Path, theme_name: str, language: str, size: tuple[int, int]
) -> None:
    """Looked at by eye elsewhere; here: the size asked for, not blank, no title or button cut off."""
    i18n.use(language)
    window = MainWindow(console)
    window.set_theme(theme_name)
    window.resize(*size)
    window.show()
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window, 8)
    path = tmp_path / "shots" / "window.png"
    window.grab_to(path)
    image = QImage(str(path))
    assert (image.width(), image.height()) == size
    assert len({image.pixel(x, y) for x in range(0, size[0], 7) for y in range(0, size[1], 7)}) > 20
    cut = []
    for widget in window.findChildren(QAbstractButton):
        if widget.isVisible() and widget.text() and widget.window() is window:
            need = widget.fontMetrics().horizontalAdvance(widget.text().replace("&", ""))
            if need > widget.width():
                cut.append(widget.text())
    assert not cut
    for name in ("ttft", "tpot", "throughput"):
        header = getattr(window, name).header
        assert header.legend.width() >= header.legend.sizeHint().width(), name
    window.keep_console = True
    discard(window)


def test_a_picture_shows_texts_whole_that_grew_just_now(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 2)
    legend, pill = window.ttft.header.legend, window.status_line.pill
    legend.set_values(dict.fromkeys(("p50", "p95", "p99"), "123,456,789 ms"))
    pill.set_state("busy", "A state with a rather long name")
    assert legend.width() < legend.sizeHint().width()
    window.picture()
    for widget in (legend, pill):
        assert widget.width() >= widget.sizeHint().width()


def test_another_language_leaves_the_panels_in_front_there(
    qapp: QApplication, console: Console, link: FeedLink, qtbot: QtBot
) -> None:
    made = application.Application(qapp, console, application.parser().parse_args([]))
    made.window.show()
    link.ready()
    beat(made.window, 2)
    for name in ("playground", "baselines"):
        made.window.show_panel(name)
    made.window.optimizations.filter.setText("prefix")
    first = made.window
    first.set_language("zh_CN")
    qtbot.waitUntil(lambda: made.window is not first)
    front = {dock.current for dock in made.window.docks.values()}
    beat(made.window, 2)
    assert made.window.optimizations.filter.text() == "prefix"
    assert console.patch_text({"prefix_cache": False}).endswith("：关"), "a mark in Chinese has its colon"
    made.window.keep_console = True
    made.window.close()
    assert {"playground", "baselines"} <= front


def test_a_new_engine_has_none_of_the_dead_ones_figures(window: MainWindow, link: FeedLink) -> None:
    """Before its first step its pool is what its own blocks say, or not known; so is the sparkline's end."""
    link.ready()
    beat(window, 1)
    link.traffic()
    beat(window)
    assert tile(window, "kv").startswith("20|")
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    link.ready()
    link.push(state=b.state(model=b.MODEL, device=b.DEVICE, running=0, waiting=0))
    beat(window)
    assert tile(window, "kv").startswith(NONE)
    assert tile(window, "running").startswith("0 / 0|")
    assert window.session.attention_rev == -1
    link.push(blocks=block_view(640))
    beat(window)
    assert tile(window, "kv") == "50|cached 25\u00a0%"
    line = window.session.timeline
    begun = line.last
    until(window, lambda: line.last is not None and begun is not None and line.last >= begun + 3)
    assert line.last is not None
    assert line.get(line.last, "kv_used_share") == 0.5
    link.push(steps=[b.step_row(1, window.session.now_s)])
    beat(window)
    assert tile(window, "kv").startswith("20|")


@pytest.mark.parametrize("state", [LinkState.FAILED, LinkState.DEAD, LinkState.OFFLINE])
def test_no_button_starts_a_load_that_cannot_run(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch, state: LinkState
) -> None:
    """Nor does a key or a script: it is said, and no generator is started against an engine that is none."""
    begun: list[object] = []
    monkeypatch.setattr(window.load_run, "start", lambda *args: begun.append(args))
    link.status = LinkStatus(state=state, endpoint="ipc:///nowhere", reason="out of memory")
    beat(window)
    for panel in ("requests", "timeline"):
        window.show_panel(panel)
        beat(window, 2)
        empty = getattr(window, panel).empty
        assert empty.isVisible()
        assert not empty.button.isEnabled()
        assert empty.button.toolTip() == "The engine is not ready yet."
    assert not window.load_bar.button.isEnabled()
    window.toggle_load()
    assert begun == []
    assert window.toasts.toasts[-1].text == "The load was not started: the engine is not ready."
    link.ready()
    beat(window, 2)
    assert window.timeline.empty.button.isEnabled()


def test_why_a_load_failed_is_not_said_of_the_next_engine(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.ready()
    beat(window, 2)
    why = "the engine at ipc:///x.ctl closed the connection; its process has probably ended"
    window.console.load_progress = LoadProgress(phase="failed", message=why, valid=False)
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    i18n.use("zh_CN")
    beat(window, 2)
    assert window.load_bar.progress.full_text == "失败：ipc:///x.ctl 处的引擎关闭了连接，其进程可能已结束"
    assert window.load_bar.progress.property("role") == "warning"
    i18n.use("en")
    link.ready()
    beat(window, 2)
    assert window.load_bar.progress.full_text.startswith("Sends seeded prompts")
    assert window.load_bar.progress.property("role") == "dim"


def test_the_button_of_the_time_says_what_the_axis_shows(window: MainWindow, link: FeedLink) -> None:
    """A young session fills less than the chosen time; both are said until it does."""
    link.ready()
    window.set_span(300)
    beat(window, 6)
    button = window.status_line.span
    assert window.ttft.span_s == 60
    assert button.text().replace("\u00a0", " ") == "1 min of 5 min"
    window.set_span(60)
    window.status_line.refresh()
    assert button.text().replace("\u00a0", " ") == "1 min"


def test_notices_stay_in_front_of_a_dock_that_is_raised(window: MainWindow, link: FeedLink) -> None:
    """A panel that was called up hid what had just been told."""
    link.ready()
    beat(window)
    window.console.tell("warning", lambda: "look at this")
    toast = window.toasts.toasts[0]
    for raise_it in (
        lambda: window.show_panel("card"), lambda: window.docks["bottom"].raise_(),
        lambda: window.docks["traffic"].raise_(), window.reset_layout,
    ):  # fmt: skip
        raise_it()
        beat(window, 1)
        under = window.childAt(toast.geometry().center())
        assert under is toast or toast.isAncestorOf(under)


def test_the_map_of_an_engine_that_is_gone_says_so(window: MainWindow, link: FeedLink) -> None:
    """Its blocks stayed on in their colours, as if they lived."""
    link.ready()
    beat(window)
    link.traffic()
    beat(window)
    panel = window.kv_map

    def coloured() -> int:
        image = panel.map.viewport().grab().toImage()
        points = [(x, y) for x in range(0, image.width(), 3) for y in range(0, image.height(), 3)]
        rgb = [image.pixelColor(*point).getRgb()[:3] for point in points]
        return sum(max(parts) - min(parts) > 40 for parts in rgb)

    assert panel.stale.isHidden()
    lively = coloured()
    assert lively > 100
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    assert panel.stale.isVisible()
    assert re.search(r"as it was at \d\d:\d\d:\d\d: its engine has stopped", panel.stale.text())
    assert coloured() < lively / 20
    link.ready()
    beat(window)
    link.push(blocks=block_view(64))
    beat(window)
    assert panel.stale.isHidden()
    assert coloured() > 20
