"""`Outages`: when no engine was there to measure, from its end until the next one can take requests."""

from __future__ import annotations

from app.model.figures import Gap
from app.net.types import LinkState, LinkStatus

# It lives and has its model, though it may hang: what it measured meanwhile can still arrive.
THERE = frozenset({LinkState.READY, LinkState.STALLED, LinkState.UNRESPONSIVE})


class Outages:
    """The outages of one session, told batch by batch. Times are the console's monotonic clock."""

    def __init__(self) -> None:
        self._told_s: float | None = None  # of the batch before
        self._there = False
        self._since_s: float | None = None  # an outage has gone on since; None before the first engine too

    def take(self, link: LinkStatus, now_s: float, new_session: bool) -> Gap | None:
        """The outage that is over with this batch, if one is."""
        told_s = now_s if self._told_s is None else self._told_s
        changed_s = min(now_s, max(told_s, link.since_s))  # within this batch, also where the clocks differ
        was_there, self._there, self._told_s = self._there, link.state in THERE, now_s
        over = None
        if was_there and not self._there:
            self._since_s = changed_s
        elif self._there and self._since_s is not None:
            over = Gap(self._since_s, changed_s, "the engine was away, another engine process began")
            self._since_s = None
        elif was_there and self._there and new_session:  # it went and came between two batches
            over = Gap(told_s, now_s, "another engine process began")
        return over

    def present(self, now_s: float) -> Gap | None:
        """The outage that goes on."""
        return None if self._since_s is None else Gap(self._since_s, now_s, "the engine is away")
