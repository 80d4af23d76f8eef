"""What the declared actions do: the half of the main window that menus, shortcuts and tests call by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QFileDialog, QMainWindow

from app import theme
from app.actions import ActionRegistry
from app.console import Console, Notice
from app.dialogs.draft_model import DraftModelDialog
from app.dialogs.help import about_dialog, metrics_dialog, shortcuts_dialog
from app.dialogs.prompt import attach_dialog
from app.dialogs.save_baseline import SaveBaselineDialog
from app.dialogs.search_codes import SearchCodesDialog
from app.i18n import tr, tr_engine
from app.panels.baselines import BaselinesPanel
from app.panels.charts import LatencyChart
from app.panels.requests import RequestsPanel
from app.panels.view import ChartView
from app.widgets.command_palette import CommandPalette
from app.widgets.dock import PanelDock
from app.widgets.load_bar import LoadBar
from app.widgets.toast import ToastStack


class WindowActions(QMainWindow):
    """The attributes are set by `MainWindow`. ``language_asked`` wants the window made anew."""

    language_asked = Signal(str)

    console: Console
    view: ChartView
    actions_by_id: ActionRegistry
    panel_actions: list[QAction]
    docks: dict[str, PanelDock]
    toasts: ToastStack
    load_bar: LoadBar
    baselines: BaselinesPanel
    requests: RequestsPanel
    ttft: LatencyChart
    tpot: LatencyChart

    def show_panel(self, name: str) -> None:
        """Show a panel (a key of `app.main_window.PANELS`) and bring it to the front."""
        next(dock for dock in self.docks.values() if name in dock.ids).show_panel(name)

    def everything(self) -> Sequence[QAction]:
        """All actions: the declared ones and those of the panels."""
        return [*self.actions_by_id.by_id.values(), *self.panel_actions]

    @Slot(object)
    def on_notice(self, notice: Notice) -> None:
        """Show a notice in the corner."""
        self.toasts.show_notice(notice.level, notice.text, notice.detail)

    @Slot(str)
    def on_refused(self, why: str) -> None:
        """Tell that something typed is not taken."""
        self.console.noticed.emit(Notice("warning", why))

    @Slot(object)
    def confirm_search(self, patch: object) -> None:
        """Say what AWQ's first search takes before it is asked for."""
        SearchCodesDialog(self.console, patch, self).open()  # type: ignore[arg-type]

    def save_baseline(self) -> None:
        """Ask for a name and save."""
        dialog = SaveBaselineDialog(self.console, self)
        dialog.accepted_values.connect(self._on_save_values)
        dialog.open()

    @Slot(object)
    def _on_save_values(self, values: tuple[str, str, str, int | None]) -> None:
        name, note, source, span = values
        try:
            data = self.console.shelf.data(name, note, source, None if span is None else float(span))
        except Exception as error:  # whatever keeps it from being saved is told, the window goes on
            self.console.tell("error", partial(tr_engine, str(error)))
            return
        self.console.shelf.save(data)
        self.show_panel("baselines")

    def import_baselines(self) -> None:
        self.show_panel("baselines")
        self.baselines.on_import()

    def export_baseline(self) -> None:
        self.show_panel("baselines")
        self.baselines.on_export()

    def save_picture(self) -> None:
        """Ask for a place and write a picture of the window."""
        dialog = QFileDialog(self, tr("Save picture"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setDefaultSuffix("png")
        dialog.setNameFilter("PNG (*.png)")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        picture = self.grab()
        dialog.fileSelected.connect(lambda path: picture.save(path))
        dialog.open()

    def open_model_file(self) -> None:
        """Ask for a GGUF file and start the engine with it."""
        dialog = QFileDialog(self, tr("Open a GGUF file"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.setNameFilter("GGUF (*.gguf)")
        self._open_with(dialog)

    def open_model_folder(self) -> None:
        """Ask for a Hugging Face folder and start the engine with it."""
        dialog = QFileDialog(self, tr("Open a model folder"))
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        self._open_with(dialog)

    def _open_with(self, dialog: QFileDialog) -> None:
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(self.console.open_model)
        dialog.open()

    def choose_draft_model(self) -> None:
        """Ask for a model that drafts, or for none, and start the engine anew with it."""
        DraftModelDialog(self.console, self).open()

    def attach(self) -> None:
        """Ask for an address and connect to an engine that runs there."""
        attach_dialog(self, self.console.link.attach)

    def restart_engine(self) -> None:
        self.console.restart()

    def stop_engine(self) -> None:
        self.console.stop_load(drain=False)
        self.console.link.stop_engine()

    def undo(self) -> None:
        self.console.knobs.undo()

    def redo(self) -> None:
        self.console.knobs.redo()

    def toggle_load(self) -> None:
        self.load_bar.toggle()

    def cancel_load(self) -> None:
        self.console.stop_load(drain=False)

    @Slot(object)
    def on_start_load(self, spec: object) -> None:
        self.console.start_load(spec)  # type: ignore[arg-type]

    def open_palette(self) -> None:
        """The command palette, in the upper middle of the window."""
        palette = CommandPalette(self.everything(), self)
        corner = self.mapToGlobal(self.rect().topLeft())
        palette.move(corner.x() + (self.width() - palette.width()) // 2, corner.y() + 70)
        palette.show()
        palette.field.setFocus()

    def set_paused(self, paused: bool) -> None:
        self.view.set_paused(paused)
        self.actions_by_id.by_id["pause"].setChecked(paused)

    def set_span(self, span_s: int) -> None:
        self.view.set_span(span_s)
        self.actions_by_id.choose("span", span_s)

    def set_log_scale(self, log: bool) -> None:
        for chart in (self.ttft, self.tpot):
            chart.set_log(log)
            chart.refresh_figures()
        self.actions_by_id.by_id["log_scale"].setChecked(log)

    def set_theme(self, choice: str) -> None:
        self.console.settings.theme = choice
        self.apply_theme(choice)
        self.actions_by_id.choose("theme", choice)

    def apply_theme(self, choice: str) -> None:
        """Give the application the colours of ``choice``."""
        app = QApplication.instance()
        if isinstance(app, QApplication):
            theme.manager().apply(app, choice)  # type: ignore[arg-type]

    def set_language(self, language: str) -> None:
        self.console.settings.language = language
        self.actions_by_id.choose("language", language)
        self.language_asked.emit(language)

    def filter_requests(self) -> None:
        self.show_panel("requests")
        self.requests.toggle_filter()

    def show_shortcuts(self) -> None:
        shortcuts_dialog(self, self.everything()).show()

    def show_metrics(self) -> None:
        metrics_dialog(self).show()

    def show_about(self) -> None:
        about_dialog(self, self.console).show()
