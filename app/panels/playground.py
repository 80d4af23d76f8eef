"""The Playground: talk with the model and see what each reply cost."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QScrollArea, QSizePolicy, QWidget

from app.console import Console, Notice
from app.i18n import tr, tr_engine, tr_n
from app.model.chat import Turn
from app.units import count, percent, rate, seconds
from app.widgets.basic import button, column, label, row, set_role, set_tip
from app.widgets.empty_state import EmptyState
from app.widgets.flowing_text import FlowingText
from app.widgets.focus import set_enabled
from app.widgets.number_field import FloatField, IntField


class TurnView(QWidget):
    """One message and, below a reply, what it cost."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self.body = FlowingText()
        self.meta = label("", "small", wrap=True)
        self.meta.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        set_tip(
            self.meta,
            tr(
                "TTFT and rate are the engine's own times: arrival to first token, and tokens after "
                "the first per second. Of the tokens that speculation drafted for it, the share that the "
                "model agreed with."
            ),
        )
        if turn.role == "user":
            bubble = QFrame()
            bubble.setProperty("role", "bubble")
            bubble.setLayout(column(self.body, margins=(10, 6, 10, 6)))
            self.setLayout(row(32, bubble))
            self.layout().setStretch(1, 1)  # type: ignore[union-attr]
        else:
            self.setLayout(column(self.body, self.meta, spacing=2, margins=(2, 0, 16, 0)))
        self.refresh()

    def refresh(self) -> None:
        """Show the turn as it is now."""
        turn = self.turn
        waiting = turn.role == "assistant" and not turn.text and turn.state in ("waiting", "streaming")
        text = "…" if waiting else turn.text
        self.body.setText(text)
        if turn.role == "assistant":
            self.body.setVisible(bool(text))
            self.meta.setText(meta_text(turn))
            set_role(self.meta, "alarm" if turn.state == "failed" else "small")


def meta_text(turn: Turn) -> str:
    """What a reply cost, in one line."""
    if turn.state == "failed":
        return tr("Failed: {why}").format(why=tr_engine(turn.error))
    if turn.state == "waiting":
        return tr("waiting for the first token")
    parts = []
    if turn.ttft_s is not None:
        parts.append(f"TTFT {seconds(turn.ttft_s)}")
    if turn.tok_per_s is not None:
        parts.append(str(rate(turn.tok_per_s)))
    parts.append(tr_n("{n} token", "{n} tokens", turn.tokens).format(n=count(turn.tokens)))
    if turn.drafted_tok:
        held = percent(turn.accepted_tok / turn.drafted_tok)
        parts.append(tr("{share} of {n} drafted accepted").format(share=held, n=count(turn.drafted_tok)))
    if turn.cached_tok and turn.prompt_tok:
        parts.append(
            tr_n(
                "{n} of {total} prompt token cached", "{n} of {total} prompt tokens cached", turn.prompt_tok
            ).format(n=count(turn.cached_tok), total=count(turn.prompt_tok))
        )
    if turn.state == "stopped":
        parts.append(tr("stopped"))
    elif turn.finish == "length":
        parts.append(tr("cut at its length limit"))
    return " · ".join(parts)


class PlaygroundPanel(QWidget):
    """A transcript and a line to write in. Enter sends, Shift+Enter breaks the line."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._seen = -1
        self._views: list[TurnView] = []
        self.page = QWidget()
        self.page.setProperty("role", "page")
        self._list = column(None, spacing=12, margins=(12, 10, 12, 10))
        self.page.setLayout(self._list)
        self.area = QScrollArea()
        self.area.setWidgetResizable(True)
        self.area.setFrameShape(QFrame.Shape.NoFrame)
        self.area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.area.setWidget(self.page)
        self.empty = EmptyState(
            tr("Talk with the model"),
            tr("Each reply shows its TTFT and its tokens per second, under whatever load is running."),
        )
        self.field = QPlainTextEdit()
        self.field.setPlaceholderText(tr("Write a message; Enter sends it"))
        self.field.setAccessibleName(tr("Message"))
        self.field.setFixedHeight(54)
        self.field.setTabChangesFocus(True)
        self.field.installEventFilter(self)
        self.temperature = FloatField()
        self.temperature.setRange(0.0, 2.0)
        self.temperature.setSingleStep(0.1)
        self.temperature.setDecimals(1)
        self.temperature.setPrefix("T ")
        self.temperature.setFixedWidth(62)
        self.temperature.setAccessibleName(tr("Temperature"))
        set_tip(self.temperature, tr("Temperature: 0 always takes the likeliest token."))
        self.max_tokens = IntField()
        self.max_tokens.setRange(1, 8192)
        self.max_tokens.setValue(console.chat.max_tokens)
        self.max_tokens.setSuffix(tr(" tokens"))
        self.max_tokens.setFixedWidth(104)
        self.max_tokens.setAccessibleName(tr("Most tokens of a reply"))
        set_tip(self.max_tokens, tr("A reply ends after this many tokens."))
        for field in (self.temperature, self.max_tokens):
            field.refused.connect(self._on_refused)
        self.clear = button(tr("New chat"), self._on_clear, tip=tr("Begin a new conversation."))
        self.send = button(tr("Send"), self.on_send, "filled")
        bar = row(self.temperature, self.max_tokens, self.clear, None, self.send, spacing=6)
        foot = column(self.field, bar, spacing=6, margins=(10, 6, 10, 8))
        self.setLayout(column(self.empty, self.area, foot, spacing=0))
        self.layout().setStretch(0, 1)  # type: ignore[union-attr]
        self.layout().setStretch(1, 1)  # type: ignore[union-attr]
        self.refresh()

    @Slot(str, str)
    def _on_refused(self, name: str, why: str) -> None:
        self._console.noticed.emit(Notice("warning", tr("{name}: {why}").format(name=name, why=why)))

    def refresh(self) -> None:
        """Show what came since the last frame."""
        chat, ready = self._console.chat, self._console.engine_ready
        self.send.setText(tr("Stop") if chat.busy else tr("Send"))
        set_enabled(self.send, chat.busy or ready)
        self.send.setToolTip("" if ready else tr("The engine is not ready yet."))
        set_role(self.send, "primary" if chat.busy else "filled")
        if chat.version == self._seen:
            return
        self._seen = chat.version
        bar = self.area.verticalScrollBar()
        following = bar.value() >= bar.maximum() - 8
        if [view.turn for view in self._views] != chat.turns[: len(self._views)]:
            for view in self._views:
                self._list.removeWidget(view)
                view.deleteLater()
            self._views = []
        for turn in chat.turns[len(self._views) :]:
            view = TurnView(turn)
            self._views.append(view)
            self._list.insertWidget(self._list.count() - 1, view)
            following = True
        for view in self._views[-2:]:
            view.refresh()
        self.empty.setVisible(not self._views)
        self.area.setVisible(bool(self._views))
        if following:
            self.page.adjustSize()
            self._list.activate()
            bar.setValue(bar.maximum())
            bar.rangeChanged.connect(self._stick, Qt.ConnectionType.UniqueConnection)

    @Slot(int, int)
    def _stick(self, _low: int, high: int) -> None:
        bar = self.area.verticalScrollBar()
        if self._console.chat.busy or bar.value() >= high - 200:
            bar.setValue(high)

    @Slot()
    def on_send(self) -> None:
        """Send the message, or stop the reply that is on its way."""
        chat = self._console.chat
        if chat.busy:
            chat.stop()
            return
        text = self.field.toPlainText().strip()
        if text and self._console.engine_ready:
            chat.temperature = self.temperature.value()
            chat.max_tokens = self.max_tokens.value()
            chat.ask(text)
            self.field.clear()
            self.refresh()

    @Slot()
    def _on_clear(self) -> None:
        self._console.chat.clear()
        self.refresh()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.KeyPress and isinstance(event, QKeyEvent):
            plain = not event.modifiers() & Qt.KeyboardModifier.ShiftModifier
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and plain:
                self.on_send()
                return True
        return False
