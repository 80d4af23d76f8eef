"""What a panel shows instead of nothing: why it is empty and the one thing to do about it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.widgets.basic import button, column, label, row
from app.widgets.focus import set_enabled


class EmptyState(QWidget):
    """A sentence or two in the middle, and at most one button."""

    def __init__(
        self, title: str, text: str = "", action: str = "", call: Callable[[], object] | None = None
    ):
        super().__init__()
        self.title = label(title, "title", wrap=True)
        self.text = label(text, "dim", wrap=True)
        for part in (self.title, self.text):
            part.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        parts: list[object] = [None, self.title, self.text]
        self.button = button(action, call, "primary") if action else None
        if self.button is not None:
            parts.append(row(None, self.button, None))
        parts.append(None)
        self.setLayout(column(*parts, spacing=6, margins=(16, 8, 16, 8)))

    def set_usable(self, usable: bool, why_not: str) -> None:
        """Let its button be pressed or not; ``why_not`` is its tooltip then."""
        if self.button is not None:
            set_enabled(self.button, usable)
            tip = "" if usable else why_not
            if tip != self.button.toolTip():
                self.button.setToolTip(tip)

    def set_texts(self, title: str, text: str) -> None:
        """Change what is said."""
        if self.title.text() != title:
            self.title.setText(title)
        if self.text.text() != text:
            self.text.setText(text)
