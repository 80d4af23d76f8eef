"""Keyboard focus stays where a person left it, whatever is disabled or hidden under it.

Qt hands the focus of a control that cannot be used any more to the next one, where the next key then acts
upon something nobody aimed at. Here it waits beside the control instead and goes back once that can be used.
"""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt, Slot
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QAbstractSpinBox, QApplication, QLineEdit, QPlainTextEdit, QWidget
from shiboken6 import isValid

_WAITS = "focusWaits"  # property of a widget that would have the focus, could it be used
_UNDO = (QKeySequence.StandardKey.Undo, QKeySequence.StandardKey.Redo)


def has_focus(widget: QWidget) -> bool:
    """Whether the keyboard acts upon ``widget`` or a part of it once its window is in front."""
    at = widget.window().focusWidget()
    return at is not None and (at is widget or widget.isAncestorOf(at))


def set_enabled(widget: QWidget, enabled: bool) -> None:
    """Enable or disable ``widget``. While it is disabled its focus waits at the widget around it."""
    if enabled == widget.isEnabled():
        return
    around = widget.parentWidget()
    if not enabled:
        if around is not None and has_focus(widget):
            widget.setProperty(_WAITS, True)
            around.setFocus(Qt.FocusReason.OtherFocusReason)
        widget.setEnabled(False)
        return
    widget.setEnabled(True)
    if widget.property(_WAITS):
        widget.setProperty(_WAITS, None)
        if around is not None and around.window().focusWidget() is around:
            widget.setFocus(Qt.FocusReason.OtherFocusReason)


def set_visible(widget: QWidget, visible: bool) -> None:
    """Show or hide ``widget``. The focus of what is hidden goes to the window, not to the next control."""
    if not visible and widget.isVisible() and has_focus(widget):
        widget.window().setFocus(Qt.FocusReason.OtherFocusReason)
    widget.setVisible(visible)


class UndoKeys(QObject):
    """Lets the keys of undo and redo through to the window where a text has nothing of its own to undo.

    Every text field of Qt takes them, even one that was never typed in.
    """

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._watched: QWidget | None = None
        app = QApplication.instance()
        if isinstance(app, QApplication):
            app.focusChanged.connect(self._on_focus)

    @Slot(QWidget, QWidget)
    def _on_focus(self, _old: QWidget | None, now: QWidget | None) -> None:
        if self._watched is not None and isValid(self._watched):
            self._watched.removeEventFilter(self)
        self._watched = now if isinstance(now, QLineEdit | QAbstractSpinBox | QPlainTextEdit) else None
        if self._watched is not None:
            self._watched.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() != QEvent.Type.ShortcutOverride or not isinstance(event, QKeyEvent):
            return False
        if not any(event.matches(key) for key in _UNDO):
            return False
        own = _can_undo(watched)
        event.setAccepted(own)
        return not own


def _can_undo(field: QObject) -> bool:
    """Whether something was typed into a text field that it can take back."""
    if isinstance(field, QPlainTextEdit):
        return field.document().isUndoAvailable() or field.document().isRedoAvailable()
    line = field.lineEdit() if isinstance(field, QAbstractSpinBox) else field
    return isinstance(line, QLineEdit) and (line.isUndoAvailable() or line.isRedoAvailable())
