"""The main window: docks around the charts, menus from the declared actions, one clock for all panels.

Driving it from a script or a smoke run (all calls on the GUI thread, between `QApplication.processEvents`):

    app, window = application.build(argv)      # as `main` does it, without entering the event loop
    window.console.engine_ready                # False until the model is loaded; keep processing events
    window.session, window.knobs, window.load_run, window.store     # the Qt-free middle, live
    window.action("toggle_load").trigger()     # any action by its id, see app/actions.py
    window.console.start_load(WorkloadSpec(...)); window.load_run.running; window.console.load_progress
    window.knobs.set({"prefix_cache": False})  # as the panel does; window.knobs.view(id).status tells
    window.console.shelf.save(window.console.shelf.data("name", "note", "load", None), on_saved)
    window.console.shelf.use(title, lambda store: ..., on_done)    # anything else with the store
    window.show_panel("requests")              # bring a dock to the front
    window.grab_to(Path("picture.png"))        # a picture of the whole window
    window.close()                             # ends load, jobs, engine; returns when they are gone

``window.store`` is None until the first use, and belongs to the jobs' thread: use `console.shelf.use`.
"""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QByteArray, QCoreApplication, QEvent, QPoint, QRect, Qt, QTimer, Slot
from PySide6.QtGui import QAction, QCloseEvent, QGuiApplication, QPixmap, QResizeEvent
from PySide6.QtWidgets import (
    QMainWindow,
    QMenu,
    QSizePolicy,
    QSplitter,
    QToolBar,
    QWidget,
)

from app import i18n, status
from app.actions import ACTIONS, MENUS, ActionRegistry
from app.clock import FIGURES_EVERY, ROWS_EVERY, FrameClock
from app.console import Console
from app.i18n import N_, tr, tr_later
from app.lab.load_run import LoadRun
from app.model.knobs import KnobModel
from app.model.session import SessionModel
from app.panels.bandwidth import BandwidthPanel
from app.panels.baselines import BaselinesPanel
from app.panels.card import CardPanel
from app.panels.charts import LatencyChart, ThroughputChart
from app.panels.kpi_strip import KpiStrip
from app.panels.kv_map import KvMapPanel
from app.panels.log import LogPanel
from app.panels.memory import MemoryPanel
from app.panels.optimizations import OptimizationsPanel
from app.panels.playground import PlaygroundPanel
from app.panels.requests import RequestsPanel
from app.panels.stages import StagesPanel
from app.panels.timeline import TimelinePanel
from app.panels.view import ChartView
from app.settings import LAYOUT_VERSION, reachable
from app.status_bar import StatusLine
from app.store.store import Store
from app.widgets.banner import Banner
from app.widgets.basic import button, column, label
from app.widgets.dock import PanelDock
from app.widgets.focus import UndoKeys, set_visible
from app.widgets.load_bar import LoadBar
from app.widgets.toast import ToastStack
from app.window_actions import WindowActions

Area = Qt.DockWidgetArea
# Docks: id, area, and the panels in it.
DOCKS: tuple[tuple[str, Area, tuple[str, ...]], ...] = (
    ("left", Area.LeftDockWidgetArea, ("optimizations", "playground")),
    ("map", Area.RightDockWidgetArea, ("kv_map",)),
    ("traffic", Area.RightDockWidgetArea, ("bandwidth", "memory", "card")),
    ("bottom", Area.BottomDockWidgetArea, ("requests", "timeline", "stages", "baselines", "log")),
)
PANELS: dict[str, str] = {
    "optimizations": N_("Optimizations"), "playground": N_("Playground"), "kv_map": N_("KV blocks"),
    "bandwidth": N_("Bandwidth"), "requests": N_("Requests"), "baselines": N_("Baselines"), "log": N_("Log"),
    "timeline": N_("Timeline"), "stages": N_("Stages"), "memory": N_("Memory"), "card": N_("Card"),
}  # fmt: skip
LEFT_WIDTH, RIGHT_WIDTH, BOTTOM_HEIGHT = 324, 344, 244


class MainWindow(WindowActions):
    """See the module; what its actions do is in `WindowActions`."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.view = ChartView(console)
        self.keep_console = False  # True while the window is only replaced
        self.setObjectName("main")
        self.setWindowTitle("Decodeck")
        self.setContentsMargins(8, 0, 8, 0)
        self.setDockOptions(QMainWindow.DockOption.AnimatedDocks | QMainWindow.DockOption.AllowNestedDocks)
        self.setCorner(Qt.Corner.BottomLeftCorner, Area.BottomDockWidgetArea)
        self.setCorner(Qt.Corner.BottomRightCorner, Area.RightDockWidgetArea)
        self.actions_by_id = ActionRegistry(self)
        self.toasts = ToastStack(self)
        self.clock = FrameClock(self)
        self.undo_keys = UndoKeys(self)
        self._build_centre()
        self._build_docks()
        self._build_menus()
        self.status_line = StatusLine(self)
        self.setStatusBar(self.status_line)
        self._connect()
        self._restore()
        self.clock.start()

    # --- what scripts and tests use -----------------------------------------------------------------

    @property
    def session(self) -> SessionModel:
        return self.console.session

    @property
    def knobs(self) -> KnobModel:
        return self.console.knobs

    @property
    def load_run(self) -> LoadRun:
        return self.console.load_run

    @property
    def store(self) -> Store | None:
        return self.console.shelf.store

    def action(self, name: str) -> QAction:
        """The action with this id. Raises KeyError that names the known ones."""
        if name not in self.actions_by_id.by_id:
            raise KeyError(f"no action {name!r}; there are {', '.join(sorted(self.actions_by_id.by_id))}")
        return self.actions_by_id.by_id[name]

    def picture(self) -> QPixmap:
        """What the window shows, laid out for its present texts."""
        # A text that grew asks for room by a posted event, and so does each layout around it.
        for _ in range(8):
            QCoreApplication.sendPostedEvents(None, QEvent.Type.LayoutRequest)
        return self.grab()

    def grab_to(self, path: Path) -> None:
        """Write a picture of the window as PNG. Raises OSError where that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.picture().save(str(path), "PNG"):
            raise OSError(f"could not write a picture to {path}")

    # --- building -----------------------------------------------------------------------------------

    def _build_centre(self) -> None:
        console = self.console
        self.banner = Banner()
        self.load_bar = LoadBar()
        self.load_bar.set_values(console.settings.load)
        self.kpis = KpiStrip(console)
        top = QWidget()
        top.setLayout(column(self.load_bar, self.kpis, self.banner, spacing=8, margins=(0, 8, 0, 8)))
        top.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.ttft = LatencyChart(self.view, "ttft")
        self.tpot = LatencyChart(self.view, "tpot")
        self.throughput = ThroughputChart(self.view)
        self.splitter = QSplitter(Qt.Orientation.Vertical)
        self.splitter.setHandleWidth(8)
        self.splitter.setChildrenCollapsible(False)
        for chart in (self.ttft, self.tpot, self.throughput):
            self.splitter.addWidget(chart)
        self.setCentralWidget(self.splitter)
        self.change_banner = Banner(self, self._change_room)
        # A tool bar is the one place of a main window that spans the docks at both sides.
        bar = QToolBar(tr("Load and figures"))
        bar.setObjectName("top")
        bar.setMovable(False)
        bar.addWidget(top)
        self.addToolBar(Qt.ToolBarArea.TopToolBarArea, bar)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.NoContextMenu)

    def _build_docks(self) -> None:
        console = self.console
        self.optimizations = OptimizationsPanel(console)
        self.playground = PlaygroundPanel(console)
        self.kv_map = KvMapPanel(console)
        self.bandwidth = BandwidthPanel(self.view)
        self.memory = MemoryPanel(console)
        self.card = CardPanel(console)
        self.requests = RequestsPanel(console)
        self.timeline = TimelinePanel(self.view)
        self.stages = StagesPanel(self.view)
        self.baselines = BaselinesPanel(console)
        self.log = LogPanel(console)
        panels: dict[str, QWidget] = {
            "optimizations": self.optimizations, "playground": self.playground, "kv_map": self.kv_map,
            "bandwidth": self.bandwidth, "requests": self.requests, "baselines": self.baselines,
            "log": self.log, "timeline": self.timeline, "stages": self.stages, "memory": self.memory,
            "card": self.card,
        }  # fmt: skip
        self.panels = panels
        self.docks = {}
        for name, area, ids in DOCKS:
            dock = PanelDock(name, {i: (tr_later(PANELS[i]), panels[i]) for i in ids}, self)
            self.addDockWidget(area, dock)
            self.docks[name] = dock
            self.toasts.stay_above(dock)

    def _place_docks(self) -> None:
        """The default arrangement."""
        for name, area, _ids in DOCKS:
            dock = self.docks[name]
            dock.setFloating(False)
            self.addDockWidget(area, dock)
            dock.show_index(0)
            dock.show()
        self._size_docks()

    @Slot()
    def _size_docks(self) -> None:
        left, blocks, traffic, bottom = (self.docks[name] for name, _, _ in DOCKS)
        self.resizeDocks([left, blocks], [LEFT_WIDTH, RIGHT_WIDTH], Qt.Orientation.Horizontal)
        self.resizeDocks([bottom], [BOTTOM_HEIGHT], Qt.Orientation.Vertical)
        self.resizeDocks([blocks, traffic], [512, 488], Qt.Orientation.Vertical)
        self.splitter.setSizes([1000, 1000, 1000])

    def _build_menus(self) -> None:
        self.menus: dict[str, QMenu] = {}
        for key, title in MENUS.items():
            self.menus[key] = self.menuBar().addMenu(tr_later(title))
        for spec in ACTIONS:
            if spec.separator:
                self.menus[spec.menu].addSeparator()
            self.menus[spec.menu].addAction(self.actions_by_id.by_id[spec.id])
            self.addAction(self.actions_by_id.by_id[spec.id])
        panels = QMenu(tr("Panels"), self)
        self.panel_actions: list[QAction] = []
        for i, (name, title) in enumerate(PANELS.items(), 1):
            action = QAction(tr_later(title), self)
            if i <= 10:  # there are no more digits
                action.setShortcut(f"Ctrl+{i % 10}")
            action.triggered.connect(lambda _checked=False, panel=name: self.show_panel(panel))
            panels.addAction(action)
            self.addAction(action)
            self.panel_actions.append(action)
        self.menus["view"].insertMenu(self.action("reset_layout"), panels)
        # Kept as attributes: the menu bar does not keep the Python side of its corners alive.
        self._brand = label("Decodeck", "brand")
        self.menuBar().setCornerWidget(self._brand, Qt.Corner.TopLeftCorner)
        self._search = button(f"{tr('Search commands')}   Ctrl+K", self.open_palette, "search")
        self.menuBar().setCornerWidget(self._search, Qt.Corner.TopRightCorner)
        settings = self.console.settings
        self.actions_by_id.choose("span", settings.time_window_s)
        self.actions_by_id.choose("theme", settings.theme)
        self.actions_by_id.choose("language", i18n.language())

    def _connect(self) -> None:
        console = self.console
        console.noticed.connect(self.on_notice)
        console.costly.connect(self.confirm_search)
        console.asked.connect(self._refresh_actions)
        self.load_bar.started.connect(self.on_start_load)
        self.load_bar.stopped.connect(lambda: console.stop_load())
        self.load_bar.cancelled.connect(self.cancel_load)
        self.load_bar.refused.connect(self.on_refused)
        self.change_banner.cancel_asked.connect(console.cancel_change)
        self.banner.restart_asked.connect(self.restart_engine)
        self.banner.draft_asked.connect(self.choose_draft_model)
        self.banner.cpu_asked.connect(console.start_on_cpu)
        self.banner.again_asked.connect(console.set_left_out)
        self.banner.forgo_asked.connect(console.forgo_left_out)
        self.banner.log_asked.connect(lambda: self.show_panel("log"))
        self.requests.load_asked.connect(self.toggle_load)
        self.timeline.load_asked.connect(self.toggle_load)
        self.timeline.requests_asked.connect(lambda: self.show_panel("requests"))
        self.baselines.save_asked.connect(self.save_baseline)
        self.optimizations.baseline_asked.connect(self.save_baseline)
        self.optimizations.draft_model_asked.connect(self.choose_draft_model)
        self.clock.on_error = console.errors.put_error
        self.clock.always(console.tick)
        clock = self.clock
        clock.register(self, self._refresh_state)
        clock.register(self.kpis, self.kpis.refresh, FIGURES_EVERY)
        for chart in (self.ttft, self.tpot, self.throughput):
            clock.register(chart, chart.refresh)
            clock.register(chart, chart.refresh_figures, FIGURES_EVERY)
        clock.register(self.requests, self.requests.refresh, ROWS_EVERY)
        clock.register(self.requests, self.requests.refresh_figures, FIGURES_EVERY)
        for panel in (self.kv_map, self.bandwidth, self.timeline, self.stages):
            clock.register(panel, panel.refresh)
            clock.register(panel, panel.refresh_figures, FIGURES_EVERY)
        for other in (self.optimizations, self.playground, self.log):
            clock.register(other, other.refresh)
        for figures in (self.optimizations, self.memory, self.card):
            clock.register(figures, figures.refresh_figures, FIGURES_EVERY)
        clock.register(self.status_line, self.status_line.refresh, FIGURES_EVERY)

    def _change_room(self) -> QRect:
        """The empty part of the menu's line, at most as wide as the charts: changes are told of there."""
        bar = self.menuBar()
        menus = [bar.actionGeometry(action) for action in bar.actions()]
        left = bar.mapTo(self, QPoint(max((box.right() for box in menus), default=0) + 12, 0)).x()
        right = self._search.mapTo(self, QPoint(-12, 0)).x()
        width = min(self.splitter.width(), right - left)
        at = self.splitter.mapTo(self, QPoint(0, 0)).x()
        below = self.load_bar.mapTo(self, QPoint(0, 0)).y()
        return QRect(min(max(at, left), right - width), 0, width, below)

    # --- the beat -----------------------------------------------------------------------------------

    def _refresh_state(self) -> None:
        console = self.console
        message = status.banner_message(
            self.session, console.pending_text(), console.pending_text(brief=True)
        )
        if message is None and console.left_out:
            message = status.left_out_message(console.left_out_text(console.left_out))
        for banner in (self.banner, self.change_banner):
            if message is None or message.change != (banner is self.change_banner):
                set_visible(banner, False)
                continue
            banner.show_message(
                message.level, message.title, message.text, message.brief,
                share=message.share, busy=message.busy,
                can_restart=message.can_restart, log=message.log, draft=message.draft,
                can_cancel=message.can_cancel, cpu=message.cpu, again=message.again,
            )  # fmt: skip
        if self.session.device is not None:
            self.load_bar.suit(self.session.device.kind)
        self.load_bar.show_progress(
            self.console.load_progress, self.load_run.running, self.console.engine_ready
        )
        self._refresh_actions()

    @Slot()
    def _refresh_actions(self) -> None:
        self.actions_by_id.refresh(self.console)

    # --- layout -------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Open where and how the window was closed, if that can be reached; else the default."""
        settings = self.console.settings
        screens = QGuiApplication.screens()
        primary = QGuiApplication.primaryScreen()
        ordered = [s for s in screens if s is primary] + [s for s in screens if s is not primary]
        self.setMinimumSize(1120, 680)
        self.setGeometry(reachable(settings.rect, [s.availableGeometry() for s in ordered]))
        if settings.maximized:
            self.setWindowState(Qt.WindowState.WindowMaximized)
        state = settings.window_state
        if state.isEmpty() or not self.restoreState(state, LAYOUT_VERSION):
            # Sizes of docks hold only once the window has been laid out.
            QTimer.singleShot(0, self, self._size_docks)
        if not settings.splitter_state.isEmpty():
            self.splitter.restoreState(settings.splitter_state)

    def save_layout(self) -> None:
        """Remember the arrangement for the next start."""
        settings = self.console.settings
        if not self.isMaximized() and not self.isMinimized():
            settings.rect = self.geometry()
        settings.maximized = self.isMaximized()
        settings.window_state = QByteArray(self.saveState(LAYOUT_VERSION))
        settings.splitter_state = QByteArray(self.splitter.saveState())
        settings.load = self.load_bar.values()
        settings.sync()

    def reset_layout(self) -> None:
        """All panels back to their first places."""
        self.console.settings.forget_layout()
        self._place_docks()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.clock.stop()
        self.save_layout()
        if not self.keep_console:
            self.hide()
            self.console.close()
        event.accept()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.toasts.arrange()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.ThemeChange and self.console.settings.theme == "system":
            self.apply_theme("system")
