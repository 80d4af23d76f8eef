"""Puts a `BaselineData` together from a live session or a finished load."""

from __future__ import annotations

from app.lab.load_run import LoadRun
from app.model.session import SessionModel
from app.store.records import BaselineData


def from_live(session: SessionModel, name: str, note: str = "", span_s: float | None = None) -> BaselineData:
    """The trailing window of the live session, raw request rows included."""
    raise NotImplementedError


def from_load(session: SessionModel, run: LoadRun, name: str, note: str = "") -> BaselineData:
    """A load run of this console, with the session's identity and configuration."""
    raise NotImplementedError
