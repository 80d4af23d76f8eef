"""What the tests of the window share: settings of their own, a console over a written link, no leftovers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QStandardPaths
from PySide6.QtWidgets import QApplication
from shiboken6 import isValid

from app import application, i18n, theme
from app.console import Console
from app.main_window import MainWindow
from app.settings import Settings
from tests.app.gui.feed import FeedLink


@pytest.fixture(scope="session")
def qapp() -> QApplication:
    QStandardPaths.setTestModeEnabled(True)
    app = application.make_qt([])
    theme.manager().apply(app, "dark")
    return app


@pytest.fixture(autouse=True)
def english(qapp: QApplication) -> Iterator[None]:
    i18n.use("en")
    yield
    i18n.use("en")
    if theme.manager().name != "dark":
        theme.manager().apply(qapp, "dark")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "мои настройки #1" / "console.ini")


@pytest.fixture
def link() -> FeedLink:
    return FeedLink()


@pytest.fixture
def console(qapp: QApplication, link: FeedLink, settings: Settings, tmp_path: Path) -> Iterator[Console]:
    made = Console(link, settings, tmp_path / "данные 空" / "decodeck.sqlite")  # type: ignore[arg-type]
    yield made
    made.close()
    leftovers = [t.name for t in threading.enumerate() if t.name.startswith("decodeck-jobs")]
    assert not leftovers, f"threads that outlived the console: {leftovers}"


@pytest.fixture
def window(console: Console) -> Iterator[MainWindow]:
    made = MainWindow(console)
    made.resize(1440, 900)
    made.show()
    yield made
    discard(made)


def discard(window: MainWindow) -> None:
    """Close a window and let Qt really take it away."""
    window.close()
    window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)
    assert not isValid(window), "something keeps the window alive"


def beat(window: MainWindow, frames: int = 6) -> None:
    """Some frames of the clock, with what they put into Qt's queue."""
    for _ in range(frames):
        window.clock.tick()
        QApplication.processEvents()


def until(window: MainWindow, so: object, frames: int = 400) -> None:
    """Frames until ``so()`` holds."""
    import time

    for _ in range(frames):
        if so():  # type: ignore[operator]
            return
        beat(window, 1)
        time.sleep(0.01)
    raise AssertionError("it did not come to that")
