"""Whether two arms differ: the ratio of a figure over ABBA pairs, with its interval.

Noise on a shared machine is proportional and drifts, so the two runs of a pair stand side by side in time
and are compared as a ratio. Over the pairs the logarithms of the ratios are averaged; their interval is
Student's, with one degree of freedom less than there are pairs. With three pairs it is wide: a real effect of
a few percent is then not shown, which is not the same as its absence.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

CONFIDENCE = 0.95

Better = Literal["higher", "lower"]
Verdict = Literal["helps", "hurts", "no clear effect", "no ratio"]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the pairs. ``ratio`` is on / off, ``low`` to ``high`` its interval.

    A figure that a run does not have is None. There is no ratio where a value is None, 0 or below, and no
    interval from a single pair.
    """

    figure: str
    unit: str
    better: Better
    off: list[float | None]
    on: list[float | None]
    pairs: int
    off_median: float | None
    on_median: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict


def abba(pairs: int) -> Iterator[tuple[int, Literal["off", "on"]]]:
    """The order of the runs, (pair, arm): off on, on off, off on, ... so that a drift favours neither."""
    for pair in range(pairs):
        for arm in (("off", "on"), ("on", "off"))[pair % 2]:
            yield pair, arm  # type: ignore[misc]


def t_quantile(df: int, confidence: float = CONFIDENCE) -> float:
    """The t for which Student's distribution with ``df`` degrees has ``confidence`` between -t and t.

    By bisection of the closed form for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    if df < 1:
        raise ValueError(f"Student's distribution needs at least 1 degree of freedom, not {df}")
    low, high = 0.0, 1.0
    while _between(high, df) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _between(middle, df) < confidence else (low, middle)
    return (low + high) / 2


def _between(t: float, df: int) -> float:
    """The probability that Student's t with ``df`` degrees lies between -t and t."""
    angle = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    if df % 2:
        term = math.cos(angle)
        total = term if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cos2 * (k - 1) / k
            total += term
        return 2 / math.pi * (angle + math.sin(angle) * total)
    term = total = 1.0
    for k in range(2, df, 2):
        term *= cos2 * (k - 1) / k
        total += term
    return math.sin(angle) * total


def ratio_interval(off: Sequence[float], on: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Ratio on / off over pairs of positive values and the ends of its interval (None with one pair)."""
    logs = [math.log(b / a) for a, b in zip(off, on, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(
    figure: str, unit: str, better: Better, off: Sequence[float | None], on: Sequence[float | None]
) -> Comparison:
    """One figure of the two arms, pair by pair in the same order."""
    ratio = low = high = None
    a, b = _positive(off), _positive(on)
    if a and b:
        ratio, low, high = ratio_interval(a, b)
    return Comparison(
        figure=figure,
        unit=unit,
        better=better,
        off=list(off),
        on=list(on),
        pairs=len(off),
        off_median=_median(off),
        on_median=_median(on),
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict(better, ratio, low, high),
    )


def verdict(better: Better, ratio: float | None, low: float | None, high: float | None) -> Verdict:
    """Helps or hurts only where the whole interval lies on one side of 1."""
    if ratio is None:
        return "no ratio"
    if low is None or high is None or low <= 1 <= high:
        return "no clear effect"
    return "helps" if (low > 1) == (better == "higher") else "hurts"


def _positive(values: Sequence[float | None]) -> list[float]:
    """All the values, or none of them where one is missing or not above 0."""
    kept = [value for value in values if value is not None and value > 0]
    return kept if len(kept) == len(values) else []


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
