"""A dock that looks like a card: one line with its panels' names, a summary, float and hide.

Several panels of one dock are pages behind their names in that line. Keeping them in one dock, and not in
Qt's own tabbed docks, spares a second title line and keeps the summary beside the names.
"""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import QDockWidget, QFrame, QMainWindow, QStackedWidget, QToolButton, QWidget

from app.i18n import tr
from app.widgets.basic import ElidedLabel, column, row, set_state, set_tip


class DockHeader(QWidget):
    """The line; `chosen` emits the index of the name that was clicked."""

    chosen = Signal(int)

    def __init__(self, dock: PanelDock, titles: list[str]) -> None:
        super().__init__()
        self.setProperty("role", "header")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.tabs: list[QToolButton] = []
        for i, title in enumerate(titles):
            tab = QToolButton()
            tab.setText(title)
            tab.setProperty("role", "tab")
            tab.setCheckable(len(titles) > 1)
            tab.setAccessibleName(title)
            if len(titles) == 1:
                # A single name is a title: it takes no click, so the dock can be dragged by it.
                tab.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
                tab.setFocusPolicy(Qt.FocusPolicy.NoFocus)
            tab.clicked.connect(lambda _checked=False, index=i: self.chosen.emit(index))
            self.tabs.append(tab)
        self.summary = ElidedLabel("", "small")
        self.summary.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.float_button = _flat("↗", tr("Float or dock this panel"))
        self.close_button = _flat("×", tr("Hide this panel (View menu shows it again)"))
        self.float_button.clicked.connect(dock.toggle_floating)
        self.close_button.clicked.connect(dock.close)
        line = row(*self.tabs, 6, self.summary, 4, self.float_button, self.close_button, spacing=0)
        line.setContentsMargins(4, 0, 4, 0)
        line.setStretchFactor(self.summary, 1)
        self.setLayout(line)
        self.setFixedHeight(32)

    def show_current(self, index: int) -> None:
        """Mark the name of the shown panel."""
        for i, tab in enumerate(self.tabs):
            tab.setChecked(i == index)
            set_state(tab, "current", i == index)


def _flat(text: str, tip: str) -> QToolButton:
    made = QToolButton()
    made.setText(text)
    made.setProperty("role", "icon")
    made.setFixedSize(22, 22)
    made.setAccessibleName(tip)
    made.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    set_tip(made, tip)
    return made


class PanelDock(QDockWidget):
    """Holds panels by id. ``object_name`` identifies it in saved layouts."""

    def __init__(
        self, object_name: str, panels: Mapping[str, tuple[str, QWidget]], window: QMainWindow
    ) -> None:
        """``panels``: title and widget of each panel by its id, in order."""
        titles = [title for title, _ in panels.values()]
        super().__init__(" / ".join(titles), window)
        self.setObjectName(object_name)
        self.setAllowedAreas(Qt.DockWidgetArea.AllDockWidgetAreas)
        self.ids = list(panels)
        self._summaries = [""] * len(panels)
        self.header = DockHeader(self, titles)
        self.header.chosen.connect(self.show_index)
        self.setTitleBarWidget(self.header)
        self.stack = QStackedWidget()
        for i, (_, panel) in enumerate(panels.values()):
            self.stack.addWidget(panel)
            panel.summary_changed.connect(  # type: ignore[attr-defined]
                lambda text, index=i: self._set_summary(index, text)
            )
        frame = QFrame()
        frame.setProperty("role", "dock")
        frame.setLayout(column(self.stack, spacing=0, margins=(1, 0, 1, 1)))
        self.setWidget(frame)
        self.setAccessibleName(self.windowTitle())
        self.show_index(0)

    @Slot()
    def toggle_floating(self) -> None:
        self.setFloating(not self.isFloating())

    @Slot(int)
    def show_index(self, index: int) -> None:
        """Show the panel with this index."""
        self.stack.setCurrentIndex(index)
        self.header.show_current(index)
        self.header.summary.set_full_text(self._summaries[index])

    def show_panel(self, name: str) -> None:
        """Show the panel with this id, and the dock with it."""
        self.show_index(self.ids.index(name))
        self.show()
        self.raise_()

    @property
    def current(self) -> str:
        """The id of the shown panel."""
        return self.ids[self.stack.currentIndex()]

    def _set_summary(self, index: int, text: str) -> None:
        self._summaries[index] = text
        if index == self.stack.currentIndex():
            self.header.summary.set_full_text(text)
