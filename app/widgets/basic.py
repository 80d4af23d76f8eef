"""Small parts that every panel is made of: labels with a role, rules, buttons, rows."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QMargins, QRect, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)


def label(text: str = "", role: str = "", tip: str = "", *, wrap: bool = False) -> QLabel:
    """A label of plain text; ``role`` is one that the style sheet knows (dim, small, title, alarm…)."""
    made = QLabel(text)
    made.setTextFormat(Qt.TextFormat.PlainText)
    made.setWordWrap(wrap)
    if role:
        made.setProperty("role", role)
    if tip:
        set_tip(made, tip)
    return made


def set_tip(widget: QWidget, tip: str) -> None:
    """Give a widget a tooltip of plain text and the same words for a screen reader."""
    if tip != widget.accessibleDescription() or plain_tip(tip) != widget.toolTip():
        widget.setToolTip(plain_tip(tip))
        widget.setAccessibleDescription(tip)


def keep_room(widget: QWidget) -> None:
    """Let a widget have its room while it is hidden too."""
    policy = widget.sizePolicy()
    policy.setRetainSizeWhenHidden(True)
    widget.setSizePolicy(policy)


def plain_tip(tip: str) -> str:
    """A tooltip that Qt wraps and never reads as markup, whatever an engine put into it."""
    escaped = tip.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    return f"<qt>{escaped}</qt>" if tip else ""


def set_role(widget: QWidget, role: str) -> None:
    """Change a widget's role and have the style sheet look at it again."""
    set_state(widget, "role", role)


def set_state(widget: QWidget, name: str, value: object) -> None:
    """Change a property that the style sheet selects by, if it differs."""
    if widget.property(name) != value:
        widget.setProperty(name, value)
        widget.style().unpolish(widget)
        widget.style().polish(widget)


def button(
    text: str, clicked: Callable[[], object] | None = None, role: str = "", tip: str = ""
) -> QPushButton:
    """A push button. ``clicked`` takes no argument."""
    made = QPushButton(text)
    made.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
    made.setAccessibleName(text)
    if role:
        made.setProperty("role", role)
    if tip:
        set_tip(made, tip)
    if clicked is not None:
        made.clicked.connect(lambda _checked=False: clicked())
    return made


def rule(*, vertical: bool = False) -> QFrame:
    """A line of one pixel."""
    made = QFrame()
    made.setProperty("role", "rule")
    if vertical:
        made.setFixedWidth(1)
    else:
        made.setFixedHeight(1)
    return made


def _filled(layout: QHBoxLayout | QVBoxLayout, parts: tuple[object, ...]) -> None:
    for part in parts:
        if isinstance(part, QWidget):
            layout.addWidget(part)
        elif isinstance(part, QLayout):
            layout.addLayout(part)
        elif isinstance(part, int):
            layout.addSpacing(part)
        elif part is None:
            layout.addStretch(1)
        else:
            raise TypeError(f"cannot put a {type(part).__name__} into a layout")


def row(*parts: object, spacing: int = 8, margins: tuple[int, int, int, int] = (0, 0, 0, 0)) -> QHBoxLayout:
    """Widgets and layouts side by side; an int is a space, None is a stretch."""
    made = QHBoxLayout()
    made.setSpacing(spacing)
    made.setContentsMargins(QMargins(*margins))
    _filled(made, parts)
    return made


def column(
    *parts: object, spacing: int = 8, margins: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> QVBoxLayout:
    """Widgets and layouts one below the other; an int is a space, None is a stretch."""
    made = QVBoxLayout()
    made.setSpacing(spacing)
    made.setContentsMargins(QMargins(*margins))
    _filled(made, parts)
    return made


class WrappedLabel(QLabel):
    """A label as high as its text needs at a width that `fit` is told, since tool bars do not ask for it."""

    def __init__(self, role: str = "") -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setWordWrap(True)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        if role:
            self.setProperty("role", role)

    @property
    def full_text(self) -> str:
        return self.text()

    def set_full_text(self, text: str) -> None:
        if text != self.text():
            self.setText(text)

    def fit(self, width: int) -> None:
        """Be as high as the text needs at ``width``; not while a layout is being made, which it changes."""
        height = max(self.fontMetrics().height(), self.heightForWidth(max(1, width)))
        if height != self.minimumHeight():
            self.setFixedHeight(height)


class PaintedLabel(QLabel):
    """A label that paints a text of its own. Qt's own lays the whole window out anew for each new text."""

    def __init__(self, role: str = "") -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self._shown = ""
        if role:
            self.setProperty("role", role)

    def text(self) -> str:
        """What is painted."""
        return self._shown

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        flags = int(self.alignment().value) | (Qt.TextFlag.TextWordWrap if self.wordWrap() else 0)
        self.style().drawItemText(
            painter, self.contentsRect(), flags, self.palette(), self.isEnabled(), self._shown,
            self.foregroundRole(),
        )  # fmt: skip


class FigureLabel(PaintedLabel):
    """A figure that changes often. Its room only grows, until it is empty: nothing moves beside it."""

    def __init__(self, role: str = "") -> None:
        super().__init__(role)
        self._room = 0
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)

    def setText(self, text: str) -> None:
        """Show ``text``."""
        if text != self._shown:
            self._shown = text
            self.setAccessibleName(text)
            self._fit(0 if not text else self._room)
            self.update()

    def _fit(self, least: int) -> None:
        room = max(least, self.fontMetrics().horizontalAdvance(self._shown))
        if room != self._room:
            self._room = room
            self.updateGeometry()

    def sizeHint(self) -> QSize:
        return QSize(self._room, self.fontMetrics().height())

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._fit(0)


class FlowingLabel(PaintedLabel):
    """Words in several lines, with figures that change often. It asks for room where its height changes."""

    def __init__(self, role: str = "") -> None:
        super().__init__(role)
        self.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        self.setWordWrap(True)
        policy = QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def setText(self, text: str) -> None:
        """Show ``text``."""
        if text != self._shown:
            before = self.heightForWidth(self.width())
            self._shown = text
            self.setAccessibleName(text)
            if self.heightForWidth(self.width()) != before:
                self.updateGeometry()
            self.update()

    def heightForWidth(self, width: int) -> int:
        flags = int(self.alignment().value) | Qt.TextFlag.TextWordWrap
        room = QRect(0, 0, max(1, width), 10_000)
        return self.fontMetrics().boundingRect(room, flags, self._shown).height()

    def sizeHint(self) -> QSize:
        return QSize(0, self.heightForWidth(self.width()))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.fontMetrics().height() if self._shown else 0)


class ElidedLabel(PaintedLabel):
    """A label with an ellipsis where it has no room, by default at its end, and the whole as its tooltip."""

    def __init__(
        self, text: str = "", role: str = "", mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight
    ) -> None:
        super().__init__(role)
        self._full = ""
        self._mode = mode
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.set_full_text(text)

    @property
    def full_text(self) -> str:
        return self._full

    def set_full_text(self, text: str) -> None:
        """Show ``text``, shortened to the width there is."""
        if text != self._full:
            self._full = text
            self.setAccessibleName(text)
            self._elide()

    def _elide(self) -> None:
        shown = self.fontMetrics().elidedText(self._full, self._mode, max(0, self.width()))
        if shown != self._shown:
            self._shown = shown
            self.update()
        tip = plain_tip(self._full) if shown != self._full else ""
        if tip != self.toolTip():
            self.setToolTip(tip)

    def sizeHint(self) -> QSize:
        return QSize(self.fontMetrics().horizontalAdvance(self._full), self.fontMetrics().height())

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.fontMetrics().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._elide()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._elide()
