"""`Shelf`: the stored baselines. They are read and written on a thread of jobs, never on the window's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from PySide6.QtCore import QObject, Signal

from app.i18n import tr, tr_engine
from app.jobs import Jobs
from app.lab.load_run import LoadRun
from app.model.session import SessionModel
from app.store.collect import from_live, from_load
from app.store.records import BaselineData, BaselineSummary, Comparison
from app.store.store import ExportFormat, Store

AFTER_CHANGE_S = 1e-3  # so that the change itself is not in the window that begins with it


class Tell(Protocol):
    """How the person is told of something: its level, and what says it in the language in use."""

    def __call__(self, level: str, say: Callable[[], str], /) -> None: ...


class Shelf(QObject):
    """All methods belong to the GUI thread and return at once; what went wrong is told."""

    changed = Signal()  # `items`

    def __init__(self, path: Path, jobs: Jobs, session: SessionModel, load_run: LoadRun, tell: Tell) -> None:
        """``path``: the database. ``session`` and ``load_run`` are what a new baseline is made of."""
        super().__init__()
        self.path = path
        self.items: list[BaselineSummary] = []
        self.store: Store | None = None  # lives on the jobs' thread; use `use`
        self._jobs = jobs
        self._session = session
        self._load_run = load_run
        self._tell = tell

    def use(
        self, title: str, work: Callable[[Store], Any], on_done: Callable[[Any], None] | None = None
    ) -> None:
        """Run ``work(store)`` on the jobs' thread and tell ``on_done`` later; errors become a notice."""
        told: list[str] = []  # what happened when the store was opened; written before the job ends

        def job() -> Any:
            if self.store is not None and self.store.is_gone():
                told.append(f"The database {self.path} was deleted or replaced; it was opened anew.")
                self.store.close()
                self.store = None
            if self.store is None:
                self.store = Store(self.path)
                told.extend(self.store.notices)
            return work(self.store)

        def done(result: Any) -> None:
            for text in told:
                self._tell("warning", partial(tr_engine, text))
            if on_done is not None:
                on_done(result)

        def failed(error: Exception) -> None:
            for text in (*told, str(error)):
                self._tell("error", partial(tr_engine, text))

        self._jobs.submit(title, job, done, failed)

    def reload(self) -> None:
        """Read the list of baselines again."""

        def show(found: list[BaselineSummary]) -> None:
            self.items = found
            self.changed.emit()

        self.use(tr("Reading baselines"), lambda store: store.list(), show)

    def data(self, name: str, note: str, source: str, span_s: float | None) -> BaselineData:
        """What `save` would store now. Raises StoreError if it cannot.

        ``source``: load; live, the last ``span_s`` seconds; or change, since the configuration last changed.
        """
        if source == "load":
            return from_load(self._session, self._load_run, name, note)
        if source == "change" and self._session.changed_s is not None:
            span_s = self._session.now_s - self._session.changed_s - AFTER_CHANGE_S
            return from_live(self._session, name, note, span_s, whole=True)
        return from_live(self._session, name, note, span_s)

    def save(self, data: BaselineData, on_saved: Callable[[str], None] | None = None) -> None:
        """Write a baseline; ``on_saved`` gets its id."""

        def saved(found: str) -> None:
            self._tell("info", lambda: tr("Saved baseline “{name}”.").format(name=data.name))
            self.reload()
            if on_saved is not None:
                on_saved(found)

        self.use(tr("Saving a baseline"), lambda store: store.save_baseline(data), saved)

    def delete(self, baseline_id: str) -> None:
        def gone(_result: None) -> None:
            self.reload()

        self.use(tr("Deleting a baseline"), lambda store: store.delete(baseline_id), gone)

    def compare(self, a: str, b: str, on_done: Callable[[Comparison], None]) -> None:
        self.use(tr("Comparing baselines"), lambda store: store.compare(a, b), on_done)

    def export(self, baseline_id: str, form: ExportFormat, out: Path) -> None:
        """Write one baseline to ``out``."""

        def written(path: Path) -> None:
            self._tell("info", lambda: tr("Wrote {path}").format(path=path))

        self.use(tr("Exporting"), lambda store: store.export(baseline_id, form, out), written)

    def import_(self, path: Path) -> None:
        """Read a bundle that was exported before."""

        def read(result: Any) -> None:
            counts = {"added": len(result.added), "there": len(result.already_there)}
            self._tell("info", lambda: tr("Imported {added}; already there: {there}.").format(**counts))
            self.reload()

        self.use(tr("Importing"), lambda store: store.import_(path), read)

    def close(self) -> None:
        """End the jobs, and with the last one the store."""
        self._jobs.close(self.store.close if self.store is not None else None)
