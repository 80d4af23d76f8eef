"""The keyboard acts upon what a person aimed at, also while a change is on its way or the engine is gone."""

from __future__ import annotations

import dataclasses

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QAbstractSpinBox, QComboBox, QWidget

from app.main_window import MainWindow
from app.net.types import LinkState
from ipc.messages import CfgSet, Error
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat, until
from tests.app.gui.feed import KNOBS, FeedLink

KEYS = (Qt.Key.Key_Down, Qt.Key.Key_Up, Qt.Key.Key_Space, Qt.Key.Key_Return, Qt.Key.Key_7)


def patches(link: FeedLink) -> list[dict[str, object]]:
    return [dict(command.patch) for command in link.sent if isinstance(command, CfgSet)]


def at(window: MainWindow) -> QWidget:
    found = window.focusWidget()
    assert found is not None
    return found


def press(window: MainWindow, *keys: Qt.Key, modifier: Qt.KeyboardModifier | None = None) -> None:
    for key in keys:
        QTest.keyClick(at(window), key, modifier or Qt.KeyboardModifier.NoModifier)


def change(window: MainWindow, knob: str) -> None:
    """Focus the knob and change it by the keyboard alone."""
    editor = window.optimizations.rows[knob].editor
    editor.setFocus()
    if isinstance(editor, QComboBox):
        press(window, Qt.Key.Key_Up if editor.currentIndex() else Qt.Key.Key_Down)
    elif isinstance(editor, QAbstractSpinBox):
        press(window, Qt.Key.Key_3, Qt.Key.Key_Return)
    else:
        press(window, Qt.Key.Key_Space)


@pytest.mark.parametrize("knob", ["prefix_cache", "batching", "max_num_seqs", "priority_ageing_s"])
@pytest.mark.parametrize("ends", ["applied", "refused"])
def test_a_pending_knob_keeps_the_focus_and_takes_no_key(
    window: MainWindow, link: FeedLink, knob: str, ends: str
) -> None:
    """What is pressed meanwhile reaches neither it nor its neighbours, and afterwards it has the focus."""
    link.ready()
    beat(window)
    rows = window.optimizations.rows
    change(window, knob)
    until(window, lambda: bool(patches(link)))
    beat(window, 1)
    assert not rows[knob].editor.isEnabled()
    assert at(window) is rows[knob]
    press(window, *KEYS)
    beat(window, 2)
    number, command = link.last(CfgSet)
    if ends == "applied":
        link.apply(number, command)
    else:
        link.answer(number, Error(id=number, code="invalid", message="no"))
    beat(window, 4)
    assert at(window) is rows[knob].editor
    press(window, Qt.Key.Key_Tab)
    until(window, lambda: not window.knobs.pending)
    assert len(patches(link)) == 1, "one change was asked for"
    assert not rows[knob].isAncestorOf(at(window))


def test_a_person_who_went_on_is_not_called_back(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    change(window, "prefix_cache")
    press(window, Qt.Key.Key_Tab)
    gone_to = at(window)
    assert gone_to is window.optimizations.rows["block_size"].editor
    link.apply(*link.last(CfgSet))
    beat(window, 4)
    assert at(window) is gone_to


@pytest.mark.parametrize("state", [LinkState.DEAD, LinkState.UNRESPONSIVE])
def test_focus_and_place_stay_when_the_engine_is_gone(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch, state: LinkState
) -> None:
    more = [b.knob(f"more{i}", group="kernels", title=f"More {i}") for i in range(30)]
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, *more])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, **{info.id: info.default for info in more}})
    link.ready()
    beat(window)
    panel = window.optimizations
    panel.rows["more20"].editor.setFocus()
    bar = panel.area.verticalScrollBar()
    bar.setValue(bar.maximum() // 2)
    place = bar.value()
    assert place > 0
    link.status = dataclasses.replace(link.status, state=state, reason="It was killed by SIGKILL.")
    beat(window)
    assert at(window) is panel.rows["more20"]
    press(window, Qt.Key.Key_Space, Qt.Key.Key_Down)
    assert bar.value() == place
    monkeypatch.setattr(feed, "KNOBS", feed.KNOBS[:-1])  # another engine, that knows one less
    link.ready()
    beat(window)
    assert at(window) is panel.rows["more20"].editor
    assert bar.value() == place
    assert patches(link) == []


def test_what_was_half_typed_is_given_up_with_the_engine(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    spin = window.optimizations.rows["max_num_seqs"].editor
    assert isinstance(spin, QAbstractSpinBox)
    spin.setFocus()
    spin.selectAll()
    press(window, Qt.Key.Key_9)
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    QTest.qWait(600)
    beat(window)
    assert spin.text() == "64"
    assert patches(link) == []


def test_a_button_that_goes_leaves_its_keys_to_nobody(window: MainWindow, link: FeedLink) -> None:
    """Undo, the banner's buttons and the load's: a second press must not land on the neighbour."""
    link.ready(max_num_seqs=8)
    beat(window)
    change(window, "prefix_cache")
    link.apply(*link.last(CfgSet))
    beat(window, 4)
    window.optimizations.undo.setFocus()
    press(window, Qt.Key.Key_Space, Qt.Key.Key_Space, Qt.Key.Key_Return)
    assert patches(link) == [{"prefix_cache": False}, {"prefix_cache": True}]
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    window.banner.restart.setFocus()
    press(window, Qt.Key.Key_Space)
    link.status = dataclasses.replace(link.status, state=LinkState.READY)
    beat(window)
    assert window.banner.isHidden()
    assert at(window) is window


CTRL = Qt.KeyboardModifier.ControlModifier


def test_undo_reaches_the_last_change_wherever_the_focus_is(window: MainWindow, link: FeedLink) -> None:
    """Also while that change is on its way; a text that was typed takes back its own typing first."""
    link.ready()
    window.activateWindow()
    beat(window)
    panel = window.optimizations
    field = window.playground.field
    for place in (panel.rows["block_size"].editor, panel.filter, window.load_bar.rate, field):
        change(window, "prefix_cache")
        link.apply(*link.last(CfgSet), rev=len(patches(link)))
        beat(window, 4)
        if place is field:
            window.show_panel("playground")
        place.setFocus()
        press(window, Qt.Key.Key_Z, modifier=CTRL)
        assert patches(link)[-2:] == [{"prefix_cache": False}, {"prefix_cache": True}], place
        link.apply(*link.last(CfgSet), rev=len(patches(link)))
        beat(window, 4)
    sent = len(patches(link))
    window.show_panel("optimizations")
    beat(window, 1)
    change(window, "prefix_cache")
    press(window, Qt.Key.Key_Z, modifier=CTRL)
    assert len(patches(link)) == sent + 1, "it is still being applied"
    link.apply(*link.last(CfgSet), rev=sent + 1)
    beat(window, 2)
    assert patches(link)[-1] == {"prefix_cache": True}
    link.apply(*link.last(CfgSet), rev=sent + 2)
    beat(window, 4)
    change(window, "prefix_cache")
    link.apply(*link.last(CfgSet), rev=sent + 3)
    beat(window, 4)
    sent = len(patches(link))
    panel.filter.setFocus()
    press(window, Qt.Key.Key_C)
    press(window, Qt.Key.Key_Z, modifier=CTRL)
    assert panel.filter.text() == ""
    assert len(patches(link)) == sent
