"""Figures and reasons below the knobs of speculation, and the choice of a draft model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox
from pytestqt.qtbot import QtBot

from app.console import Console
from app.dialogs.draft_model import DraftModelDialog
from app.main_window import MainWindow
from app.net.types import LaunchSpec, LinkState, LinkStatus
from app.panels.knob_notes import SpeculationNote, places_text
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat
from tests.app.gui.feed import KNOBS, FeedLink

SPECULATION = b.knob(
    "speculation", group="speculation", title="Speculation", type="choice", default="off",
    choices=["off", "ngram", "draft", "self"],
    choice_reasons={"draft": "the engine was started without --draft-model"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine can speculate, but has no draft model."""
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, SPECULATION])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, "speculation": "off"})


def note_of(window: MainWindow) -> SpeculationNote:
    note = window.optimizations.notes["speculation"]
    assert isinstance(note, SpeculationNote)
    return note


def shown(note: SpeculationNote) -> dict[str, str]:
    values = {key: note.facts.value(key).replace("\u00a0", " ") for key in note.facts.values}
    return {key: value for key, value in values.items() if value}


def dialog_of(window: MainWindow) -> DraftModelDialog:
    window.action("draft_model").trigger()
    found = window.findChild(DraftModelDialog)
    assert found is not None
    return found


@pytest.fixture
def ours(console: Console, link: FeedLink, tmp_path: Path) -> Path:
    """An engine that this console started, and the folder of a model that could draft."""
    model, draft = tmp_path / "big", tmp_path / "small 空"
    for folder in (model, draft):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    console.launch(LaunchSpec(model=str(model)))
    return draft


def test_weights_that_are_loaded_beside_the_steps_show_their_progress(
    window: MainWindow, link: FeedLink
) -> None:
    """The engine serves meanwhile, so there is no banner."""
    link.ready()
    beat(window)
    row, note = window.optimizations.rows["speculation"], note_of(window)
    window.console.knobs.set({"speculation": "self"})
    beat(window, 2)
    assert row.status.full_text == "applying…"
    state = b.state(
        model=b.MODEL, device=b.DEVICE, pending_apply=1, stage="making a draft in int8",
        done_bytes=50 << 20, total_bytes=200 << 20,
    )  # fmt: skip
    link.push(state=state)
    beat(window)
    assert row.status.full_text.replace("\u00a0", " ") == "25 % done"
    assert note.none.text().replace("\u00a0", " ") == "making a draft in int8 · 25 %"
    assert window.banner.isHidden()
    link.push(state=b.state(model=b.MODEL, device=b.DEVICE))
    beat(window)
    assert note.none.text() == ""


def test_who_looks_for_a_draft_finds_where_to_choose_one(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    window.optimizations.filter.setText("speculation")
    assert note_of(window).isVisible()
    window.optimizations.filter.setText("batching")
    assert not note_of(window).isVisible()


def test_figures_of_drafts_stand_below_their_knob_with_definitions(
    window: MainWindow, link: FeedLink
) -> None:
    link.ready(speculation="ngram")
    beat(window)
    note = note_of(window)
    rows = [
        b.step_row(n, window.session.now_s + n / 100, draft_reqs=2, drafted_tok=5, accepted_tok=3,
                   drafted_at=[2, 2, 1], accepted_at=[2, 1, 0], draft_us=300, verify_us=5000)
        for n in range(1, 11)
    ]  # fmt: skip
    link.push(steps=rows, state=b.state(draft_weight_bytes=56 << 20, draft_kv_bytes=128 << 20))
    beat(window)
    assert shown(note) == {
        "accepted": "60 %", "length": "2.50", "places": "100 50 0 %", "draft": "300 µs", "verify": "5.00 ms",
        "weights": "56.0 MiB", "kv": "128 MiB",
    }  # fmt: skip
    assert note.facts.remarks["accepted"].full_text == "of 50 tokens"
    assert note.facts.remarks["verify"].full_text == "a step"
    assert "model's own token" in note.facts.values["length"].toolTip()
    assert not note.none.text()


def test_without_drafts_it_says_so_and_why(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    note = note_of(window)
    assert shown(note) == {}
    assert (note.none.text(), note.why.text()) == ("", ""), "off: nothing to explain"
    link.ready(speculation="ngram")
    link.push(state=b.state(speculation="nothing <b>repeats</b>"))
    beat(window)
    assert note.why.text() == "No drafts: nothing <b>repeats</b>"
    assert note.why.textFormat() is Qt.TextFormat.PlainText
    assert note.none.text().replace("\u00a0", " ") == "No drafts in the last 30 s."
    window.show_panel("stages")
    beat(window)
    assert "No drafts in the last" in window.stages.drafts.text().replace("\u00a0", " ")


def test_figures_of_drafts_keep_their_place_while_speculation_is_on(
    window: MainWindow, link: FeedLink
) -> None:
    """They come and go with the traffic; the rows below must not."""
    link.ready(speculation="ngram")
    beat(window)
    note = note_of(window)
    keys = ("accepted", "length", "places", "draft", "verify")
    assert {key: note.facts.value(key) for key in keys} == dict.fromkeys(keys, "–")
    link.push(state=b.state(speculation="nothing that requests wrote lately occurs earlier in their text"))
    beat(window)
    height = note.sizeHint().height()
    row = b.step_row(1, window.session.now_s, draft_reqs=2, drafted_tok=5, accepted_tok=3,
                     drafted_at=[2, 2, 1], accepted_at=[2, 1, 0], draft_us=300, verify_us=5000)  # fmt: skip
    link.push(steps=[row], state=b.state())
    beat(window)
    assert note.facts.value("length") == "2.50"
    assert (note.why.text(), note.none.text()) == ("", "")
    assert note.sizeHint().height() == height
    link.ready()
    beat(window)
    assert note_of(window).sizeHint().height() < height, "off: there is nothing to hold a place for"


def test_the_note_folds_with_its_group(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    group = window.optimizations.groups["speculation"]
    assert note_of(window).isVisibleTo(group)
    group.head.click()
    assert not note_of(window).isVisibleTo(group)


def test_many_places_are_cut_to_one_line() -> None:
    assert places_text((0.84, 0.71)) == "84 71\u00a0%"
    assert places_text(tuple(0.9 for _ in range(9))) == "90 90 90 90 90 90 …\u00a0%"


def test_the_choice_without_a_draft_model_says_what_to_do(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    editor = window.optimizations.rows["speculation"].editor
    assert isinstance(editor, QComboBox)
    text = editor.itemText(2)
    assert "without --draft-model" in text
    assert "choose one under “Draft model” below" in text
    assert note_of(window).model.full_text == "none"


def test_a_draft_model_is_chosen_and_the_engine_starts_anew_as_it_was(
    window: MainWindow, link: FeedLink, ours: Path, qtbot: QtBot
) -> None:
    link.ready(max_num_seqs=8)
    beat(window)
    note_of(window).choose.click()
    dialog = window.findChild(DraftModelDialog)
    assert dialog is not None
    assert "starts anew" in dialog.cost.text()
    assert not dialog.restart.isEnabled()
    assert not dialog.none.isEnabled(), "there is none to give up"
    dialog.path.setText(str(ours))
    assert dialog.restart.isEnabled()
    assert dialog.switch_on.isChecked()
    qtbot.mouseClick(dialog.restart, Qt.MouseButton.LeftButton)
    assert link.calls[-1] == f"restart with draft {ours}"
    assert link.restarted_with is not None
    assert (link.restarted_with["max_num_seqs"], link.restarted_with["speculation"]) == (8, "draft")
    assert "cuda_graphs" not in link.restarted_with, "what cannot be had is not asked for"
    beat(window)
    assert note_of(window).model.full_text == "small 空"
    assert window.console.settings.draft_model == str(ours)


def test_a_draft_model_is_given_up(window: MainWindow, link: FeedLink, ours: Path) -> None:
    link.ready(speculation="draft")
    beat(window)
    window.console.choose_draft_model(str(ours))
    dialog = dialog_of(window)
    assert dialog.path.text() == str(ours)
    dialog.none.click()
    assert link.calls[-1] == "restart with draft None"
    beat(window)
    assert note_of(window).model.full_text == "none"


def test_an_engine_that_ended_is_started_with_what_the_link_knows_was_good(
    window: MainWindow, link: FeedLink, ours: Path
) -> None:
    """What it died of a moment after a change must not come back with the draft model."""
    link.ready(max_num_seqs=3)
    beat(window)
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD)
    beat(window)
    window.console.choose_draft_model(str(ours), switch_on=True)
    assert link.restarted_with == {"speculation": "draft"}


def test_what_is_no_model_is_refused_with_the_reason(
    window: MainWindow, link: FeedLink, ours: Path, tmp_path: Path
) -> None:
    link.ready()
    beat(window)
    dialog = dialog_of(window)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, why in (
        (tmp_path / "nowhere", "no such file"),
        (tmp_path / "notes.txt", "a GGUF file or a folder"),
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "big", "the model itself"),
    ):
        dialog.path.setText(str(path))
        assert why in dialog.hint.text()
        assert not dialog.restart.isEnabled()


def test_an_attached_engine_is_not_ours_to_restart(window: MainWindow, link: FeedLink, ours: Path) -> None:
    """It ends with who started it; the dialog says what to do there."""
    link.ready()
    link.status = LinkStatus(
        state=LinkState.READY, session="s1", pid=9, endpoint="tcp://127.0.0.1:7750", data_age_s=0.1
    )
    beat(window)
    dialog = dialog_of(window)
    assert "started elsewhere" in dialog.cost.text()
    assert "--draft-model PATH" in dialog.cost.text()
    assert dialog.restart.isHidden()
    assert dialog.path.isHidden()
    before = list(link.calls)
    window.console.choose_draft_model("/m")
    assert link.calls == before
    assert any("started elsewhere" in toast.text for toast in window.toasts.toasts)
    assert note_of(window).model.full_text == "none"


def test_an_attached_engine_with_a_draft_model_says_that_it_has_one(
    window: MainWindow, link: FeedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = b.knob(
        "speculation", group="speculation", type="choice", default="off", choices=["off", "ngram", "draft"]
    )
    monkeypatch.setattr(feed, "KNOBS", [*KNOBS, info])
    link.ready()
    link.status = dataclasses.replace(link.status, managed=False, can_restart=False)
    beat(window)
    assert note_of(window).model.full_text == "chosen where the engine was started"


def test_without_an_engine_the_dialog_says_to_open_a_model(window: MainWindow, link: FeedLink) -> None:
    beat(window)
    dialog = dialog_of(window)
    assert dialog.cost.text() == "No engine of this console runs. Open a model first."
    assert dialog.restart.isHidden()


def test_a_draft_model_that_failed_to_load_says_where_to_choose_another(
    window: MainWindow, link: FeedLink, ours: Path
) -> None:
    link.status = LinkStatus(
        state=LinkState.FAILED, managed=True, can_restart=True, reason="their tokenizers differ.",
        command_line=("python3", "-m", "engine", "--draft-model", str(ours)),
    )  # fmt: skip
    beat(window)
    banner = window.banner
    assert banner.title.text() == "The engine could not start with this draft model"
    assert banner.text.full_text == "their tokenizers differ."
    # What starts with the same model again is not what is offered first.
    assert (banner.draft.property("role"), banner.restart.property("role")) == ("filled", "")
    banner.draft.click()
    assert window.findChild(DraftModelDialog) is not None
    link.status = dataclasses.replace(link.status, command_line=("python3", "-m", "engine"))
    beat(window)
    assert banner.title.text() == "The engine could not start"
    assert banner.draft.isHidden()
    assert banner.restart.property("role") == "filled"
