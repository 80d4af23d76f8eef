"""A line across the window for the one thing that matters now: the engine is loading, or it is gone."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Signal
from PySide6.QtWidgets import QFrame, QProgressBar, QWidget

from app.i18n import tr
from app.widgets.basic import WrappedLabel, button, column, label, row, set_role, set_state, set_tip
from app.widgets.focus import set_visible
from app.widgets.status_pill import StatusPill

PROGRESS_WIDTH = 220


class Banner(QFrame):
    """Hidden while all is well.

    ``over``: it lies over the upper edge of this widget and takes no room, so that nothing moves under the
    pointer when it comes and goes.
    """

    restart_asked = Signal()
    log_asked = Signal()
    draft_asked = Signal()
    cancel_asked = Signal()

    def __init__(self, over: QWidget | None = None) -> None:
        super().__init__(None if over is None else over.window())
        self._over = over
        self.pill = StatusPill()
        self.title = label("", "title")
        self.text = WrappedLabel("dim")
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.log = button(tr("Show log"), self.log_asked.emit)
        self.draft = button(tr("Draft model…"), self.draft_asked.emit)
        self.restart = button(tr("Restart engine"), self.restart_asked.emit, "filled")
        self.cancel = button(tr("Cancel the change"), self.cancel_asked.emit)
        set_tip(
            self.cancel,
            tr("Give the change up and go back to the configuration before it. Requests then go on."),
        )
        buttons = (self.log, self.draft, self.restart, self.cancel)
        if over is None:
            self.progress.setFixedWidth(PROGRESS_WIDTH)
            line = row(self.pill, self.title, self.text, self.progress, *buttons, spacing=8)
            line.setContentsMargins(8, 6, 10, 6)
            line.setStretchFactor(self.text, 1)
            self.setLayout(line)
        else:
            # The charts may be narrow: title and buttons have a line of their own, and so has the bar.
            head = row(self.pill, self.title, None, *buttons, spacing=8)
            self.setLayout(column(head, self.text, self.progress, spacing=4, margins=(8, 6, 10, 8)))
        self.hide()

    def show_message(
        self, level: str, title: str, text: str, *, share: float | None = None, busy: bool = False,
        can_restart: bool = False, log: bool = False, draft: bool = False, can_cancel: bool = False,
    ) -> None:  # fmt: skip
        """Show one message. ``share`` 0..1 draws a bar; ``busy`` one without an end."""
        set_state(self, "role", "banner" if level == "alarm" else "card" if self._over is None else "toast")
        self.pill.set_state(level, "")
        self.title.setText(title)
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
        set_visible(self.cancel, can_cancel)
        self.setAccessibleName(f"{title}. {text}")
        if self._over is not None:
            corner = self._over.mapTo(self.window(), QPoint(0, 0))
            self.text.fit(self._over.width() - 18)
            self.layout().activate()  # type: ignore[union-attr]
            self.setGeometry(corner.x(), corner.y(), self._over.width(), self.sizeHint().height())
            self.raise_()
        self.show()
        if self._over is None:
            parts = [self.pill, self.title, self.progress, self.log, self.draft, self.restart, self.cancel]
            widths = [PROGRESS_WIDTH if part is self.progress else part.sizeHint().width() for part in parts]
            taken = sum(w + 8 for part, w in zip(parts, widths, strict=True) if part.isVisibleTo(self))
            self.text.fit(self.width() - taken - 26)
