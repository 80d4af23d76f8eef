"""`Judge`: from process, connection and heartbeats to one `LinkStatus`, and the last good configuration.

A configuration is good once the engine has run with it for ten seconds and at least one step. An engine
that ends sooner after a change is restarted with the one before.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from app.net.connection import Connection
from app.net.supervisor import EngineProcess, ExitCause
from app.net.types import LOADING, LaunchSpec, LinkState, LinkStatus
from ipc import messages as m
from ipc.liveness import SILENT_BUSY_AFTER_S, STALLED_STEPS, Liveness, assess

GOOD_AFTER_S = 10.0
_NO_ANSWER_S = 2.0  # before "connecting" explains itself
_ASK_AFTER_S = 8.0  # before it asks whether the address is the right one
_LOST_S = 1.0  # an attached engine whose connection stays broken is taken for dead
_SLOW_STEP_ROWS = 200
# Until one is known: a CPU's first prefill takes seconds, so it gets the patience that loading gets.
_UNKNOWN_STEP_S = SILENT_BUSY_AFTER_S / STALLED_STEPS

_LIVENESS_STATE = {
    Liveness.OK: LinkState.READY,
    Liveness.SLOW: LinkState.READY,
    Liveness.STALLED: LinkState.STALLED,
    Liveness.UNRESPONSIVE: LinkState.UNRESPONSIVE,
    Liveness.DEAD: LinkState.DEAD,
}
_TAIL_STATES = (LinkState.FAILED, LinkState.STALLED, LinkState.UNRESPONSIVE)


class Judge:
    """Used by the I/O thread only. All times are its monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._now_state = LinkState.OFFLINE
        self._since_s = 0.0
        self._begun_s = 0.0
        self._managed = False
        self._cause: ExitCause | None = None
        self._tail: tuple[str, ...] = ()
        self._final: tuple[LinkState, str] | None = (LinkState.OFFLINE, "")
        self._good: dict[str, m.KnobValue] | None = None
        self._good_rev: int | None = None
        self._last: m.Cfg | None = None  # what the engine ran with last, good or not
        self.left_out: dict[str, m.KnobValue] = {}  # what of it the present engine was started without
        self._changed_s: float | None = None
        self._rev: int | None = None
        self._rev_step = 0
        self._slow_s, self._slow_at_s = _UNKNOWN_STEP_S, -1.0

    def begin(self, now_s: float, *, managed: bool) -> None:
        """A new attempt: whatever ended before is history."""
        self._begun_s, self._managed = now_s, managed
        self._cause, self._tail, self._final = None, (), None
        self._rev, self._good_rev, self._changed_s = None, None, None

    def ended(self, now_s: float, cause: ExitCause, tail: tuple[str, ...]) -> None:
        """The managed process is gone."""
        self._cause, self._tail = cause, tail
        if cause.asked_for:
            self._final = (LinkState.OFFLINE, "The engine was stopped.")
            return
        reason = f"The engine's process has ended: {cause.words}."
        if self._changed_s is not None and self._good_rev != self._rev:
            reason += (
                f" That was {now_s - self._changed_s:.1f} s after a change of its configuration;"
                " a restart goes back to the one before."
            )
        self._final = (LinkState.DEAD, reason)

    def not_started(self, now_s: float, reason: str) -> None:
        self._final = (LinkState.DEAD, reason)

    def offline(self, now_s: float) -> None:
        self._final = (LinkState.OFFLINE, "")

    # --- configuration ---------------------------------------------------------------------------

    def good_knobs(self, launched: dict[str, m.KnobValue]) -> dict[str, m.KnobValue]:
        """What to restart with: the last good values where any became good, else those of the launch."""
        return dict(launched if self._good is None else self._good)

    def forget_good(self) -> None:
        """Another engine altogether: what was good for the one before says nothing of it."""
        self._good, self._last, self.left_out = None, None, {}

    def note_restart(self, knobs: dict[str, m.KnobValue]) -> None:
        """An engine is to start with ``knobs``: keep what the one before ran with and this one will not."""
        self.left_out = {}
        if self._last is not None:
            starts = {info.id: info.default for info in self._last.knobs if info.available} | knobs
            values = self._last.values
            self.left_out = {k: values[k] for k, value in starts.items() if values.get(k, value) != value}

    def _learn(self, now_s: float, connection: Connection) -> None:
        cfg, heartbeat = connection.mirror.cfg, connection.mirror.heartbeat
        if cfg is None or heartbeat is None:
            return
        self._last = cfg
        if cfg.rev != self._rev:
            self._changed_s = now_s if self._rev is not None else None
            self._rev, self._rev_step = cfg.rev, heartbeat.step
            if self._changed_s is None and self._good is None:
                self._take_good(cfg)  # what it was launched with, until something better is known
        ran = heartbeat.step > self._rev_step
        aged = self._changed_s is None or now_s - self._changed_s >= GOOD_AFTER_S
        if self._good_rev != cfg.rev and ran and aged:
            self._take_good(cfg)

    def _take_good(self, cfg: m.Cfg) -> None:
        can_start_with = {info.id: info.default for info in cfg.knobs if info.available}
        self._good = {
            knob: value
            for knob, value in cfg.values.items()
            if knob in can_start_with and value != can_start_with[knob]
        }
        self._good_rev = cfg.rev

    # --- status ----------------------------------------------------------------------------------

    def status(
        self,
        now_s: float,
        spec: LaunchSpec | None,
        process: EngineProcess | None,
        connection: Connection | None,
    ) -> LinkStatus:
        """The link as it stands now."""
        if connection is not None and connection.welcome is not None:
            self._learn(now_s, connection)
        state, reason = self._judge(now_s, process, connection)
        if state != self._now_state:
            self._now_state, self._since_s = state, now_s
        welcome = connection.welcome if connection is not None else None
        pid = process.pid if process is not None else welcome.engine.pid if welcome is not None else None
        return LinkStatus(
            state=state,
            reason=reason,
            since_s=self._since_s,
            endpoint=connection.address if connection is not None else "",
            managed=self._managed,
            pid=pid,
            session=welcome.session if welcome is not None else None,
            engine=welcome.engine if welcome is not None else None,
            exit_code=self._cause.code if self._cause is not None else None,
            exit_signal=self._cause.signal if self._cause is not None else None,
            log_tail=process.log_tail() if process is not None and state in _TAIL_STATES else self._tail,
            heartbeat=connection.mirror.heartbeat if connection is not None else None,
            clock_offset_ns=connection.clock_offset_ns if connection is not None else 0,
            rtt_s=connection.rtt_s if connection is not None else None,
            lost=dict(connection.mirror.gaps) if connection is not None else {},
            bad_frames=connection.bad_frames if connection is not None else 0,
            can_restart=spec is not None,
            left_out=self.left_out,
            command_line=process.argv if process is not None else (),
        )

    def _judge(
        self, now_s: float, process: EngineProcess | None, connection: Connection | None
    ) -> tuple[LinkState, str]:
        if self._final is not None:
            return self._final
        if connection is None:
            return LinkState.STARTING, "The engine's process is starting."
        if connection.refused:
            return LinkState.FAILED, f"The engine refused this console: {connection.refused}"
        if connection.welcome is None:
            return self._unconnected(now_s, connection)
        silent_s = now_s - connection.last_heard_s if connection.last_heard_s is not None else 0.0
        heartbeat = connection.mirror.heartbeat
        state = connection.mirror.state
        if (
            heartbeat is not None
            and state is not None
            and state.phase == "ready"
            and heartbeat.busy != "step"
        ):
            # The last heartbeat may still tell of a load that is over; the patience for one is not due.
            heartbeat = msgspec.structs.replace(heartbeat, busy="idle")
        verdict = assess(
            silent_s=silent_s, heartbeat=heartbeat, slow_step_s=self._slow_step_s(now_s, connection)
        )
        if verdict.liveness not in (Liveness.OK, Liveness.SLOW):
            return _LIVENESS_STATE[verdict.liveness], verdict.reason
        return self._phase(state, verdict.reason)

    def _unconnected(self, now_s: float, connection: Connection) -> tuple[LinkState, str]:
        if connection.lost_at_s is not None and now_s - connection.lost_at_s > _LOST_S and not self._managed:
            return LinkState.DEAD, (
                f"The engine at {connection.address} has closed the connection. "
                "When it is back there, this console is too."
            )
        if connection.connected and connection.last_heard_s is not None:
            silent_s = now_s - connection.last_heard_s
            if silent_s > _NO_ANSWER_S:
                return LinkState.UNRESPONSIVE, f"The engine has not answered for {silent_s:.1f} s."
        waited_s = now_s - self._begun_s
        if waited_s > _ASK_AFTER_S and not connection.connected and not self._managed:
            return LinkState.CONNECTING, (
                f"No engine answers at {connection.address}. Is it started, is this its control port, "
                "and is the port forwarded? “Stop or detach the engine” in the Engine menu "
                "ends the waiting."
            )
        if waited_s > _NO_ANSWER_S and not connection.connected:
            return LinkState.CONNECTING, f"No engine answers at {connection.address} yet."
        return LinkState.CONNECTING, ""

    @staticmethod
    def _phase(state: m.EngineState | None, note: str) -> tuple[LinkState, str]:
        if state is None:
            return LinkState.CONNECTING, "Waiting for the engine's state."
        if state.phase in LOADING:
            return LinkState.LOADING, state.stage or "The model is being loaded."
        if state.phase == "failed":
            return LinkState.FAILED, state.reason or "The engine could not load its model."
        if state.phase == "stalled":
            return LinkState.STALLED, state.reason or "The engine reports work and no progress."
        if state.phase == "stopping":
            return LinkState.READY, "The engine is stopping."
        if state.phase == "applying":
            return LinkState.READY, "A change of the configuration is being applied."
        return LinkState.READY, note

    def _slow_step_s(self, now_s: float, connection: Connection) -> float:
        """The 99th percentile of the newest steps' durations, at most a second old.

        `_UNKNOWN_STEP_S` before any step is known.
        """
        if now_s - self._slow_at_s > 1.0:
            self._slow_at_s = now_s
            newest = itertools.islice(reversed(connection.mirror.steps.values()), _SLOW_STEP_ROWS)
            sample = [row.dur_us for row in newest]
            self._slow_s = float(np.percentile(sample, 99)) * 1e-6 if sample else _UNKNOWN_STEP_S
        return self._slow_s
