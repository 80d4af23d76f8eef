"""The panel is the registry; a click is pending until the engine has answered."""

from __future__ import annotations

import time

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QSpinBox
from pytestqt.qtbot import QtBot

from app import i18n
from app.main_window import MainWindow
from app.panels.optimizations import group_title
from app.widgets.knob_row import COMMIT_MS
from app.widgets.toggle import ToggleSwitch
from ipc.messages import ApplyEvent, Cfg, CfgSet, Error
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat, discard, until
from tests.app.gui.feed import KNOBS, FeedLink


def test_every_knob_of_the_registry_has_a_row_with_its_editor(window: MainWindow, link: FeedLink) -> None:
    assert window.optimizations.rows == {}
    link.ready()
    beat(window)
    rows = window.optimizations.rows
    assert list(rows) == [info.id for info in KNOBS]
    assert isinstance(rows["prefix_cache"].editor, ToggleSwitch)
    assert isinstance(rows["max_num_seqs"].editor, QSpinBox)
    assert isinstance(rows["attention"].editor, QComboBox)
    assert rows["prefix_cache"].editor.isChecked()
    assert rows["max_num_seqs"].editor.value() == 64
    assert rows["block_size"].status.full_text == "rebuilds KV"


def test_what_is_not_available_says_why_and_takes_no_click(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    row = window.optimizations.rows["cuda_graphs"]
    assert not row.editor.isEnabled()
    assert row.status.full_text == "not built yet"
    attention = window.optimizations.rows["attention"].editor
    item = attention.model().item(2)
    assert not item.isEnabled()
    assert "needs CUDA" in item.text()


def test_what_auto_became_is_shown_once_a_step_said_so(window: MainWindow, link: FeedLink) -> None:
    """And is not shown any more once the configuration is another one than that step ran with."""
    link.ready(attention="auto")
    beat(window)
    row = window.optimizations.rows["attention"]
    assert row.status.full_text == ""
    link.push(steps=[b.step_row(1, 1.0, attention="paged", cfg_rev=0)])
    beat(window)
    assert row.status.full_text == "auto → paged"
    assert "paged" in row.status.toolTip()
    link.push(cfg=Cfg(id=1, rev=1, values={**feed.VALUES, "attention": "auto"}, knobs=KNOBS))
    beat(window)
    assert row.status.full_text == ""


def test_engine_text_is_never_markup(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    tip = window.optimizations.rows["prefix_cache"].toolTip()
    assert "&lt;b&gt;" in tip
    assert "<b>" not in tip


def test_a_click_is_pending_until_it_is_applied(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    link.ready()
    beat(window)
    row = window.optimizations.rows["prefix_cache"]
    qtbot.mouseClick(row.editor, Qt.MouseButton.LeftButton)
    number, command = link.last(CfgSet)
    assert command.patch == {"prefix_cache": False}
    assert command.expect_rev == 0
    beat(window, 1)
    assert row.editor.pending
    assert not row.editor.isEnabled()
    assert row.status.full_text == "applying…"
    link.apply(number, command)
    beat(window, 4)
    assert not row.editor.pending
    assert row.editor.isEnabled()
    assert not row.editor.isChecked()
    assert row.status.full_text.startswith("applied, 1.50")
    assert window.view.marks()[0].label == "Prefix cache: off"


def test_a_mark_names_its_own_change_though_another_engine_counts_anew(
    window: MainWindow, link: FeedLink
) -> None:
    link.ready()
    beat(window)
    for patch in ({"prefix_cache": False}, {"batching": "static"}):
        event = ApplyEvent(
            apply_id=1, from_rev=0, to_rev=1, result="ok", t_ns=time.monotonic_ns(), at_step=5, took_us=1500,
            mode="step", patch=patch, why="",
        )  # fmt: skip
        link.push(events=[event])
        beat(window, 2)
    assert [mark.label for mark in window.view.marks()] == ["Prefix cache: off", "Batching: static"]


def test_a_refused_click_goes_back_and_says_why(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    link.ready()
    beat(window)
    row = window.optimizations.rows["prefix_cache"]
    qtbot.mouseClick(row.editor, Qt.MouseButton.LeftButton)
    number, _ = link.last(CfgSet)
    refusal = Error(id=number, code="invalid", message="no", keys={"prefix_cache": "not with this model"})
    link.answer(number, refusal)
    beat(window, 3)
    assert row.editor.isChecked()
    assert "not with this model" in row.status.full_text
    assert any("not with this model" in toast.text for toast in window.toasts.toasts)


def test_a_change_that_failed_is_rolled_back_and_told(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    link.ready()
    beat(window)
    qtbot.mouseClick(window.optimizations.rows["prefix_cache"].editor, Qt.MouseButton.LeftButton)
    number, command = link.last(CfgSet)
    link.apply(number, command, ok=False, why="out of memory")
    beat(window, 4)
    assert window.optimizations.rows["prefix_cache"].editor.isChecked()
    assert any("out of memory" in toast.text for toast in window.toasts.toasts)
    assert not window.view.marks()[0].ok


def test_arrow_clicks_make_one_change(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    link.ready()
    beat(window)
    spin = window.optimizations.rows["max_num_seqs"].editor
    spin.setFocus()
    for _ in range(3):
        qtbot.keyClick(spin, Qt.Key.Key_Up)
    wanted = spin.value()
    assert wanted > 64
    qtbot.waitUntil(lambda: any(isinstance(c, CfgSet) for c in link.sent), timeout=5000)
    qtbot.wait(50)
    patches = [c.patch for c in link.sent if isinstance(c, CfgSet)]
    assert patches == [{"max_num_seqs": wanted}]


def test_a_choice_is_sent_by_its_id(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    combo = window.optimizations.rows["batching"].editor
    combo.setCurrentIndex(0)
    combo.activated.emit(0)
    assert link.last(CfgSet)[1].patch == {"batching": "static"}


def test_undo_asks_for_the_inverse(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    link.ready()
    beat(window)
    assert not window.action("undo").isEnabled()
    qtbot.mouseClick(window.optimizations.rows["prefix_cache"].editor, Qt.MouseButton.LeftButton)
    link.apply(*link.last(CfgSet))
    until(window, lambda: not window.knobs.pending)
    beat(window, 1)
    assert window.action("undo").isEnabled()
    window.action("undo").trigger()
    number, command = link.last(CfgSet)
    assert command.patch == {"prefix_cache": True}
    link.apply(number, command, rev=2)
    until(window, lambda: window.action("redo").isEnabled())
    assert window.optimizations.rows["prefix_cache"].editor.isChecked()


def test_defaults_ask_only_for_what_differs(window: MainWindow, link: FeedLink) -> None:
    link.ready(max_num_seqs=8, prefix_cache=False)
    beat(window)
    window.optimizations.defaults.click()
    assert link.last(CfgSet)[1].patch == {"max_num_seqs": 64, "prefix_cache": True}


def test_groups_fold_and_stay_folded(window: MainWindow, link: FeedLink) -> None:
    """What cannot be used here waits behind a line; so do folded groups, also in the next window."""
    link.ready(max_num_seqs=8)
    beat(window)
    panel = window.optimizations
    kernels = panel.groups["kernels"]
    assert panel.rows["attention"].isVisible()
    assert not panel.rows["cuda_graphs"].isVisible()
    assert kernels.more.text().endswith("1 not available here")
    kernels.more.click()
    assert panel.rows["cuda_graphs"].isVisible()
    assert panel.groups["batching"].changed.text() == "1 changed"
    panel.groups["batching"].head.click()
    assert not panel.rows["max_num_seqs"].isVisible()
    assert window.console.settings.folded == ["batching"]
    again = MainWindow(window.console)
    again.show()
    beat(again, 2)
    assert not again.optimizations.rows["max_num_seqs"].isVisible()
    assert again.optimizations.rows["prefix_cache"].isVisible()
    again.keep_console = True
    discard(again)


def test_a_group_without_anything_to_use_begins_folded(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [b.knob(f"spec{i}", group="speculation", available=False, reason="not built yet") for i in (1, 2)]
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, *later])
    link.ready()
    beat(window)
    assert window.optimizations.groups["speculation"].folded
    assert not window.optimizations.groups["speculation"].more.isVisible()
    assert window.optimizations.groups["speculation"].isVisible()


def test_an_optimization_is_found_by_a_word_folded_or_not(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    panel = window.optimizations
    panel.groups["kv memory"].head.click()
    panel.filter.setText("BLOCK")  # in a name, an id or a help text
    assert panel.rows["block_size"].isVisible()
    assert panel.rows["prefix_cache"].isVisible()
    assert not panel.rows["batching"].isVisible()
    assert not panel.groups["batching"].isVisible()
    panel.filter.setText("lock")  # only where a word begins
    assert not panel.rows["block_size"].isVisible()
    panel.filter.setText("size")  # also behind the underscore of an id
    assert panel.rows["block_size"].isVisible()
    panel.filter.setText("cuda")
    assert panel.rows["cuda_graphs"].isVisible()
    panel.filter.clear()
    assert not panel.rows["block_size"].isVisible()
    assert panel.rows["batching"].isVisible()


def test_a_knob_that_needs_another_says_when_it_has_no_effect(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = b.knob(
        "batch_wait_ms", group="batching", type="float", default=0.0, minimum=0.0, maximum=10.0,
        requires={"batching": "static"},
    )  # fmt: skip
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, wait])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, "batch_wait_ms": 0.0})
    link.ready()
    beat(window)
    assert window.optimizations.rows["batch_wait_ms"].status.full_text == "no effect"
    assert window.optimizations.rows["batch_wait_ms"].editor.isEnabled()
    window.console.knobs.set({"batching": "static"})
    link.apply(*link.last(CfgSet))
    until(window, lambda: window.optimizations.rows["batch_wait_ms"].status.full_text == "")


def test_the_group_of_measuring_has_a_name_in_both_languages() -> None:
    for language, title in (("en", "Measuring"), ("zh_CN", "测量")):
        i18n.use(language)
        assert group_title("measuring") == title


REFUSED = [
    ("max_num_seqs", "99999", "64", "99999 is not within 1 to 1,024"),
    ("max_num_seqs", "0", "64", "0 is not within 1 to 1,024"),
    ("max_num_seqs", "-3", "64", "-3 is not within 1 to 1,024"),
    ("max_num_seqs", "1.5", "64", "1.5 is not a whole number"),
    ("priority_ageing_s", "99999", "2 s", "99999 is not within 0.001 to 3,600"),
    ("priority_ageing_s", "0.0004", "2 s", "0.0004 is not within 0.001 to 3,600"),
    ("priority_ageing_s", "1.0005", "2 s", "1.0005 has more than 3 decimals"),
]


@pytest.mark.parametrize(("knob", "typed", "kept", "why"), REFUSED)
@pytest.mark.parametrize("leave", [Qt.Key.Key_Return, Qt.Key.Key_Tab])
def test_a_number_that_cannot_be_had_is_refused_whole(
    window: MainWindow,
    link: FeedLink,
    qtbot: QtBot,
    knob: str,
    typed: str,
    kept: str,
    why: str,
    leave: Qt.Key,
) -> None:  # fmt: skip
    """It becomes no other number: nothing is asked for, the range is said, the old value stays."""
    link.ready()
    beat(window)
    row = window.optimizations.rows[knob]
    row.editor.setFocus()
    row.editor.selectAll()
    qtbot.keyClicks(row.editor, typed)
    qtbot.keyClick(row.editor, leave)
    beat(window, 2)
    assert row.editor.text() == kept
    assert row.status.full_text == why
    assert window.toasts.toasts[-1].text == f"{row.title.text()}: {why}"
    qtbot.wait(COMMIT_MS + 50)
    assert not [command for command in link.sent if isinstance(command, CfgSet)]
    row.editor.setFocus()
    qtbot.keyClick(row.editor, Qt.Key.Key_Up)
    beat(window, 2)
    assert row.status.full_text != why


def test_a_load_is_not_started_with_another_number_than_was_typed(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    link.ready()
    beat(window)
    bar = window.load_bar
    bar.set_values({"arrival": "poisson", "rate": 2.0})
    for typed, rate, told in (("5", 5.0, 0), ("99999", 5.0, 1)):
        bar.rate.setFocus()
        bar.rate.selectAll()
        qtbot.keyClicks(bar.rate, typed)
        assert bar.spec().rate_rps == rate
        assert len(window.toasts.toasts) == told
    assert window.toasts.toasts[-1].text == "Rate: 99999 is not within 0.05 to 1,000"
