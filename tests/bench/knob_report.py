"""What the knob benchmark writes: the JSON with everything raw, and the table for a person."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import psutil

from ipc import messages as m
from tests.bench.knob_run import MEMORY, Outcome
from tests.bench.knob_specs import Spec, name
from tests.bench.paired import Comparison, compare

MIB = 1 << 20
NARROW = 1.05  # an interval within this of 1 shows that there is hardly any effect


class KnobResult(msgspec.Struct, kw_only=True):
    """One entry of the benchmark. ``skipped`` says why it was not run, ``failed`` why it broke off.

    ``memory`` holds, for each arm, the median over its runs of the most that a run held, in bytes.
    """

    entry: str
    knob: str
    off: m.KnobValue
    on: m.KnobValue
    base: dict[str, m.KnobValue]
    workload: str
    expected: str
    otherwise: str
    skipped: str = ""
    failed: str = ""
    pairs: int = 0
    figures: list[Comparison] = []
    memory: dict[str, dict[str, float]] = {}
    flip_ms: dict[str, float] = {}
    at_most: float | None = None
    within: bool | None = None  # whether the whole interval lies at or below at_most
    outcomes: list[Outcome] = []


class Report(msgspec.Struct, kw_only=True):
    """A whole run of the benchmark."""

    date: str
    machine: dict[str, str | int | float]
    engine: m.EngineInfo
    model: m.ModelInfo
    device: m.DeviceInfo | None
    options: dict[str, str | int]
    pairs: int
    results: list[KnobResult] = []


def machine() -> dict[str, str | int | float]:
    """What the figures depend on of this machine, its load at the beginning included."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": psutil.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "load_1min": psutil.getloadavg()[0],
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def begin(spec: Spec) -> KnobResult:
    """The entry's result before it was run."""
    return KnobResult(
        entry=name(spec),
        knob=spec.knob,
        off=spec.off,
        on=spec.on,
        base=dict(spec.base),
        workload=" ".join((spec.workload.__doc__ or "").split()),
        expected=spec.expected,
        otherwise=spec.otherwise,
        at_most=spec.at_most,
    )


def conclude(result: KnobResult, spec: Spec, outcomes: Sequence[Outcome]) -> None:
    """Compare the arms of all runs, pair by pair."""
    arms = {arm: sorted((o for o in outcomes if o.arm == arm), key=lambda o: o.pair) for arm in ("off", "on")}
    if [o.pair for o in arms["off"]] != [o.pair for o in arms["on"]]:
        raise ValueError("the two arms do not have the same pairs")
    result.outcomes = list(outcomes)
    result.pairs = len(arms["off"])
    result.figures = [
        compare(
            figure.name,
            figure.unit,
            figure.better,
            [figure.of(o) for o in arms["off"]],
            [figure.of(o) for o in arms["on"]],
        )
        for figure in spec.figures
    ]
    for arm, runs in arms.items():
        result.memory[arm] = {
            kind: statistics.median(run.memory.get(kind, 0) for run in runs)
            for kind in (*MEMORY, "rss_bytes")
        }
        flips = [run.flip_us / 1e3 for run in runs if run.flip_us is not None]
        if flips:
            result.flip_ms[arm] = statistics.median(flips)
    if spec.at_most is not None and (high := result.figures[0].high) is not None:
        result.within = high <= spec.at_most


def text(result: KnobResult) -> str:
    """One entry for a person."""
    head = f"{result.entry}: {_value(result.off)} -> {_value(result.on)}"
    if result.skipped:
        return f"{head}\n  not run: {result.skipped}"
    if result.failed:
        return f"{head}\n  BROKE OFF: {result.failed}"
    main = result.figures[0]
    lines = [f"{head}   {main.verdict.upper()}   ({pairs(result.pairs)})"]
    lines += [f"  {_line(figure)}" for figure in result.figures]
    lines.append(f"  memory: {_memory(result)}")
    if result.flip_ms:
        lines.append(
            "  a flip takes " + ", ".join(f"{ms:.1f} ms to {arm}" for arm, ms in result.flip_ms.items())
        )
    lines.append(f"  expected: {result.expected}")
    if result.at_most is not None:
        shown = {True: "shown", False: "NOT SHOWN", None: "NOT SHOWN, one pair has no interval"}[
            result.within
        ]
        lines.append(f"  a ratio of at most {result.at_most:g}: {shown}")
    elif main.verdict != "helps":
        lines.append(f"  FINDING: {finding(main)} {result.otherwise}")
    return "\n".join(lines)


def finding(main: Comparison) -> str:
    """What is to be said where a knob does not do what it is for: nothing shown is not nothing there."""
    if main.verdict == "hurts":
        return f"{main.figure} is meant to be {main.better}, and is not."
    if main.ratio is None or main.low is None or main.high is None:
        return f"whether {main.figure} gets {main.better} cannot be said from these runs."
    if main.low >= 1 / NARROW and main.high <= NARROW:
        return f"{main.figure} stays the same to within {100 * (NARROW - 1):.0f} %."
    return (
        f"an effect on {main.figure} is not shown: the interval holds 1 and is wide, more pairs narrow it. "
        "If it stays so:"
    )


def summary(results: Sequence[KnobResult]) -> str:
    """One line for each entry."""
    rows = [["knob", "off -> on", "figure", "off", "on", "on/off [95 % interval]", "pairs", "verdict"]]
    for result in results:
        change = f"{_value(result.off)} -> {_value(result.on)}"
        if result.skipped or result.failed:
            rows.append(
                [result.entry, change, "-", "-", "-", "-", "0", "not run" if result.skipped else "broke off"]
            )
            continue
        main = result.figures[0]
        rows.append(
            [
                result.entry, change, f"{main.figure}, {main.unit}", number(main.off_median),
                number(main.on_median), _ratio(main), str(result.pairs), main.verdict,
            ]
        )  # fmt: skip
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def number(value: float | None) -> str:
    """Three significant digits, or a dash for what is undefined."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _line(figure: Comparison) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    return (
        f"{figure.figure:32} {number(figure.off_median):>8} -> {number(figure.on_median):>8}{unit:9} "
        f"{_ratio(figure)}  {figure.better} is better"
    )


def _ratio(figure: Comparison) -> str:
    if figure.ratio is None:
        return "no ratio"
    if figure.low is None or figure.high is None:
        return f"{figure.ratio:.3f} [no interval]"
    return f"{figure.ratio:.3f} [{figure.low:.3f} {figure.high:.3f}]"


def _memory(result: KnobResult) -> str:
    off, on = result.memory["off"], result.memory["on"]
    names = {
        "kv_bytes": "KV pool",
        "host_kv_bytes": "host KV",
        "swap_bytes": "swap space",
        "result_bytes": "answers kept",
        "rss_bytes": "whole process",
    }
    parts = [
        f"{title} {off[kind] / MIB:.1f} -> {on[kind] / MIB:.1f} MiB"
        for kind, title in names.items()
        if off[kind] or on[kind]
    ]
    return "; ".join(parts) or "the engine told of none"


def _value(value: m.KnobValue) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def about(report: Report) -> str:
    """On what all this was measured."""
    model, machine_ = report.model, report.machine
    return (
        f"{report.date}, {machine_['cpus']} CPUs ({machine_['processor']}), "
        f"load {machine_['load_1min']:.1f} at the beginning; {model.name}, "
        f"{model.num_params / 1e6:.0f} M weights, {model.dtype}, "
        f"{model.kv_bytes_per_token} bytes of keys and values a token; torch {report.engine.torch}, "
        f"{report.options['threads']} threads; {pairs(report.pairs)}"
    )
