"""What one judge makes of heartbeats. No process and no socket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.net.judge import Judge
from app.net.supervisor import ExitCause
from app.net.types import LinkState, LinkStatus
from ipc import messages as m
from tests.app.builders import cfg


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


def test_a_restart_tells_what_of_the_last_configuration_it_leaves_out() -> None:
    """F09: a change without a step is not trusted, however long ago, and neither end nor restart hides it."""
    engine = Engine()
    judge = engine.judge
    engine.mirror.cfg = cfg(0, policy="fcfs", max_num_seqs=8)
    engine.status(0.0, 1, 0.0)
    engine.status(1.0, 2, 0.0)
    changed = {"policy": "priority", "max_num_seqs": 8}
    engine.mirror.cfg = msgspec.structs.replace(engine.mirror.cfg, rev=1, values=changed)
    engine.status(2.0, 2, 0.0)
    engine.status(62.0, 2, 0.0)
    judge.ended(62.0, ExitCause(None, 9, "it was killed by SIGKILL", False), ())
    assert "60.0 s after a change" in judge.status(62.0, None, None, None).reason
    judge.note_restart(judge.good_knobs({}))
    judge.begin(63.0, managed=True)
    assert engine.status(64.0, 2, 0.0).left_out == {"policy": "priority"}
    judge.note_restart({**judge.good_knobs({}), "policy": "priority"})
    assert judge.left_out == {}


def test_a_configuration_that_has_run_is_restarted_in_full() -> None:
    engine = Engine()
    judge = engine.judge
    engine.mirror.cfg = cfg(0, policy="fcfs")
    engine.status(0.0, 1, 0.0)
    engine.mirror.cfg = msgspec.structs.replace(engine.mirror.cfg, rev=1, values={"policy": "priority"})
    engine.status(1.0, 2, 0.0)
    engine.status(12.0, 3, 0.0)
    judge.ended(13.0, ExitCause(None, 9, "it was killed by SIGKILL", False), ())
    assert "after a change" not in judge.status(13.0, None, None, None).reason
    judge.note_restart(judge.good_knobs({}))
    assert judge.good_knobs({}) == {"policy": "priority"}
    assert judge.left_out == {}


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
