"""The stages in the order of what they are worth, and the run through them against the deadline.

A stage that takes too long is ended by an alarm. Where that does not reach it, as it hangs in the driver, and
where the card is lost to this process, the script starts itself anew for the stages that are left.
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.check import (
    baselines,
    ceilings,
    correctness,
    decode,
    environment,
    knobs,
    parity,
    prefill,
    rooflines,
    serving,
    summary,
    warm,
)
from tests.gpu.check.become import become
from tests.gpu.check.context import Context
from tests.gpu.check.results import Results
from tests.gpu.check.settings import Settings
from tests.gpu.check.timing import Timer

TRACEBACK_LINES = 12
GRACE_S = 30.0  # after which a stage that was to end hangs; an engine is given 20 to end by itself


@dataclass(frozen=True)
class Stage:
    """On a card it is left out where less than ``least_s`` remain, and ended after ``most_s``."""

    name: str
    run: Callable[[Context], dict[str, Any]]
    least_s: float
    most_s: float = math.inf


STAGES = (
    Stage("environment", environment.run, 0.0, 30.0),
    Stage("ceilings", ceilings.run, 5.0, 45.0),
    Stage("warm", warm.run, 15.0, 75.0),
    Stage("correctness", correctness.run, 10.0, 90.0),
    Stage("decode", decode.run, 20.0, 90.0),
    Stage("prefill", prefill.run, 10.0, 40.0),
    Stage("parity", parity.run, 15.0, 60.0),
    Stage("decode_fp8", decode.run_fp8, 20.0, 90.0),
    Stage("rooflines", rooflines.run, 10.0, 75.0),
    Stage("serving", serving.run, 40.0, 150.0),
    Stage("knobs", knobs.run, 40.0),
    Stage("generate", baselines.run_generate, 20.0, 60.0),
    Stage("generate_batch", baselines.run_batch, 20.0, 90.0),
)
NAMES = tuple(stage.name for stage in STAGES)


def run(settings: Settings) -> int:
    """Run what was asked for, print the table; returns the exit code."""
    try:
        device = _device(settings)
        identity = environment.identity(settings, device)
        results = Results(settings.out, identity, environment.source(), keep=settings.only is not None)
    except (RuntimeError, ValueError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    context = Context(settings, results, device, Timer(device, quick=settings.tiny))
    wanted = [stage for stage in STAGES if settings.only is None or stage.name in settings.only]
    if context.timer.on_card:  # where a thread waits for the card with Python's lock, no other one runs
        faulthandler.dump_traceback_later(max(context.left_s, 0.0) + 3 * GRACE_S, exit=True)
    names = [stage.name for stage in wanted]
    for i, stage in enumerate(wanted):
        _run_one(context, stage, lambda rest=names[i + 1 :]: _start_anew(context, rest))  # type: ignore[misc]
    context.drop_model()
    _finish(context)
    if context.timer.on_card:
        faulthandler.cancel_dump_traceback_later()
    found = [results.of(stage.name) for stage in wanted]
    good = all(each is not None and not each.get("failed") for each in found)
    return 0 if good and not settings.lost else 1


def _finish(context: Context) -> None:
    """Write the summary and print the table."""
    results = context.results
    results.data["seconds"] = round(time.perf_counter() - context.settings.began_s, 1)
    results.data["summary"] = summary.rows(results)
    results.write()
    print(summary.table(results), flush=True)


def _start_anew(context: Context, rest: Sequence[str]) -> None:
    """Become a new process for the stages that are left, which gives back what this one has of the card."""
    settings = context.settings
    if not rest:
        _finish(context)
        become(None)
    print(f"started anew for {', '.join(rest)}", flush=True)
    options = ["--out", str(settings.out), "--device", settings.device, *(["--tiny"] * settings.tiny)]
    clock = ["--deadline", f"{settings.deadline_s:g}", "--began", f"{settings.began_s:.3f}"]
    become([*options, *clock, "--only", ",".join(rest), "--lost"])


def _device(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("no NVIDIA GPU can be used here; --device cpu --tiny is the dry run without one")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


class DeadlinePassed(BaseException):
    """A stage was still running at its end. No Exception, so no stage takes it for one of its own."""


@contextmanager
def _alarm(left_s: float, hangs: Callable[[], None]) -> Iterator[None]:
    """Raise `DeadlinePassed` in this thread, which must be the main one, once ``left_s`` are over.

    ``hangs`` is called, on another thread, where that did not end it.
    """

    def ring(number: int, frame: object) -> None:
        raise DeadlinePassed(
            f"the stage was still running at the deadline, its own or that of all: {left_s:.0f} s"
        )

    before = signal.signal(signal.SIGALRM, ring)
    watch = threading.Timer(max(left_s, 0.0) + GRACE_S, hangs)
    watch.daemon = True
    try:
        try:
            watch.start()
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # also where the alarm rings before the stage begins, or as it ends
        watch.cancel()
        signal.signal(signal.SIGALRM, before)


def _run_one(context: Context, stage: Stage, start_anew: Callable[[], None]) -> None:
    """Run a stage; whatever it raises is written down, and the next one can go on."""
    results, began, tiny = context.results, time.perf_counter(), context.settings.tiny
    if not tiny and context.left_s < stage.least_s:
        why = f"{context.left_s:.0f} s were left to the deadline, it takes {stage.least_s:g} s at least"
        results.put(stage.name, "skipped", 0.0, error=why)
        print(f"{stage.name:15} skipped: {why}", flush=True)
        return
    context.found, context.stage, context.stage_began_s = {}, stage.name, began

    def failed(error: str) -> None:
        took = time.perf_counter() - began
        results.put(stage.name, "failed", took, error=error, result=context.found)
        print(f"{stage.name:15} FAILED: {error.splitlines()[-1]}", flush=True)

    def hangs() -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        failed("it hung, and was not to be ended")
        start_anew()

    try:
        left_s = context.left_s if tiny else min(context.left_s, stage.most_s)
        with torch.inference_mode(), _alarm(left_s, hangs):
            result = stage.run(context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a failed stage must not take the figures of the others along
        lines = traceback.format_exception(error)
        text = "".join(lines).replace(str(environment.ROOT), ".").splitlines()[-TRACEBACK_LINES:]
        failed("\n".join(text))
        if isinstance(error, MemoryError | torch.OutOfMemoryError | DeadlinePassed):
            context.drop_model()
    else:
        results.put(stage.name, "ok", time.perf_counter() - began, result=result)
        print(f"{stage.name:15} {time.perf_counter() - began:6.1f} s", flush=True)
    if not context.free():
        start_anew()
