"""Where the time of a step goes, and what telling so costs. ``python -m tests.bench.knobs --stages``.

32 requests at once, prompts and answers. A step's stages follow each other on the step thread, except that
text and sockets are the work of other threads, beside the steps, and that with ``overlap`` some of the rest
is done while a forward pass runs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipc import messages as m
from tests.bench.knob_figures import steady
from tests.bench.knob_report import columns, machine, now, number
from tests.bench.knob_run import Send, Session
from tests.bench.knob_workloads import Draw

REQUESTS = 32
STAGES = (
    "tokenize_us", "plan_us", "prepare_us", "copy_us", "forward_us", "attention_us", "linear_us", "head_us",
    "sample_us", "detokenize_us", "send_us", "publish_us",
)  # fmt: skip
BESIDE = ("tokenize_us", "detokenize_us", "send_us")
PARTS = ("attention_us", "linear_us", "head_us")
REQUEST_STAGES = tuple(stage for stage in STAGES if stage not in (*PARTS, "publish_us"))
STAMPS = 24  # clock readings that timing the stages takes in a step, at most


def step_table(rows: Sequence[m.StepRow]) -> list[dict[str, Any]]:
    """Mean, deviation and share of the steps' time of each stage, over steps that follow one another.

    ``publish_us`` stands in the row of the step after, and is taken from there. A stage that no step has
    (parts of the forward pass without ``forward_timing``) is left out.
    """
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b.step == a.step + 1]
    whole = sum(a.dur_us + b.publish_us for a, b in pairs)
    table = []
    for stage in STAGES:
        values = [getattr(b if stage == "publish_us" else a, stage) for a, b in pairs]
        known = [value for value in values if value is not None]
        if not known:
            continue
        table.append(
            {
                "stage": stage.removesuffix("_us"),
                "where": "beside" if stage in BESIDE else "of forward" if stage in PARTS else "in the step",
                "mean_ms": statistics.fmean(known) / 1e3,
                "std_ms": statistics.pstdev(known) / 1e3,
                "share_percent": 100 * sum(known) / whole if whole else None,
                "steps": len(known),
            }
        )
    return table


def request_table(rows: Sequence[m.RequestRow]) -> list[dict[str, Any]]:
    """Mean and deviation over requests: how long each queued, and what the engine did while it ran."""
    columns_: dict[str, list[float]] = {
        "queue": [(row.sched_ns - row.arrive_ns) / 1e6 for row in rows if row.sched_ns is not None]
    }
    for stage in REQUEST_STAGES:
        columns_[stage.removesuffix("_us")] = [getattr(row, stage) / 1e3 for row in rows]
    return [
        {
            "stage": name,
            "mean_ms": statistics.fmean(values),
            "std_ms": statistics.pstdev(values),
            "requests": len(values),
        }
        for name, values in columns_.items()
        if values
    ]


def stamp_cost_us(count: int = 200_000) -> float:
    """What one reading of the clock takes here, in microseconds."""
    begin = time.perf_counter_ns()
    for _ in range(count):
        time.monotonic_ns()
    return (time.perf_counter_ns() - begin) / count / 1e3


def _workload(draw: Draw) -> list[list[Send]]:
    """32 requests at once: 16 to 128 tokens in, 24 to 48 out."""
    size = draw.random.randint
    return [[Send(prompt=draw.ids(size(16, 128)), out=size(24, 48)) for _ in range(REQUESTS)]]


def report(session: Session, file: Path | None) -> int:
    """Run, print and, if asked, write it. The parts of the forward pass come from a run of their own."""
    session.flip(dict(session.defaults))
    outcome = session.run(_workload(Draw("stages", session.setup)), arm="", pair=0, salt="stages")
    timed = session.knobs.get("forward_timing")
    parts: list[dict[str, Any]] = []
    if timed is not None and timed.available:
        session.flip({"forward_timing": True})
        detailed = session.run(_workload(Draw("parts", session.setup)), arm="", pair=1, salt="parts")
        session.flip({"forward_timing": False})
        parts = [row for row in step_table(detailed.steps) if row["where"] == "of forward"]
    steps = step_table(outcome.steps)
    requests = request_table([answer.row for answer in outcome.answers if answer.row is not None])
    step_ms = statistics.fmean(row.dur_us for row in outcome.steps) / 1e3
    decode = [ms for _, ms in steady(outcome.steps)]
    cost = {
        "stamp_us": stamp_cost_us(),
        "stamps_a_step": STAMPS,
        "step_ms": step_ms,
        "decode_step_ms": statistics.median(decode) if decode else None,
    }
    cost["share_percent"] = 100 * STAMPS * cost["stamp_us"] / 1e3 / step_ms
    whole = {
        "date": now(),
        "machine": machine(),
        "steps": steps,
        "forward_parts": parts,
        "requests": requests,
        "timing_cost": cost,
    }
    print(f"{len(outcome.steps)} steps of {REQUESTS} requests, {step_ms:.2f} ms each on average\n")
    print(_text(steps + parts, ("stage", "where", "mean_ms", "std_ms", "share_percent")))
    print("\nOf a request:\n")
    print(_text(requests, ("stage", "mean_ms", "std_ms")))
    if not parts:
        print("\nattention, linear and head apart: forward_timing is not available in this engine")
    print(
        f"\nTiming the stages: {STAMPS} readings of the clock of {cost['stamp_us']:.3f} us make "
        f"{cost['share_percent']:.4f} % of a step. What timing the parts of the forward pass costs beside is "
        "measured by `--only forward_timing`."
    )
    if file is not None:
        file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    return 0


def _text(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    head = [name.replace("_ms", ", ms").replace("_percent", ", %") for name in names]
    body = [[row[n] if isinstance(row[n], str) else number(row[n]) for n in names] for row in rows]
    return columns([head, *body])
