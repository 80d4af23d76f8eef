"""A line across the window for the one thing that matters now: the engine is loading, or it is gone."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QProgressBar

from app.i18n import tr
from app.widgets.basic import ElidedLabel, button, label, row, set_state
from app.widgets.status_pill import StatusPill


class Banner(QFrame):
    """Hidden while all is well."""

    restart_asked = Signal()
    log_asked = Signal()
    draft_asked = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.pill = StatusPill()
        self.title = label("", "title")
        self.text = ElidedLabel("", "dim")
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setFixedWidth(220)
        self.log = button(tr("Show log"), self.log_asked.emit)
        self.draft = button(tr("Draft model…"), self.draft_asked.emit)
        self.restart = button(tr("Restart engine"), self.restart_asked.emit, "filled")
        buttons = (self.log, self.draft, self.restart)
        line = row(self.pill, self.title, self.text, self.progress, *buttons, spacing=8)
        line.setContentsMargins(8, 6, 10, 6)
        line.setStretchFactor(self.text, 1)
        self.setLayout(line)
        self.hide()

    def show_message(
        self, level: str, title: str, text: str, *, share: float | None = None, busy: bool = False,
        can_restart: bool = False, log: bool = False, draft: bool = False,
    ) -> None:  # fmt: skip
        """Show one message. ``share`` 0..1 draws a bar; ``busy`` one without an end."""
        set_state(self, "role", "banner" if level == "alarm" else "card")
        self.pill.set_state(level, "")
        self.title.setText(title)
        self.text.set_full_text(text)
        self.progress.setVisible(share is not None or busy)
        if share is not None:
            self.progress.setRange(0, 1000)
            self.progress.setValue(round(min(1.0, max(0.0, share)) * 1000))
        elif busy:
            self.progress.setRange(0, 0)
        self.restart.setVisible(can_restart)
        self.log.setVisible(log)
        self.draft.setVisible(draft)
        self.setAccessibleName(f"{title}. {text}")
        self.show()
