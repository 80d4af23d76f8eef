"""The log: what the engine says, filtered by level and text."""

from __future__ import annotations

import time

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QApplication, QComboBox, QLineEdit, QListView, QWidget

from app import theme
from app.console import Console, Notice
from app.i18n import N_, tr, tr_later
from app.model.log_table import LogFilter, LogModel
from app.units import count
from app.widgets.basic import button, column, row
from ipc.messages import LogLine

LEVEL_NAMES = {"debug": N_("All"), "info": N_("Info"), "warning": N_("Warnings"), "error": N_("Errors")}


class LogPanel(QWidget):
    """Follows the newest line unless scrolled up."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._seen = 0
        self._own: list[LogLine] = []
        self.model = LogModel()
        self.filter = LogFilter(self.model)
        self.view = QListView()
        self.view.setModel(self.filter)
        self.view.setFont(theme.fixed_font())
        self.view.setUniformItemSizes(True)
        self.view.setAccessibleName(tr("Log"))
        self.view.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.level = QComboBox()
        self.level.setAccessibleName(tr("Least level"))
        for key, name in LEVEL_NAMES.items():
            self.level.addItem(tr_later(name), key)
        self.level.setCurrentIndex(1)
        self.level.currentIndexChanged.connect(self._on_level)
        self.text = QLineEdit()
        self.text.setPlaceholderText(tr("Search the log"))
        self.text.setAccessibleName(tr("Search the log"))
        self.text.setClearButtonEnabled(True)
        self.text.textChanged.connect(self.filter.set_text)
        copy = button(tr("Copy"), self.copy, tip=tr("Copy the selected lines, or all."))
        clear = button(tr("Clear"), self.model.clear)
        bar = row(self.level, self.text, copy, clear, margins=(10, 4, 10, 4), spacing=6)
        self.setLayout(column(bar, self.view, spacing=0))
        QShortcut(QKeySequence.StandardKey.Copy, self.view, self.copy)
        console.noticed.connect(self._on_notice)

    def refresh(self) -> None:
        """Take in new lines."""
        session = self._console.session
        new = min(session.log_total - self._seen, len(session.logs))
        self._seen = session.log_total
        lines = list(session.logs)[len(session.logs) - new :] if new > 0 else []
        lines += self._own
        self._own = []
        if lines:
            bar = self.view.verticalScrollBar()
            following = bar.value() >= bar.maximum() - 4
            self.model.append(lines)
            if following:
                self.view.scrollToBottom()
            self.summary_changed.emit(tr("{n} lines").format(n=count(self.model.rowCount())))

    @Slot(object)
    def _on_notice(self, notice: Notice) -> None:
        text = f"{notice.text}\n{notice.detail}".strip()
        level = notice.level if notice.level in ("info", "warning", "error") else "info"
        stamp = int(time.time() * 1000)
        self._own.append(LogLine(n=0, level=level, unix_ms=stamp, source="console", message=text[:4096]))  # type: ignore[arg-type]

    @Slot()
    def _on_level(self) -> None:
        self.filter.set_least(str(self.level.currentData()))

    @Slot()
    def copy(self) -> None:
        """Put the selected lines, or all shown ones, on the clipboard."""
        chosen = sorted(index.row() for index in self.view.selectedIndexes())
        rows = chosen or list(range(self.filter.rowCount()))
        QApplication.clipboard().setText("\n".join(str(self.filter.index(r, 0).data()) for r in rows))
