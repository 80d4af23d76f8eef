"""Baselines: what was saved, two of them side by side, back to the engine, out to a file and in again."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import (
    QAbstractTableModel,
    QItemSelection,
    QModelIndex,
    QPersistentModelIndex,
    QPoint,
    Qt,
    Signal,
    Slot,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFileDialog,
    QHeaderView,
    QMenu,
    QMessageBox,
    QStackedLayout,
    QTableView,
    QWidget,
)

from app.console import Console
from app.dialogs.compare import CompareDialog
from app.i18n import N_, tr, tr_engine, tr_later
from app.store.records import BaselineSummary, Comparison
from app.store.store import ExportFormat
from app.units import count, rate, seconds
from app.widgets.basic import button, column, label, plain_tip, row
from app.widgets.empty_state import EmptyState
from app.widgets.focus import set_enabled

AnyIndex = QModelIndex | QPersistentModelIndex
FORMATS: dict[ExportFormat, str] = {"json": "JSON", "csv": "CSV", "md": "Markdown"}
HEADS = (
    (N_("Name"), N_("As it was named when it was saved.")),
    (N_("Saved"), N_("When it was saved, local time.")),
    (N_("Model"), N_("The model that was measured.")),
    (N_("Source"), N_("The trailing window of live traffic, or a load run.")),
    (N_("Requests"), N_("Requests in the measurement.")),
    (N_("TTFT p50"), N_("Time to first token, median.")),
    (N_("TTFT p99"), N_("Time to first token, 99th percentile.")),
    (N_("TPOT p50"), N_("Time per output token, median.")),
    (N_("Output"), N_("Generated tokens per second over the measurement.")),
    (N_("Validity"), N_("Whether anything speaks against believing the figures.")),
)
WIDTHS = (100, 104, 118, 72, 74, 86, 86, 84, 94, 80)


class BaselineTable(QAbstractTableModel):
    """The list as the store gave it, newest first."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[BaselineSummary] = []

    def set_rows(self, rows: list[BaselineSummary]) -> None:
        self.beginResetModel()
        self.rows = sorted(rows, key=lambda item: -item.created_unix_ms)
        self.endResetModel()

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(HEADS)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or not 0 <= index.row() < len(self.rows):
            return None
        item = self.rows[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return _cells(item)[index.column()]
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(
                "\n".join(
                    part
                    for part in (
                        item.name,
                        item.note,
                        item.model,
                        item.device,
                        _stamp(item),
                        item.id,
                        _caution(item),
                    )
                    if part
                )
            )
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if 4 <= index.column() <= 8 else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> object:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return tr_later(HEADS[section][0])
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tr_later(HEADS[section][1]))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if 4 <= section <= 8 else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None


def _caution(item: BaselineSummary) -> str:
    if not item.caution:
        return ""
    return tr("Take its figures with caution: {why}.").format(why=tr_engine(item.caution))


def _validity(item: BaselineSummary) -> str:
    if not item.valid:
        return tr("doubtful")
    return tr("caution") if item.caution else tr("valid")


def _stamp(item: BaselineSummary) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.created_unix_ms / 1000))


def _cells(item: BaselineSummary) -> list[str]:
    saved = time.strftime("%m-%d %H:%M", time.localtime(item.created_unix_ms / 1000))
    name = item.name + (f" ({tr('imported')})" if item.imported else "")
    return [
        name, saved, item.model, tr("load run") if item.source == "load" else tr("live"),
        str(count(item.requests)), str(seconds(item.ttft_p50_s)), str(seconds(item.ttft_p99_s)),
        str(seconds(item.tpot_p50_s)), str(rate(item.output_tok_s)),
        _validity(item),
    ]  # fmt: skip


class BaselinesPanel(QWidget):
    """One selected: restore, export, delete. Two selected: compare."""

    summary_changed = Signal(str)
    save_asked = Signal()

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.model = BaselineTable()
        self.table = QTableView()
        self.table.setModel(self.model)
        self._shape_table()
        self.compare = button(
            tr("Compare"), self.on_compare, tip=tr("Show two selected baselines side by side.")
        )
        self.restore = button(
            tr("Restore"), self.on_restore, tip=tr("Ask the engine for this baseline's configuration.")
        )
        self.export = button(
            tr("Export…"), self.on_export, tip=tr("Write it as JSON (lossless), CSV or Markdown.")
        )
        self.delete = button(tr("Delete"), self.on_delete)
        load = button(tr("Import…"), self.on_import, tip=tr("Read a JSON bundle that was exported before."))
        save = button(tr("Save baseline…"), self.save_asked.emit, "primary")
        hint = label(tr("Select two to compare (Ctrl+click)."), "small")
        bar = row(
            self.compare, self.restore, self.export, self.delete, 8, hint, None, load, save,
            spacing=6, margins=(10, 4, 10, 4),
        )  # fmt: skip
        page = QWidget()
        page.setLayout(column(bar, self.table, spacing=0))
        self.empty = EmptyState(
            tr("No baselines yet"),
            tr(
                "A baseline keeps the whole configuration with what was measured under it. "
                "Save one, change a switch, compare."
            ),
            tr("Save baseline…"),
            self.save_asked.emit,
        )
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(page)
        console.shelf.changed.connect(self.reload)
        self.dialog: CompareDialog | None = None
        self.reload()

    def _shape_table(self) -> None:
        table = self.table
        table.setAccessibleName(tr("Baselines"))
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        table.setShowGrid(False)
        table.setWordWrap(False)
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(24)
        table.horizontalHeader().setHighlightSections(False)
        for i, width in enumerate(WIDTHS):
            table.setColumnWidth(i, width)
        for i in (0, 2):  # names share what the figures leave
            table.horizontalHeader().setSectionResizeMode(i, QHeaderView.ResizeMode.Stretch)
        table.selectionModel().selectionChanged.connect(self._on_selection)

    @Slot()
    def reload(self) -> None:
        """Show the console's list."""
        self.model.set_rows(self._console.shelf.items)
        self._stack.setCurrentIndex(1 if self.model.rows else 0)
        self.summary_changed.emit(tr("{n} saved").format(n=count(len(self.model.rows))))
        self._show_buttons()

    @Slot(QItemSelection, QItemSelection)
    def _on_selection(self, _new: QItemSelection, _old: QItemSelection) -> None:
        self._show_buttons()

    def _show_buttons(self) -> None:
        number = len(self.selected())
        set_enabled(self.compare, number == 2)
        for made in (self.restore, self.export):
            set_enabled(made, number == 1)
        set_enabled(self.delete, number >= 1)

    def selected(self) -> list[BaselineSummary]:
        """The selected baselines, oldest first: the older one is A."""
        model = self.table.selectionModel()
        rows = [self.model.rows[index.row()] for index in model.selectedRows()] if model else []
        return sorted(rows, key=lambda item: item.created_unix_ms)

    @Slot()
    def on_compare(self) -> None:
        """Compare the two selected ones."""
        chosen = self.selected()
        if len(chosen) == 2:
            self._console.shelf.compare(chosen[0].id, chosen[1].id, self.show_comparison)

    def show_comparison(self, comparison: Comparison) -> None:
        """Open the window that shows two side by side."""
        titles = {view.info.id: view.info.title for view in self._console.knobs.views()}
        self.dialog = CompareDialog(comparison, titles, self.window())
        self.dialog.restore_asked.connect(self._console.restore_configuration)
        self.dialog.show()

    @Slot()
    def on_restore(self) -> None:
        chosen = self.selected()
        if len(chosen) == 1:
            self._console.restore_configuration(chosen[0].id)

    @Slot()
    def on_export(self) -> None:
        """Ask for a format, then for a place."""
        chosen = self.selected()
        if len(chosen) != 1:
            why = N_("Select one baseline in the list to export it.")
            self._console.tell("info", lambda: tr_later(why))
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for form, name in FORMATS.items():
            menu.addAction(name).triggered.connect(lambda _c=False, f=form: self._export_as(chosen[0], f))
        menu.popup(self.export.mapToGlobal(QPoint(0, self.export.height())))

    def _export_as(self, item: BaselineSummary, form: ExportFormat) -> None:
        dialog = QFileDialog(self, tr("Export baseline"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setDefaultSuffix(form)
        dialog.setNameFilter(f"{FORMATS[form]} (*.{form})")
        dialog.selectFile(f"{safe_name(item.name)}.{form}")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda path: self._console.shelf.export(item.id, form, Path(path)))
        dialog.open()

    @Slot()
    def on_import(self) -> None:
        """Ask for a bundle and read it."""
        dialog = QFileDialog(self, tr("Import baselines"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.setNameFilter("JSON (*.json)")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(lambda path: self._console.shelf.import_(Path(path)))
        dialog.open()

    @Slot()
    def on_delete(self) -> None:
        """Delete after asking: it cannot be undone."""
        chosen = self.selected()
        if not chosen:
            return
        names = ", ".join(f"“{item.name}”" for item in chosen)
        box = QMessageBox(self)
        box.setWindowTitle(tr("Delete baselines"))
        box.setText(tr("Delete {names}? This cannot be undone.").format(names=names))
        box.setTextFormat(Qt.TextFormat.PlainText)
        yes = box.addButton(tr("Delete"), QMessageBox.ButtonRole.DestructiveRole)
        box.addButton(tr("Keep"), QMessageBox.ButtonRole.RejectRole)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)

        def answered(clicked: object) -> None:
            if clicked is yes:
                for item in chosen:
                    self._console.shelf.delete(item.id)

        box.buttonClicked.connect(answered)
        box.open()


def safe_name(name: str) -> str:
    """A file name made of ``name``: what file systems refuse is replaced."""
    kept = "".join("_" if c in '<>:"/\\|?*' or ord(c) < 32 else c for c in name).strip(" .")
    return kept[:80] or "baseline"
