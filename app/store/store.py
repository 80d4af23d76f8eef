"""`Store`: baselines in one SQLite file. One instance belongs to one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from app.store.records import Baseline, BaselineData, BaselineSummary, Comparison

ExportFormat = Literal["json", "csv", "md"]


class StoreError(Exception):
    """Something could not be stored or read; the text says what and what to do about it."""


class ImportResult:
    added: list[str]
    already_there: list[str]


class Store:
    """Opens (makes, migrates) ``path``. What a person should know about that is in ``notices``."""

    notices: list[str]

    def __init__(self, path: Path) -> None:
        raise NotImplementedError

    def save_baseline(self, data: BaselineData) -> str:
        """Write it whole or not at all; returns its id."""
        raise NotImplementedError

    def list(self) -> list[BaselineSummary]:
        raise NotImplementedError

    def get(self, baseline_id: str) -> Baseline:
        """By its id or an unambiguous beginning of it (4 characters or more)."""
        raise NotImplementedError

    def delete(self, baseline_id: str) -> None:
        raise NotImplementedError

    def set_locked(self, baseline_id: str, locked: bool) -> None:
        raise NotImplementedError

    def compare(self, a: str, b: str) -> Comparison:
        raise NotImplementedError

    def export(self, baseline_id: str, form: ExportFormat, out: Path) -> Path:
        raise NotImplementedError

    def import_(self, path: Path) -> ImportResult:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
