"""Colours, fonts and the one style sheet of the console.

Every colour is a token of `DARK` or `LIGHT`; widgets that paint themselves read `tokens()` at paint time and
listen to `ThemeManager.changed`. Ordinary widgets are told apart by a ``role`` property that the style sheet
knows. Series colours are taken from Okabe and Ito's palette, darkened where a light ground asks for it; a
status is never told by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QFontMetricsF, QPalette
from PySide6.QtWidgets import QApplication

import resources

ThemeName = Literal["dark", "light"]
ThemeChoice = Literal["system", "dark", "light"]

BASE_POINT_SIZE = 9.75  # 13 px at 96 dpi
CJK_FAMILIES = ["Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC"]
CJK_FAMILIES += ["WenQuanYi Micro Hei", "WenQuanYi Zen Hei"]
FAMILIES = ["Inter", "Segoe UI", "Cantarell", "Noto Sans", "DejaVu Sans", *CJK_FAMILIES]
FIXED_FAMILIES = ["JetBrains Mono", "Cascadia Mono", "Noto Sans Mono", "DejaVu Sans Mono", *CJK_FAMILIES]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One theme. ``*_text`` are shades of a status colour that can be read on a panel."""

    ground: str
    panel: str
    raised: str
    line: str
    grid: str
    text: str
    dim: str
    disabled: str
    accent: str
    on_accent: str
    selection: str
    hover: str
    ok_text: str
    warning: str
    warning_text: str
    alarm: str
    alarm_text: str
    series_a: str  # p50, output, A
    series_b: str  # p95, prompt, B
    series_c: str  # p99
    series_d: str
    knob: str
    kv_free: str
    kv_cached: str
    kv_used: str
    kv_shared: str
    kv_reserved: str
    kv_host: str
    kv_swapped: str
    seat: str  # an empty place in the batch
    stage_forward: str
    stage_linear: str
    stage_attention: str
    stage_head: str
    stage_rest: str
    stage_copy: str
    stage_sample: str
    stage_prepare: str
    stage_plan: str
    stage_publish: str
    stage_other: str
    stage_overlap: str
    stage_tokenize: str
    stage_detokenize: str
    stage_send: str


DARK = Tokens(
    ground="#15181d", panel="#1c2026", raised="#262b33", line="#333a44", grid="#272c34",
    text="#e6e9ee", dim="#9aa4b2", disabled="#69727f", accent="#56b4e9", on_accent="#0d1720",
    selection="#24425a", hover="#2b313a",
    ok_text="#35b68c", warning="#e69f00", warning_text="#e6a417", alarm="#d55e00", alarm_text="#f5834a",
    series_a="#56b4e9", series_b="#e69f00", series_c="#cc79a7", series_d="#009e73", knob="#e6e9ee",
    kv_free="#2d343d", kv_cached="#3d6a8a", kv_used="#56b4e9", kv_shared="#e69f00",
    kv_reserved="#5d6673", kv_host="#8b70a8", kv_swapped="#cc79a7", seat="#272d36",
    stage_forward="#56b4e9", stage_linear="#3585b8", stage_attention="#9bd4f5", stage_head="#2a6a96",
    stage_rest="#c9e6f7", stage_copy="#b9a3d6", stage_sample="#a8508a", stage_prepare="#b87a00",
    stage_plan="#f0c24a", stage_publish="#a05a2c", stage_other="#8a929e",
    stage_overlap="#d99a1f", stage_tokenize="#007f5c", stage_detokenize="#4fc3a1", stage_send="#00694c",
)  # fmt: skip

LIGHT = Tokens(
    ground="#f1f3f6", panel="#ffffff", raised="#eef1f4", line="#d3d9e0", grid="#eceff3",
    text="#1b1f24", dim="#5b6573", disabled="#9aa3ae", accent="#0072b2", on_accent="#ffffff",
    selection="#cfe4f2", hover="#e6eaef",
    ok_text="#007a59", warning="#a86f00", warning_text="#8a5a00", alarm="#d55e00", alarm_text="#b54a00",
    series_a="#0072b2", series_b="#a86f00", series_c="#a8508a", series_d="#00805d", knob="#ffffff",
    kv_free="#e3e8ed", kv_cached="#a9c9e0", kv_used="#0072b2", kv_shared="#c98500",
    kv_reserved="#b6bec8", kv_host="#8e74ad", kv_swapped="#a8508a", seat="#e9edf1",
    stage_forward="#0072b2", stage_linear="#3d8fc4", stage_attention="#0a4f7d", stage_head="#7db8dc",
    stage_rest="#05324f", stage_copy="#8e74ad", stage_sample="#d193bd", stage_prepare="#c98500",
    stage_plan="#7a5000", stage_publish="#d99c6c", stage_other="#6d7682",
    stage_overlap="#b07a10", stage_tokenize="#004d38", stage_detokenize="#4aa98a", stage_send="#00664a",
)  # fmt: skip

THEMES: dict[str, Tokens] = {"dark": DARK, "light": LIGHT}


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.2), 0 to 1."""

    def linear(part: int) -> float:
        share = part / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours (WCAG 2.2), 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


class ThemeManager(QObject):
    """The theme in use, application-wide. There is one: `manager`."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.name: ThemeName = "dark"
        self.tokens: Tokens = DARK

    def apply(self, app: QApplication, choice: ThemeChoice) -> None:
        """Give ``app`` the palette and style sheet of ``choice``. Safe to call at any time."""
        hints = app.styleHints()
        if choice == "system":
            self.name = "light" if hints.colorScheme() == Qt.ColorScheme.Light else "dark"
        else:
            self.name = choice
        self.tokens = THEMES[self.name]
        # The offscreen platform ignores this; elsewhere title bars and native menus follow it.
        scheme = {"system": Qt.ColorScheme.Unknown, "dark": Qt.ColorScheme.Dark}
        hints.setColorScheme(scheme.get(choice, Qt.ColorScheme.Light))
        app.setPalette(make_palette(self.tokens))
        app.setStyleSheet(style_sheet(self.tokens))
        self.changed.emit()


_manager: ThemeManager | None = None


def manager() -> ThemeManager:
    """The one `ThemeManager` of this process."""
    global _manager
    if _manager is None:
        _manager = ThemeManager()
    return _manager


def tokens() -> Tokens:
    """The colours in use now."""
    return manager().tokens


def colour(name: str) -> QColor:
    """The token called ``name`` as a colour. Raises AttributeError where there is none."""
    return QColor(getattr(tokens(), name))


def resource(*parts: str) -> Path:
    """The path of a file that comes along, such as ``icons/decodeck.svg``."""
    return Path(resources.__file__).parent.joinpath(*parts)


def load_fonts(app: QApplication) -> None:
    """Register the fonts that come along and make them the application's, with Chinese families behind."""
    for name in ("Inter-Regular.otf", "Inter-SemiBold.otf"):
        QFontDatabase.addApplicationFont(str(resource("fonts", name)))
    app.setFont(ui_font())


@cache
def ui_font(scale: float = 1.0, *, bold: bool = False) -> QFont:
    """The interface's font with figures of equal width, so that changing numbers stand still.

    Everybody gets the same one: not to be changed.
    """
    font = QFont()
    font.setFamilies(FAMILIES)
    font.setPointSizeF(BASE_POINT_SIZE * scale)
    font.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    font.setFeature(QFont.Tag("tnum"), 1)
    return font


@cache
def metrics(scale: float = 1.0, *, bold: bool = False) -> QFontMetricsF:
    """How much room a text takes in `ui_font`."""
    return QFontMetricsF(ui_font(scale, bold=bold))


def fixed_font(scale: float = 0.92) -> QFont:
    """A font for engine output, paths and identifiers."""
    font = QFont()
    font.setFamilies(FIXED_FAMILIES)
    font.setStyleHint(QFont.StyleHint.Monospace)
    font.setPointSizeF(BASE_POINT_SIZE * scale)
    return font


def make_palette(t: Tokens) -> QPalette:
    """The palette of Fusion for a theme: what the style sheet does not reach follows it."""
    role, group = QPalette.ColorRole, QPalette.ColorGroup
    palette = QPalette()
    pairs = {
        role.Window: t.ground, role.WindowText: t.text, role.Base: t.panel, role.AlternateBase: t.raised,
        role.Text: t.text, role.Button: t.raised, role.ButtonText: t.text, role.BrightText: t.alarm_text,
        role.ToolTipBase: t.raised, role.ToolTipText: t.text, role.PlaceholderText: t.dim,
        role.Highlight: t.selection, role.HighlightedText: t.text, role.Link: t.accent,
        role.Light: t.raised, role.Midlight: t.raised, role.Mid: t.line, role.Dark: t.line,
        role.Shadow: t.ground, role.Accent: t.accent,
    }  # fmt: skip
    for key, value in pairs.items():
        palette.setColor(key, QColor(value))
    for key in (role.WindowText, role.Text, role.ButtonText):
        palette.setColor(group.Disabled, key, QColor(t.disabled))
    return palette


def style_sheet(t: Tokens) -> str:
    """The application's style sheet for a theme."""
    text = resource("themes", "console.qss").read_text(encoding="utf-8")
    for field in sorted(fields(t), key=lambda f: -len(f.name)):
        text = text.replace(f"@{field.name}", getattr(t, field.name))
    shade = "dark" if t is DARK else "light"
    return text.replace("@icons", resource("icons").as_posix()).replace("@shade", shade)
