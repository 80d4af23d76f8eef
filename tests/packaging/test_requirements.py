"""The pinned requirements against pyproject.toml, and against what is really installed."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from PySide6.QtCore import QObject, QTimer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def _pins(name: str) -> dict[str, Version]:
    pins = {}
    for line in (ROOT / "packaging" / name).read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (spec,) = requirement.specifier
        assert spec.operator == "==", f"{name}: {line} is not pinned"
        assert "*" not in spec.version
        pins[canonicalize_name(requirement.name)] = Version(spec.version)
    return pins


def test_pins_hold_every_dependency_inside_its_allowed_range() -> None:
    run, dev = _pins("requirements.txt"), _pins("requirements-dev.txt")
    for pins, wanted in ((run, PROJECT["dependencies"]), (dev, PROJECT["optional-dependencies"]["dev"])):
        for text in wanted:
            requirement = Requirement(text)
            pinned = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pinned), f"{text} does not allow the pinned {pinned}"
    assert not set(run) & set(dev), "a package is pinned twice"


def test_what_is_installed_is_what_is_pinned() -> None:
    pins = _pins("requirements.txt") | _pins("requirements-dev.txt")
    wrong = {
        name: (installed, str(pinned))
        for name, pinned in pins.items()
        if Version(installed := version(name)).public != pinned.public
    }
    assert not wrong, f"installed and pinned differ: {wrong}"


def test_calls_that_return_none_keep_their_reference() -> None:
    """PySide6 6.12.0 on Python 3.11 loses one reference to None in each such call, and aborts at zero."""
    timer, thing = QTimer(), QObject()
    rounds = 5000
    before = sys.getrefcount(None)
    for _ in range(rounds):
        timer.setInterval(5)
        thing.setObjectName("x")
    assert sys.getrefcount(None) > before - rounds / 10
