"""A Qt list model over log lines: the engine's, and what went wrong in the console itself."""

from __future__ import annotations

import time
from collections import deque

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, QSortFilterProxyModel, Qt

from ipc.messages import LogLine

AnyIndex = QModelIndex | QPersistentModelIndex
DEPTH = 2000
LEVELS = ("debug", "info", "warning", "error")
LEVEL_ROLE = Qt.ItemDataRole.UserRole + 1


class LogModel(QAbstractListModel):
    """Oldest first, at most `DEPTH` lines."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque()

    def append(self, lines: list[LogLine]) -> None:
        """Add lines in one go and drop the oldest beyond the depth."""
        lines = lines[-DEPTH:]
        if not lines:
            return
        surplus = len(self._lines) + len(lines) - DEPTH
        if surplus > 0:
            self.beginRemoveRows(QModelIndex(), 0, surplus - 1)
            for _ in range(surplus):
                self._lines.popleft()
            self.endRemoveRows()
        start = len(self._lines)
        self.beginInsertRows(QModelIndex(), start, start + len(lines) - 1)
        self._lines.extend(lines)
        self.endInsertRows()

    def clear(self) -> None:
        self.beginResetModel()
        self._lines.clear()
        self.endResetModel()

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._lines)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or not 0 <= index.row() < len(self._lines):
            return None
        line = self._lines[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return line_text(line)
        if role == LEVEL_ROLE:
            return line.level
        return None


def line_text(line: LogLine) -> str:
    """One line as it is shown and copied."""
    stamp = time.strftime("%H:%M:%S", time.localtime(line.unix_ms / 1000)) + f".{line.unix_ms % 1000:03d}"
    message = " ".join(line.message.splitlines())
    return f"{stamp}  {line.level.upper():<7}  {line.source:<10}  {message}"


class LogFilter(QSortFilterProxyModel):
    """Lines of a level or above that contain a text."""

    def __init__(self, source: LogModel) -> None:
        super().__init__()
        self._least = 1
        self._text = ""
        self.setSourceModel(source)

    def set_least(self, level: str) -> None:
        self._least = LEVELS.index(level)
        self.invalidate()

    def set_text(self, text: str) -> None:
        self._text = text.lower()
        self.invalidate()

    def filterAcceptsRow(self, row: int, parent: AnyIndex) -> bool:
        index = self.sourceModel().index(row, 0)
        if LEVELS.index(str(index.data(LEVEL_ROLE))) < self._least:
            return False
        return self._text in str(index.data()).lower()
