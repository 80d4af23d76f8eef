"""Choose the model that drafts for the engine's model, or none, and start the engine anew with it."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, Slot
from PySide6.QtWidgets import QCheckBox, QDialog, QFileDialog, QGridLayout, QLineEdit, QWidget

from app.console import Console
from app.i18n import tr
from app.units import data
from app.widgets.basic import ElidedLabel, button, column, label, row, set_role

COMMAND = "decodeck-engine --model PATH --draft-model PATH"


class DraftModelDialog(QDialog):
    """Asks `Console.choose_draft_model`. For an engine that is not this console's it only says what to do."""

    def __init__(self, console: Console, parent: QWidget) -> None:
        super().__init__(parent)
        self._console = console
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Draft model"))
        self.setMinimumWidth(540)
        link, model = console.session.link, console.session.model
        self.ours = link.can_restart and console.launch_spec is not None
        about = tr(
            "With speculation = draft, a smaller model with the same tokenizer drafts tokens, and the model "
            "verifies them together. It is read once when the engine starts, to check that it fits, and "
            "takes memory beside the model only while it drafts."
        )
        self.cost = label("", "dim", wrap=True)
        self.path = QLineEdit(console.draft_model or console.settings.draft_model)
        self.path.setPlaceholderText(tr("a GGUF file or a Hugging Face folder"))
        self.path.setAccessibleName(tr("Draft model"))
        self.path.textChanged.connect(self._check)
        self.file = button(tr("File…"), self._ask_file)
        self.folder = button(tr("Folder…"), self._ask_folder)
        self.switch_on = QCheckBox(tr("Draft with it from the start (speculation = draft)"))
        self.switch_on.setChecked(True)
        self.hint = label("", "small", wrap=True)
        self.restart = button(tr("Restart with it"), self._on_restart, "filled")
        self.none = button(tr("Restart without one"), self._on_none)
        self.none.setEnabled(self.ours and console.draft_model is not None)
        self.restart.setDefault(True)
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.addWidget(label(tr("Model"), "dim"), 0, 0)
        grid.addWidget(ElidedLabel(model.name if model is not None else self._launched()), 0, 1)
        grid.addWidget(label(tr("Draft model"), "dim"), 1, 0)
        grid.addLayout(row(self.path, self.file, self.folder, spacing=6), 1, 1)
        grid.setColumnStretch(1, 1)
        close = button(tr("Cancel") if self.ours else tr("Close"), self.reject)
        buttons = row(self.none, None, close, self.restart)
        parts = (label(about, "dim", wrap=True), grid, self.hint, self.switch_on, self.cost, buttons)
        self.setLayout(column(*parts, spacing=12, margins=(16, 16, 16, 14)))
        for part in (self.path, self.file, self.folder, self.switch_on, self.hint):
            part.setVisible(self.ours)
        for part in (self.none, self.restart):
            part.setVisible(self.ours)
        self.cost.setText(self._cost())
        self._check()

    def _launched(self) -> str:
        spec = self._console.launch_spec
        return Path(spec.model).name if spec is not None and self.ours else tr("none")

    def _cost(self) -> str:
        """What choosing takes, or why it cannot be had here."""
        if self.ours:
            return tr(
                "Because of that check the engine starts anew: requests that run now end, the load stops, "
                "and the configuration stays as it is."
            )
        if self._console.session.link.endpoint:
            text = tr(
                "This engine was started elsewhere, so this console does not restart it. Where it runs, "
                "start it again with a draft model: {command}"
            )
            return text.format(command=COMMAND)
        return tr("No engine of this console runs. Open a model first.")

    def _why_not(self, text: str) -> str:
        """What speaks against a path, "" where nothing does. Its tokenizer is compared by the engine."""
        path = Path(text).expanduser()
        spec = self._console.launch_spec
        if not text:
            return tr("Choose a model.")
        if not path.exists():
            return tr("There is no such file or folder.")
        if path.is_dir() and not (path / "config.json").is_file():
            return tr("This folder has no config.json, so it is no model.")
        if path.is_file() and path.suffix.lower() != ".gguf":
            return tr("A model is a GGUF file or a folder.")
        if spec is not None and path.resolve() == Path(spec.model).expanduser().resolve():
            return tr("This is the model itself. To draft with its own weights in fewer bits, choose self.")
        return ""

    @Slot()
    def _check(self) -> None:
        text = self.path.text().strip()
        why = self._why_not(text)
        self.restart.setEnabled(self.ours and not why)
        if why:
            self.hint.setText(why)
        else:
            found = tr("{size}. The engine refuses it if its tokenizer is not the model's.")
            self.hint.setText(found.format(size=data(_size(Path(text).expanduser()))))
        set_role(self.hint, "warning" if why and text else "small")

    def _ask(self, title: str, mode: QFileDialog.FileMode, names: str = "") -> None:
        dialog = QFileDialog(self, title)
        dialog.setFileMode(mode)
        if names:
            dialog.setNameFilter(names)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(self.path.setText)
        dialog.open()

    def _ask_file(self) -> None:
        self._ask(tr("Open a GGUF file"), QFileDialog.FileMode.ExistingFile, "GGUF (*.gguf)")

    def _ask_folder(self) -> None:
        self._ask(tr("Open a model folder"), QFileDialog.FileMode.Directory)

    def _on_restart(self) -> None:
        path = str(Path(self.path.text().strip()).expanduser().absolute())
        self._console.choose_draft_model(path, self.switch_on.isChecked())
        self.accept()

    def _on_none(self) -> None:
        self._console.choose_draft_model(None)
        self.accept()


def _size(path: Path) -> int | None:
    """Bytes of a file, or of the files right in a folder; None where they cannot be read."""
    try:
        files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return None
