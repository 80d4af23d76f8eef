"""Changes that take long: asked for with their price, told of without moving the window, and cancelled."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QComboBox

from app import i18n
from app.console import Console
from app.dialogs.save_baseline import SaveBaselineDialog
from app.dialogs.search_codes import SearchCodesDialog
from app.main_window import MainWindow
from app.net.types import LinkState
from ipc.messages import CANCELLED, ApplyEvent, CfgCancel, CfgSet
from tests.app import builders as b
from tests.app.gui import feed
from tests.app.gui.conftest import beat, discard, until
from tests.app.gui.feed import KNOBS, FeedLink

WEIGHTS = [
    b.knob("weight_dtype", group="weights", title="Weight precision", type="choice", default="model",
           choices=["model", "int8", "int4"], apply="reload"),
    b.knob("int4_method", group="weights", title="4-bit rounding", type="choice", default="awq",
           choices=["awq", "rtn"], apply="reload"),
    b.knob("high_precision", group="weights", title="Kept layers", type="choice", default="head",
           choices=["none", "head"], apply="reload"),
]  # fmt: skip
VALUES = {info.id: info.default for info in WEIGHTS}


@pytest.fixture(autouse=True)
def weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KNOBS", [*WEIGHTS, *KNOBS])
    monkeypatch.setattr(feed, "VALUES", {**feed.VALUES, **VALUES})


def choose(window: MainWindow, knob: str, value: str) -> None:
    editor = window.optimizations.rows[knob].editor
    assert isinstance(editor, QComboBox)
    editor.setCurrentIndex(editor.findData(value))
    editor.activated.emit(editor.currentIndex())


def question(window: MainWindow) -> SearchCodesDialog | None:
    return window.findChild(SearchCodesDialog)


def patches(link: FeedLink) -> list[dict[str, object]]:
    return [dict(command.patch) for command in link.sent if isinstance(command, CfgSet)]


@pytest.mark.parametrize(("answer", "sent"), [
    ("search", [{"weight_dtype": "int4"}]), ("rounding", [{"weight_dtype": "int4", "int4_method": "rtn"}]),
    ("keep", []),
])  # fmt: skip
def test_the_first_search_of_codes_says_what_it_takes_and_offers_rounding(
    window: MainWindow, link: FeedLink, answer: str, sent: list[dict[str, object]]
) -> None:
    link.ready()
    link.push(state=b.state(running=3, waiting=1))
    beat(window)
    choose(window, "weight_dtype", "int4")
    asked = question(window)
    assert asked is not None
    assert patches(link) == [], "nothing is asked for before it is confirmed"
    assert "minutes" in asked.text()
    assert "cancelled at any time" in asked.informativeText()
    assert "would wait now: 4" in asked.informativeText()
    getattr(asked, answer).click()
    beat(window, 2)
    assert patches(link) == sent
    editor = window.optimizations.rows["weight_dtype"].editor
    assert isinstance(editor, QComboBox)
    assert editor.currentData() == ("int4" if sent else "model")


def test_codes_that_are_there_already_are_not_asked_about(window: MainWindow, link: FeedLink) -> None:
    link.ready(weight_dtype="int4")
    beat(window)
    for value in ("int8", "int4"):
        choose(window, "weight_dtype", value)
        link.apply(*link.last(CfgSet), rev=len(patches(link)))
        beat(window, 4)
    assert question(window) is None
    assert patches(link) == [{"weight_dtype": "int8"}, {"weight_dtype": "int4"}]


def applying(window: MainWindow, link: FeedLink, share: float = 0.25, **changes: object) -> None:
    link.push(state=b.state(
        phase="applying", stage="searching 4-bit codes (AWQ)", done_bytes=round(share * 1000),
        total_bytes=1000,
        since_ns=time.monotonic_ns() - 20_000_000_000, pending_apply=7, running=3, waiting=1, **changes,
    ))  # fmt: skip
    beat(window)


def test_a_change_moves_nothing_under_the_pointer(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    rows = window.optimizations.rows
    seen = [window.optimizations, window.ttft, window.kpis, window.kv_map, *rows.values()]
    before = [(part.mapTo(window, QPoint(0, 0)), part.size()) for part in seen]
    applying(window, link)
    assert window.change_banner.isVisible()
    assert window.banner.isHidden()
    assert [(part.mapTo(window, QPoint(0, 0)), part.size()) for part in seen] == before
    assert window.change_banner.width() == window.splitter.width()
    assert window.kpis.tiles["running"].quantity.value == "0 / 4", "as the banner says, they wait"


def test_a_change_can_be_cancelled_which_is_no_refusal(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    window.console.knobs.set({"weight_dtype": "int4"})
    number, command = link.last(CfgSet)
    applying(window, link)
    window.change_banner.cancel.click()
    assert link.last(CfgCancel)[1].apply_id == 7
    link.apply(number, command, ok=False, why=CANCELLED, rev=7)
    beat(window)
    link.push(state=b.state())
    beat(window)
    assert window.change_banner.isHidden()
    told = [(toast.level, toast.text) for toast in window.toasts.toasts]
    assert told == [("info", "Weight precision: int4 was cancelled; the configuration is as it was before.")]
    row = window.optimizations.rows["weight_dtype"]
    assert row.status.full_text == "converts"
    assert isinstance(row.editor, QComboBox)
    assert row.editor.currentData() == "model"


def test_what_cannot_be_measured_cannot_be_cancelled(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window)
    link.push(state=b.state(phase="applying", pending_apply=1))
    beat(window)
    assert window.change_banner.cancel.isHidden()


def test_latencies_with_a_pause_in_them_say_so(window: MainWindow, link: FeedLink) -> None:
    link.ready()
    beat(window, 1)
    now = window.session.now_s
    event = ApplyEvent(
        apply_id=1, from_rev=0, to_rev=1, result="ok", t_ns=round((now - 1) * 1e9), at_step=1, mode="reload",
        took_us=9_700_000, patch={"weight_dtype": "int8"},
    )  # fmt: skip
    waited = b.request_row(
        1, now - 9, sched_ns=round((now - 1) * 1e9), first_ns=round((now - 0.9) * 1e9),
        last_ns=round((now - 0.5) * 1e9), end_ns=round((now - 0.5) * 1e9), preempt_reason="rebuild",
        preempted_us=9_700_000,
    )  # fmt: skip
    link.push(requests=[waited], events=[event])
    beat(window)
    for name, chart in (("ttft", window.ttft), ("tpot", window.tpot)):
        tile = window.kpis.tiles[name]
        assert tile.note.replace("\u00a0", " ") == "with a pause of 9.7 s"
        assert "waited up to 9.7 s for a change" in tile.toolTip().replace("\u00a0", " ")
        assert "n=1" in tile.toolTip()
        until(window, lambda chart=chart: chart.basis() != "no traffic")
        assert chart.basis().replace("\u00a0", " ").startswith("includes a pause of 9.7 s for a change · n=")


def test_a_baseline_is_called_doubtful_before_it_is_saved(window: MainWindow, link: FeedLink) -> None:
    """And what ran since the last change is offered, which holds one configuration."""
    link.ready()
    beat(window, 1)
    now = window.session.now_s
    event = ApplyEvent(
        apply_id=1, from_rev=0, to_rev=1, result="ok", t_ns=round((now - 10) * 1e9), at_step=1, mode="step",
        took_us=100, patch={"prefix_cache": False},
    )  # fmt: skip
    rows = [
        b.request_row(n, now - 20 + n, rev_first=int(n > 10), rev_last=int(n >= 10)) for n in range(1, 19)
    ]
    link.push(requests=rows, events=[event])
    beat(window)
    dialog = SaveBaselineDialog(window.console, window)
    assert dialog.source.currentData() == ("change", None)
    assert "since the last change" in dialog.source.currentText()
    assert dialog.hint.text() == "8 requests ended in this time."
    assert dialog.caution.isHidden()
    dialog.source.setCurrentIndex(1)
    assert "marked as doubtful: the configuration changed inside the window" in dialog.caution.text()
    assert dialog.caution.property("role") == "warning"
    assert "requests ended in this time" in dialog.hint.text()
    assert dialog.hint.property("role") == "small", "what is so warns of nothing"
    assert dialog.save.isEnabled()
    data = window.console.shelf.data("x", "", "change", None)
    assert (data.validity.valid, data.config["prefix_cache"], len(data.requests)) == (True, False, 8)


@pytest.mark.parametrize("language", ["en", "zh_CN"])
def test_banners_are_read_whole_in_a_small_window(console: Console, link: FeedLink, language: str) -> None:
    """Nothing is cut, nothing lies upon something else, and a long reason takes two lines, not the window."""
    i18n.use(language)
    window = MainWindow(console)
    window.resize(1280, 800)
    window.show()
    link.ready()
    beat(window)
    window.console.knobs.set({"weight_dtype": "int8", "high_precision": "none", "int4_method": "rtn"})
    applying(window, link)
    banner = window.change_banner
    for part in (banner.title, banner.cancel):
        assert part.width() >= part.sizeHint().width()
    assert banner.text.text() == banner.text.full_text, "nothing is left out at its end"
    assert banner.text.height() >= banner.text.fontMetrics().height()
    boxes = [p.geometry() for p in (banner.pill, banner.title, banner.cancel, banner.text, banner.progress)]
    assert not [1 for a, b in itertools.combinations(boxes, 2) if a.intersects(b)]
    assert all(banner.rect().contains(box) for box in boxes)
    below = window.load_bar.mapTo(window, QPoint(0, 0)).y()
    assert banner.geometry().bottom() < below, "it does not hang over the load"
    more = "and 2 more" if language == "en" else "另 2 项"
    assert (more in banner.text.full_text) == ("rtn" not in banner.text.full_text)
    assert "rtn" in banner.toolTip(), "what is asked for is read whole there"
    reason = (
        "The engine's process has ended: it was killed by SIGKILL. That was 3.6 s after a change of its "
        "configuration; a restart goes back to the one before."
    )
    link.status = dataclasses.replace(link.status, state=LinkState.DEAD, reason=reason)
    beat(window)
    text = window.banner.text
    assert text.height() >= text.heightForWidth(text.width())
    assert window.banner.height() < 70
    window.keep_console = True
    discard(window)


@pytest.mark.parametrize("language", ["en", "zh_CN"])
@pytest.mark.parametrize("again", [True, False])
def test_a_change_that_a_restart_left_out_is_told_and_can_be_set_again(
    window: MainWindow, link: FeedLink, again: bool, language: str
) -> None:
    """F09: what the engine came back without stays in the banner until somebody decides on it."""
    link.ready()
    beat(window)
    assert window.banner.isHidden()
    link.ready()
    link.status = dataclasses.replace(link.status, session="s2", left_out={"weight_dtype": "int8"})
    i18n.use(language)
    beat(window, 2)
    banner = window.banner
    assert not banner.isHidden()
    assert not banner.again.isHidden()
    assert banner.restart.isHidden()
    assert "int8" in banner.text.full_text
    assert ("Restarted without" in banner.text.full_text) is (language == "en")
    log = window.console.journal.model
    assert sum(str(log.index(i).data()).endswith(banner.text.full_text) for i in range(log.rowCount())) == 1
    (banner.again if again else banner.forgo).click()
    beat(window, 2)
    assert patches(link) == ([{"weight_dtype": "int8"}] if again else [])
    assert banner.isHidden()
