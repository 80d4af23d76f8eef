"""How alive an engine is, judged from its process, its traffic and its own heartbeat.

Pure: the caller brings the times, all of one monotonic clock. A live socket proves little, since the
engine's I/O thread answers while its step loop hangs; so the heartbeat carries the age of the last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ipc import messages as m

SILENT_AFTER_S = 1.0  # four missed heartbeats
SILENT_BUSY_AFTER_S = 10.0  # loading and applying may hold the interpreter for seconds
STALLED_AFTER_S = 1.0
STALLED_STEPS = 10.0  # a step that takes ten times the slow ones is stuck
SLOW_STEPS = 3.0


class Liveness(Enum):
    """From good to bad."""

    OK = "ok"
    SLOW = "slow"
    STALLED = "stalled"
    UNRESPONSIVE = "unresponsive"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A class and the sentence that explains it to a person."""

    liveness: Liveness
    reason: str = ""


def assess(
    *,
    silent_s: float,
    heartbeat: m.Heartbeat | None,
    slow_step_s: float = 0.0,
    gone: str | None = None,
) -> Verdict:
    """Judge an engine.

    ``silent_s``: seconds since anything at all came from it. ``slow_step_s``: its 99th percentile step, 0
    if unknown. ``gone``: why its process or connection has ended, None while it has not.
    """
    if gone is not None:
        return Verdict(Liveness.DEAD, gone)
    busy = heartbeat.busy if heartbeat is not None else "load"
    limit_s = SILENT_BUSY_AFTER_S if busy in ("load", "apply") else SILENT_AFTER_S
    if silent_s > limit_s:
        return Verdict(Liveness.UNRESPONSIVE, f"nothing heard from the engine for {silent_s:.1f} s")
    if heartbeat is None or busy != "step":
        return Verdict(Liveness.OK)
    age_s = heartbeat.last_step_age_us / 1e6 + silent_s
    if age_s > max(STALLED_AFTER_S, STALLED_STEPS * slow_step_s):
        reason = f"the engine answers, but its step {heartbeat.step} has run {age_s:.1f} s"
        return Verdict(Liveness.STALLED, reason)
    if slow_step_s > 0.0 and age_s > max(SILENT_AFTER_S / 4, SLOW_STEPS * slow_step_s):
        return Verdict(Liveness.SLOW, f"its step {heartbeat.step} has run {age_s:.2f} s")
    return Verdict(Liveness.OK)
