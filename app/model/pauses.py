"""How long a change of the configuration kept requests waiting whose latency a figure is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from app.model.series import Ring

if TYPE_CHECKING:
    from app.model.figures import Marker

LEAST_S = 0.01  # shorter ones show in no figure


def longest_wait(firsts: Ring, changes: Iterable[Marker], t0_s: float, t1_s: float) -> float | None:
    """The longest change that was applied while a request waited for its first token; None without one.

    ``firsts`` holds when first tokens came and how long they took; those from ``t0_s`` to ``t1_s`` count.
    """
    times, took = firsts.column("t_s"), firsts.column("value")
    inside = (times > t0_s) & (times <= t1_s)
    times, took = times[inside], took[inside]
    found = [
        change.took_s
        for change in changes
        if change.mode != "step"
        and change.took_s >= LEAST_S
        and np.any((times - took < change.t_s) & (times > change.t_s - change.took_s))
    ]
    return max(found, default=None)
