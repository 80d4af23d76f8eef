"""Baselines as files: a lossless JSON bundle, CSV with one row a request, and Markdown for people.

What is exported and imported again gives the same bytes: the canonical form sorts its keys, and numbers are
written in the shortest form that reads back as the same number. Nothing here depends on the locale.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from app.lab.stats import METRIC_ORDER, LoadRow, row_of_engine
from app.store.compare import other_work
from app.store.errors import StoreError
from app.store.records import (
    BUNDLE_FORMAT,
    BUNDLE_VERSION,
    Baseline,
    BaselineData,
    BaselineId,
    ExportFormat,
)

MAX_BUNDLE_BYTES = 256 << 20
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a baseline travels: whether it is locked or was imported is each store's own business."""

    id: BaselineId
    created_unix_ms: int
    data: BaselineData


class _Bundle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    sha256: str  # of the canonical form of ``baselines``
    baselines: list[_Item]


class _Header(msgspec.Struct, frozen=True):
    """Read first, so that a newer bundle is recognised whatever else it holds."""

    format: str
    version: int


class _Content(msgspec.Struct, frozen=True):
    """The baselines as the file has them: the checksum is of those, whatever fields came later."""

    baselines: list[Any]


def to_json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def canonical(made: Baseline) -> bytes:
    """One baseline in the one form that stands for it."""
    return msgspec.json.encode(_item(made), order="sorted")


def _item(made: Baseline) -> _Item:
    return _Item(id=made.id, created_unix_ms=made.created_unix_ms, data=made.data)


def _digest(items: Sequence[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(items, order="sorted")).hexdigest()


def render(made: Baseline, form: ExportFormat) -> bytes:
    """The file's bytes."""
    if form == "json":
        items = [_item(made)]
        whole = _Bundle(format=BUNDLE_FORMAT, version=BUNDLE_VERSION, sha256=_digest(items), baselines=items)
        return msgspec.json.format(msgspec.json.encode(whole, order="sorted"), indent=1) + b"\n"
    if form == "csv":
        return csv_of(made)
    return markdown(made).encode()


def read(path: Path) -> list[Baseline]:
    """The baselines of a bundle. Raises StoreError for anything that is not one, whole and unchanged."""
    try:
        if path.stat().st_size > MAX_BUNDLE_BYTES:
            raise StoreError(f"{path} is larger than a bundle can be ({MAX_BUNDLE_BYTES} bytes).")
        raw = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    try:
        header = msgspec.json.decode(raw, type=_Header)
        if header.format != BUNDLE_FORMAT:
            raise StoreError(f"{path} is not a bundle of Decodeck but {header.format!r}.")
        if not 1 <= header.version <= BUNDLE_VERSION:
            raise StoreError(
                f"{path} is a bundle of version {header.version}; this Decodeck reads versions 1 to "
                f"{BUNDLE_VERSION}."
            )
        whole = msgspec.json.decode(raw, type=_Bundle)
        content = msgspec.json.decode(raw, type=_Content)
        made = [
            Baseline(id=item.id, created_unix_ms=item.created_unix_ms, data=item.data)
            for item in whole.baselines
        ]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path} is not a bundle of Decodeck: {error}.") from error
    if _digest(content.baselines) != whole.sha256:
        raise StoreError(f"{path} was changed after its export: its checksum does not fit. Export it again.")
    return made


def write(content: bytes, out: Path) -> Path:
    """Write a file all or nothing: beside the target first, then renamed."""
    partial: str | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(prefix=".export-", dir=out.parent)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, out)
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise StoreError(f"{out} cannot be written: {error}. No part of it was left behind.") from error
    return out


# --- CSV -----------------------------------------------------------------------------------------

_CSV_SKIPPED = ("itl_us",)
_CSV_DERIVED = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "lag_s")
# Of the whole run, the same in each row, so that files of several runs can be put together.
_CSV_RUN = ("weight_bytes", "original_bytes", "draft_weight_bytes", "draft_acceptance", "draft_length")


def cell(value: object) -> str:
    """One cell: numbers without locale, empty for undefined, and text that no spreadsheet will execute."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if text.startswith(_FORMULA) and not _is_number(text):
        return "'" + text
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def rows_of(data: BaselineData) -> list[LoadRow]:
    """The requests as one kind of row, wherever they were measured."""
    return list(data.load_rows) or [row_of_engine(row) for row in data.requests]


def csv_of(made: Baseline) -> bytes:
    """One row a request (RFC 4180, UTF-8): raw fields, derived latencies in seconds, figures of the run."""
    fields = [name for name in LoadRow.__struct_fields__ if name not in _CSV_SKIPPED]
    text = io.StringIO(newline="")
    out = csv.writer(text, lineterminator="\r\n")
    run = [cell(made.data.step_stats.get(name)) for name in _CSV_RUN]
    out.writerow([*fields, *_CSV_DERIVED, *(f"run_{name}" for name in _CSV_RUN)])
    for row in rows_of(made.data):
        out.writerow([*(cell(getattr(row, name)) for name in (*fields, *_CSV_DERIVED)), *run])
    return text.getvalue().encode()


# --- Markdown ------------------------------------------------------------------------------------


_MARKUP = re.compile(r"[\\|`*<>\[\]]|(?<!\w)_|_(?!\w)")  # an underscore inside a word is none


def _md(value: object) -> str:
    """Text for a table's cell: nothing in it can end the cell or start markup."""
    text = cell(value) if not isinstance(value, str) else value
    text = _MARKUP.sub(r"\\\g<0>", text)
    return text.replace("\n", " ").replace("\r", " ")


def _table(head: list[str], rows: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(_md(value) for value in row) + " |" for row in rows]


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    # Bytes and tokens are whole numbers, which no power of ten makes easier to read.
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def markdown(made: Baseline) -> str:
    """A page for a report or a pull request."""
    data = made.data
    stats = data.stats
    when = datetime.fromtimestamp(made.created_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    identity = data.identity
    lines = [f"# {_md(data.name)}", "", f"Saved {when}, id `{made.id}`, from {data.source} traffic.", ""]
    if data.note:
        lines += [_md(data.note), ""]
    if not data.validity.valid:
        lines += ["**Doubtful:** " + _md("; ".join(data.validity.reasons)), ""]
    work = other_work(data.step_stats)
    if work:
        lines += ["**Take its figures with caution:** " + _md(work) + ".", ""]
    lines += ["## Measured", ""]
    lines += _table(
        ["metric", "unit", "n", "excluded", "mean", "p50", "p90", "p95", "p99"],
        [
            [m.name, m.unit, m.n, m.excluded, *map(_figure, (m.mean, m.p50, m.p90, m.p95, m.p99))]
            for m in (stats.metrics[name] for name in METRIC_ORDER if name in stats.metrics)
        ],
    )
    lines += ["", f"Percentiles: {stats.percentile_rule}. TTFT counts from the intended sending.", ""]
    lines += _table(
        [
            "requests",
            "good",
            "errors",
            "error share",
            "duration s",
            "requests/s",
            "output tok/s",
            "prompt tok/s",
            "from result cache",
        ],
        [
            [
                stats.requests,
                stats.ok,
                ", ".join(f"{count} {kind}" for kind, count in stats.errors.items()) or "none",
                *map(
                    _figure,
                    (
                        stats.error_share,
                        stats.duration_s,
                        stats.request_rate_rps,
                        stats.output_tok_s,
                        stats.prompt_tok_s,
                    ),
                ),
                stats.result_cached,
            ]
        ],
    )
    if data.step_stats:
        lines += ["", "## Steps", ""]
        lines += _table(
            ["figure", "value"], [[name, _figure(v)] for name, v in sorted(data.step_stats.items())]
        )
    lines += ["", "## Configuration", ""]
    lines += _table(["knob", "value"], [[knob, value] for knob, value in sorted(data.config.items())])
    lines += ["", "## On", ""]
    model, device, engine = identity.model, identity.device, identity.engine
    env = identity.environment
    lines += _table(
        ["", ""],
        [
            ["model", model.name if model else None],
            ["model SHA-256", model.sha256 if model else None],
            ["dtype", model.dtype if model else None],
            ["device", device.name if device else None],
            ["driver", device.driver if device else None],
            ["engine", engine.version if engine else None],
            ["torch", engine.torch if engine else None],
            ["Decodeck", f"{env.app_version} {env.git_commit[:12]}".strip()],
            ["system", f"{env.os} {env.kernel}".strip()],
            ["CPU", env.cpu],
            ["workload SHA-256", data.workload_sha256],
        ],
    )
    return "\n".join(lines) + "\n"
