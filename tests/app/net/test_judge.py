"""What one judge makes of heartbeats. No process and no socket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.net.judge import Judge
from app.net.types import LinkState, LinkStatus
from ipc import messages as m


class Engine:
    """What a connection shows of an engine: its last heartbeat, its configuration and its steps."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.judge.begin(0.0, managed=True)
        self.mirror = SimpleNamespace(
            state=m.EngineState(phase="ready", since_ns=0, cfg_rev=0),
            heartbeat=None,
            cfg=None,
            steps={},
            gaps={},
        )

    def status(self, now_s: float, step: int, age_s: float) -> LinkStatus:
        """The link while step ``step`` has run for ``age_s``."""
        self.mirror.heartbeat = m.Heartbeat(
            mono_ns=1, step=step, busy="step", last_step_age_us=round(age_s * 1e6), rss_bytes=1
        )
        welcome = SimpleNamespace(engine=SimpleNamespace(pid=1), session="one")
        connection: Any = SimpleNamespace(
            mirror=self.mirror, welcome=welcome, refused="", last_heard_s=now_s, address="tcp://here",
            clock_offset_ns=0, rtt_s=None, bad_frames=0,
        )  # fmt: skip
        return self.judge.status(now_s, None, None, connection)


@pytest.mark.parametrize(
    ("known_us", "age_s", "expected"),
    [
        (None, 1.1, LinkState.READY),  # the first prefill on a CPU: nobody knows yet how long a step is
        (None, 10.5, LinkState.STALLED),
        (30_000, 0.9, LinkState.READY),
        (30_000, 1.1, LinkState.STALLED),
    ],
)
def test_a_first_step_gets_the_patience_of_loading(
    known_us: int | None, age_s: float, expected: LinkState
) -> None:
    """F09: a hang is told in any step, but no first step of a CPU is called one after a second."""
    engine = Engine()
    if known_us is not None:
        engine.mirror.steps[1] = SimpleNamespace(dur_us=known_us)
    assert engine.status(20.0, 2, age_s).state is expected
