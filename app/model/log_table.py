"""A Qt list model over what happened: the engine's lines and the console's own events, by their time.

An event keeps how it is said, not the words, so that the list reads in the language of the window over it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, QSortFilterProxyModel, Qt

from ipc.messages import LogLine

AnyIndex = QModelIndex | QPersistentModelIndex
DEPTH = 2000
LEVELS = ("debug", "info", "warning", "error")
LEVEL_ROLE = Qt.ItemDataRole.UserRole + 1
WHOLE_ROLE = Qt.ItemDataRole.UserRole + 2  # with its line breaks
_TIME = attrgetter("unix_ms")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event: when (wall clock, ms), of which of `LEVELS`, whose, and how it is said."""

    unix_ms: int
    level: str
    source: str
    say: Callable[[], str]

    @classmethod
    def of_line(cls, line: LogLine) -> LogEntry:
        """A line of the engine, in its own words."""
        return cls(line.unix_ms, line.level, line.source, lambda: line.message)


class LogModel(QAbstractListModel):
    """Oldest first, at most `DEPTH` entries. An entry that arrives late is put where its time belongs."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[LogEntry] = []
        self.version = 0  # grows with every change

    def append(self, entries: Iterable[LogEntry]) -> None:
        """Add entries in any order and drop the oldest beyond the depth."""
        new = sorted(entries, key=_TIME)[-DEPTH:]
        if not new:
            return
        self.version += 1
        newest = self._entries[-1].unix_ms if self._entries else new[0].unix_ms
        late = bisect_left(new, newest, key=_TIME)
        for entry in new[:late]:
            self._insert(bisect_right(self._entries, entry.unix_ms, key=_TIME), [entry])
        self._insert(len(self._entries), new[late:])
        surplus = len(self._entries) - DEPTH
        if surplus > 0:
            self.beginRemoveRows(QModelIndex(), 0, surplus - 1)
            del self._entries[:surplus]
            self.endRemoveRows()

    def _insert(self, at: int, entries: list[LogEntry]) -> None:
        if entries:
            self.beginInsertRows(QModelIndex(), at, at + len(entries) - 1)
            self._entries[at:at] = entries
            self.endInsertRows()

    def clear(self) -> None:
        self.version += 1
        self.beginResetModel()
        self._entries.clear()
        self.endResetModel()

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._entries)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or not 0 <= index.row() < len(self._entries):
            return None
        entry = self._entries[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return entry_text(entry)
        if role == LEVEL_ROLE:
            return entry.level
        if role == WHOLE_ROLE:
            return entry.say()
        return None


def entry_text(entry: LogEntry) -> str:
    """One entry as it is shown and copied."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.unix_ms / 1000))
    message = " ".join(entry.say().splitlines())
    return f"{stamp}.{entry.unix_ms % 1000:03d}  {entry.level.upper():<7}  {entry.source:<10}  {message}"


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
