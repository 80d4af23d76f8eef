"""`Console`: everything behind the window, in one place, for panels, actions and tests.

It owns the link to the engine, the session, the knobs, the load run, the chat and the shelf of baselines, and
takes in what is new on each frame of the clock. It knows no widget. Window and language can change over it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.errors import ErrorHub
from app.i18n import N_, knob_title, tr, tr_engine, tr_later, tr_n
from app.jobs import Jobs
from app.journal import Journal
from app.knob_text import value_text
from app.lab.load_run import LoadError, LoadProgress, LoadRun
from app.lab.workload import WorkloadError, WorkloadSpec, fitted
from app.load_names import fitted_text, load_text
from app.model.chat import ChatModel
from app.model.costs import first_awq_search
from app.model.knobs import KnobModel, KnobStatus, Patch
from app.model.session import SessionModel
from app.net.io_thread import EngineLink
from app.net.judge import GOOD_AFTER_S
from app.net.types import LaunchSpec, LinkState
from app.settings import Settings
from app.shelf import Shelf
from app.units import count, pause, span
from ipc.messages import CANCELLED, ApplyEvent, Cancel, CfgCancel, Error, KnobValue, Reply


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to tell the person. ``level``: info, warning or error."""

    level: str
    text: str
    detail: str = ""


class Console(QObject):
    """All methods belong to the GUI thread and return at once."""

    noticed = Signal(object)  # Notice
    selected = Signal(object)  # rid of the request that was picked, or None
    asked = Signal()  # a change of knobs
    costly = Signal(object)  # the patch of a change that takes minutes: to be confirmed

    def __init__(
        self, link: EngineLink, settings: Settings, store_path: Path, errors: ErrorHub | None = None
    ) -> None:
        super().__init__()
        self.link = link
        self.settings = settings
        self.errors = errors or ErrorHub()
        self.session = SessionModel()
        self.journal = Journal()
        self.knobs = KnobModel(link.send, on_asked=self._note_asked)
        self.load_run = LoadRun()
        self.load_progress = LoadProgress()
        self.chat = ChatModel(self.link.send)
        self.jobs = Jobs()
        self.shelf = Shelf(store_path, self.jobs, self.session, self.load_run, self.tell)
        self.selected_rid: int | None = None
        self.launch_spec: LaunchSpec | None = None
        self._refusals: dict[str, str] = {}
        self.left_out: dict[str, KnobValue] = {}  # changes that a restart left out and nobody decided on yet
        self._left_out_of: str | None = None  # the session that was asked for them
        self._load_was_running = False
        self._closed = False
        self.shelf.reload()

    # --- the beat -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take in what is new. Called by the clock ten times a second."""
        if self._closed:
            return
        batch = self.link.drain()
        self.session.ingest(batch)
        self.knobs.ingest(batch)
        self.journal.take_lines(batch.logs)
        self.journal.take_link(batch.link)
        for event in batch.events:
            self._tell_applied(event)
        self._tell_refusals()
        if self.load_run.running or self._load_was_running:
            self.load_progress = self.load_run.poll()
            self._tell_load_end()
        elif batch.new_session and self.load_progress.phase == "failed":
            self.load_progress = LoadProgress()  # why it failed is not true of the engine of now
        self._heed_left_out()
        self._watch_machine()
        self.jobs.poll()
        for record in self.errors.take():
            self.tell("error", partial(str, record.summary), record.detail)

    def _heed_left_out(self) -> None:
        """Tell once what a restart left out of the configuration; forget it once it is set again."""
        link = self.session.link
        if link.state is not LinkState.READY:
            return
        if link.session != self._left_out_of:
            self._left_out_of, self.left_out = link.session, dict(link.left_out)
            if self.left_out:
                self.journal.note("warning", partial(self.left_out_text, dict(self.left_out)))
        elif self.left_out and self.left_out.items() <= self.knobs.values().items():
            self.left_out = {}

    def left_out_text(self, left_out: Patch) -> str:
        """What a restart left out, and why."""
        text = tr("Restarted without {change}: the engine had not run for {time} and one step with it.")
        return text.format(change=self.patch_text(left_out), time=span(GOOD_AFTER_S))

    def set_left_out(self) -> None:
        """Ask for the changes that the restart left out."""
        patch, self.left_out = self.left_out, {}
        self.change(patch)

    def forgo_left_out(self) -> None:
        """Stay with the configuration that the engine was restarted with."""
        self.left_out = {}

    def _watch_machine(self) -> None:
        """Note what else works on the engine's machine, where that is this one."""
        link = self.session.link
        if link.pid is None or not (link.managed or link.endpoint.startswith("ipc://")):
            self.session.other_work.forget()
            return
        pids = [os.getpid(), link.pid]
        if self.load_run.pid is not None:
            pids.append(self.load_run.pid)
        self.session.other_work.sample(self.session.now_s, pids)

    def tell(self, level: str, say: Callable[[], str], detail: str = "") -> None:
        """Tell the person something now and keep it in the log. ``say`` words it in the language in use."""
        self.journal.note(level, lambda: f"{say()}\n{detail}".strip())
        self.noticed.emit(Notice(level, say(), detail))

    def _note_asked(self, patch: Patch, before: Patch) -> None:
        self.journal.note(
            "info", lambda: tr("Asked for {change}.").format(change=self.patch_text(patch, before))
        )

    def _tell_applied(self, event: ApplyEvent) -> None:
        """Keep how a change ended, whoever asked for it, and say so where it is not as it was asked for."""
        patch, before = dict(event.patch), self.session.config_at(event.from_rev)
        ago_s = self.session.now_s - (event.t_ns - self.session.link.clock_offset_ns) * 1e-9
        when = round((time.time() - max(0.0, ago_s)) * 1000)

        def applied() -> str:
            took = pause(event.took_us * 1e-6)
            text = tr("Applied {change} in {time}.").format(change=self.patch_text(patch, before), time=took)
            if event.preempted:
                more = tr("Requests that lost their place and went on by recompute: {n}.")
                text = f"{text} {more.format(n=event.preempted)}"
            return text

        def cancelled() -> str:
            text = tr("{names} was cancelled; the configuration is as it was before.")
            return text.format(names=self.patch_text(patch))

        def rolled_back() -> str:
            names = self.patch_text(patch)
            return tr("{names} was rolled back: {why}").format(names=names, why=tr_engine(event.why))

        if event.result == "ok":
            self.journal.note("info", applied, when)
        elif event.why == CANCELLED:
            self.tell("info", cancelled)
        else:
            self.tell("warning", rolled_back)

    def patch_text(
        self, patch: Mapping[str, KnobValue], before: Mapping[str, KnobValue] | None = None
    ) -> str:
        """A change for a person: ``Prefix cache: off``, or with what was ``before``: ``…: on → off``."""
        titles = {view.info.id: view.info.title for view in self.knobs.views()}
        parts = []
        for knob, value in patch.items():
            text = value_text(value)
            if before is not None and knob in before:
                text = f"{value_text(before[knob])} → {text}"
            name = knob_title(knob, titles.get(knob, knob))
            parts.append(tr("{name}: {value}").format(name=name, value=text))
        return ", ".join(parts)

    def change(self, patch: Patch) -> None:
        """Ask for a change of knobs, or let one that takes minutes be confirmed first."""
        if first_awq_search(self.knobs.values(), patch, self.session.configs()):
            self.costly.emit(patch)
        elif patch:
            self.knobs.set(patch)
            self.asked.emit()

    def cancel_change(self) -> None:
        """Have the change given up that the engine is applying, whoever asked for it."""
        state = self.session.state
        if state is not None and state.pending_apply is not None:
            self.link.send(CfgCancel(id=1, apply_id=state.pending_apply), self._tell_error)

    def pending_text(self, *, brief: bool = False) -> str:
        """What this console asked for and the engine has not applied yet; ``brief``: the first of it."""
        views = self.knobs.views()
        patch = {v.info.id: v.desired for v in views if v.status is KnobStatus.PENDING}
        if not brief or len(patch) < 2:
            return self.patch_text(patch)
        knob, value = next(iter(patch.items()))
        first = self.patch_text({knob: value})
        return tr("{change} and {n} more").format(change=first, n=count(len(patch) - 1))

    def _tell_refusals(self) -> None:
        refused = {v.info.id: v.reason for v in self.knobs.views() if v.status is KnobStatus.REFUSED}
        for knob, reason in refused.items():
            if self._refusals.get(knob) != reason:
                self.tell("warning", partial(self._refusal_text, knob, reason))
        self._refusals = refused

    def _refusal_text(self, knob: str, reason: str) -> str:
        known = [view.info.title for view in self.knobs.views() if view.info.id == knob]
        title = knob_title(knob, known[0] if known else knob)
        return tr("{name} was not changed: {why}").format(name=title, why=tr_engine(reason))

    def _tell_load_end(self) -> None:
        running = self.load_run.running
        if self._load_was_running and not running:
            progress = self.load_progress
            failed, reasons = progress.message, progress.invalid_reasons

            def ended() -> str:
                text = tr_n(
                    "The load has ended: {done} request done, {failed} failed.",
                    "The load has ended: {done} requests done, {failed} failed.",
                    progress.done,
                )
                parts = [text.format(done=progress.done, failed=progress.failed)]
                if progress.common_error:
                    why = tr_engine(progress.common_error)
                    parts.append(tr("Most frequent failure: {why}").format(why=why))
                return " ".join(parts)

            def doubtful() -> str:
                text = tr("This load run is doubtful: {why}")
                return text.format(why="; ".join(map(tr_engine, reasons)))

            if progress.phase == "failed":
                self.tell("error", lambda: tr("The load failed: {why}").format(why=tr_engine(failed)))
            elif progress.valid:
                self.tell("warning" if progress.failed else "info", ended)
            else:
                self.journal.note("info", ended)
                self.tell("warning", doubtful)
        self._load_was_running = running

    # --- the engine ---------------------------------------------------------------------------------

    def launch(self, spec: LaunchSpec) -> None:
        """Start a managed engine with ``spec``."""
        self.launch_spec = spec
        self.settings.remember_model(spec.model)
        self.link.launch(spec)

    def open_model(self, path: str) -> None:
        """Start the engine anew with another model, everything else as it was but for what drafts for it."""
        self.stop_load(drain=False)
        spec = (
            replace(self.launch_spec, model=path, draft_model=None)
            if self.launch_spec
            else LaunchSpec(model=path)
        )
        self.launch(spec)

    def restart(self) -> None:
        """Start the engine again with the configuration that it last ran well with."""
        self.link.restart()

    def start_on_cpu(self) -> None:
        """Start the engine anew on the CPU, with what it was started with otherwise."""
        if self.launch_spec is not None:
            self.stop_load(drain=False)
            self.launch(replace(self.launch_spec, device="cpu"))

    @property
    def draft_model(self) -> str | None:
        """The draft model that this console starts its engine with; None for none, or another's engine."""
        spec = self.launch_spec
        return spec.draft_model if spec is not None and self.session.link.can_restart else None

    def choose_draft_model(self, path: str | None, switch_on: bool = False) -> None:
        """Start the engine anew with a draft model, or with none, and with the configuration that it has.

        ``switch_on``: draft with it from the start.
        """
        if self.launch_spec is None or not self.session.link.can_restart:
            why = N_("The engine was started elsewhere, so its draft model can only be chosen there.")
            self.tell("warning", lambda: tr_later(why))
            return
        self.stop_load(drain=False)
        self.launch_spec = replace(self.launch_spec, draft_model=path)
        if path is not None:
            self.settings.draft_model = path
        # What a ready engine has is what a person sees. Of one that ended, the link knows what was good.
        known = [v for v in self.knobs.views() if v.info.available] if self.engine_ready else []
        values: dict[str, KnobValue] = {view.info.id: view.applied for view in known}
        if path is not None and switch_on:
            values["speculation"] = "draft"
        self.link.restart_with_draft(path, values)

    @property
    def engine_ready(self) -> bool:
        return self.session.link.state is LinkState.READY

    @property
    def can_load(self) -> bool:
        """Whether a load can be started or stopped now."""
        return self.engine_ready or self.load_run.running

    # --- requests and load --------------------------------------------------------------------------

    def select(self, rid: int | None) -> None:
        """Pick a request: its blocks stand out in the map."""
        if rid != self.selected_rid:
            self.selected_rid = rid
            self.selected.emit(rid)

    def cancel_request(self, rid: int) -> None:
        """Ask the engine to end one request."""
        self.link.send(Cancel(id=1, rid=rid), self._tell_error)

    def _tell_error(self, reply: Reply) -> None:
        if isinstance(reply, Error):
            why = reply.message
            self.tell("warning", lambda: tr_engine(why))

    def start_load(self, spec: WorkloadSpec) -> None:
        """Start a load against the present engine; a notice says why where that fails."""
        if self.session.link.endpoint and not self.engine_ready:
            why = N_("The load was not started: the engine is not ready.")
            self.tell("warning", lambda: tr_later(why))
            return
        model = self.session.model
        try:
            spec.check()
            sent = spec if model is None else fitted(spec, model.max_model_len, model.vocab_size)
            self.load_run.start(sent, self.session.link.endpoint)
        except (LoadError, WorkloadError) as error:
            self.tell("error", partial(tr_engine, str(error)))
            return
        self.journal.note("info", lambda: tr("Load started: {load}").format(load=load_text(spec)))
        if sent != spec and model is not None:
            self.tell("warning", partial(fitted_text, sent, model.max_model_len, model.vocab_size))
        self._load_was_running = True
        self.load_progress = self.load_run.poll()

    def stop_load(self, drain: bool = True) -> None:
        """End the load, if one runs."""
        if self.load_run.running:
            self.load_run.stop(drain)
            how = N_("The load was told to send nothing more.") if drain else N_("The load was cancelled.")
            self.journal.note("info", lambda: tr_later(how))

    # --- baselines ----------------------------------------------------------------------------------

    def restore_configuration(self, baseline_id: str) -> None:
        """Ask the engine for the configuration of a stored baseline."""

        def ask(baseline: Any) -> None:
            asked = self.knobs.difference(baseline.data.config)
            self.change(asked)

            def said() -> str:
                if not asked:
                    return tr("Nothing to restore: the engine already runs with this configuration.")
                text = tr("Restoring “{name}”; settings that change: {n}.")
                return text.format(n=len(asked), name=baseline.data.name)

            self.tell("info", said)

        self.shelf.use(tr("Reading a baseline"), lambda store: store.get(baseline_id), ask)

    # --- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the load, the jobs and the link with a managed engine. Returns within seconds."""
        if self._closed:
            return
        self._closed = True
        self.load_run.close()
        self.shelf.close()
        self.link.close()
        self.settings.sync()
