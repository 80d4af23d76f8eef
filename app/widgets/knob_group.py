"""A group of optimizations: a heading that folds it, its rows, and behind one line what is not available."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QPushButton, QSizePolicy, QWidget

from app.i18n import tr
from app.units import count
from app.widgets.basic import column, label, row
from app.widgets.knob_row import KnobRow

OPEN, CLOSED = "▾", "▸"


class KnobGroup(QWidget):
    """`folded_changed` tells that a person folded or unfolded it."""

    folded_changed = Signal()

    def __init__(
        self, title: str, rows: Sequence[KnobRow], folded: bool, note: QWidget | None = None
    ) -> None:
        """``note`` stands below the knobs that can be used."""
        super().__init__()
        self._note = note
        self._title = title
        self.rows = [made for made in rows if made.info.available] + [
            made for made in rows if not made.info.available
        ]
        self._missing = sum(not made.info.available for made in rows)
        self._filter = ""
        self.head = _fold_button(title, "section")
        self.head.setChecked(not folded)
        self.head.clicked.connect(self._on_head)
        self.changed = label("", "small")
        self.more = _fold_button("", "more")
        self.more.setChecked(self._missing == 0)
        self.more.clicked.connect(self._arrange)
        head = row(self.head, None, self.changed, spacing=6)
        notes = [] if note is None else [note]
        self.setLayout(column(head, *self.rows[: len(rows) - self._missing], *notes, self.more,
                              *self.rows[len(rows) - self._missing :], spacing=3))  # fmt: skip
        self._arrange()

    @property
    def folded(self) -> bool:
        return not self.head.isChecked()

    def show_changed(self, number: int) -> None:
        """How many of its knobs differ from their default."""
        self.changed.setText(tr("{n} changed").format(n=count(number)) if number else "")

    def set_filter(self, text: str) -> None:
        """Show only rows that hold ``text``, folded or not; an empty text shows the group as it was."""
        self._filter = text.strip().casefold()
        self._arrange()

    @Slot()
    def _on_head(self) -> None:
        self._arrange()
        self.folded_changed.emit()

    @Slot()
    def _arrange(self) -> None:
        opened, filtered = self.head.isChecked(), bool(self._filter)
        found = [made.matches(self._filter) for made in self.rows]
        for made, hit in zip(self.rows, found, strict=True):
            shown = opened and (made.info.available or self.more.isChecked())
            made.setVisible(hit if filtered else shown)
        if self._note is not None:
            self._note.setVisible(any(found) if filtered else opened)
        self.more.setVisible(opened and self._missing > 0 and not filtered)
        text = tr("{n} not available here").format(n=count(self._missing))
        self.more.setAccessibleName(f"{self._title}: {text}")
        for fold, words in ((self.head, self._title), (self.more, text)):
            fold.setText(f"{OPEN if fold.isChecked() else CLOSED}  {words}")
        if self.parent() is not None:  # without one it would be a window for a moment
            self.setVisible(any(found) or not filtered)


def _fold_button(text: str, role: str) -> QPushButton:
    made = QPushButton()
    made.setProperty("role", role)
    made.setCheckable(True)
    made.setAccessibleName(text)
    made.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
    return made
