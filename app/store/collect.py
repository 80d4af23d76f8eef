"""Puts a `BaselineData` together from a live session or a finished load.

Both take what they need on the caller's thread, quickly. The environment stays empty: `Store.save_baseline`
fills it in, since that asks git and the disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.lab.load_run import LoadRun
from app.lab.stats import LoadRow, row_of_engine, summarize
from app.model.session import SessionModel
from app.store.errors import StoreError
from app.store.records import BaselineData, Environment, Identity, Validity
from ipc.messages import KnobValue

_UNKNOWN_ENVIRONMENT = Environment(app_version="")


def from_live(
    session: SessionModel,
    name: str,
    note: str = "",
    span_s: float | None = None,
    newest: int | None = None,
    *,
    whole: bool = False,
) -> BaselineData:
    """The trailing window of the live session, or its ``newest`` ended requests, raw rows included.

    ``whole``: without requests that arrived before the window. Raises StoreError if there is no engine, or
    nothing ended in the window.
    """
    window = session.live_window(span_s, newest, whole=whole)
    if not window.requests:
        raise StoreError(
            f"No request ended in the last {window.t1_s - window.t0_s:.0f} s, so there is nothing to keep. "
            "Start a load, or choose a longer window."
        )
    reasons: list[str] = []
    if window.markers:
        reasons.append("the configuration changed inside the window: " + window.markers[-1].label)
    if window.sessions > 1:
        reasons.append("the engine was started anew inside the window")
    rows = [row_of_engine(row) for row in window.requests]
    rev, config = _configuration(session, rows, reasons)
    return BaselineData(
        name=name,
        note=note,
        source="live",
        identity=_identity(session),
        cfg_rev=rev,
        config=config,
        duration_s=window.t1_s - window.t0_s,
        requests=list(window.requests),
        stats=summarize(rows),
        step_stats=window.step_stats,
        validity=Validity(valid=not reasons, reasons=reasons),
    )


def from_load(session: SessionModel, run: LoadRun, name: str, note: str = "") -> BaselineData:
    """A load run of this console, with the configuration that it ran under.

    Raises StoreError if no request of it has ended yet.
    """
    progress = run.poll()
    rows, spec = run.rows(), run.spec
    if not rows or spec is None:
        raise StoreError("No request of the load has ended yet, so there is nothing to keep.")
    reasons = list(progress.invalid_reasons)
    if progress.phase not in ("done", "failed"):
        reasons.append("it was kept before the run had ended")
    if run.session and session.link.session != run.session:
        reasons.append("the engine was started anew since the run began")
    rev, config = _configuration(session, rows, reasons)
    stats = summarize(rows)
    begun_s = min(row.intended_ns for row in rows) * 1e-9
    ended_s = max(row.end_ns for row in rows if row.end_ns is not None) * 1e-9
    return BaselineData(
        name=name,
        note=note,
        source="load",
        identity=_identity(session),
        cfg_rev=rev,
        config=config,
        workload=msgspec.to_builtins(spec),
        workload_sha256=progress.workload_sha256,
        duration_s=stats.duration_s,
        load_rows=rows,
        stats=stats,
        step_stats=session.step_stats(begun_s, ended_s),
        validity=Validity(valid=not reasons, reasons=reasons),
    )


def _configuration(
    session: SessionModel, rows: Sequence[LoadRow], reasons: list[str]
) -> tuple[int, dict[str, KnobValue]]:
    """Revision and values that the rows ran under, which need not be the present ones.

    Adds to ``reasons`` if it was more than one, or is not known any more.
    """
    if session.cfg is None:
        reasons.append("the engine's configuration is not known")
        return 0, {}
    revisions = {r for row in rows if row.good for r in (row.rev_first, row.rev_last) if r is not None}
    if len(revisions) > 1:
        named = ", ".join(map(str, sorted(revisions)))
        reasons.append(f"the configuration changed while it was measured (revisions {named})")
    rev = max(revisions, default=session.cfg.rev)
    config = session.config_at(rev)
    if config is None:
        reasons.append(f"the values of configuration revision {rev} are not known any more")
        return session.cfg.rev, dict(session.cfg.values)
    return rev, config


def _identity(session: SessionModel) -> Identity:
    return Identity(
        model=session.model,
        device=session.device,
        engine=session.link.engine,
        environment=_UNKNOWN_ENVIRONMENT,
    )
