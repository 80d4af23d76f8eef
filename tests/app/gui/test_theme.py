"""Colours can be read, and the style sheet knows every name it uses."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from PySide6.QtGui import QColor, QFontInfo
from PySide6.QtWidgets import QApplication

from app import theme
from app.panels.stages import ABOVE, BELOW
from app.theme import DARK, LIGHT, Tokens, contrast

APP = Path(theme.__file__).parent


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize("name", ["text", "dim", "accent", "ok_text", "warning_text", "alarm_text"])
@pytest.mark.parametrize("ground", ["ground", "panel"])
def test_text_is_readable(t: Tokens, name: str, ground: str) -> None:
    """WCAG 2.2 AA for text: 4.5 to 1."""
    assert contrast(getattr(t, name), getattr(t, ground)) >= 4.5


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
@pytest.mark.parametrize(
    "name", ["series_a", "series_b", "series_c", "series_d", "warning", "alarm", "kv_used"]
)
def test_lines_and_marks_stand_out(t: Tokens, name: str) -> None:
    """WCAG 2.2 for graphics: 3 to 1."""
    assert contrast(getattr(t, name), t.panel) >= 3.0


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
def test_neighbours_in_the_stack_of_stages_differ_in_lightness(t: Tokens) -> None:
    """Told apart without hue: by the colour-blind, and in print."""
    for side in (ABOVE, BELOW):
        tokens = [getattr(t, f"stage_{key}") for key in side]
        pairs = [*itertools.pairwise(tokens)]
        if side is ABOVE:  # a pass is either split or whole, and copies are rare
            pairs += [(t.stage_forward, t.stage_sample), (t.stage_rest, t.stage_sample)]
        for one, other in pairs:
            assert contrast(one, other) >= 1.25, (one, other)


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
def test_an_empty_seat_is_seen_and_stays_behind_the_bars(t: Tokens) -> None:
    assert 1.05 <= contrast(t.seat, t.panel) <= 1.6
    for name in ("stage_other", "series_a", "series_b", "alarm", "kv_swapped"):
        assert contrast(getattr(t, name), t.seat) >= 2.5, name


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
def test_text_on_filled_and_selected_grounds(t: Tokens) -> None:
    assert contrast(t.on_accent, t.accent) >= 4.5
    assert contrast(t.text, t.selection) >= 4.5
    assert contrast(t.text, t.raised) >= 4.5


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("t", [DARK, LIGHT], ids=["dark", "light"])
def test_style_sheet_has_no_unknown_name(t: Tokens) -> None:
    sheet = theme.style_sheet(t)
    assert "@" not in sheet
    for path in re.findall(r'url\("([^"]+)"\)', sheet):
        assert Path(path).is_file(), path


def test_the_style_lives_in_one_place() -> None:
    users = [p.name for p in APP.rglob("*.py") if "setStyleSheet" in p.read_text(encoding="utf-8")]
    assert users == ["theme.py"]


def test_applying_a_theme_reaches_the_palette_offscreen(qapp: QApplication) -> None:
    for choice, expected in (("light", LIGHT), ("dark", DARK)):
        theme.manager().apply(qapp, choice)  # type: ignore[arg-type]
        assert qapp.palette().window().color() == QColor(expected.ground)
        assert theme.tokens() is expected


def test_the_font_that_comes_along_is_used(qapp: QApplication) -> None:
    assert QFontInfo(theme.ui_font()).family() == "Inter"
