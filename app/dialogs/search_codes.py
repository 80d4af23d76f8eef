"""Before AWQ searches codes for the first time: what that takes, and what can be had at once instead."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget

from app.console import Console
from app.i18n import tr
from app.model.knobs import Patch
from app.units import count


class SearchCodesDialog(QMessageBox):
    """Asks for ``patch`` as it is, or with rounding instead of the search; or leaves all as it was."""

    def __init__(self, console: Console, patch: Patch, parent: QWidget) -> None:
        super().__init__(parent)
        self._console, self._patch = console, patch
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setIcon(QMessageBox.Icon.NoIcon)
        self.setWindowTitle(tr("4-bit weights"))
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(tr("AWQ has to search codes for these layers first. That takes minutes."))
        state = console.session.state
        live = state.running + state.waiting if state is not None else 0
        parts = [
            tr(
                "Until it is done, all requests wait. It can be cancelled at any time. Codes that were found "
                "are kept, so the next time is quick."
            ),
            tr("Rounding to nearest (rtn) takes seconds and loses more."),
        ]
        if live:
            parts.append(tr("Requests that would wait now: {n}.").format(n=count(live)))
        self.setInformativeText("\n\n".join(parts))
        role = QMessageBox.ButtonRole
        self.search = self.addButton(tr("Search codes (awq)"), role.AcceptRole)
        self.rounding = self.addButton(tr("Round to nearest (rtn)"), role.AcceptRole)
        self.keep = self.addButton(tr("Change nothing"), role.RejectRole)
        self.setDefaultButton(self.rounding)
        self.setEscapeButton(self.keep)
        self.buttonClicked.connect(self._answered)

    def _answered(self, clicked: object) -> None:
        if clicked is self.search:
            self._console.knobs.set(self._patch)
        elif clicked is self.rounding:
            self._console.knobs.set({**self._patch, "int4_method": "rtn"})
