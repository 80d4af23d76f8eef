"""What can go wrong with stored data, in words for the person at the console."""

from __future__ import annotations

import sqlite3

_FULL = 13
_CORRUPT, _NOT_A_DATABASE = 11, 26
_BUSY, _LOCKED = 5, 6
_READ_ONLY, _CANNOT_OPEN, _IO_ERROR, _CONSTRAINT = 8, 14, 10, 19


class StoreError(Exception):
    """Something could not be stored or read; the text says what and what to do about it."""


class NotFound(StoreError):
    """There is no such baseline."""


def _primary(error: sqlite3.Error) -> int:
    code = getattr(error, "sqlite_errorcode", None)
    return int(code) & 0xFF if code is not None else 0


def is_damage(error: sqlite3.Error) -> bool:
    """The file is no database, or a damaged one; not merely locked or out of reach."""
    return _primary(error) in (_CORRUPT, _NOT_A_DATABASE)


def explain(error: sqlite3.Error, what: str) -> StoreError:
    """A `StoreError` for what SQLite reports; ``what`` was being done."""
    reasons = {
        _FULL: "the disk is full. Nothing of it was kept; make room and try again",
        _BUSY: "another program keeps the database locked. Try again when it is done",
        _LOCKED: "another program keeps the database locked. Try again when it is done",
        _READ_ONLY: "the database cannot be written to; check the permissions of its folder",
        _CANNOT_OPEN: "the database file cannot be opened; check the permissions of its folder",
        _IO_ERROR: "the disk reports an error, or has no room left",
        _CORRUPT: "the database file is damaged; start Decodeck again to have it moved aside",
        _NOT_A_DATABASE: "the file is not a database; start Decodeck again to have it moved aside",
        _CONSTRAINT: "the database refused a value",
    }
    reason = reasons.get(_primary(error))
    return StoreError(f"{what}: {reason} ({error})." if reason else f"{what}: {error}.")
