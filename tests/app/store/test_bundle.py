"""Baselines as files."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.lab.stats import summarize
from app.store import bundle
from app.store.records import Baseline
from app.store.store import Store, StoreError
from tests.app.builders import baseline, load_row, request_row
from tests.app.engines import ROOT

_ID = "0123456789abcdef0123456789abcdef"


def made(**changes: object) -> Baseline:
    return Baseline(id=_ID, created_unix_ms=1_700_000_000_123, data=baseline(**changes))  # type: ignore[arg-type]


def test_what_is_exported_and_imported_exports_to_the_same_bytes(tmp_path: Path) -> None:
    """E12: file names may hold any letters."""
    store = Store(tmp_path / "a.sqlite")
    kept = store.save_baseline(baseline(load_rows=[load_row(i) for i in range(5)]))
    store.set_locked(kept, True)
    first = store.export(kept, "json", tmp_path / "обзор #1.json")
    other = Store(tmp_path / "b.sqlite")
    result = other.import_(first)
    assert (result.added, result.already_there) == ([kept], [])
    second = other.export(kept, "json", tmp_path / "again.json")
    assert first.read_bytes() == second.read_bytes()
    assert other.get(kept).imported
    assert not other.get(kept).locked
    assert other.get(kept).data == store.get(kept).data


def test_importing_twice_adds_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    kept = store.save_baseline(baseline())
    out = store.export(kept, "json", tmp_path / "x.json")
    result = store.import_(out)
    assert (result.added, result.already_there) == ([], [kept])
    assert len(store.list()) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    note=st.text(max_size=200).filter(lambda t: "\x00" not in t),
    values=st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.none()
        | st.booleans()
        | st.integers(-(1 << 53), 1 << 53)
        | st.floats(-1e18, 1e18, allow_nan=False, allow_infinity=False)
        | st.text(max_size=50),
        max_size=6,
    ),
    mean=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_values_survive_the_trip(
    tmp_path: Path, note: str, values: dict[str, object], mean: float
) -> None:
    out = tmp_path / "trip.json"
    first = made(note=note, config=values, step_stats={"mean": mean})
    bundle.write(bundle.render(first, "json"), out)
    back = bundle.read(out)
    assert back == [first]
    assert bundle.render(back[0], "json") == out.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: raw.replace(b'"first"', b'"worst"'), "changed after its export"),
        (lambda raw: raw.replace(b'"version": 3', b'"version": 4'), "version 4"),
        (lambda raw: raw.replace(b"decodeck-baseline", b"something-else"), "not a bundle"),
        (lambda raw: raw[: len(raw) // 2], "not a bundle"),
        (lambda raw: b"[" * 5000, "not a bundle"),
        (lambda raw: b"", "not a bundle"),
        (lambda raw: raw.replace(b'"note"', b'"extra": 1, "note"'), "not a bundle"),
        (lambda raw: raw.replace(_ID.encode(), b"../../../../etc/passwd"), "not a bundle"),
    ],
)
def test_a_file_that_is_no_whole_bundle_is_refused_and_nothing_taken_in(
    tmp_path: Path, spoil: object, said: str
) -> None:
    assert callable(spoil)
    out = tmp_path / "x.json"
    out.write_bytes(spoil(bundle.render(made(), "json")))
    store = Store(tmp_path / "a.sqlite")
    with pytest.raises(StoreError, match=said):
        store.import_(out)
    assert store.list() == []


def test_a_bundle_of_version_1_is_read_and_its_checksum_still_holds(tmp_path: Path) -> None:
    """What it was written without takes its default; its bytes are what was signed, not today's fields."""
    rows = [load_row(i, sent_ns=i * 1_000_000_000) for i in range(3)]
    new = made(requests=[], load_rows=rows, source="load", stats=summarize(rows))
    items = msgspec.to_builtins([{"id": new.id, "created_unix_ms": new.created_unix_ms, "data": new.data}])
    for row in items[0]["data"]["load_rows"]:
        for later in ("result_cached", "drafts_n", "drafted_tok", "accepted_tok"):
            del row[later]
    del items[0]["data"]["stats"]["result_cached"]
    digest = hashlib.sha256(msgspec.json.encode(items, order="sorted")).hexdigest()
    old = {"format": "decodeck-baseline", "version": 1, "sha256": digest, "baselines": items}
    out = tmp_path / "old.json"
    out.write_bytes(msgspec.json.encode(old))
    assert bundle.read(out) == [new]
    items[0]["data"]["cfg_rev"] += 1
    out.write_bytes(msgspec.json.encode(old))
    with pytest.raises(StoreError, match="changed after its export"):
        bundle.read(out)


def test_another_baseline_under_a_known_id_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    bundle.write(bundle.render(made(), "json"), tmp_path / "one.json")
    store.import_(tmp_path / "one.json")
    bundle.write(bundle.render(made(note="another"), "json"), tmp_path / "two.json")
    with pytest.raises(StoreError, match="differs"):
        store.import_(tmp_path / "two.json")
    assert store.get(_ID).data.note == baseline().note


def test_csv_has_a_row_a_request_and_raw_and_derived_columns() -> None:
    text = bundle.csv_of(made()).decode()
    assert text.endswith("\r\n")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == 12
    assert float(rows[3]["ttft_s"]) == pytest.approx(0.050)
    assert rows[0]["tpot_s"] == ""  # one token: undefined, not 0
    assert rows[0]["rid"] == "1"


def test_drafts_and_weights_are_in_every_form_of_export() -> None:
    row = request_row(1, 100.0, drafts_n=4, drafted_tok=12, accepted_tok=9)
    stats = {"weight_bytes": 276_000_000, "draft_acceptance": 0.75, "draft_length": 3.25}
    exported = made(requests=[row], step_stats=stats)
    (line,) = csv.DictReader(io.StringIO(bundle.csv_of(exported).decode(), newline=""))
    assert (line["drafts_n"], line["drafted_tok"], line["accepted_tok"]) == ("4", "12", "9")
    assert (line["run_weight_bytes"], line["run_draft_acceptance"]) == ("276000000", "0.75")
    assert line["run_draft_weight_bytes"] == "", "unknown is empty, not 0"
    page = bundle.markdown(exported)
    assert "| weight_bytes | 276000000 |" in page
    assert "| draft_acceptance | 0.75 |" in page
    assert b'"weight_bytes": 276000000' in bundle.render(exported, "json")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-2", "-2"),
        ("-1e5", "-1e5"),
        ("-x", "'-x"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\tx", "'\tx"),
        ("\rx", "'\rx"),
        ("plain", "plain"),
    ],
)
def test_no_cell_is_a_formula(text: str, safe: str) -> None:
    assert bundle.cell(text) == safe


def test_quotes_commas_and_line_ends_stay_inside_their_cell() -> None:
    """G09: RFC 4180."""
    odd = 'a "b", c\r\nd;e'
    data = baseline(requests=[], load_rows=[load_row(0, error=odd, error_class="client", finish=None)])
    text = bundle.csv_of(Baseline(id=_ID, created_unix_ms=1, data=data)).decode()
    assert next(csv.DictReader(io.StringIO(text, newline="")))["error"] == odd


_EXPORTER = """
import locale, sys
from pathlib import Path
from app.lab.stats import summarize
from app.store import bundle
from tests.app.store.test_bundle import made
locale.setlocale(locale.LC_ALL, sys.argv[1])
for form in ("csv", "md", "json"):
    Path(sys.argv[2], form).write_bytes(bundle.render(made(), form))
print(locale.localeconv()["decimal_point"])
"""


def test_exports_are_the_same_bytes_under_every_locale(tmp_path: Path) -> None:
    """G09: under a locale with a comma as its decimal mark the exports are those of the C locale."""
    outputs, marks = [], []
    for name in ("C", comma_locale(tmp_path)):
        folder = tmp_path / f"out {len(outputs)}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", _EXPORTER, name, str(folder)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "LC_ALL": name,
                "LOCPATH": str(tmp_path / "locales"),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        marks.append(done.stdout.strip())
        outputs.append([(folder / form).read_bytes() for form in ("csv", "md", "json")])
    assert marks == [".", ","]
    assert outputs[0] == outputs[1]


def comma_locale(tmp_path: Path) -> str:
    """The name of a locale with a decimal comma, compiled for this test; skips where that cannot be done."""
    target = tmp_path / "locales" / "de_DE.UTF-8"
    target.parent.mkdir()
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("no sources of locales here (Debian's package locales holds them)")
    subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", str(target)], capture_output=True, check=False)
    return "de_DE.UTF-8"


def test_markdown_shows_figures_and_lets_no_name_break_its_tables() -> None:
    text = bundle.markdown(made(name="a | b <img src=x> `c`"))
    assert "a \\| b \\<img src=x\\> \\`c\\`" in text
    assert "| ttft_s | s | 12 |" in text
    assert "| prefix_cache | true |" in text
    assert bundle._md("_x_ a_b") == "\\_x\\_ a_b"


def test_an_export_that_fails_leaves_no_file_and_says_so(tmp_path: Path) -> None:
    """G07: the disk is full in mid-export (here: a limit on file sizes): no half file stays."""
    out = tmp_path / "x.json"
    out.write_text("the old export")
    code = (
        "import signal, sys, resource; from pathlib import Path; from app.store import bundle\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: bundle.write(b'x' * 5000, Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("StoreError")
    assert "cannot be written" in done.stdout
    assert out.read_text() == "the old export"
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_show_json_is_the_whole_baseline(tmp_path: Path) -> None:
    store = Store(tmp_path / "decodeck.sqlite")
    kept = store.save_baseline(baseline())
    store.close()
    done = subprocess.run(
        [sys.executable, "-m", "app", "snapshot", "show", kept[:8], "--json", "--data-dir", str(tmp_path)],
        capture_output=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    assert shown["id"] == kept
    assert len(shown["data"]["requests"]) == 12
    assert msgspec.json.decode(done.stdout, type=Baseline).data == baseline()


def test_bytes_tokens_and_times_beyond_31_and_53_bits_stay_exact(tmp_path: Path) -> None:
    """E09: no number is narrowed on its way through the store and the files."""
    big_ns, big = (1 << 63) - 1, (1 << 53) - 1
    rows = [
        request_row(1, 1.0, prompt_tok=1 << 31, computed_tok=big),
        request_row(2, 1.0, arrive_ns=big_ns - 5, sched_ns=big_ns - 4, first_ns=big_ns - 3, end_ns=big_ns),
    ]
    data = baseline(requests=rows, step_stats={"weight_bytes": 1 << 40, "kv_bytes": big_ns})
    store = Store(tmp_path / "a.sqlite")
    kept = store.save_baseline(data)
    assert store.get(kept).data == data
    out = store.export(kept, "json", tmp_path / "x.json")
    assert bundle.read(out)[0].data == data
    cells = list(csv.DictReader(io.StringIO(bundle.csv_of(store.get(kept)).decode(), newline="")))
    assert [int(cells[1]["intended_ns"]), int(cells[1]["end_ns"])] == [big_ns - 5, big_ns]
    assert int(cells[0]["prompt_tok"]) == 1 << 31
