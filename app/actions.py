"""Everything a person can do, declared once: menus, shortcuts, the command palette and tests read this list.

``run`` names a method of the main window. ``needs`` names a condition of `CONDITIONS`; an action whose
condition does not hold is disabled, not hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QKeySequence

from app.console import Console
from app.i18n import LANGUAGES, N_, tr_later
from app.net.types import LinkState


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One action. ``argument`` is passed to ``run``; ``group`` makes checkable actions exclusive."""

    id: str
    menu: str
    text: str
    run: str
    shortcut: str = ""
    needs: str = ""
    argument: str | int | None = None
    group: str = ""
    checkable: bool = False
    separator: bool = False  # a line before it


CONDITIONS: dict[str, Callable[[Console], bool]] = {
    "ready": lambda c: c.engine_ready,
    "managed": lambda c: c.session.link.can_restart,
    "connected": lambda c: c.session.link.state is not LinkState.OFFLINE,
    "undo": lambda c: c.engine_ready and c.knobs.can_undo,
    "redo": lambda c: c.engine_ready and c.knobs.can_redo,
    "load": lambda c: c.can_load,
}

MENUS: dict[str, str] = {
    "file": N_("&File"),
    "engine": N_("&Engine"),
    "optimize": N_("&Optimize"),
    "load": N_("&Load"),
    "view": N_("&View"),
    "help": N_("&Help"),
}

ACTIONS: tuple[ActionSpec, ...] = (
    ActionSpec("save_baseline", "file", N_("Save baseline…"), "save_baseline", "Ctrl+S"),
    ActionSpec("import_baselines", "file", N_("Import baselines…"), "import_baselines", "Ctrl+I"),
    ActionSpec("export_baseline", "file", N_("Export baseline…"), "export_baseline", "Ctrl+E"),
    ActionSpec(
        "save_picture",
        "file",
        N_("Save picture of the window…"),
        "save_picture",
        "Ctrl+Shift+P",
        separator=True,
    ),
    ActionSpec("quit", "file", N_("Quit"), "close", "Ctrl+Q", separator=True),
    ActionSpec("open_model_file", "engine", N_("Open a GGUF file…"), "open_model_file", "Ctrl+O"),
    ActionSpec(
        "open_model_folder", "engine", N_("Open a model folder…"), "open_model_folder", "Ctrl+Shift+O"
    ),
    ActionSpec("draft_model", "engine", N_("Draft model…"), "choose_draft_model", "Ctrl+Shift+M"),
    ActionSpec("attach", "engine", N_("Attach to a running engine…"), "attach", "Ctrl+Shift+A"),
    ActionSpec(
        "restart_engine",
        "engine",
        N_("Restart the engine"),
        "restart_engine",
        "Ctrl+Shift+R",
        "managed",
        separator=True,
    ),
    ActionSpec("stop_engine", "engine", N_("Stop or detach the engine"), "stop_engine", "", "connected"),
    ActionSpec("undo", "optimize", N_("Undo the last change"), "undo", "Ctrl+Z", "undo"),
    ActionSpec("redo", "optimize", N_("Redo the change"), "redo", "Ctrl+Shift+Z", "redo"),
    ActionSpec("toggle_load", "load", N_("Start or stop the load"), "toggle_load", "Ctrl+R", "load"),
    ActionSpec(
        "cancel_load",
        "load",
        N_("Stop the load and cancel its requests"),
        "cancel_load",
        "Ctrl+Shift+X",
        "load",
    ),
    ActionSpec("palette", "view", N_("Search commands"), "open_palette", "Ctrl+K"),
    ActionSpec("pause", "view", N_("Pause the charts"), "set_paused", "Ctrl+P", checkable=True),
    ActionSpec(
        "span_60", "view", N_("Show 1 minute"), "set_span", "Alt+1", argument=60, group="span", separator=True
    ),
    ActionSpec("span_300", "view", N_("Show 5 minutes"), "set_span", "Alt+2", argument=300, group="span"),
    ActionSpec("span_900", "view", N_("Show 15 minutes"), "set_span", "Alt+3", argument=900, group="span"),
    ActionSpec("span_3600", "view", N_("Show 1 hour"), "set_span", "Alt+4", argument=3600, group="span"),
    ActionSpec("log_scale", "view", N_("Logarithmic latency"), "set_log_scale", "Ctrl+G", checkable=True),
    ActionSpec(
        "theme_dark",
        "view",
        N_("Dark theme"),
        "set_theme",
        "Ctrl+Shift+D",
        argument="dark",
        group="theme",
        separator=True,
    ),
    ActionSpec(
        "theme_light", "view", N_("Light theme"), "set_theme", "Ctrl+Shift+L", argument="light", group="theme"
    ),
    ActionSpec(
        "theme_system", "view", N_("Theme of the system"), "set_theme", "", argument="system", group="theme"
    ),
    ActionSpec(
        "language_en",
        "view",
        LANGUAGES["en"],
        "set_language",
        "",
        argument="en",
        group="language",
        separator=True,
    ),
    ActionSpec(
        "language_zh_CN", "view", LANGUAGES["zh_CN"], "set_language", "", argument="zh_CN", group="language"
    ),
    ActionSpec("reset_layout", "view", N_("Reset layout"), "reset_layout", "Ctrl+Shift+0", separator=True),
    ActionSpec("filter_requests", "view", N_("Filter requests"), "filter_requests", "Ctrl+F"),
    ActionSpec("shortcuts", "help", N_("Keyboard shortcuts"), "show_shortcuts", "F1"),
    ActionSpec("metrics", "help", N_("What the figures mean"), "show_metrics", "Shift+F1"),
    ActionSpec("about", "help", N_("About Decodeck"), "show_about"),
)


class ActionRegistry(QObject):
    """The actions of one window, by id."""

    def __init__(self, window: QObject) -> None:
        super().__init__(window)
        self._window = window
        self.by_id: dict[str, QAction] = {}
        for spec in ACTIONS:
            action = QAction(tr_later(spec.text), self)
            action.setObjectName(spec.id)
            action.setCheckable(spec.checkable or bool(spec.group))
            if spec.shortcut:
                action.setShortcut(QKeySequence(spec.shortcut))
            self._connect(spec, action)
            self.by_id[spec.id] = action

    def _connect(self, spec: ActionSpec, action: QAction) -> None:
        method = getattr(self._window, spec.run)
        if spec.argument is not None:
            argument = spec.argument
            action.triggered.connect(lambda _checked=False: method(argument))
        elif spec.checkable:
            action.triggered.connect(lambda checked=False: method(checked))
        else:
            action.triggered.connect(lambda _checked=False: method())

    def choose(self, group: str, argument: str | int) -> None:
        """Check the action of an exclusive group that stands for ``argument``."""
        for spec in ACTIONS:
            if spec.group == group:
                self.by_id[spec.id].setChecked(spec.argument == argument)

    def refresh(self, console: Console) -> None:
        """Enable what can be done now."""
        for spec in ACTIONS:
            if spec.needs:
                self.by_id[spec.id].setEnabled(CONDITIONS[spec.needs](console))
