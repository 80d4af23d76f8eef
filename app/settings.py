"""What the console remembers between two starts, typed. A damaged settings file never stops a start.

One INI file in the data folder. Layout blobs carry `LAYOUT_VERSION`: after a change of the docks an old blob
is not restored. Values of a wrong type or range read as the default.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from PySide6.QtCore import QByteArray, QPoint, QRect, QSettings, QSize

from app.i18n import LANGUAGES

LAYOUT_VERSION = 1
TIME_WINDOWS_S = (60, 300, 900, 3600)
RECENT_MAX = 8
MIN_SIZE = QSize(1120, 680)
DEFAULT_SIZE = QSize(1440, 900)


class Settings:
    """A typed view of one INI file. All methods belong to the GUI thread."""

    def __init__(self, path: Path) -> None:
        # Without its folder nothing is remembered, and the window opens all the same: the store, which lies
        # in that folder too, says what is wrong with it.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._ini = QSettings(str(path), QSettings.Format.IniFormat)

    def sync(self) -> None:
        """Write to disk now."""
        self._ini.sync()

    def _text(self, key: str, default: str, allowed: tuple[str, ...] | None = None) -> str:
        value = self._ini.value(key, default)
        text = value if isinstance(value, str) else default
        return text if allowed is None or text in allowed else default

    def _blob(self, key: str) -> QByteArray:
        value = self._ini.value(key)
        return value if isinstance(value, QByteArray) else QByteArray()

    @property
    def theme(self) -> str:
        return self._text("theme", "dark", ("system", "dark", "light"))

    @theme.setter
    def theme(self, value: str) -> None:
        self._ini.setValue("theme", value)

    @property
    def language(self) -> str:
        """The chosen language, or an empty text where none was chosen."""
        return self._text("language", "", ("", *LANGUAGES))

    @language.setter
    def language(self, value: str) -> None:
        self._ini.setValue("language", value)

    @property
    def time_window_s(self) -> int:
        try:
            value = int(self._text("time_window_s", "300"))
        except ValueError:
            return 300
        return value if value in TIME_WINDOWS_S else 300

    @time_window_s.setter
    def time_window_s(self, value: int) -> None:
        self._ini.setValue("time_window_s", str(value))

    @property
    def recent_models(self) -> list[str]:
        return [item for item in self._json_list("recent_models") if isinstance(item, str)][:RECENT_MAX]

    def remember_model(self, path: str) -> None:
        """Put ``path`` first among the recent models."""
        others = [item for item in self.recent_models if item != path]
        self._ini.setValue("recent_models", json.dumps([path, *others][:RECENT_MAX]))

    @property
    def draft_model(self) -> str:
        """The draft model that was chosen last, or an empty text."""
        return self._text("draft_model", "")

    @draft_model.setter
    def draft_model(self, value: str) -> None:
        self._ini.setValue("draft_model", value)

    def _json_list(self, key: str) -> list[object]:
        try:
            value = json.loads(self._text(key, "[]"))
        except ValueError:
            return []
        return value if isinstance(value, list) else []

    @property
    def folded(self) -> list[str] | None:
        """The groups of optimizations that are folded; None where nobody ever folded any."""
        if self._ini.value("folded") is None:
            return None
        return [item for item in self._json_list("folded") if isinstance(item, str)]

    @folded.setter
    def folded(self, value: list[str]) -> None:
        self._ini.setValue("folded", json.dumps(value))

    @property
    def load(self) -> dict[str, object]:
        """The load bar's last values, by name."""
        try:
            value = json.loads(self._text("load", "{}"))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @load.setter
    def load(self, value: dict[str, object]) -> None:
        self._ini.setValue("load", json.dumps(value))

    @property
    def window_state(self) -> QByteArray:
        """The docks' arrangement as `QMainWindow.saveState` gave it."""
        return self._blob("window_state")

    @window_state.setter
    def window_state(self, value: QByteArray) -> None:
        self._ini.setValue("window_state", value)

    @property
    def splitter_state(self) -> QByteArray:
        return self._blob("splitter_state")

    @splitter_state.setter
    def splitter_state(self, value: QByteArray) -> None:
        self._ini.setValue("splitter_state", value)

    @property
    def rect(self) -> QRect | None:
        """The window's place when it was last closed, as saved; see `reachable` before use."""
        try:
            x, y, width, height = (int(part) for part in self._text("rect", "").split(" "))
        except ValueError:
            return None
        if not all(abs(value) < 1 << 20 for value in (x, y, width, height)):
            return None
        return QRect(x, y, width, height)

    @rect.setter
    def rect(self, value: QRect) -> None:
        self._ini.setValue("rect", f"{value.x()} {value.y()} {value.width()} {value.height()}")

    @property
    def maximized(self) -> bool:
        return self._text("maximized", "0") == "1"

    @maximized.setter
    def maximized(self, value: bool) -> None:
        self._ini.setValue("maximized", "1" if value else "0")

    def forget_layout(self) -> None:
        """Drop what is known of docks and window, so that the next start uses the defaults."""
        for key in ("window_state", "splitter_state", "rect", "maximized"):
            self._ini.remove(key)


def reachable(saved: QRect | None, screens: list[QRect]) -> QRect:
    """Where to open the window: the saved size, on a screen that exists, all of it in reach.

    ``screens`` are the available areas, the primary one first. A size too small to be meant gives the
    default.
    """
    size = saved.size() if saved is not None else DEFAULT_SIZE
    if size.width() < MIN_SIZE.width() // 2 or size.height() < MIN_SIZE.height() // 2:
        size = DEFAULT_SIZE
    home = screens[0] if screens else QRect(QPoint(0, 0), DEFAULT_SIZE)
    if saved is not None:
        overlaps = [(area.intersected(saved), area) for area in screens]
        best = max(
            overlaps, key=lambda pair: max(0, pair[0].width()) * max(0, pair[0].height()), default=None
        )
        if best is not None and not best[0].isEmpty():
            home = best[1]
    size = size.boundedTo(home.size())
    if saved is None or not home.intersects(saved):
        corner = QPoint((home.width() - size.width()) // 2, (home.height() - size.height()) // 2)
        return QRect(home.topLeft() + corner, size)
    x = min(max(saved.x(), home.left()), home.right() - size.width() + 1)
    y = min(max(saved.y(), home.top()), home.bottom() - size.height() + 1)
    return QRect(QPoint(x, y), size)
