"""What was measured against the goals, each a part of the floor that was measured on the same device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.gpu.check.results import Results

Found = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """``measure`` gives parts of the floor by name from what the stage found; the worst one counts."""

    case: str
    share: float
    stage: str
    measure: Callable[[Found], dict[str, float]]
    at_most: bool = False


def _cell(name: str) -> Callable[[Found], dict[str, float]]:
    return lambda found: {each: cell["of_floor"] for each, cell in _rows(found, "cells") if each == name}


def _rows(found: Found, what: str) -> Iterable[tuple[str, Any]]:
    """Of a stage that may have failed before it got there."""
    return (found.get(what) or {}).items()


def _kernels(pattern: str, least: int) -> Callable[[Found], dict[str, float]]:
    """Kernels whose name fits, with at least so many rows: the number that the pattern's group holds."""

    def measure(found: Found) -> dict[str, float]:
        fitting = ((name, row, re.fullmatch(pattern, name)) for name, row in _rows(found, "kernels"))
        return {
            name: row["of_roofline"]
            for name, row, fits in fitting
            if fits is not None and int(fits.group(1)) >= least
        }

    return measure


def _prompts(found: Found) -> dict[str, float]:
    return {f"{length} tokens": row["of_floor"] for length, row in _rows(found, "prompts")}


def _loop(found: Found) -> dict[str, float]:
    loads = _rows(found, "loads")
    return {name: row["beyond_forward"] for name, row in loads if row["beyond_forward"] is not None}


GOALS = (
    Goal("bf16, batch 1", 0.80, "decode", _cell("bf16, batch 1, 1024")),
    Goal("bf16, batch 64, 1k", 0.80, "decode", _cell("bf16, batch 64, 1024")),
    Goal("fp8 weights, batch 1", 0.65, "decode_fp8", _cell("fp8 weights, batch 1, 1024")),
    Goal(
        "fp8 weights and KV, batch 128, 1k", 0.72, "decode_fp8", _cell("fp8 weights and KV, batch 128, 1024")
    ),
    Goal("prefill bf16 2k / 8k", 0.78, "prefill", _prompts),
    Goal(
        "decode attention, batch >= 32", 0.80, "rooflines",
        _kernels(r"attention decode \w+, batch (\d+), \d+", 32),
    ),
    Goal(
        "fused elementwise, >= 256 tokens", 0.85, "rooflines",
        _kernels(r"(?:add_rmsnorm|silu_mul|qkv)(?: to e4m3)?, (\d+) tokens", 256),
    ),
    Goal("engine loop beyond graph replay, batch 64", 0.05, "serving", _loop, at_most=True),
)  # fmt: skip


def rows(results: Results) -> list[dict[str, Any]]:
    """One row for each goal: met, missed, or not measured and why."""
    return [_row(goal, results) for goal in GOALS]


def _row(goal: Goal, results: Results) -> dict[str, Any]:
    sign, whole = ("at most", "a step") if goal.at_most else ("at least", "the floor")
    asked = f"{sign} {goal.share:.0%} of {whole}"
    row: dict[str, Any] = {"case": goal.case, "goal": asked, "measured": None, "why": ""}
    found = results.so_far(goal.stage)
    parts = goal.measure(found)
    if not parts and results.of(goal.stage) is None:
        return row | {"verdict": "not measured", "why": results.why_not(goal.stage)}
    if not parts:
        missing = {**(found.get("not_run") or {}), **(found.get("failed") or {})}
        return row | {"verdict": "not measured", "why": _missing(goal.stage, missing, results)}
    worst = (max if goal.at_most else min)(parts, key=lambda name: parts[name])
    met = parts[worst] <= goal.share if goal.at_most else parts[worst] >= goal.share
    why = f"the worst of {len(parts)}: {worst}" if len(parts) > 1 else ""
    if results.of(goal.stage) is None:  # what it had found counts, and that it is not all of it
        why = "; ".join(filter(None, (why, results.why_not(goal.stage))))
    if results.data["identity"]["device"] == "cpu":
        return row | {"verdict": "not measured", "why": "a dry run on a CPU says nothing of a card"}
    return row | {"verdict": "met" if met else "missed", "measured": parts[worst], "why": why}


def _missing(stage: str, missing: dict[str, str], results: Results) -> str:
    if results.data["identity"]["tiny"]:
        return "not among the shapes of a dry run"
    reasons = "; ".join(f"{name}: {why}" for name, why in list(missing.items())[:2])
    return f"{stage} has no such figure" + (f" ({reasons})" if reasons else "")


def table(results: Results) -> str:
    """The rows, and where what else was measured stands, for a terminal."""
    head = ("case", "goal", "measured", "verdict", "why")
    body = [
        (
            row["case"], row["goal"], "-" if row["measured"] is None else f"{row['measured']:.1%}",
            row["verdict"], row["why"][:90],
        )
        for row in results.data["summary"]
    ]  # fmt: skip
    lines = [*_aligned([head, *body]), "", *_changes(results), *_stages(results), ""]
    return "\n".join([*lines, f"results: {results.path.name}"])


def _changes(results: Results) -> Iterable[str]:
    """What each change from everything on made of the time of a token, or why it was not made."""
    found = results.data["stages"].get("knobs", {}).get("result")
    if not found:
        return
    title = "change from everything on"
    if results.data["identity"]["device"] == "cpu":
        title += " (a dry run says nothing of a card)"
    cells = [(title, "ms a token", "times", "95 % of it", "accepted drafts")]
    for name, row in found["changes"].items():
        drafts = f"{row['accepted_tok']} of {row['drafted_tok']}" if row["drafted_tok"] else ""
        spread = f"{row['low']:.3f} to {row['high']:.3f}"
        cells.append((name, f"{row['token_ms']:.3f}", f"{row['times']:.3f}", spread, drafts))
    yield from _aligned(cells)
    for kind in ("failed", "not_run"):
        for name, why in found[kind].items():
            yield f"{name}: {'FAILED: ' if kind == 'failed' else ''}{why}"[:150]
    yield ""


def _aligned(cells: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _stages(results: Results) -> Iterable[str]:
    for name, stage in results.data["stages"].items():
        failed = (stage.get("result") or {}).get("failed")
        note = f", {len(failed)} failed: {', '.join(failed)}" if failed else ""
        yield f"{name:15} {stage['status']:8} {stage['seconds']:7.1f} s{note}"[:160]
