"""The composition root of the window: `main` runs it, `build` makes it for scripts and tests.

Nothing here waits for torch or for a model: the window is shown first, the engine loads in its own process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pyqtgraph as pg
from PySide6.QtCore import QLibraryInfo, QLocale, QObject, QStandardPaths, QTimer, QTranslator, Slot
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import QApplication, QStyleFactory

from app import demo_model, i18n, theme
from app.console import Console
from app.errors import ErrorHub
from app.main_window import MainWindow
from app.net.io_thread import EngineLink
from app.net.types import LaunchSpec
from app.settings import Settings
from app.store.store import default_path

SETTINGS_FILE = "console.ini"
CRASH_FILE = "errors.log"


def parser() -> argparse.ArgumentParser:
    """The options of the window."""
    made = argparse.ArgumentParser(prog="decodeck", description="Open the Decodeck console.")
    made.add_argument(
        "--model", help="a Hugging Face folder (safetensors) or a GGUF file; the demo model if not given"
    )
    made.add_argument("--draft-model", help="a smaller model with the same tokenizer, to draft with")
    made.add_argument("--attach", metavar="ADDR", help="connect to a running engine instead of starting one")
    made.add_argument("--no-engine", action="store_true", help="open the window without an engine")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or a UUID (default: auto)")
    made.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    made.add_argument("--threads", type=int, help="CPU threads of the engine")
    made.add_argument("--kv-pool-gib", type=float, help="size of the KV pool in GiB")
    made.add_argument("--theme", choices=("system", "dark", "light"), help="colours; remembered")
    made.add_argument("--lang", choices=tuple(i18n.LANGUAGES), help="language; remembered")
    made.add_argument("--data-dir", type=Path, help="folder for settings and baselines")
    made.add_argument(
        "--engine-arg", action="append", default=[], metavar="ARG", help="a further argument for the engine"
    )
    made.add_argument("--size", metavar="WxH", help="size of the window in pixels, such as 1440x900")
    made.add_argument("--reset-layout", action="store_true", help="forget window and panel places")
    return made


class Application(QObject):
    """Owns the console and the one main window over it, and makes the window anew for another language."""

    def __init__(self, app: QApplication, console: Console, options: argparse.Namespace) -> None:
        super().__init__()
        self.app = app
        self.console = console
        self.options = options
        self._translator: QTranslator | None = None
        self.window = self._make_window()

    def _make_window(self) -> MainWindow:
        self._translate()
        window = MainWindow(self.console)
        window.language_asked.connect(self._on_language)
        return window

    def _translate(self) -> None:
        """Use the chosen language, for Qt's own dialogs too."""
        language = self.console.settings.language or i18n.pick(QLocale.system().name())
        i18n.use(language)
        if self._translator is not None:
            self.app.removeTranslator(self._translator)
            self._translator = None
        if language != "en":
            translator = QTranslator(self)
            folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
            if translator.load(f"qtbase_{language}", folder):
                self.app.installTranslator(translator)
                self._translator = translator

    @Slot(str)
    def _on_language(self, _language: str) -> None:
        # The window that asks must not be replaced while its own slot runs.
        QTimer.singleShot(0, self._replace_window)

    @Slot()
    def _replace_window(self) -> None:
        old = self.window
        old.keep_console = True
        old.close()
        self.window = self._make_window()
        self.window.setGeometry(old.geometry())
        self.window.optimizations.filter.setText(old.optimizations.filter.text())
        for name, dock in old.docks.items():
            self.window.docks[name].show_index(dock.stack.currentIndex())
        self.window.show()
        old.deleteLater()

    def start_engine(self) -> None:
        """Attach or launch, as the options say."""
        options = self.options
        if options.attach:
            self.console.link.attach(options.attach)
            return
        if options.no_engine:
            return
        model = options.model or _default_model(self.console.settings)
        if model is None:
            return
        spec = LaunchSpec(
            model=str(model),
            dtype=options.dtype,
            device=options.device,
            draft_model=options.draft_model,
            kv_pool_gib=options.kv_pool_gib,
            threads=options.threads,
            extra=tuple(options.engine_arg),
        )
        self.console.launch(spec)


def _size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise SystemExit(f"--size {text}: give two numbers such as 1440x900") from None
    return width, height


def _default_model(settings: Settings) -> str | None:
    """The demo model if it is there, else the last one used that still is."""
    found = demo_model.installed()
    if found is not None:
        return str(found)
    return next((path for path in settings.recent_models if Path(path).exists()), None)


def make_qt(argv: Sequence[str]) -> QApplication:
    """The `QApplication`, with style, fonts and icon. Offscreen where there is no display to open."""
    existing = QApplication.instance()
    app = existing if isinstance(existing, QApplication) else QApplication([sys.argv[0] or "decodeck", *argv])
    app.setApplicationName("decodeck")
    app.setApplicationDisplayName("Decodeck")
    app.setDesktopFileName("decodeck")
    style = QStyleFactory.create("Fusion")
    if style is not None:
        app.setStyle(style)
    theme.load_fonts(app)
    app.setWindowIcon(QIcon(str(theme.resource("icons", "decodeck.svg"))))
    # Curves are one pixel wide, where antialiasing costs nothing; the GPU path draws partial frames in docks.
    pg.setConfigOptions(antialias=True, useOpenGL=False, imageAxisOrder="row-major")
    pg.setConfigOption("mouseRateLimit", 60)
    return app


def build(argv: Sequence[str], errors: ErrorHub | None = None) -> Application:
    """Make everything, show the window and start the engine; the caller runs the event loop.

    Raises SystemExit for options that cannot be read.
    """
    options = parser().parse_args(list(argv))
    app = make_qt([])
    folder = options.data_dir or demo_model.data_dir()
    settings = Settings(Path(folder) / SETTINGS_FILE)
    if options.theme:
        settings.theme = options.theme
    if options.lang:
        settings.language = options.lang
    if options.reset_layout:
        settings.forget_layout()
    theme.manager().apply(app, settings.theme)  # type: ignore[arg-type]
    link = EngineLink()
    link.start()
    console = Console(link, settings, default_path(Path(folder)), errors)
    made = Application(app, console, options)
    if options.size:
        made.window.resize(*_size(options.size))
    made.window.show()
    made.start_engine()
    return made


def main(argv: Sequence[str]) -> int:
    """Run the console until its window is closed. Returns the process's exit code."""
    folder = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.TempLocation))
    errors = ErrorHub(folder / f"decodeck-{os.getuid() if hasattr(os, 'getuid') else 0}-{CRASH_FILE}")
    errors.install()
    made = build(argv, errors)
    # Ctrl+C in the terminal closes the window in order; the timer lets Python see the signal.
    signal.signal(signal.SIGINT, lambda *_: made.window.close())
    signal.signal(signal.SIGTERM, lambda *_: made.window.close())
    wake = QTimer()
    wake.timeout.connect(lambda: None)
    wake.start(250)
    code = made.app.exec()
    made.console.close()
    return code
