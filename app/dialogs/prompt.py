"""Asks for the address of a running engine."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QInputDialog, QWidget

from app.i18n import tr


def attach_dialog(parent: QWidget, attach: Callable[[str], None]) -> QInputDialog:
    """Open the question; ``attach`` gets the address."""
    dialog = QInputDialog(parent)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setWindowTitle(tr("Attach to a running engine"))
    dialog.setLabelText(
        tr(
            "Address of its control socket, such as tcp://127.0.0.1:7750. For another machine, forward both "
            "of its ports through SSH first and give the local end here."
        )
    )
    dialog.setTextValue("tcp://127.0.0.1:")
    dialog.resize(460, 140)
    dialog.textValueSelected.connect(lambda text: attach(text.strip()) if text.strip() else None)
    dialog.open()
    return dialog
