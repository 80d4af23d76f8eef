"""The requests: what each waits for, what it reused, how long everything took, and which were refused."""

from __future__ import annotations

from PySide6.QtCore import QItemSelection, QPoint, QRect, QSortFilterProxyModel, Qt, Signal, Slot
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QLineEdit,
    QMenu,
    QStackedLayout,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app import theme
from app.console import Console
from app.i18n import tr
from app.model.request_table import (
    COLUMNS,
    REASON_COLUMN,
    REFUSED_ROLE,
    RID_ROLE,
    AnyIndex,
    RequestTable,
    refusal_text,
)
from app.units import count
from app.widgets.basic import ElidedLabel, button, column, row
from app.widgets.empty_state import EmptyState
from app.widgets.focus import set_visible

PAD = 8  # at both sides of a cell, in pixels


class _Cells(QStyledItemDelegate):
    """Paints plain text cells in a fifth of the time that Qt takes with a style sheet."""

    def __init__(self, table: QTableView) -> None:
        super().__init__(table)
        self._header = table.horizontalHeader()

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        t = theme.tokens()
        box: QRect = option.rect
        painter.save()
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(box, QColor(t.selection))
        painter.setPen(QColor(t.grid))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        right, text = COLUMNS[index.column()].right, index.data()
        painter.setPen(QColor(t.text))
        if index.data(REFUSED_ROLE):
            painter.setPen(QColor(t.dim))
            if index.column() >= REASON_COLUMN:
                painter.setClipRect(box)
                box, text, right = (
                    self._reason_box(index, box),
                    index.sibling(index.row(), REASON_COLUMN).data(),
                    False,
                )
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        box = box.adjusted(PAD, 0, -PAD, -1)
        text = option.fontMetrics.elidedText(text, Qt.TextElideMode.ElideRight, box.width())
        painter.drawText(box, side | Qt.AlignmentFlag.AlignVCenter, text)
        painter.restore()

    def _reason_box(self, index: AnyIndex, box: QRect) -> QRect:
        """The cells of a refused request's reason as one: each cell paints its part of the text."""
        header = self._header
        last = len(COLUMNS) - 1
        left = header.sectionViewportPosition(REASON_COLUMN)
        right = header.sectionViewportPosition(last) + header.sectionSize(last)
        return QRect(left, box.y(), right - left, box.height())


class RequestsPanel(QWidget):
    """A table; picking a request shows its blocks in the KV map."""

    summary_changed = Signal(str)
    load_asked = Signal()

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.model = RequestTable(console.session)
        self.proxy = QSortFilterProxyModel()
        self.proxy.setSourceModel(self.model)
        self.proxy.setFilterKeyColumn(-1)
        self.proxy.setFilterCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        self.filter = QLineEdit()
        self.filter.setPlaceholderText(tr("Filter: a tag, a state, a number"))
        self.filter.setAccessibleName(tr("Filter requests"))
        self.filter.setClearButtonEnabled(True)
        self.filter.textChanged.connect(self.proxy.setFilterFixedString)
        self.filter.hide()
        self.table = QTableView()
        self.table.setModel(self.proxy)
        self.table.setItemDelegate(_Cells(self.table))
        self._shape_table()
        self.empty = EmptyState(
            tr("No requests yet"),
            tr("Start the demo load above, chat in the Playground, or send traffic from another client."),
            tr("Start load"),
            self.load_asked.emit,
        )
        self.refused = ElidedLabel("", "warning")
        self._told = 0  # of the refused ones, when the line was last put away
        show = button(tr("Show them"), self.show_refused, "flat", tr("Show the requests that were refused."))
        away = button("×", self._put_away, "icon", tr("Close this notice"))
        away.setFixedSize(22, 22)
        self.refused_line = QWidget()
        self.refused_line.setLayout(row(self.refused, show, away, margins=(8, 2, 6, 2), spacing=6))
        self.refused_line.hide()
        page = QWidget()
        page.setLayout(column(self.refused_line, self.filter, self.table, spacing=0))
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(page)
        console.selected.connect(self._on_selected)

    def _shape_table(self) -> None:
        table = self.table
        table.setAccessibleName(tr("Requests"))
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        table.setShowGrid(False)
        table.setWordWrap(False)
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(24)
        table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        header = table.horizontalHeader()
        header.setHighlightSections(False)
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        for i, spec in enumerate(COLUMNS):
            table.setColumnWidth(i, spec.width)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        table.customContextMenuRequested.connect(self._menu)
        table.selectionModel().selectionChanged.connect(self._on_row)

    def refresh(self) -> None:
        """Take in changed rows."""
        self.model.refresh()
        self.empty.set_usable(self._console.can_load, tr("The engine is not ready yet."))
        self._stack.setCurrentIndex(1 if self.model.rowCount() else 0)

    def refresh_figures(self) -> None:
        """Write the summary."""
        total = self.model.num_requests
        live = 0
        for line in range(min(total, 600)):
            live += self.model.view_at(line).row.state != "finished"
        text = tr("{live} live · {ended} ended").format(live=count(live), ended=count(total - live))
        refusals = self._console.session.refusals
        if refusals.total:
            text = f"{text} · {tr('{n} refused').format(n=count(refusals.total))}"
        self.summary_changed.emit(text if total or refusals.total else "")
        set_visible(self.refused_line, refusals.told > max(self._told, refusals.told_before))
        if refusals.kept:
            newest = refusal_text(refusals.kept[-1])
            told = tr("{n} refused, the last one for {why}")
            self.refused.set_full_text(told.format(n=count(refusals.present), why=newest))

    def show_refused(self) -> None:
        """Show only what was refused."""
        self.filter.show()
        self.filter.setText(tr("refused"))

    def _put_away(self) -> None:
        self._told = self._console.session.refusals.told
        set_visible(self.refused_line, False)

    def toggle_filter(self) -> None:
        """Show or hide the filter line."""
        self.filter.setVisible(not self.filter.isVisible())
        if self.filter.isVisible():
            self.filter.setFocus()
        else:
            self.filter.clear()

    @Slot(QItemSelection, QItemSelection)
    def _on_row(self, selected: QItemSelection, _old: QItemSelection) -> None:
        indexes = selected.indexes()
        if indexes:
            self._console.select(indexes[0].data(RID_ROLE))

    @Slot(object)
    def _on_selected(self, rid: int | None) -> None:
        self.model.refresh()  # while another page is in front, nothing else does
        line = None if rid is None else self.model.line_of(rid)
        if line is None:
            self.table.clearSelection()
            return
        index = self.proxy.mapFromSource(self.model.index(line, 0))
        if index.isValid() and not self.table.selectionModel().isRowSelected(index.row(), index.parent()):
            self.table.selectRow(index.row())
            self.table.scrollTo(index)

    @Slot(QPoint)
    def _menu(self, at: QPoint) -> None:
        index = self.table.indexAt(at)
        if not index.isValid():
            return
        rid = index.data(RID_ROLE)
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if rid is not None:
            menu.addAction(tr("Show its blocks")).triggered.connect(lambda: self._console.select(rid))
            cancel = menu.addAction(tr("Cancel this request"))
            cancel.triggered.connect(lambda: self._console.cancel_request(rid))
        menu.addAction(tr("Filter requests")).triggered.connect(self.toggle_filter)
        menu.popup(self.table.viewport().mapToGlobal(at))
