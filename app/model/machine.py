"""What else kept the machine busy: the processor time of all processes but the engine's and our own.

A figure of speed says little where other work took the same cores, and nobody remembers it a week later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

import psutil

EVERY_S = 1.0
KEPT = 7200  # samples: two hours

ProcessorTime = Callable[[], float]


def busy_s() -> float:
    """Processor time that the machine has spent so far, in seconds of one core; waiting is none."""
    spent = psutil.cpu_times()
    return float(sum(spent) - spent.idle - getattr(spent, "iowait", 0.0) - getattr(spent, "guest", 0.0)
                 - getattr(spent, "guest_nice", 0.0))  # fmt: skip


def used_s(pids: Iterable[int]) -> dict[int, float]:
    """Processor time of processes so far by their number; those that are gone are left out."""
    found: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            spent = psutil.Process(pid).cpu_times()
            found[pid] = float(spent.user + spent.system)
    return found


class OtherWork:
    """Samples once a second. Times are seconds of the console's monotonic clock."""

    def __init__(
        self, machine: ProcessorTime = busy_s, own: Callable[[Iterable[int]], dict[int, float]] = used_s
    ) -> None:
        self._machine, self._own = machine, own
        self._last: tuple[float, float, dict[int, float]] | None = None
        self._cores: deque[tuple[float, float]] = deque(maxlen=KEPT)  # when, and how many were busy

    def sample(self, now_s: float, pids: Iterable[int]) -> None:
        """Take what was spent since the last time. ``pids``: the engine, its load and this window."""
        if self._last is not None and now_s - self._last[0] < EVERY_S:
            return
        machine, own = self._machine(), self._own(pids)
        if self._last is not None:
            then_s, before, used = self._last
            ours = sum(spent - used[pid] for pid, spent in own.items() if pid in used)
            self._cores.append((now_s, max(0.0, (machine - before - ours) / (now_s - then_s))))
        self._last = now_s, machine, own

    def forget(self) -> None:
        """There is no engine of this machine: nothing is known until there is one again."""
        self._last = None

    def stats(self, t0_s: float, t1_s: float) -> dict[str, float | int | None]:
        """Mean and most of the cores that other processes kept busy; nothing where that is not known."""
        found = [cores for at_s, cores in self._cores if t0_s < at_s <= t1_s]
        if not found:
            return {}
        return {
            "other_cores_mean": sum(found) / len(found),
            "other_cores_max": max(found),
            "machine_cores": psutil.cpu_count() or 1,
        }
