"""Plain text that can be selected and is as high as it needs to be at the width it is given."""

from __future__ import annotations

import math

from PySide6.QtCore import QSize, QSizeF, Qt, Slot
from PySide6.QtGui import QTextCursor, QTextOption, QWheelEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextEdit


class FlowingText(QTextEdit):
    """Breaks lines between words and, where a word is longer than a line, within it: it asks for no width.

    A label breaks no word, so that one long address or line of code makes all around it wider than its room.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self.setProperty("role", "flow")
        self.setReadOnly(True)
        self.setAcceptRichText(False)
        self.setUndoRedoEnabled(False)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)

    def text(self) -> str:
        """What is shown."""
        return self._text

    def setText(self, text: str) -> None:
        """Show ``text``, never read as markup; one that only grew is not laid out anew."""
        if text == self._text:
            return
        if self._text and text.startswith(self._text):
            end = QTextCursor(self.document())
            end.movePosition(QTextCursor.MoveOperation.End)
            end.insertText(text[len(self._text) :])
        else:
            self.setPlainText(text)
        self._text = text
        self.setAccessibleName(text)

    @Slot(QSizeF)
    def _fit(self, size: QSizeF) -> None:
        height = max(1, math.ceil(size.height()))
        if height != self.minimumHeight():
            self.setFixedHeight(height)

    def sizeHint(self) -> QSize:
        return QSize(0, math.ceil(self.document().size().height()))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.minimumHeight())

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # what it lies in scrolls
