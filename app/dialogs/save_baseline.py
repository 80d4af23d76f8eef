"""Name a baseline and say what it is made of."""

from __future__ import annotations

import time

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import QComboBox, QDialog, QGridLayout, QLineEdit, QPlainTextEdit, QWidget

from app.console import Console
from app.i18n import tr, tr_engine, tr_n
from app.store.compare import other_work
from app.store.errors import StoreError
from app.units import count, pause
from app.units import span as span_text
from app.widgets.basic import button, column, label, row

WINDOWS_S = (30, 60, 300, 900)


class SaveBaselineDialog(QDialog):
    """Emits `accepted_values` with (name, note, source, span_s or None)."""

    accepted_values = Signal(object)

    def __init__(self, console: Console, parent: QWidget) -> None:
        super().__init__(parent)
        self._console = console
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Save baseline"))
        self.setMinimumWidth(460)
        self.name = QLineEdit(self._suggest())
        self.name.setMaxLength(128)
        self.name.setAccessibleName(tr("Name"))
        self.name.selectAll()
        self.note = QPlainTextEdit()
        self.note.setPlaceholderText(tr("What was tried, and why (optional)"))
        self.note.setAccessibleName(tr("Note"))
        self.note.setFixedHeight(72)
        self.note.setTabChangesFocus(True)
        self.source = QComboBox()
        self.source.setAccessibleName(tr("Measured over"))
        if self._load_rows():
            rows = self._load_rows()
            text = tr_n("the last load run ({n} request)", "the last load run ({n} requests)", rows)
            text = text.format(n=count(rows))
            self.source.addItem(text, ("load", None))
        if console.session.changed_s is not None:
            ago = pause(console.session.now_s - console.session.changed_s)
            text = tr("live traffic since the last change ({time} ago)").format(time=ago)
            self.source.addItem(text, ("change", None))
        for span in WINDOWS_S:
            self.source.addItem(
                tr("live traffic of the last {time}").format(time=span_text(span)), ("live", span)
            )
        self.hint = label("", "small", wrap=True)
        self.caution = label("", "warning", wrap=True)
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        for i, (text, field) in enumerate(
            ((tr("Name"), self.name), (tr("Note"), self.note), (tr("Measured over"), self.source))
        ):
            grid.addWidget(label(text, "dim"), i, 0, Qt.AlignmentFlag.AlignTop)
            grid.addWidget(field, i, 1)
        self.save = button(tr("Save"), self.accept, "filled")
        self.save.setDefault(True)
        buttons = row(None, button(tr("Cancel"), self.reject), self.save)
        self.setLayout(column(grid, self.hint, self.caution, buttons, spacing=12, margins=(16, 16, 16, 14)))
        self.name.textChanged.connect(self._check)
        self.source.currentIndexChanged.connect(self._check)
        self._check()

    def _suggest(self) -> str:
        model = self._console.session.model
        stamp = time.strftime("%H:%M")
        return f"{model.name} {stamp}" if model is not None else stamp

    def _load_rows(self) -> int:
        return len(self._console.load_run.rows()) if self._console.load_run.spec is not None else 0

    @Slot()
    def _check(self) -> None:
        self.save.setEnabled(bool(self.name.text().strip()))
        source, span = self.source.currentData()
        try:
            data = self._console.shelf.data("?", "", source, None if span is None else float(span))
        except StoreError:
            self.save.setEnabled(False)
            text = tr("No request ended in this time. Start a load, or choose a longer time.")
            if source == "change":
                text = tr("No request has begun and ended since the change yet. Let the load go on.")
            self._tell("", text)
            return
        if source == "load":
            text = tr("Every request of the run is kept, with its intended and its actual times.")
        else:
            ended = len(data.requests)
            text = tr_n("{n} request ended in this time.", "{n} requests ended in this time.", ended)
            text = text.format(n=count(ended))
        cautions = []
        if not data.validity.valid:
            why = "; ".join(map(tr_engine, data.validity.reasons))
            cautions.append(tr("It will be marked as doubtful: {why}.").format(why=why))
        work = other_work(data.step_stats)
        if work:
            cautions.append(tr("Take its figures with caution: {why}.").format(why=tr_engine(work)))
        self._tell(text, "\n".join(cautions))

    def _tell(self, hint: str, caution: str) -> None:
        for line, text in ((self.hint, hint), (self.caution, caution)):
            line.setText(text)
            line.setVisible(bool(text))

    def accept(self) -> None:
        """Tell what was entered, and close."""
        source, span = self.source.currentData()
        values = (self.name.text().strip(), self.note.toPlainText().strip(), source, span)
        self.accepted_values.emit(values)
        super().accept()
