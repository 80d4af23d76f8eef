"""The stages in the order of what they are worth, and the run through them against the deadline."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
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
from tests.gpu.check.context import Context
from tests.gpu.check.results import Results
from tests.gpu.check.settings import Settings
from tests.gpu.check.timing import Timer

TRACEBACK_LINES = 12


@dataclass(frozen=True)
class Stage:
    """``least_s``: on a card it is left out where less time remains."""

    name: str
    run: Callable[[Context], dict[str, Any]]
    least_s: float


STAGES = (
    Stage("environment", environment.run, 0.0),
    Stage("ceilings", ceilings.run, 5.0),
    Stage("warm", warm.run, 15.0),
    Stage("correctness", correctness.run, 10.0),
    Stage("decode", decode.run, 20.0),
    Stage("prefill", prefill.run, 10.0),
    Stage("parity", parity.run, 15.0),
    Stage("decode_fp8", decode.run_fp8, 20.0),
    Stage("rooflines", rooflines.run, 10.0),
    Stage("serving", serving.run, 40.0),
    Stage("knobs", knobs.run, 40.0),
    Stage("generate", baselines.run_generate, 20.0),
    Stage("generate_batch", baselines.run_batch, 20.0),
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
    for stage in wanted:
        _run_one(context, stage)
    context.drop_model()
    results.data["seconds"] = round(time.perf_counter() - context.started_s, 1)
    results.data["summary"] = summary.rows(results)
    results.write()
    print(summary.table(results), flush=True)
    found = [results.of(stage.name) for stage in wanted]
    return 0 if all(each is not None and not each.get("failed") for each in found) else 1


def _device(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("no NVIDIA GPU can be used here; --device cpu --tiny is the dry run without one")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


class DeadlinePassed(BaseException):
    """A stage was still running at the deadline. No Exception, so no stage takes it for one of its own."""


@contextmanager
def _alarm(left_s: float) -> Iterator[None]:
    """Raise `DeadlinePassed` in this thread, which must be the main one, once ``left_s`` are over."""

    def ring(number: int, frame: object) -> None:
        raise DeadlinePassed("the stage was still running at the deadline")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(left_s, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _run_one(context: Context, stage: Stage) -> None:
    """Run a stage; whatever it raises is written down, and the next one can go on."""
    results, began = context.results, time.perf_counter()
    if not context.settings.tiny and context.left_s < stage.least_s:
        why = f"{context.left_s:.0f} s were left to the deadline, it takes {stage.least_s:g} s at least"
        results.put(stage.name, "skipped", 0.0, error=why)
        print(f"{stage.name:15} skipped: {why}", flush=True)
        return
    context.found, context.stage, context.stage_began_s = {}, stage.name, began
    try:
        with torch.inference_mode(), _alarm(context.left_s):
            result = stage.run(context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a failed stage must not take the figures of the others along
        lines = traceback.format_exception(error)
        text = "".join(lines).replace(str(environment.ROOT), ".").splitlines()[-TRACEBACK_LINES:]
        results.put(
            stage.name, "failed", time.perf_counter() - began, error="\n".join(text), result=context.found
        )
        print(f"{stage.name:15} FAILED: {text[-1]}", flush=True)
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            context.drop_model()
    else:
        results.put(stage.name, "ok", time.perf_counter() - began, result=result)
        print(f"{stage.name:15} {time.perf_counter() - began:6.1f} s", flush=True)
    context.timer.free()
