"""The Playground: a conversation, its costs, and how it ends."""

from __future__ import annotations

import msgspec
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.main_window import MainWindow
from app.net.types import StreamLost
from ipc.messages import Cancel, Done, Error, RequestRow, Submit, Tokens
from tests.app.gui.conftest import beat
from tests.app.gui.feed import FeedLink

MS = 1_000_000


def ask(window: MainWindow, link: FeedLink, qtbot: QtBot, text: str = "Hello") -> int:
    link.ready()
    beat(window)
    window.show_panel("playground")
    qtbot.keyClicks(window.playground.field, text)
    qtbot.keyClick(window.playground.field, Qt.Key.Key_Return)
    number = link.accept_chat(rid=5)
    beat(window, 2)
    return number


def row(output: int, finish: str = "stop") -> RequestRow:
    return RequestRow(
        rid=5, tag="playground", state="finished", arrive_ns=0, prompt_tok=12, cached_tok=8,
        output_tok=output,
        first_ns=150 * MS, last_ns=(150 + 40 * (output - 1)) * MS, end_ns=10**9, finish=finish,
    )  # fmt: skip


def test_a_reply_streams_and_shows_its_cost(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    number = ask(window, link, qtbot)
    _, command = link.last(Submit)
    assert [m.content for m in command.messages] == ["Hello"]
    assert window.playground.send.text() == "Stop"
    link.stream(number, Tokens(rid=5, index=0, ids=[1, 2], text="Good <b>day", t_ns=[150 * MS, 190 * MS]))
    beat(window, 2)
    view = window.playground._views[1]
    assert view.body.text() == "Good <b>day"
    assert view.body.toPlainText() == "Good <b>day", "it is no markup"
    link.stream(number, Done(rid=5, finish="stop", text=".", row=row(3)))
    beat(window, 2)
    assert view.body.text() == view.body.toPlainText() == "Good <b>day."
    shown = view.meta.text().replace("\u00a0", " ")
    assert shown == "TTFT 150 ms · 25.0 tok/s · 3 tokens · 8 of 12 prompt tokens cached"
    assert window.playground.send.text() == "Send"


def test_a_reply_shows_how_many_drafts_held(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    number = ask(window, link, qtbot)
    drafted = msgspec.structs.replace(row(9), drafted_tok=8, accepted_tok=5)
    link.stream(number, Done(rid=5, finish="stop", text="Good day.", row=drafted))
    beat(window, 2)
    shown = window.playground._views[1].meta.text().replace("\u00a0", " ")
    assert "9 tokens · 62 % of 8 drafted accepted" in shown


def test_the_conversation_goes_along(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    number = ask(window, link, qtbot)
    link.stream(number, Done(rid=5, finish="stop", text="Good day.", row=row(3)))
    beat(window, 2)
    window.playground.field.setPlainText("And now?")
    window.playground.on_send()
    _, command = link.last(Submit)
    assert [(m.role, m.content) for m in command.messages] == [
        ("user", "Hello"), ("assistant", "Good day."), ("user", "And now?"),
    ]  # fmt: skip


def test_stop_cancels_and_keeps_what_came(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    number = ask(window, link, qtbot)
    link.stream(number, Tokens(rid=5, index=0, ids=[1], text="Good", t_ns=[150 * MS]))
    beat(window, 2)
    qtbot.mouseClick(window.playground.send, Qt.MouseButton.LeftButton)
    assert link.last(Cancel)[1].rid == 5
    link.stream(number, Done(rid=5, finish="cancelled", row=row(1, "cancelled")))
    beat(window, 2)
    view = window.playground._views[1]
    assert view.body.text() == "Good"
    assert "stopped" in view.meta.text()


def test_f09_an_open_reply_fails_when_the_engine_dies(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    """F09: open streams get an error instead of hanging."""
    number = ask(window, link, qtbot)
    link.stream(number, StreamLost(rid=5, message="The engine ended: it was killed by SIGKILL."))
    beat(window, 2)
    view = window.playground._views[1]
    assert "killed by SIGKILL" in view.meta.text()
    assert view.meta.property("role") == "alarm"
    assert not window.console.chat.busy


def test_a_refusal_is_shown_and_left_out_of_the_next_question(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    link.ready()
    beat(window)
    window.show_panel("playground")
    window.playground.field.setPlainText("x")
    window.playground.on_send()
    number, _ = link.last(Submit)
    link.answer(number, Error(id=number, code="too_long", message="The prompt is too long."))
    beat(window, 2)
    assert "too long" in window.playground._views[1].meta.text()
    window.playground.field.setPlainText("short")
    window.playground.on_send()
    assert [m.content for m in link.last(Submit)[1].messages] == ["short"], (
        "the refused one is not sent again"
    )


def test_a_question_without_an_answer_does_not_make_two_in_a_row(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    number = ask(window, link, qtbot, "first")
    link.stream(number, Done(rid=5, finish="cancelled", row=row(0, "cancelled")))
    beat(window, 2)
    ask(window, link, qtbot, "second")
    assert [m.content for m in link.last(Submit)[1].messages] == ["second"]


def test_what_is_stopped_before_the_engine_has_named_it_is_cancelled_then(
    window: MainWindow, link: FeedLink, qtbot: QtBot
) -> None:
    link.ready()
    beat(window)
    window.show_panel("playground")
    window.playground.field.setPlainText("x")
    window.playground.on_send()
    window.playground.clear.click()
    assert not any(isinstance(command, Cancel) for command in link.sent)
    link.accept_chat(rid=5)
    beat(window, 2)
    assert link.last(Cancel)[1].rid == 5


def test_a_new_chat_is_empty(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    ask(window, link, qtbot)
    window.playground.clear.click()
    beat(window, 1)
    assert window.playground._views == []
    assert window.playground.empty.isVisible()


def test_text_without_spaces_makes_nothing_wider(window: MainWindow, link: FeedLink, qtbot: QtBot) -> None:
    """One long address or line of code had the whole conversation scroll sideways."""
    word = "https://example.org/" + "x" * 400
    number = ask(window, link, qtbot, word)
    panel = window.playground
    link.stream(number, Tokens(rid=5, index=0, ids=[1], text=word, t_ns=[150 * MS]))
    beat(window, 2)
    link.stream(number, Tokens(rid=5, index=1, ids=[2], text=word + "\nand more", t_ns=[190 * MS]))
    beat(window, 2)
    question, reply = panel._views
    width = panel.area.viewport().width()
    assert panel.area.horizontalScrollBar().maximum() == 0
    assert panel.page.width() <= width
    for view in (question, reply):
        line = view.body.fontMetrics().height()
        assert view.body.document().size().width() <= view.body.width()
        assert view.body.height() >= view.body.document().size().height() > 4 * line, "all lines are seen"
        assert view.body.mapTo(panel.page, view.body.rect().topRight()).x() < width
    assert reply.body.toPlainText() == 2 * word + "\nand more"
    reply.body.selectAll()
    assert reply.body.textCursor().selectedText().replace("\u2029", "\n") == 2 * word + "\nand more"
