"""The log: what the engine says and what happened to it, by time, filtered by level and text."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QRect, QRectF, QSize, Qt, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QFontMetrics,
    QHelpEvent,
    QKeySequence,
    QPainter,
    QPalette,
    QResizeEvent,
    QShortcut,
    QTextLayout,
    QTextOption,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QComboBox,
    QLineEdit,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QToolTip,
    QWidget,
)

from app import theme
from app.console import Console
from app.i18n import N_, tr, tr_later, tr_n
from app.model.log_table import LEVEL_ROLE, WHOLE_ROLE, LogFilter
from app.units import count
from app.widgets.basic import button, column, plain_tip, row

LEVEL_NAMES = {"debug": N_("All"), "info": N_("Info"), "warning": N_("Warnings"), "error": N_("Errors")}
PAD_X, PAD_Y = 8, 2
_KEPT_HEIGHTS = 8000
AnyIndex = QModelIndex | QPersistentModelIndex


class WrappedLines(QStyledItemDelegate):
    """Lines as long as the list is wide and as high as they need; the tooltip has the line breaks."""

    def __init__(self, view: QListView) -> None:
        super().__init__(view)
        self._view = view
        self._heights: dict[tuple[str, int], int] = {}
        self._option = QTextOption()
        self._option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        width = max(40, self._view.viewport().width() - 2 * PAD_X)
        return QSize(width, self._height(str(index.data()), width) + 2 * PAD_Y)

    def _height(self, text: str, width: int) -> int:
        metrics = self._view.fontMetrics()
        if text.isascii() and metrics.horizontalAdvance("m") * len(text) < width:
            return metrics.height()  # what most lines are, and quickly known with a font of one width
        found = self._heights.get((text, width))
        if found is None:
            if len(self._heights) >= _KEPT_HEIGHTS:
                self._heights.clear()
            found = self._heights[text, width] = self._measure(text, width, metrics)
        return found

    def _measure(self, text: str, width: int, metrics: QFontMetrics) -> int:
        layout = QTextLayout(text, self._view.font())
        layout.setTextOption(self._option)
        layout.beginLayout()
        lines = 0
        while (line := layout.createLine()).isValid():
            line.setLineWidth(width)
            lines += 1
        layout.endLayout()
        return lines * metrics.lineSpacing() + metrics.height() - metrics.lineSpacing()

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        widget, rect = self._view, QRect(option.rect)
        widget.style().drawPrimitive(QStyle.PrimitiveElement.PE_PanelItemViewItem, option, painter, widget)
        t = theme.tokens()
        colours = {"warning": t.warning_text, "error": t.alarm_text, "debug": t.dim}
        colour = QColor(colours.get(str(index.data(LEVEL_ROLE)), t.text))
        if option.state & QStyle.StateFlag.State_Selected:
            colour = widget.palette().color(QPalette.ColorRole.HighlightedText)
        painter.setFont(widget.font())
        painter.setPen(colour)
        box = QRectF(rect.adjusted(PAD_X, PAD_Y, -PAD_X, 0))
        painter.drawText(box, str(index.data()), self._option)

    def helpEvent(
        self, event: QHelpEvent, view: QAbstractItemView, option: QStyleOptionViewItem, index: AnyIndex
    ) -> bool:
        if event.type() != QEvent.Type.ToolTip or not index.isValid():
            return False
        QToolTip.showText(event.globalPos(), plain_tip(str(index.data(WHOLE_ROLE))), view)
        return True


class LogView(QListView):
    """Lays its lines out anew when its width changes."""

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self.scheduleDelayedItemsLayout()


class LogPanel(QWidget):
    """Follows the newest line unless scrolled up."""

    summary_changed = Signal(str)

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.model = console.journal.model
        self._seen = -1
        self._following = True
        self.filter = LogFilter(self.model)
        self.view = LogView()
        self.view.setModel(self.filter)
        self.view.setFont(theme.fixed_font())
        self.view.setItemDelegate(WrappedLines(self.view))
        self.view.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.view.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.view.setAccessibleName(tr("Log"))
        self.view.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.view.verticalScrollBar().valueChanged.connect(self._on_scrolled)
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

    def refresh(self) -> None:
        """Follow what is new."""
        if self.model.version == self._seen:
            return
        self._seen = self.model.version
        if self._following:
            self.view.scrollToBottom()
        lines = self.model.rowCount()
        self.summary_changed.emit(tr_n("{n} line", "{n} lines", lines).format(n=count(lines)))

    @Slot(int)
    def _on_scrolled(self, value: int) -> None:
        self._following = value >= self.view.verticalScrollBar().maximum() - 4

    @Slot()
    def _on_level(self) -> None:
        self.filter.set_least(str(self.level.currentData()))

    @Slot()
    def copy(self) -> None:
        """Put the selected lines, or all shown ones, on the clipboard."""
        chosen = sorted(index.row() for index in self.view.selectedIndexes())
        rows = chosen or list(range(self.filter.rowCount()))
        QApplication.clipboard().setText("\n".join(str(self.filter.index(r, 0).data()) for r in rows))
