"""What an engine tells of itself by the clock: its phase, a stall, the block map, how far requests are."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.answer import Answers
from engine.config import EngineConfig
from engine.scheduler import Scheduler
from engine.sizes import counted
from ipc.messages import EngineState, Phase

log = logging.getLogger(__name__)

STAGE_EVERY_NS = 100_000_000


class Pulse:
    """Phase and reason of one engine, and what is due to be published. The step thread owns it.

    ``state`` makes the message that tells of a new phase.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        answers: Answers,
        state: Callable[[], EngineState],
        clock_ns: Callable[[], int],
    ) -> None:
        now = clock_ns()
        self.phase: Phase = "ready"
        self.reason = ""
        self.stage = ""  # of applying a change: what is being done, with its bytes done and in all
        self.done_bytes = 0
        self.total_bytes = 0
        self.since_ns = now
        self.beat_ns = now  # when the loop last began or ended something: a round, or a change
        self._stall_after_s = config.stall_after_s
        self._view_every_ns = int(config.block_view_interval_s * 1e9)
        self._rows_every_ns = int(config.progress_interval_s * 1e9)
        self._scheduler = scheduler
        self._answers = answers
        self._state = state
        self._clock = clock_ns
        self._moved_ns = now
        self._stage_ns = 0
        self._rows_ns = now
        self._view_ns = 0
        self._view_due = True

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        """Enter a phase and tell of it."""
        # First, so that nobody takes the pause of a change that is over for the age of the step after it.
        self.beat_ns = self._clock()
        self.phase, self.reason, self.since_ns = phase, reason, self.beat_ns
        self.stage, self.done_bytes, self.total_bytes = "", 0, 0
        self._answers.events.append(self._state())

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Tell how far a change is: at once where a stage begins, then ten times a second."""
        now, begins = self._clock(), stage != self.stage
        self.stage, self.done_bytes, self.total_bytes = stage, done_bytes, total_bytes
        if begins or now - self._stage_ns >= STAGE_EVERY_NS:
            self._stage_ns = now
            self._answers.tell(self._state())

    def moved(self) -> None:
        """Work was done, or there is none, or it waits on purpose."""
        self._moved_ns = self._clock()
        if self.phase == "stalled":
            self.set_phase("ready")

    def look_for_stall(self, why: str) -> None:
        """Work waits and nothing was done: after a while that is a stall, told to everybody."""
        waited_s = (self._clock() - self._moved_ns) / 1e9
        if waited_s < self._stall_after_s or self.phase == "stalled":
            return
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        reason = (
            f"{counted(waiting, 'request')} waiting and {running} running, but nothing was computed for "
            f"{waited_s:.1f} s"
        )
        self.set_phase("stalled", f"{reason}: {why or 'the plan is empty'}")
        log.error("%s", self.reason)

    def blocks_changed(self, *, show_at_once: bool = False) -> None:
        """The block map is to be shown again, in its time or at once."""
        self._view_due = True
        if show_at_once:
            self._view_ns = 0

    def publish(self) -> None:
        """The block map if it is due, and rows of running requests, so that their tokens are seen to grow."""
        now, answers = self._clock(), self._answers
        if self._view_due and (now - self._view_ns >= self._view_every_ns or not answers.live):
            answers.events.append(self._scheduler.view(now))
            self._view_ns = now
            self._view_due = False
        if now - self._rows_ns >= self._rows_every_ns:
            self._rows_ns = now
            answers.events += [request.row() for request in self._scheduler.running]
