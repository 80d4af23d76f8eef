"""How an engine is judged."""

from __future__ import annotations

import pytest

from ipc import messages as m
from ipc.liveness import Liveness, assess


def _beat(busy: str, age_s: float = 0.0) -> m.Heartbeat:
    return m.Heartbeat(mono_ns=1, step=7, busy=busy, last_step_age_us=int(age_s * 1e6), rss_bytes=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("silent_s", "beat", "slow_step_s", "gone", "expected"),
    [
        (0.1, _beat("idle", 500.0), 0.05, None, Liveness.OK),  # an idle loop takes no steps
        (0.1, _beat("step", 0.03), 0.05, None, Liveness.OK),
        (0.1, _beat("step", 0.4), 0.05, None, Liveness.SLOW),
        (0.1, _beat("step", 1.2), 0.05, None, Liveness.STALLED),
        (0.1, _beat("step", 1.2), 0.5, None, Liveness.OK),  # its steps are that long
        (0.1, _beat("step", 6.0), 0.5, None, Liveness.STALLED),
        (0.9, _beat("step", 0.4), 0.0, None, Liveness.STALLED),  # it went on while nothing was heard
        (1.1, _beat("idle"), 0.05, None, Liveness.UNRESPONSIVE),
        (1.1, _beat("load"), 0.0, None, Liveness.OK),  # importing and loading hold the interpreter
        (1.1, None, 0.0, None, Liveness.OK),
        (11.0, _beat("apply"), 0.0, None, Liveness.UNRESPONSIVE),
        (0.0, _beat("idle"), 0.05, "killed by signal 9", Liveness.DEAD),
    ],
)
def test_classes(
    silent_s: float, beat: m.Heartbeat | None, slow_step_s: float, gone: str | None, expected: Liveness
) -> None:
    """F09: a live socket alone never counts as health."""
    verdict = assess(silent_s=silent_s, heartbeat=beat, slow_step_s=slow_step_s, gone=gone)
    assert verdict.liveness is expected
    assert bool(verdict.reason) is (expected is not Liveness.OK)
