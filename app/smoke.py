"""``--smoke``: the real window on the real engine, offscreen, used as a person would, and checked.

It starts the engine, chats, replays a short load, flips prefix caching off and on while requests run, saves
and exports a snapshot, takes screenshots and closes. Each piece has a name and a time limit; the first that
does not work ends the run with that name. Settings and baselines of the user are not touched.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
from PySide6.QtCore import QEvent, QEventLoop, QSize
from PySide6.QtGui import QFontDatabase, QImage
from PySide6.QtWidgets import QApplication, QWidget

from app import application, i18n
from app.console import Notice
from app.errors import ErrorHub
from app.lab.workload import WorkloadSpec
from app.model.knobs import KnobStatus
from app.net.types import LinkState
from app.settings import DEFAULT_SIZE, MIN_SIZE
from app.smoke_report import Change, Playground, Report, phases, summary
from app.store.records import Baseline
from app.store.store import ExportFormat, Store
from app.theme import CJK_FAMILIES
from ipc.messages import BLOCK_FREE, BLOCK_SHARED, BLOCK_USED, KnobValue

KNOB = "prefix_cache"
PER_PHASE = 6  # requests that must have been scheduled in each phase of the load
QUESTION = "What is the capital of France?"
FORMS: tuple[ExportFormat, ...] = ("json", "csv", "md")
LOAD = WorkloadSpec(
    name="smoke",
    arrival="concurrency",
    concurrency=4,
    num_requests=None,
    duration_s=600.0,
    mix={"shared_prefix": 3.0, "chat": 1.0},
    input_tok=(16, 64),
    prefix_tok=192,
    output_tok=(12, 24),
)
SHOTS = (
    ("console-dark", "dark", "en", DEFAULT_SIZE),
    ("console-light", "light", "en", DEFAULT_SIZE),
    ("console-dark-zh", "dark", "zh_CN", DEFAULT_SIZE),
    ("console-light-zh", "light", "zh_CN", DEFAULT_SIZE),
    ("console-dark-small", "dark", "en", MIN_SIZE),
    ("console-dark-large", "dark", "en", QSize(1920, 1200)),
)
T = TypeVar("T")


class SmokeError(Exception):
    """A piece of the product did not work; the text says what was seen."""


class Smoke:
    """One run. ``run`` returns the exit status; ``report`` holds what was found."""

    def __init__(self, options: Sequence[str], out: Path) -> None:
        """``options`` are the window's own, such as ``--model``."""
        self.options = list(options)
        self.out = out
        self.report = Report()
        self._piece = "window"
        self._begun_s = time.monotonic()
        self._errors: list[str] = []
        self._most_used = 0
        self._most_shared = 0

    def run(self) -> int:
        """All pieces in order. Writes ``smoke.json`` and prints the summary whatever happens."""
        self.out.mkdir(parents=True, exist_ok=True)
        failure: Exception | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="decodeck-smoke-") as data:
                self.data = Path(data)
                self._run()
            self.report.ok = True
        except Exception as error:  # whatever it is, it is told with the piece that it broke
            failure = error
            self.report.failed, self.report.why = self._piece, f"{error}" or type(error).__name__
        self.report.timings_s["whole"] = time.monotonic() - self._begun_s
        text = msgspec.json.format(msgspec.json.encode(self.report), indent=1)
        (self.out / "smoke.json").write_bytes(text + b"\n")
        print(summary(self.report), flush=True)
        if failure is None:
            return 0
        print(f"decodeck: the smoke run failed at: {self._piece}", file=sys.stderr)
        if not isinstance(failure, SmokeError):
            sys.excepthook(type(failure), failure, failure.__traceback__)
        return 1

    def _run(self) -> None:
        self._timed("window", self._open_window)
        try:
            self._timed("engine", self._start_engine)
            self._timed("playground", self._chat)
            self._timed("load", self._load)
            self._timed("screenshots", self._screenshots)  # while the load goes on
            self._timed("end of the load", self._end_load)
            self._timed("snapshot", self._snapshot)
        except Exception:
            for line in self.console.session.logs:
                print(f"engine: {line.level} {line.source}: {line.message}", file=sys.stderr)
            for text in self.console.session.link.log_tail:
                print(f"engine: {text}", file=sys.stderr)
            self.app.window.close()
            raise
        self._timed("close", self._close)

    def _timed(self, piece: str, work: Callable[[], None]) -> None:
        self._piece = piece
        print(f"decodeck: smoke: {piece}", file=sys.stderr, flush=True)
        begun_s = time.monotonic()
        work()
        self._check_errors()
        self.report.timings_s[piece] = time.monotonic() - begun_s

    def _on_notice(self, notice: Notice) -> None:
        if notice.level == "error":
            self._errors.append(notice.text)

    def _check_errors(self) -> None:
        if self._errors:
            raise SmokeError(f"the window reported {len(self._errors)} errors, first: {self._errors[0]}")

    def _until(self, what: str, timeout_s: float, ready: Callable[[], T | None]) -> T:
        """Let the window live until ``ready`` gives something true. Raises `SmokeError` with ``what``."""
        end_s = time.monotonic() + timeout_s
        while True:
            found = ready()
            if found:
                return found
            self._check_errors()
            link, state = self.console.session.link, self.console.session.state
            if link.state is LinkState.DEAD:
                raise SmokeError(f"the engine ended while waiting for {what}: {link.reason}")
            if state is not None and state.phase == "failed":
                raise SmokeError(f"the engine failed while waiting for {what}: {state.reason}")
            if time.monotonic() > end_s:
                raise SmokeError(
                    f"no {what} within {timeout_s:g} s; the engine is {link.state} {link.reason}"
                )
            self._live(0.05)

    def _live(self, seconds: float) -> None:
        """Let the event loop run, and keep the largest figures of the KV map."""
        end_s = time.monotonic() + seconds
        while True:
            QApplication.processEvents(QEventLoop.ProcessEventsFlag.AllEvents, 20)
            QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
            if time.monotonic() >= end_s:
                break
            time.sleep(0.01)
        blocks = self.console.session.blocks
        if blocks is not None:
            shared = int((blocks.state == BLOCK_SHARED).sum())
            self._most_shared = max(self._most_shared, shared)
            self._most_used = max(self._most_used, shared + int((blocks.state == BLOCK_USED).sum()))

    # --- the pieces -------------------------------------------------------------------------------

    def _open_window(self) -> None:
        # A small pool, so that the load is seen in the KV map; an option that was given wins, being later.
        fixed = ["--kv-pool-gib", "0.125", "--data-dir", str(self.data), "--theme", "dark", "--lang", "en"]
        errors = ErrorHub()
        errors.install()
        self.app = application.build([*fixed, *self.options], errors)
        self.console = self.app.console
        self.console.noticed.connect(self._on_notice)
        self.app.window.set_span(60)
        self._until("window", 10, lambda: self.app.window.isVisible())
        self._live(0.1)
        # The launcher becomes this process, so what it did before counts as well.
        self.report.timings_s["start to window"] = time.time() - psutil.Process().create_time()

    def _start_engine(self) -> None:
        """It was started with the window, which does not wait for it."""
        self._until("loaded model", 300, lambda: self.console.engine_ready)
        self._until("description of model and device", 10, self._described)
        session = self.console.session
        self.report.model, self.report.device = session.model, session.device
        self.report.engine = session.link.engine

    def _described(self) -> bool:
        session = self.console.session
        return None not in (session.model, session.device, session.cfg)

    def _chat(self) -> None:
        chat = self.console.chat
        chat.max_tokens = 24
        chat.ask(QUESTION)
        self._until("reply in the playground", 120, lambda: not chat.busy)
        turn = chat.turns[-1]
        if turn.state != "done" or not turn.text.strip():
            raise SmokeError(f"the playground's reply is {turn.state}: {turn.error or turn.text!r}")
        ttft_ms = None if turn.ttft_s is None else 1e3 * turn.ttft_s
        self.report.playground = Playground(
            prompt=QUESTION, reply=turn.text, ttft_ms=ttft_ms, tok_per_s=turn.tok_per_s, tokens=turn.tokens
        )

    def _load(self) -> None:
        self.report.workload = msgspec.to_builtins(LOAD)
        self.console.start_load(LOAD)
        if not self.console.load_run.running:
            raise SmokeError(f"the load did not start: {self.console.load_progress.message}")
        self._ended("with the prefix cache", PER_PHASE)
        self._flip(False)
        self._ended("without the prefix cache", self._done() + PER_PHASE + LOAD.concurrency)
        self._flip(True)
        self._ended("with the prefix cache again", self._done() + PER_PHASE + LOAD.concurrency)
        self._collect()

    def _end_load(self) -> None:
        self.console.stop_load(drain=True)
        self._until("end of the load", 120, lambda: not self.console.load_run.running)
        self._live(0.6)  # the last rows come with the next frames
        self._collect()
        self._judge_load()

    def _done(self) -> int:
        return self.console.load_progress.done

    def _ended(self, when: str, count: int) -> None:
        def enough() -> bool:
            progress = self.console.load_progress
            if progress.phase == "failed":
                raise SmokeError(f"the load failed: {progress.message}")
            return progress.done >= count

        self._until(f"{count} ended requests {when}", 300, enough)

    def _flip(self, value: KnobValue) -> None:
        """Change the knob while requests run, and wait until the engine says that it is applied."""
        self._piece = f"load: {KNOB} {value}"
        session, knobs = self.console.session, self.console.knobs
        running = self._until(
            "running requests", 60, lambda: session.state.running if session.state is not None else None
        )
        known = len(session.markers)
        knobs.set({KNOB: value})
        self._until(f"{KNOB}={value} applied", 60, lambda: self._settled(known))
        view, marker = knobs.view(KNOB), session.markers[-1]
        if view.applied != value or not marker.ok:
            raise SmokeError(f"{KNOB} is {view.applied} instead of {value}: {view.reason or marker.why}")
        t_ns = round(marker.t_s * 1e9) + session.link.clock_offset_ns
        change = Change(
            value=value, rev=marker.rev, took_ms=1e3 * marker.took_s, running=int(running), t_ns=t_ns
        )
        self.report.changes.append(change)
        self._piece = "load"

    def _settled(self, known: int) -> bool:
        status = self.console.knobs.view(KNOB).status
        if status is KnobStatus.REFUSED:
            raise SmokeError(f"{KNOB} was refused: {self.console.knobs.view(KNOB).reason}")
        return status is KnobStatus.APPLIED and len(self.console.session.markers) > known

    def _collect(self) -> None:
        """Put into the report what is known of the load so far."""
        report, session, run = self.report, self.console.session, self.console.load_run
        report.load, report.load_valid = run.stats(), self.console.load_progress.valid
        report.phases = phases(run.rows(), report.changes)
        stages = session.stages()
        report.steps, report.outside_forward_share = stages.n, stages.outside_forward_share
        report.attention, report.kernels = session.attention, session.kernels
        cost_s = self.app.window.clock.cost_s
        report.frame_ms = None if cost_s is None else 1e3 * cost_s
        report.most_used_blocks, report.most_shared_blocks = self._most_used, self._most_shared
        if session.blocks is not None:
            report.num_blocks, report.block_size = session.blocks.num_blocks, session.blocks.block_size

    def _judge_load(self) -> None:
        report, session = self.report, self.console.session
        if session.blocks is None or not self._most_used:
            raise SmokeError("the KV map never showed a used block")
        if bool((session.blocks.state == BLOCK_FREE).all()):
            raise SmokeError("the prefix cache is on, and after the load the KV map shows no cached block")
        if report.load is None or report.load.errors or not report.load.ok:
            raise SmokeError(f"requests of the load failed: {report.load}")
        if session.kpis().output_tok_s.value is None:
            raise SmokeError("the KPI strip has no figure for the output rate while a load ran")
        on, off, again = report.phases
        if not on.hit_rate or not again.hit_rate:
            raise SmokeError(f"no prefix hits with the cache on: {on.hit_rate} and {again.hit_rate}")
        if off.hit_rate != 0:
            raise SmokeError(f"{off.cached_tok} cached tokens were used while the prefix cache was off")

    def _snapshot(self) -> None:
        console, report = self.console, self.report
        data = console.shelf.data("Smoke run", "Saved by the smoke run.", "load", None)
        saved: list[str] = []
        console.shelf.save(data, saved.append)
        report.snapshot_id = self._until("saved snapshot", 60, lambda: saved[0] if saved else None)
        report.snapshot_rows = len(data.load_rows) + len(data.requests)
        for form in FORMS:
            path = self.out / f"snapshot.{form}"
            path.unlink(missing_ok=True)
            console.shelf.export(report.snapshot_id, form, path)
            self._until(f"export as {form}", 60, partial(_is_written, path))
            report.exports[form] = str(path)
        report.imported_equal = self._imported_equal()
        if not report.imported_equal:
            raise SmokeError("what was imported from the JSON export differs from what was saved")

    def _imported_equal(self) -> bool:
        """Import the export into an empty store and compare all that was saved."""
        store = Store(self.data / "imported.sqlite")
        try:
            store.import_(self.out / "snapshot.json")
            there = store.get(self.report.snapshot_id).data
        finally:
            store.close()
        found: list[Baseline] = []
        self.console.shelf.use("Reading", lambda s: s.get(self.report.snapshot_id), found.append)
        here = self._until("saved snapshot read back", 30, lambda: found[0] if found else None).data
        return bool(here == there)

    def _screenshots(self) -> None:
        if not set(CJK_FAMILIES) & set(QFontDatabase.families()):
            self.report.notes.append("no font with Chinese characters is installed (fonts-noto-cjk has one)")
        for name, theme, language, size in SHOTS:
            if i18n.language() != language:
                self.app.window.set_language(language)
                self._until(f"window in {language}", 20, partial(_speaks, language))
            self.app.window.set_theme(theme)
            self.app.window.resize(size)
            self._live(0.7)  # figures are written twice a second
            path = self.out / f"{name}.png"
            image = self.app.window.picture().toImage()
            _check_image(name, image, self.app.window, size)
            if not image.save(str(path)):
                raise SmokeError(f"{path} could not be written")
            self.report.screenshots.append(str(path))

    def _close(self) -> None:
        children = psutil.Process().children(recursive=True)
        self.app.window.close()
        _, alive = psutil.wait_procs(children, timeout=10)
        if alive:
            raise SmokeError(f"processes outlived the console: {[process.pid for process in alive]}")


def _is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _speaks(language: str) -> bool:
    return i18n.language() == language and (language == "en" or i18n.tr("Start load") != "Start load")


def _check_image(name: str, image: QImage, window: QWidget, size: QSize) -> None:
    """A window that could not take its size, or drew (almost) nothing, is a failure."""
    if window.size() != size:
        got = f"{window.width()}×{window.height()}"
        raise SmokeError(f"{name}: the window is {got} instead of {size.width()}×{size.height()}")
    colours = {image.pixel(x, y) for x in range(0, image.width(), 7) for y in range(0, image.height(), 7)}
    if len(colours) < 32:
        raise SmokeError(f"{name}: the window shows {len(colours)} colours; it is all but empty")


def main(arguments: Sequence[str]) -> int:
    """``decodeck --smoke --out DIR [OPTION...]``; 0 when every piece worked."""
    cli = argparse.ArgumentParser(prog="decodeck --smoke", description=__doc__)
    cli.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, required=True, help="folder for smoke.json, screenshots and exports")
    own, options = cli.parse_known_args(arguments)
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    return Smoke(options, own.out.resolve()).run()
