"""Brings a database file to the present version: each step in its own transaction, a backup first.

``PRAGMA user_version`` holds the version. A file from a newer Decodeck is left exactly as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from app.store import schema
from app.store.errors import StoreError

Step = Callable[[sqlite3.Connection], None]


def run_script(connection: sqlite3.Connection, script: str) -> None:
    """Run several statements inside the open transaction (``executescript`` would commit it)."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


STEPS: Sequence[Step] = (
    lambda connection: run_script(connection, schema.V1),
    lambda connection: run_script(connection, schema.V2),
    lambda connection: run_script(connection, schema.V3),
)


def version_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[Step] = STEPS) -> Path | None:
    """Apply the steps that are missing; returns the backup's path if one was made.

    Raises StoreError for a file of a newer version, which is not touched.
    """
    found = version_of(connection)
    if found > len(steps):
        raise StoreError(
            f"{path} was written by a newer Decodeck (version {found} of its tables; this one knows "
            f"{len(steps)}). It was left as it is. Update Decodeck, or choose another --data-dir."
        )
    if found == len(steps):
        return None
    backup = _back_up(connection, path, found) if found > 0 else None
    for number in range(found + 1, len(steps) + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version_of(connection) < number:  # another process may have been quicker
                steps[number - 1](connection)
                connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # with no room left, SQLite has rolled back by itself
                connection.execute("ROLLBACK")
            raise
    return backup


def _back_up(connection: sqlite3.Connection, path: Path, version: int) -> Path:
    """A consistent copy of the whole file, whatever is in its write-ahead log."""
    backup = path.with_name(f"{path.stem}.v{version}.backup{path.suffix}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.stem}.v{version}.backup{number}{path.suffix}")
    copy = sqlite3.connect(backup)
    try:
        connection.backup(copy)
    finally:
        copy.close()
    return backup
