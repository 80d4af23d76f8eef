"""A line across the window for the one thing that matters now: the engine is loading, or it is gone."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QRect, Qt, Signal
from PySide6.QtWidgets import QFrame, QProgressBar, QWidget

from app.i18n import tr
from app.widgets.basic import (
    ElidedLabel,
    WrappedLabel,
    button,
    column,
    label,
    row,
    set_role,
    set_state,
    set_tip,
)
from app.widgets.focus import set_visible
from app.widgets.status_pill import StatusPill

PROGRESS_WIDTH = 220
HEAD_HEIGHT = 24  # of the first of two lines where there is little room


class Banner(QFrame):
    """Hidden while all is well.

    ``room``: it lies in this part of its window, which nothing else uses, so that nothing moves under the
    pointer and nothing is hidden when it comes and goes. Its text then has one line.
    """

    restart_asked = Signal()
    log_asked = Signal()
    draft_asked = Signal()
    cancel_asked = Signal()
    cpu_asked = Signal()
    again_asked = Signal()
    forgo_asked = Signal()

    def __init__(self, window: QWidget | None = None, room: Callable[[], QRect] | None = None) -> None:
        super().__init__(window)
        self._room = room
        self.pill = StatusPill()
        self.title = label("", "title")
        self.text: WrappedLabel | ElidedLabel = WrappedLabel("dim")
        if room is not None:  # how far it is stands at the end
            self.text = ElidedLabel("", "small", Qt.TextElideMode.ElideMiddle)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.log = button(tr("Show log"), self.log_asked.emit)
        self.draft = button(tr("Draft model…"), self.draft_asked.emit)
        self.cpu = button(tr("Start on the CPU"), self.cpu_asked.emit)
        set_tip(self.cpu, tr("Start the engine anew with the same model on the CPU instead of the card."))
        self.restart = button(tr("Restart engine"), self.restart_asked.emit, "filled")
        self.cancel = button(tr("Cancel the change"), self.cancel_asked.emit)
        set_tip(
            self.cancel,
            tr("Give the change up and go back to the configuration before it. Requests then go on."),
        )
        self.again = button(tr("Set it again"), self.again_asked.emit, "filled")
        self.forgo = button(tr("Leave it"), self.forgo_asked.emit)
        set_tip(self.forgo, tr("Stay with the configuration that the engine was restarted with."))
        self._buttons = buttons = (
            self.log, self.draft, self.cpu, self.restart, self.cancel, self.again, self.forgo,
        )  # fmt: skip
        if room is None:
            self.progress.setFixedWidth(PROGRESS_WIDTH)
            line = row(self.pill, self.title, self.text, self.progress, *buttons, spacing=8)
            line.setContentsMargins(8, 6, 10, 6)
            line.setStretchFactor(self.text, 1)
            self.setLayout(line)
        else:
            set_role(self.cancel, "flat")
            head = row(self.pill, self.title, 4, self.progress, *buttons, spacing=6)
            head.setStretchFactor(self.progress, 1)
            self.cancel.setFixedHeight(HEAD_HEIGHT)
            self.setLayout(column(head, self.text, spacing=0, margins=(8, 0, 6, 1)))
        self.hide()

    def show_message(
        self, level: str, title: str, text: str, brief: str = "", *, share: float | None = None,
        busy: bool = False, can_restart: bool = False, log: bool = False, draft: bool = False,
        can_cancel: bool = False, cpu: bool = False, again: bool = False,
    ) -> None:  # fmt: skip
        """Show one message. ``share`` 0..1 draws a bar; ``busy`` one without an end.

        ``brief``: what to show where ``text`` has no room in its one line; the whole is then the tooltip.
        """
        set_state(self, "role", "banner" if level == "alarm" else "card" if self._room is None else "toast")
        self.pill.set_state(level, "")
        self.title.setText(title)
        if self._room is None:
            self.text.set_full_text(text)
        self.progress.setVisible(share is not None or busy)
        if share is not None:
            self.progress.setRange(0, 1000)
            self.progress.setValue(round(min(1.0, max(0.0, share)) * 1000))
        elif busy:
            self.progress.setRange(0, 0)
        set_visible(self.restart, can_restart)
        # What starts with the same draft model would fail the same way.
        set_role(self.restart, "" if draft else "filled")
        set_role(self.draft, "filled" if draft else "")
        set_visible(self.log, log)
        set_visible(self.draft, draft)
        set_visible(self.cpu, cpu)
        set_visible(self.cancel, can_cancel)
        set_visible(self.again, again)
        set_visible(self.forgo, again)
        self.setAccessibleName(f"{title}. {text}")
        if self._room is not None:
            room = self._room()
            fits = self.text.fontMetrics().horizontalAdvance(text) <= room.width() - 14
            self.text.set_full_text(text if fits or not brief else brief)
            set_tip(self, text)
            self.layout().activate()  # type: ignore[union-attr]
            height = min(self.sizeHint().height(), room.height())
            top = room.top() + (room.height() - height) // 2
            self.setGeometry(room.left(), top, room.width(), height)
            self.raise_()
        self.show()
        if isinstance(self.text, WrappedLabel):
            parts = [self.pill, self.title, self.progress, *self._buttons]
            widths = [PROGRESS_WIDTH if part is self.progress else part.sizeHint().width() for part in parts]
            taken = sum(w + 8 for part, w in zip(parts, widths, strict=True) if part.isVisibleTo(self))
            self.text.fit(self.width() - taken - 26)
