"""What a step costs by its number of tokens, learned from steps as they happen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL_RATE = 0.2  # how fast the common level follows what is measured
SHAPE_RATE = 0.1  # how fast one size follows it, once it was measured often
OUTLIER = 4.0  # a single time counts as at most so many times more or less than expected
EXACT = 16  # up to this many tokens each number has a point of its own
GROWTH = 1.15  # above, a point serves sizes up to so many times its smallest
STALE = 2048  # observations after which what was measured at one size should be measured again


@dataclass(slots=True)
class _Point:
    tokens: float  # mean of what was measured here
    shape: float  # seconds as a multiple of the common level
    seen: int  # number of the last observation here
    count: int = 1


class StepCost:
    """Seconds of a step (forward pass and choice of tokens) as a function of the tokens computed in it.

    A time is a common level multiplied by a shape: when a machine slows down or contexts grow, times measured
    at one size move the expectations for all. Between measured sizes it is interpolated, beyond the largest
    one extended by its last slope, and never falls as tokens are added.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._seen = 0
        self._points: dict[int, _Point] = {}
        self._curve: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``. Steps of no tokens or no time are left out."""
        if tokens < 1 or not 0.0 < seconds < math.inf:
            return
        self._curve = None
        self._seen += 1
        place = _place(tokens)
        point = self._points.get(place)
        if not self._points:
            self._level = seconds
        if point is None:
            self._points[place] = _Point(float(tokens), seconds / self._level, self._seen)
            return
        ratio = seconds / (self._level * point.shape)
        ratio = min(max(ratio, 1.0 / OUTLIER), OUTLIER)
        point.count += 1
        point.seen = self._seen
        self._level *= ratio**LEVEL_RATE
        point.shape *= ratio ** max(SHAPE_RATE, 1.0 / point.count)
        point.tokens += (tokens - point.tokens) * SHAPE_RATE

    def is_known(self, tokens: int) -> bool:
        """Whether a step of about this size was measured not too long ago."""
        point = self._points.get(_place(tokens))
        return point is not None and self._seen - point.seen < STALE

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step with so many tokens; 0 before anything was measured."""
        return float(self.seconds_of(np.array([tokens]))[0])

    def seconds_of(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same for several sizes at once."""
        if not self._points:
            return np.zeros(len(tokens))
        if self._curve is None:
            points = sorted(self._points.values(), key=lambda point: point.tokens)
            x = np.array([point.tokens for point in points])
            y = np.maximum.accumulate(np.array([point.shape for point in points])) * self._level
            self._curve = x, y
        x, y = self._curve
        out: NDArray[np.float64] = np.interp(tokens, x, y)
        if len(x) > 1:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            out += slope * np.maximum(tokens - x[-1], 0.0)
        return out


def _place(tokens: int) -> int:
    """Which point a size belongs to."""
    if tokens <= EXACT:
        return tokens
    return EXACT + 1 + int(math.log(tokens / EXACT) / math.log(GROWTH))
