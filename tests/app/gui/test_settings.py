"""Settings survive damage, and a window always opens where it can be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QByteArray, QRect

from app.settings import DEFAULT_SIZE, Settings, reachable

HOME = QRect(0, 0, 1920, 1080)
BESIDE = QRect(1920, 0, 1280, 1024)


@pytest.mark.parametrize(
    "saved",
    [
        QRect(9000, -5000, 1300, 800), QRect(-5000, 100, 1300, 800), QRect(0, 0, 0, 0), QRect(100, 100, 1, 1),
        QRect(1800, 1000, 1300, 800), QRect(0, 0, 30000, 20000), None,
    ],
)  # fmt: skip
def test_e11_the_window_is_fully_reachable(saved: QRect | None) -> None:
    """E11: a place on a screen that is gone, a size of nothing, a size too large."""
    place = reachable(saved, [HOME])
    assert HOME.contains(place)
    assert place.width() >= 560


def test_e11_size_is_kept_when_the_screen_is_gone() -> None:
    """E11: the size must not be thrown away with the place."""
    place = reachable(QRect(2500, 50, 1210, 790), [HOME])
    assert place.size() == QRect(0, 0, 1210, 790).size()


def test_e11_a_place_on_a_second_screen_is_kept() -> None:
    """E11: only what cannot be reached is changed."""
    saved = QRect(1950, 40, 1150, 900)
    assert reachable(saved, [HOME, BESIDE]) == saved


def test_no_saved_place_gives_the_default_size_in_the_middle() -> None:
    place = reachable(None, [HOME])
    assert place.size() == DEFAULT_SIZE
    assert abs(place.center().x() - HOME.center().x()) <= 1


def test_values_come_back(settings: Settings) -> None:
    settings.theme, settings.language, settings.time_window_s = "light", "zh_CN", 900
    settings.rect, settings.window_state = QRect(1, 2, 1300, 800), QByteArray(b"\x00\xffblob")
    settings.load = {"rate": 3.5, "mix": "code"}
    for path in ("/models/a", "/models/Модели ü 空 x", "/models/a"):
        settings.remember_model(path)
    settings.sync()
    again = Settings(settings.path)
    assert (again.theme, again.language, again.time_window_s) == ("light", "zh_CN", 900)
    assert again.rect == QRect(1, 2, 1300, 800)
    assert again.window_state == QByteArray(b"\x00\xffblob")
    assert again.load == {"rate": 3.5, "mix": "code"}
    assert again.recent_models == ["/models/a", "/models/Модели ü 空 x"]


def test_a_damaged_file_reads_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "console.ini"
    path.write_bytes(
        b"\xff\xfe\x00[General]\ntheme=@Invalid()\nrect=a b\nload={\nrecent_models=7\ntime_window_s=x\n"
        b"[General]\n"
        b"theme=purple\nlanguage=klingon\nrect=1 2 3 99999999999\nload=[1]\nrecent_models={}\n"
    )
    settings = Settings(path)
    assert settings.theme == "dark"
    assert settings.language == ""
    assert settings.rect is None
    assert settings.load == {}
    assert settings.recent_models == []
    assert settings.time_window_s == 300
