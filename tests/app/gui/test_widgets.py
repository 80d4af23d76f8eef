"""The small widgets: map, tile, toggle, toasts, palette, load bar."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction, QImage
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app import theme
from app.lab.load_run import LoadProgress
from app.lab.workload import WorkloadSpec
from app.load_names import MIXES
from app.units import Quantity
from app.widgets.block_map import MIN_CELL, BlockMap, cell_size
from app.widgets.command_palette import CommandPalette, score
from app.widgets.kpi_tile import KpiTile
from app.widgets.load_bar import LoadBar
from app.widgets.toast import MAX_TOASTS, ToastStack
from app.widgets.toggle import ToggleSwitch


def pixel(widget: QWidget, point: QPoint) -> str:
    return widget.grab().toImage().convertToFormat(QImage.Format.Format_RGB32).pixelColor(point).name()


def test_every_block_has_its_own_cell_in_its_own_colour(qtbot: QtBot) -> None:
    blocks = BlockMap()
    qtbot.addWidget(blocks)
    blocks.resize(200, 120)
    blocks.show()
    state = np.arange(60, dtype=np.uint8) % 4
    fill = np.full(60, 16, np.uint16)
    blocks.set_blocks(state, fill, 16)
    cell = blocks._cell
    colours = ["kv_free", "kv_cached", "kv_used", "kv_shared"]
    for block in (0, 1, 2, 3, 17, 59):
        column, line = block % blocks._columns, block // blocks._columns
        middle = QPoint(column * cell + cell // 2, line * cell + cell // 2)
        assert blocks.block_at(middle) == block
        assert pixel(blocks.viewport(), middle) == getattr(theme.tokens(), colours[state[block]])


def test_a_half_full_block_is_half_coloured(qtbot: QtBot) -> None:
    blocks = BlockMap()
    qtbot.addWidget(blocks)
    blocks.resize(200, 120)
    blocks.show()
    blocks.set_blocks(np.full(8, 2, np.uint8), np.full(8, 8, np.uint16), 16)
    cell = blocks._cell
    used = theme.tokens().kv_used
    assert pixel(blocks.viewport(), QPoint(cell // 2, cell - 3)) == used
    assert pixel(blocks.viewport(), QPoint(cell // 2, 1)) != used


def test_a_picked_requests_blocks_stand_out(qtbot: QtBot) -> None:
    blocks = BlockMap()
    qtbot.addWidget(blocks)
    blocks.resize(200, 120)
    blocks.show()
    blocks.set_blocks(np.full(8, 2, np.uint8), np.full(8, 16, np.uint16), 16)
    blocks.set_chosen([1])
    cell, used = blocks._cell, theme.tokens().kv_used
    assert pixel(blocks.viewport(), QPoint(cell + cell // 2, cell // 2)) == used
    assert pixel(blocks.viewport(), QPoint(cell // 2, cell // 2)) != used
    blocks.set_chosen(None)
    assert pixel(blocks.viewport(), QPoint(cell // 2, cell // 2)) == used


def test_large_pools_are_scrolled_and_not_merged(qtbot: QtBot) -> None:
    blocks = BlockMap()
    qtbot.addWidget(blocks)
    blocks.resize(240, 100)
    blocks.show()
    number = 200_000
    blocks.set_blocks(np.ones(number, np.uint8), np.ones(number, np.uint16), 16)
    assert blocks._cell == MIN_CELL
    bar = blocks.verticalScrollBar()
    assert bar.maximum() > 0
    bar.setValue(bar.maximum())
    columns = blocks._columns
    last_line = (number - 1) // columns
    y = last_line * MIN_CELL - bar.value() + 1
    assert blocks.block_at(QPoint(1, y)) == last_line * columns
    assert not blocks.grab().isNull()


@pytest.mark.parametrize(("blocks", "width", "height"), [(1, 10, 10), (100, 300, 200), (5825, 330, 260)])
def test_cells_fit(blocks: int, width: int, height: int) -> None:
    cell = cell_size(blocks, width, height)
    assert cell == MIN_CELL or (width // cell) * (height // cell) >= blocks


def test_a_tile_says_what_it_shows(qtbot: QtBot) -> None:
    tile = KpiTile("TTFT p95", "Time to first token.")
    qtbot.addWidget(tile)
    tile.resize(130, tile.sizeHint().height())
    tile.show_value(Quantity("412", "ms"), "n=213 · 30 s", "warning")
    tile.set_spark(np.array([1.0, np.nan, 3.0, 2.0]))
    assert tile.accessibleName() == "TTFT p95: 412\u00a0ms"
    assert "Time to first token" in tile.toolTip()
    edge = pixel(tile, QPoint(tile.width() // 2, 0))
    tile.show_value(Quantity("412", "ms"), "n=213 · 30 s")
    assert pixel(tile, QPoint(tile.width() // 2, 0)) != edge


def test_a_toggle_works_by_keyboard_and_shows_that_it_waits(qtbot: QtBot) -> None:
    toggle = ToggleSwitch("Prefix cache")
    qtbot.addWidget(toggle)
    toggle.show()
    toggle.setFocus()
    qtbot.keyClick(toggle, Qt.Key.Key_Space)
    assert toggle.isChecked()
    plain = toggle.grab().toImage()
    toggle.set_pending(True)
    assert toggle.grab().toImage() != plain


def test_toasts_stack_count_repeats_and_go(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    window.resize(900, 600)
    window.show()
    stack = ToastStack(window)
    for i in range(MAX_TOASTS + 3):
        stack.show_notice("info", f"notice {i}")
    assert len(stack.toasts) == MAX_TOASTS
    stack.show_notice("info", "notice 6")
    assert len(stack.toasts) == MAX_TOASTS
    assert stack.toasts[-1].count == 2
    for toast in stack.toasts:
        assert window.rect().contains(toast.geometry())
    stack.show_notice("error", "went wrong " * 20, "Traceback\n  <b>here</b>")
    assert stack.toasts[-1].height() > stack.toasts[0].height()
    label = stack.toasts[-1]._label
    assert label.height() >= label.heightForWidth(label.width()), "no line of the text is cut off"
    stack.toasts[-1].close_now()
    assert len(stack.toasts) == MAX_TOASTS - 1


def test_the_palette_finds_by_letters_and_runs(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    ran: list[str] = []
    actions = []
    for name in ("&Save baseline…", "Reset layout", "Restart the engine"):
        action = QAction(name, window)
        action.triggered.connect(lambda _checked=False, n=name: ran.append(n))
        actions.append(action)
    actions[1].setEnabled(False)
    palette = CommandPalette(actions, window)
    palette.show()
    qtbot.keyClicks(palette.field, "rsteng")
    assert palette.list.item(0).text() == "Restart the engine"
    qtbot.keyClick(palette.field, Qt.Key.Key_Return)
    assert ran == ["Restart the engine"]
    assert score("sb", "save baseline") is not None
    assert score("zz", "save baseline") is None


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("arrival", ["poisson", "constant", "concurrency"])
def test_the_load_bar_makes_a_valid_load_of_every_choice(qtbot: QtBot, mix: str, arrival: str) -> None:
    bar = LoadBar()
    qtbot.addWidget(bar)
    bar.set_values({"mix": mix, "arrival": arrival, "rate": 3.5, "concurrency": 12, "duration": "30", "x": 1})
    asked: list[WorkloadSpec] = []
    bar.started.connect(asked.append)
    bar.show_progress(LoadProgress(), False, True)
    bar.button.click()
    assert asked[0].arrival == arrival
    assert asked[0].duration_s == 30.0
    assert asked[0].mix == MIXES[mix][1]
    assert bar.values()["rate"] == 3.5


def test_a_first_load_suits_the_device_and_a_chosen_one_stays(qtbot: QtBot) -> None:
    made = {}
    for kind, remembered in (("cpu", {}), ("cuda", {}), ("cpu", {"arrival": "poisson", "rate": 3.0})):
        bar = LoadBar()
        qtbot.addWidget(bar)
        bar.set_values(remembered)
        bar.suit(kind)
        made[kind, bool(remembered)] = bar.spec()
    assert (made["cpu", False].arrival, made["cpu", False].concurrency) == ("concurrency", 4)
    assert made["cuda", False].arrival == "poisson"
    assert (made["cpu", True].arrival, made["cpu", True].rate_rps) == ("poisson", 3.0)
    bar.set_values({"arrival": "constant"})
    bar.suit("cpu")
    assert bar.spec().arrival == "constant"


def test_a_load_that_drains_can_be_cancelled(qtbot: QtBot) -> None:
    bar = LoadBar()
    qtbot.addWidget(bar)
    asked: list[str] = []
    bar.stopped.connect(lambda: asked.append("stop"))
    bar.cancelled.connect(lambda: asked.append("cancel"))
    bar.show_progress(LoadProgress("running", sent=9, in_flight=9), True, True)
    bar.button.click()
    bar.show_progress(LoadProgress("draining", sent=9, in_flight=9), True, True)
    assert bar.button.text() == "Cancel rest"
    bar.button.click()
    assert asked == ["stop", "cancel"]
    bar.show_progress(LoadProgress("done", sent=9), False, True)
    assert bar.button.text() == "Start load"
    assert not bar.button.toolTip()


def test_the_load_bar_says_how_it_goes_and_what_is_wrong(qtbot: QtBot) -> None:
    bar = LoadBar()
    qtbot.addWidget(bar)
    bar.show()
    bar.show_progress(LoadProgress(), False, False)
    assert not bar.button.isEnabled()
    running = LoadProgress(
        "running", elapsed_s=62, sent=64, done=60, failed=1, in_flight=3, achieved_rps=1.03
    )
    bar.show_progress(running, True, True)
    assert bar.button.text() == "Stop load"
    assert not bar.rate.isEnabled()
    assert (
        bar.progress.full_text
        == "running 1:02 · 64 sent · 60 done · 3 in flight · 1 failed · 1.03\u00a0req/s"
    )
    bar.show_progress(replace(running, last_error="too_long: 600 tokens"), True, True)
    assert bar.progress.full_text.endswith("last failure: too_long: 600 tokens")
    both = replace(running, last_error="rate_limited: slower", common_error="too_long: 600 tokens")
    bar.show_progress(both, True, True)
    assert bar.progress.full_text.endswith("most frequent failure: too_long: 600 tokens")
    bar.show_progress(LoadProgress("done", valid=False, invalid_reasons=("it lagged",)), False, True)
    assert "it lagged" in bar.progress.full_text
    assert bar.progress.property("role") == "warning"
    QApplication.processEvents()
