"""Baselines in SQLite: whole or not at all, shared, moved aside when damaged."""

from __future__ import annotations

import re
import resource
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import msgspec
import pytest
import sqlite_utils

from app.lab.stats import summarize
from app.store import schema
from app.store.migrations import STEPS, migrate
from app.store.records import Validity
from app.store.store import NotFound, Store, StoreError
from tests.app.builders import baseline, load_row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "Данные ü 空 x" / "decodeck.sqlite"


def test_a_baseline_comes_back_as_it_was_saved(path: Path) -> None:
    """E12: the data folder's path may hold spaces and any letters."""
    store = Store(path)
    data = baseline()
    made = store.get(store.save_baseline(data))
    assert made.data == data
    assert [row.rid for row in made.data.requests] == [row.rid for row in data.requests]
    again = Store(path)
    assert again.get(made.id[:8]) == made
    assert again.list()[0].name == "first"
    assert not again.notices


def test_load_rows_and_thousands_of_rows_come_back_in_order(path: Path) -> None:
    store = Store(path)
    data = baseline(source="load", requests=[], load_rows=[load_row(i) for i in range(2500)])
    assert store.get(store.save_baseline(data)).data == data


def test_the_environment_is_filled_in_at_saving(path: Path) -> None:
    store = Store(path)
    data = baseline()
    environment = msgspec.structs.replace(data.identity.environment, app_version="")
    bare = msgspec.structs.replace(
        data, identity=msgspec.structs.replace(data.identity, environment=environment)
    )
    found = store.get(store.save_baseline(bare)).data.identity.environment
    assert found.app_version == "0.1.0"
    assert found.python
    assert found.packages["numpy"]


def test_secrets_of_the_shell_do_not_enter_a_baseline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.store.environment import environment

    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = environment()
    assert found.variables["OMP_NUM_THREADS"] == "2"
    assert b"hf_secret_value" not in msgspec.json.encode(found)


def test_saving_one_leaves_the_fields_of_others_alone(path: Path) -> None:
    """G02: rows with different fields never share a batch, so nothing not given becomes NULL."""
    store = Store(path)
    full = store.save_baseline(baseline("full"))
    store.save_baseline(baseline("bare", count=0, config={}, step_stats={}))
    store.set_locked(full, True)
    made = store.get(full)
    assert (made.data.note, made.locked, made.data.config) == (baseline().note, True, baseline().config)


def test_a_row_that_is_not_written_is_an_error_not_a_silence(path: Path) -> None:
    """G04: the number of rows is checked, and a NOT NULL value that is missing is told."""
    store = Store(path)
    with pytest.raises(sqlite3.IntegrityError), store.db.atomic():
        store._insert_rows("baseline", [{"id": "0" * 32, "name": "no other value"}])
    store.db.conn.execute("CREATE TRIGGER swallow BEFORE INSERT ON request BEGIN SELECT RAISE(IGNORE); END")
    with pytest.raises(StoreError, match="only 0 were written"):
        store.save_baseline(baseline())
    assert store.list() == []
    assert next(store.db.query("SELECT count(*) AS n FROM setting"))["n"] == 0


def test_names_and_notes_are_values_never_sql(path: Path) -> None:
    store = Store(path)
    name = "x'); DROP TABLE baseline; --"
    store.save_baseline(baseline(name))
    assert store.list()[0].name == name
    for odd in ("x' OR 1=1", "%", "____", ""):
        with pytest.raises(NotFound):
            store.get(odd)


def test_an_ambiguous_or_unknown_id_is_refused_in_words(path: Path) -> None:
    store = Store(path)
    made = store.get(store.save_baseline(baseline()))
    twin = msgspec.structs.replace(
        made, id=made.id[:10] + ("0" * 22 if made.id[10:] != "0" * 22 else "1" * 22)
    )
    with store._writing("test"):
        store._insert(twin)
    with pytest.raises(NotFound, match="More than one"):
        store.get(made.id[:8])
    with pytest.raises(NotFound, match="no baseline"):
        store.get("0123456789abcdef" if not made.id.startswith("0123") else "fedcba98")


def test_a_locked_baseline_cannot_be_deleted(path: Path) -> None:
    store = Store(path)
    made = store.save_baseline(baseline())
    store.set_locked(made, True)
    with pytest.raises(StoreError, match="locked"):
        store.delete(made)
    store.set_locked(made, False)
    store.delete(made)
    assert store.list() == []
    assert next(store.db.query("SELECT count(*) AS n FROM request"))["n"] == 0


# --- several processes -------------------------------------------------------------------------------

_HOLDER = """
import sqlite3, sys, time
c = sqlite3.connect(sys.argv[1], timeout=10, isolation_level=None)
c.execute("BEGIN IMMEDIATE")
print("holding", flush=True)
sys.stdin.readline()
c.execute("COMMIT")
"""


def test_writers_wait_for_each_other_and_readers_do_not(path: Path) -> None:
    """G01: while another process holds the write lock, saving waits and then succeeds; reading goes on."""
    store = Store(path)
    first = store.save_baseline(baseline("before"))
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_HOLDER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline().strip() == "holding"
    saved: list[str] = []

    def write() -> None:
        own = Store(path)
        saved.extend(own.save_baseline(baseline(f"n{i}")) for i in range(5))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        assert Store(path).get(first).data.name == "before"
    assert not saved
    time.sleep(0.2)
    assert writer.is_alive()
    holder.stdin.write("\n")
    holder.stdin.flush()
    writer.join(timeout=60)
    holder.wait(timeout=30)
    assert {item.name for item in store.list()} == {"before", *(f"n{i}" for i in range(5))}


def test_a_lock_held_too_long_is_told_not_taken_for_damage(path: Path) -> None:
    """G01: after the busy timeout the error says that another program holds the file."""
    store = Store(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.db.conn.execute("PRAGMA busy_timeout = 50")
    with pytest.raises(StoreError, match="another program"):
        store.save_baseline(baseline())
    other.execute("ROLLBACK")
    store.save_baseline(baseline())
    assert len(store.list()) == 1


# --- damage ------------------------------------------------------------------------------------------


def _zero_page_two(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4096:8192] = bytes(4096)
    path.write_bytes(raw)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _text(path: Path) -> None:
    path.write_text("this is no database\n" * 50)


@pytest.mark.parametrize("damage", [_zero_page_two, _truncate, _text])
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(path: Path, damage: object) -> None:
    """G06: whatever happened to the file, the start works, and the person is told where the old one is."""
    store = Store(path)
    store.save_baseline(baseline())
    store.close()
    assert callable(damage)
    damage(path)
    broken = path.read_bytes()
    again = Store(path)
    assert again.list() == []
    assert "damaged" in again.notices[0]
    kept = list(path.parent.glob("decodeck.damaged-*.sqlite"))
    assert [each.read_bytes() for each in kept] == [broken]
    assert str(kept[0]) in again.notices[0]
    again.save_baseline(baseline("after"))
    assert [item.name for item in Store(path).list()] == ["after"]


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    """G06: 0 bytes."""
    path.parent.mkdir(parents=True)
    path.touch()
    store = Store(path)
    store.save_baseline(baseline())
    assert len(store.list()) == 1


def test_a_write_ahead_log_of_another_file_does_no_harm(path: Path, tmp_path: Path) -> None:
    """G06: a -wal that belongs to another database."""
    other = sqlite3.connect(tmp_path / "other.sqlite", isolation_level=None)
    other.execute("PRAGMA journal_mode = WAL")
    other.execute("CREATE TABLE t (x)")
    other.execute("INSERT INTO t VALUES (randomblob(20000))")
    store = Store(path)
    store.save_baseline(baseline("kept"))
    store.close()
    foreign = (tmp_path / "other.sqlite-wal").read_bytes()
    assert foreign
    path.with_name(path.name + "-wal").write_bytes(foreign)
    again = Store(path)
    again.save_baseline(baseline("more"))
    assert "more" in {item.name for item in again.list()}


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="data folder"):
        Store(tmp_path / "file" / "decodeck.sqlite")


# --- a full disk -------------------------------------------------------------------------------------


def test_a_full_disk_is_told_nothing_is_half_kept_and_saving_resumes(path: Path) -> None:
    """G07: SQLite reports FULL; no row of the baseline stays, and with room it works again."""
    store = Store(path)
    store.save_baseline(baseline("small"))
    pages = store.db.conn.execute("PRAGMA page_count").fetchone()[0]
    store.db.conn.execute(f"PRAGMA max_page_count = {pages + 4}")
    big = baseline("big", source="load", requests=[], load_rows=[load_row(i) for i in range(2000)])
    with pytest.raises(StoreError, match="disk is full"):
        store.save_baseline(big)
    assert [item.name for item in store.list()] == ["small"]
    assert next(store.db.query("SELECT count(*) AS n FROM request WHERE kind = 'load'"))["n"] == 0
    store.db.conn.execute("PRAGMA max_page_count = 1000000")
    store.save_baseline(big)
    assert len(store.list()) == 2


# --- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1000, 9000, 20_000])
def test_a_first_start_without_room_says_so_and_the_next_one_works(path: Path, limit: int) -> None:
    """SQLite rolls back by itself then; that there is nothing left to roll back must not hide the reason."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # bytes; writing beyond it fails
        with pytest.raises(StoreError, match=r"Opening .*: the disk reports an error, or has no room left"):
            Store(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store = Store(path)
    assert store.notices == []
    store.save_baseline(baseline())


def test_a_newer_file_is_refused_and_not_touched(path: Path) -> None:
    Store(path).close()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    newer.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer Decodeck"):
        Store(path)
    assert path.read_bytes() == before
    assert [
        each.name for each in path.parent.iterdir() if "damaged" in each.name or "backup" in each.name
    ] == []


def test_a_migration_backs_up_first_and_keeps_the_data(path: Path) -> None:
    store = Store(path)
    made = store.save_baseline(baseline())
    store.close()
    connection = sqlite3.connect(path, isolation_level=None)

    def second(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE baseline ADD COLUMN colour TEXT")

    backup = migrate(connection, path, [*STEPS, second])
    assert backup is not None
    assert connection.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION + 1
    assert connection.execute("SELECT id, colour FROM baseline").fetchall() == [(made, None)]
    old = sqlite_utils.Database(backup)
    assert "colour" not in old["baseline"].columns_dict
    assert [row["id"] for row in old["baseline"].rows] == [made]


def test_a_file_of_version_1_is_brought_up_to_date_and_read(path: Path) -> None:
    """Rows and statistics keep what they were stored with; what they lack has its default."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [load_row(i) for i in range(4)]
    data = baseline(source="load", requests=[], load_rows=rows, stats=summarize(rows))
    new = Store(path.with_name("new.sqlite"))
    made = new.save_baseline(data)
    connection = sqlite3.connect(path, isolation_level=None)
    migrate(connection, path, STEPS[:1])
    for table in ("baseline", "setting", "request"):
        for row in new.db[table].rows:
            for name in {"row", "head"} & row.keys():
                later = "result_cached|drafts_n|drafted_tok|accepted_tok"
                row[name] = re.sub(rf',"({later})":(false|0)', "", row[name])
                assert not re.search(later, row[name])
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO {table} VALUES ({marks})", list(row.values()))
    connection.close()
    store = Store(path)
    assert "brought up to date" in store.notices[0]
    found = store.get(made).data
    assert (found.load_rows, found.stats) == (rows, data.stats)
    look = sqlite3.connect(path)  # the store itself trusts no view
    view = look.execute("SELECT result_cached, preempt_n, forward_us, drafted_tok FROM request_view")
    assert view.fetchall() == [(0, 0, None, 0)] * 4


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    Store(path).close()
    connection = sqlite3.connect(path, isolation_level=None)

    def broken(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE half (x)")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        migrate(connection, path, [*STEPS, broken])
    assert connection.execute("PRAGMA user_version").fetchone()[0] == schema.VERSION
    assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()
    connection.close()
    Store(path).save_baseline(baseline())


# --- comparing ---------------------------------------------------------------------------------------


def test_a_comparison_shows_what_was_configured_differently_and_every_metric(path: Path) -> None:
    store = Store(path)
    slow = [
        msgspec.structs.replace(row, first_ns=(row.first_ns or 0) + 50_000_000) for row in baseline().requests
    ]
    from app.lab.stats import row_of_engine, summarize

    a = store.save_baseline(baseline("a"))
    b = store.save_baseline(
        baseline(
            "b",
            config={**baseline().config, "prefix_cache": False, "extra": 1},
            requests=slow,
            stats=summarize([row_of_engine(row) for row in slow]),
            validity=Validity(valid=False, reasons=["the generator was late"]),
        )
    )
    found = store.compare(a, b)
    assert [(d.key, d.a, d.b, d.in_a) for d in found.config] == [
        ("extra", None, 1, False),
        ("prefix_cache", True, False, True),
    ]
    ttft = next(m for m in found.metrics if m.name == "ttft_p50_s")
    assert ttft.a == pytest.approx(0.050)
    assert ttft.b == pytest.approx(0.100)
    assert (ttft.ratio, ttft.better, ttft.n_a) == (pytest.approx(2.0), "a", 12)
    assert any("generator was late" in warning for warning in found.warnings)
    assert any("same list of requests" in warning for warning in found.warnings)


def test_a_baseline_compared_with_itself_differs_in_nothing(path: Path) -> None:
    store = Store(path)
    made = store.save_baseline(baseline())
    found = store.compare(made, made)
    assert (found.config, found.identity) == ([], [])
    assert all(m.better is None for m in found.metrics)
    assert all(m.delta in (None, 0.0) for m in found.metrics)


def test_a_comparison_tells_of_drafts_and_of_the_memory_where_either_side_has_any(path: Path) -> None:
    store = Store(path)
    steps = {"steps": 50, "weight_bytes": 770, "original_bytes": 0, "draft_acceptance": None}
    a = store.save_baseline(baseline("as loaded", step_stats=steps))
    drafted = {"weight_bytes": 264, "original_bytes": 202, "draft_acceptance": 0.6, "draft_length": 2.5}
    b = store.save_baseline(baseline("int8", step_stats={**steps, **drafted}))
    found = {m.name: m for m in store.compare(a, b).metrics}
    weights, accepted = found["weight_bytes"], found["draft_acceptance"]
    assert (weights.unit, weights.a, weights.b, weights.better, weights.n_a) == ("B", 770, 264, "b", 50)
    assert (accepted.unit, accepted.a, accepted.b, accepted.better) == ("share", None, 0.6, None)
    assert found["original_bytes"].better == "a"
    assert "draft_weight_bytes" not in found, "neither holds any"
    assert "weight_bytes" not in {
        m.name for m in store.compare(*[store.save_baseline(baseline())] * 2).metrics
    }
