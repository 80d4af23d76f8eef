"""Ctrl+K: find a command by a few letters and run it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QObject, Qt, Slot
from PySide6.QtGui import QAction, QKeyEvent
from PySide6.QtWidgets import QDialog, QLineEdit, QListWidget, QListWidgetItem, QWidget

from app.i18n import tr
from app.widgets.basic import column


def score(query: str, text: str) -> int | None:
    """How well ``query`` fits ``text``: smaller is better, None where its letters do not occur in order."""
    query, text = query.lower().strip(), text.lower()
    found = text.find(query)
    if found >= 0:
        return found
    at, gaps = -1, 0
    for letter in query.replace(" ", ""):
        following = text.find(letter, at + 1)
        if following < 0:
            return None
        gaps += following - at - 1
        at = following
    return 100 + gaps


class CommandPalette(QDialog):
    """A list of actions, narrowed while typing. Enter runs the chosen one."""

    def __init__(self, actions: Sequence[QAction], parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup | Qt.WindowType.FramelessWindowHint)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setAccessibleName(tr("Search commands"))
        self._actions = [a for a in actions if a.text()]
        self.field = QLineEdit()
        self.field.setPlaceholderText(tr("Type a command"))
        self.field.setAccessibleName(tr("Search commands"))
        self.list = QListWidget()
        self.list.setAccessibleName(tr("Commands"))
        self.setLayout(column(self.field, self.list, margins=(8, 8, 8, 8)))
        self.resize(520, 380)
        self.field.textChanged.connect(self._narrow)
        self.field.installEventFilter(self)
        self.list.itemActivated.connect(self._run)
        self.list.itemClicked.connect(self._run)
        self._narrow("")

    @Slot(str)
    def _narrow(self, query: str) -> None:
        self.list.clear()
        ranked = [(score(query, title_of(a)), i, a) for i, a in enumerate(self._actions)]
        for _, _, action in sorted((r[0], r[1], r[2]) for r in ranked if r[0] is not None):
            keys = action.shortcut().toString()
            item = QListWidgetItem(title_of(action) + (f"\t{keys}" if keys else ""))
            item.setData(Qt.ItemDataRole.UserRole, action)
            if not action.isEnabled():
                item.setFlags(Qt.ItemFlag.NoItemFlags)
            self.list.addItem(item)
        self.list.setCurrentRow(0)

    @Slot(QListWidgetItem)
    def _run(self, item: QListWidgetItem) -> None:
        action = item.data(Qt.ItemDataRole.UserRole)
        self.close()
        if isinstance(action, QAction) and action.isEnabled():
            action.trigger()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.KeyPress and isinstance(event, QKeyEvent):
            if event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
                step = 1 if event.key() == Qt.Key.Key_Down else -1
                count = max(1, self.list.count())
                self.list.setCurrentRow((self.list.currentRow() + step) % count)
                return True
            item = self.list.currentItem()
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and item is not None:
                self._run(item)
                return True
        return False


def title_of(action: QAction) -> str:
    """An action's text without the mark of its mnemonic."""
    return action.text().replace("&&", "\0").replace("&", "").replace("\0", "&")
