"""Notices in the corner of the window: stacked, never modal, gone by themselves unless looked at."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QTimer, Slot
from PySide6.QtGui import QEnterEvent
from PySide6.QtWidgets import QApplication, QFrame, QPlainTextEdit, QSizePolicy, QWidget

from app import theme
from app.i18n import tr
from app.widgets.basic import button, column, label, row
from app.widgets.status_pill import StatusPill

SHOWN_MS = {"info": 4000, "warning": 9000, "error": 15000}
MAX_TOASTS = 4
WIDTH = 360
GAP = 8
TEXT_MARGIN = 72  # mark, close button and margins


class Toast(QFrame):
    """One notice. The pointer over it keeps it there."""

    def __init__(self, level: str, text: str, detail: str, stack: ToastStack) -> None:
        super().__init__(stack.window)
        self._stack = stack
        self.text, self.level, self.count = text, level, 1
        self.setProperty("role", "toast")
        self.setProperty("level", level)
        self.setFixedWidth(WIDTH)
        self.setAccessibleName(text)
        mark = StatusPill()
        mark.set_state({"info": "ok", "warning": "warning"}.get(level, "alarm"), "")
        mark.setFixedWidth(18)
        self._label = label(text, wrap=True)
        self._label.setMinimumWidth(0)
        close = button("×", self.close_now, "icon", tr("Close this notice"))
        close.setFixedSize(22, 22)
        self._detail = QPlainTextEdit(detail)
        self._detail.setReadOnly(True)
        self._detail.setFont(theme.fixed_font(0.85))
        self._detail.setFixedHeight(140)
        self._detail.hide()
        buttons = row(None, spacing=6)
        if detail:
            buttons.addWidget(button(tr("Details"), self._toggle_detail))
            buttons.addWidget(button(tr("Copy"), lambda: QApplication.clipboard().setText(detail)))
        parts: list[object] = [row(mark, self._label, close, spacing=4), self._detail]
        if detail:
            parts.append(buttons)
        self.setLayout(column(*parts, spacing=6, margins=(8, 6, 6, 8)))
        self._label.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(SHOWN_MS.get(level, SHOWN_MS["error"]))
        self._timer.timeout.connect(self.close_now)
        self._timer.start()

    def wanted_height(self) -> int:
        """The height that shows the whole text."""
        layout = self.layout()
        assert layout is not None
        layout.activate()
        text = self._label.heightForWidth(WIDTH - TEXT_MARGIN)
        self._label.setMinimumHeight(text)
        return max(layout.totalHeightForWidth(WIDTH), text + 20, layout.totalMinimumSize().height())

    def again(self) -> None:
        """The same notice came once more: count it instead of stacking it."""
        self.count += 1
        self._label.setText(f"{self.text} (×{self.count})")
        self._timer.start()

    def _toggle_detail(self) -> None:
        self._detail.setVisible(not self._detail.isVisible())
        self._timer.stop()
        self._stack.arrange()

    def enterEvent(self, event: QEnterEvent) -> None:
        self._timer.stop()

    def leaveEvent(self, event: QEvent) -> None:
        self._timer.start()

    @Slot()
    def close_now(self) -> None:
        """Take the notice away."""
        self._timer.stop()
        self.hide()
        self._stack.drop(self)
        self.deleteLater()


class ToastStack(QObject):
    """The notices of one window, newest at the bottom, at its lower right corner.

    The window calls `arrange` when its size has changed, and `stay_above` for each part of it that may be
    raised.
    """

    def __init__(self, window: QWidget) -> None:
        super().__init__(window)
        self.window = window
        self.toasts: list[Toast] = []
        self.bottom_margin = 40

    def show_notice(self, level: str, text: str, detail: str = "") -> None:
        """Show a notice; the same one again is only counted."""
        for toast in self.toasts:
            if (toast.text, toast.level) == (text, level):
                toast.again()
                return
        if len(self.toasts) >= MAX_TOASTS:
            self.toasts[0].close_now()
        toast = Toast(level, text, detail, self)
        self.toasts.append(toast)
        toast.adjustSize()
        toast.show()
        self.arrange()

    def stay_above(self, part: QWidget) -> None:
        """Keep the notices in front of a part of the window, whoever raises it."""
        part.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ZOrderChange:
            for toast in self.toasts:
                toast.raise_()
        return False

    def drop(self, toast: Toast) -> None:
        """Forget a notice that closed."""
        if toast in self.toasts:
            self.toasts.remove(toast)
            self.arrange()

    def arrange(self) -> None:
        """Stack the notices from the bottom up."""
        y = self.window.height() - self.bottom_margin
        for toast in reversed(self.toasts):
            toast.resize(WIDTH, toast.wanted_height())
            y -= toast.height() + GAP
            toast.move(self.window.width() - WIDTH - 16, y)
            toast.raise_()
