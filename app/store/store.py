"""`Store`: baselines in one SQLite file.

Write-ahead log, a busy timeout, and transactions that begin by taking the write lock: several processes may
use one file. A damaged file is moved aside, never deleted, and a fresh one begun. One instance belongs to
one thread.
"""

from __future__ import annotations

import builtins
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec
from sqlite_utils import Database

from app.lab.stats import LoadRow
from app.store import bundle, compare
from app.store.compare import other_work
from app.store.environment import with_environment
from app.store.errors import NotFound, StoreError, explain, is_damage
from app.store.migrations import migrate, version_of
from app.store.records import Baseline, BaselineData, BaselineSummary, Comparison, ExportFormat
from ipc.messages import RequestRow

__all__ = ["ExportFormat", "ImportResult", "NotFound", "Store", "StoreError", "default_path"]

BUSY_S = 10.0
_BATCH = 1000
_ID_PREFIX = 4
_SUMMARY_COLUMNS = (
    "id, name, note, created_unix_ms, source, model, device, requests, ttft_p50_s, ttft_p99_s, tpot_p50_s, "
    "output_tok_s, valid, locked, imported"
)
# Of the step statistics, which the head keeps; a damaged head is reported where it is read whole.
_CAUTION = ("other_cores_mean", "machine_cores")
_CAUTION_COLUMNS = ", ".join(
    f"CASE WHEN json_valid(head) THEN json_extract(head, '$.step_stats.{name}') END AS {name}"
    for name in _CAUTION
)


@dataclass(slots=True)
class ImportResult:
    """The ids that an import added, and those that were there already, unchanged."""

    added: list[str] = field(default_factory=list)
    already_there: list[str] = field(default_factory=list)


def default_path(data_dir: Path) -> Path:
    """Where the database lies in a data folder."""
    return data_dir / "decodeck.sqlite"


class Store:
    """Opens (makes, migrates) ``path``. What a person should know about that is in ``notices``."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError if it cannot be opened, or belongs to a newer Decodeck."""
        self.path = path
        self.notices: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"The data folder {path.parent} cannot be made: {error}.") from error
        self._connection = self._open_or_begin_anew()
        self._file = _identity(path)
        self.db = Database(self._connection)

    def is_gone(self) -> bool:
        """Whether the file was deleted or replaced since: what is written now, nobody would find again."""
        return _identity(self.path) != self._file

    def _open_or_begin_anew(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise explain(error, f"Opening {self.path}") from error
            aside = self._move_aside()
            self.notices.append(
                f"The database was damaged ({error}). It was moved to {aside} and a new one was begun; "
                "what was exported can be imported again."
            )
        try:
            return self._open()
        except sqlite3.Error as error:
            raise explain(error, f"Beginning a new {self.path}") from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA foreign_keys = ON")
            if version_of(connection) > 0:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    error = sqlite3.DatabaseError(str(found))
                    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                    raise error
            backup = migrate(connection, self.path)
            if backup is not None:
                self.notices.append(f"The database was brought up to date; the old one is kept at {backup}.")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _move_aside(self) -> Path:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        aside = self.path.with_name(
            f"{self.path.stem}.damaged-{stamp}-{uuid.uuid4().hex[:4]}{self.path.suffix}"
        )
        try:
            self.path.replace(aside)
            for suffix in ("-wal", "-shm", "-journal"):
                extra = self.path.with_name(self.path.name + suffix)
                if extra.exists():
                    extra.replace(aside.with_name(aside.name + suffix))
        except OSError as error:
            raise StoreError(f"The damaged database {self.path} cannot be moved aside: {error}.") from error
        return aside

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._connection.close()

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """A write transaction: whole or not at all, its failure in words."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise explain(error, what) from error

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise explain(error, what) from error

    # --- writing ---------------------------------------------------------------------------------

    def save_baseline(self, data: BaselineData) -> str:
        """Write it whole or not at all; returns its id. An empty environment is filled in with this one."""
        data = with_environment(data)
        made = Baseline(id=uuid.uuid4().hex, created_unix_ms=time.time_ns() // 1_000_000, data=data)
        with self._writing(f"Saving the baseline {data.name!r}"):
            self._insert(made)
        return made.id

    def _insert(self, made: Baseline) -> None:
        data = made.data
        head = msgspec.structs.replace(data, requests=[], load_rows=[])
        metrics = data.stats.metrics
        ttft, tpot = metrics.get("ttft_s"), metrics.get("tpot_s")
        model, device = data.identity.model, data.identity.device
        self._insert_rows(
            "baseline",
            [
                {
                    "id": made.id,
                    "created_unix_ms": made.created_unix_ms,
                    "name": data.name,
                    "note": data.note,
                    "source": data.source,
                    "locked": int(made.locked),
                    "imported": int(made.imported),
                    "valid": int(data.validity.valid),
                    "model": model.name if model is not None else "",
                    "device": device.name if device is not None else "",
                    "requests": data.stats.requests,
                    "ttft_p50_s": ttft.p50 if ttft is not None else None,
                    "ttft_p99_s": ttft.p99 if ttft is not None else None,
                    "tpot_p50_s": tpot.p50 if tpot is not None else None,
                    "output_tok_s": data.stats.output_tok_s,
                    "head": bundle.to_json(head),
                }
            ],
        )
        self._insert_rows(
            "setting",
            [
                {"baseline_id": made.id, "knob": knob, "value": bundle.to_json(value)}
                for knob, value in data.config.items()
            ],
        )
        for kind, rows in (("engine", data.requests), ("load", data.load_rows)):
            self._insert_rows(
                "request",
                [
                    {"baseline_id": made.id, "kind": kind, "idx": index, "row": bundle.to_json(row)}
                    for index, row in enumerate(rows)
                ],
            )

    def _insert_rows(self, table: str, rows: builtins.list[dict[str, object]]) -> None:
        """Insert rows that all have the same keys, and make sure that each one arrived."""
        before = self._connection.total_changes
        if rows:
            self.db[table].insert_all(rows, batch_size=_BATCH)
        written = self._connection.total_changes - before
        if written != len(rows):
            raise StoreError(
                f"Of {len(rows)} rows for {table} only {written} were written; nothing was kept."
            )

    def delete(self, baseline_id: str) -> None:
        """Delete an unlocked baseline with its rows."""
        found = self._row(baseline_id)
        if found["locked"]:
            raise StoreError(f"The baseline {found['name']!r} is locked; unlock it before deleting it.")
        with self._writing(f"Deleting the baseline {found['name']!r}"):
            self._connection.execute("DELETE FROM baseline WHERE id = ? AND locked = 0", (found["id"],))

    def set_locked(self, baseline_id: str, locked: bool) -> None:
        """A locked baseline cannot be deleted or renamed."""
        found = self._row(baseline_id)
        with self._writing(f"Locking the baseline {found['name']!r}"):
            self._connection.execute(
                "UPDATE baseline SET locked = ? WHERE id = ?", (int(locked), found["id"])
            )

    # --- reading ---------------------------------------------------------------------------------

    def _row(self, baseline_id: str) -> dict[str, object]:
        """The row of an id, or of an unambiguous beginning of one."""
        wanted = baseline_id.strip().lower()
        if len(wanted) < _ID_PREFIX or not all(c in "0123456789abcdef" for c in wanted):
            raise NotFound(
                f"{baseline_id!r} is not an id; give {_ID_PREFIX} of its hexadecimal digits or more."
            )
        with self._reading("Looking up a baseline"):
            query = f"SELECT *, {_CAUTION_COLUMNS} FROM baseline WHERE id >= ? AND id <= ? LIMIT 2"
            found = builtins.list(self.db.query(query, [wanted, wanted.ljust(32, "f")]))
        if not found:
            raise NotFound(f"There is no baseline {baseline_id}; `decodeck snapshot list` shows them.")
        if len(found) > 1:
            raise NotFound(f"More than one baseline begins with {baseline_id}; give more digits.")
        row: dict[str, object] = found[0]
        return row

    def list(self) -> builtins.list[BaselineSummary]:
        """All baselines, newest first."""
        with self._reading("Listing baselines"):
            query = f"SELECT {_SUMMARY_COLUMNS}, {_CAUTION_COLUMNS} FROM baseline"
            return [_summary(row) for row in self.db.query(f"{query} ORDER BY created_unix_ms DESC, id")]

    def summary(self, baseline_id: str) -> BaselineSummary:
        """One row of `list`."""
        return _summary(self._row(baseline_id))

    def get(self, baseline_id: str) -> Baseline:
        """By its id or an unambiguous beginning of it (4 digits or more)."""
        row = self._row(baseline_id)
        with self._reading("Reading a baseline"):
            query = "SELECT kind, row FROM request WHERE baseline_id = ? ORDER BY kind, idx"
            rows = builtins.list(self.db.query(query, [row["id"]]))
        try:
            head = msgspec.json.decode(str(row["head"]), type=BaselineData)
            data = msgspec.structs.replace(
                head,
                requests=[
                    msgspec.json.decode(r["row"], type=RequestRow) for r in rows if r["kind"] == "engine"
                ],
                load_rows=[msgspec.json.decode(r["row"], type=LoadRow) for r in rows if r["kind"] == "load"],
            )
        except msgspec.MsgspecError as error:
            raise StoreError(f"The baseline {row['name']!r} cannot be read back: {error}.") from error
        return Baseline(
            id=str(row["id"]),
            created_unix_ms=int(str(row["created_unix_ms"])),
            locked=bool(row["locked"]),
            imported=bool(row["imported"]),
            data=data,
        )

    def compare(self, a: str, b: str) -> Comparison:
        """Two baselines side by side: what was configured differently, and every metric."""
        return compare.compare(self.get(a), self.summary(a), self.get(b), self.summary(b))

    # --- files -----------------------------------------------------------------------------------

    def export(self, baseline_id: str, form: ExportFormat, out: Path) -> Path:
        """Write one baseline to a file, all or nothing; returns its path."""
        return bundle.write(bundle.render(self.get(baseline_id), form), out)

    def import_(self, path: Path) -> ImportResult:
        """Take in a JSON bundle. Raises StoreError, and takes in nothing, if any of it does not fit."""
        result = ImportResult()
        found = bundle.read(path)
        with self._writing(f"Importing {path}"):
            for made in found:
                if self._is_there(made, path):
                    result.already_there.append(made.id)
                    continue
                self._insert(msgspec.structs.replace(made, imported=True, locked=False))
                result.added.append(made.id)
        return result

    def _is_there(self, made: Baseline, path: Path) -> bool:
        try:
            held = self.get(made.id)
        except NotFound:
            return False
        if bundle.canonical(held) != bundle.canonical(made):
            raise StoreError(
                f"{path} holds a baseline {made.id[:8]} that differs from the one of that id here; "
                "nothing was imported."
            )
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _summary(row: dict[str, object]) -> BaselineSummary:
    names = _SUMMARY_COLUMNS.split(", ")
    values = {name: row[name] for name in names}
    for flag in ("valid", "locked", "imported"):
        values[flag] = bool(values[flag])
    stats = {name: row[name] for name in _CAUTION}
    values["caution"] = other_work(msgspec.convert(stats, dict[str, float | None]))
    return msgspec.convert(values, BaselineSummary)
