"""What the engine's process sets before torch reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.__main__ import _set_environment
from engine.config import EngineConfig

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, ("passive", "5000")),
        ({"OMP_WAIT_POLICY": "passive"}, ("passive", None)),
        ({"OMP_WAIT_POLICY": "active"}, ("active", None)),
        ({"GOMP_SPINCOUNT": "7"}, ("passive", "7")),
    ],
)
def test_threads_spin_briefly_unless_the_user_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], used: tuple[str | None, str | None]
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **given})
    _set_environment(EngineConfig(model=Path("m"), threads=3))
    assert tuple(os.environ.get(name) for name in WAITING) == used
    assert os.environ["OMP_NUM_THREADS"] == "3"
