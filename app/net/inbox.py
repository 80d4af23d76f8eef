"""`Inbox`: where the I/O thread leaves what is new and the window's thread picks it up.

Rows queue up to a bound; of everything else only the latest is kept. If nobody drains for long, the oldest
rows are given up and counted, so that a hung window costs neither memory nor the engine's time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from app.net.connection import Connection
from app.net.types import Batch, BlockView, LinkStatus
from ipc.messages import RequestRow

_MAX_STEPS = 50_000
_MAX_REQUESTS = 50_000
_MAX_OTHERS = 5_000

Callback = Callable[[], None]


class Inbox:
    """Thread-safe. The I/O thread writes, one reader calls `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = LinkStatus()
        self._batch = Batch(now_s=0.0, link=self._status)
        self._requests: dict[int, RequestRow] = {}
        self._callbacks: deque[Callback] = deque()
        self._heard_s: float | None = None

    def deliver(self, callback: Callback) -> None:
        """Have ``callback`` run by the next `take`'s caller."""
        with self._lock:
            self._callbacks.append(callback)

    def status(self, status: LinkStatus) -> None:
        with self._lock:
            self._status = status

    def collect(self, connection: Connection) -> None:
        """Move what the connection's mirror has taken in since the last call."""
        mirror = connection.mirror
        changes = mirror.take()
        with self._lock:
            self._heard_s = connection.last_heard_s
            if not changes:
                return
            batch = self._batch
            if changes.new_session:
                # The rids of another engine begin anew: nothing of both may be merged by number.
                batch.requests += self._requests.values()
                self._requests = {}
                batch.new_session = True
            if changes.resynced:
                batch.resynced, batch.live = True, frozenset(mirror.live)
            batch.steps += changes.steps
            for row in changes.requests:
                self._requests[row.rid] = row
            batch.events += changes.applies
            batch.preemptions += changes.preemptions
            if changes.refusals:
                batch.refusals += changes.refusals
                batch.refused = mirror.refused
            batch.logs += changes.logs
            batch.gpu += changes.gpus
            if changes.state_changed:
                batch.state = mirror.state
                batch.model, batch.device = mirror.model, mirror.device
            if changes.cfg_changed:
                batch.cfg = mirror.cfg
            if changes.blocks_changed and mirror.blocks_valid:
                blocks = mirror.blocks
                batch.blocks = BlockView(
                    t_s=(blocks.t_ns - connection.clock_offset_ns) * 1e-9,
                    block_size=blocks.block_size,
                    state=blocks.state.copy(),
                    fill=blocks.fill.copy(),
                    owner=blocks.owner.copy(),
                    num_host=blocks.num_host,
                )
            self._bound(batch)

    def _bound(self, batch: Batch) -> None:
        surplus = len(batch.steps) - _MAX_STEPS
        if surplus > 0:
            del batch.steps[:surplus]
            batch.dropped_rows += surplus
        while len(self._requests) > _MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
            batch.dropped_rows += 1
        for others in (batch.events, batch.preemptions, batch.refusals, batch.logs, batch.gpu):
            del others[:-_MAX_OTHERS]

    def take(self, now_s: float) -> tuple[Batch, list[Callback]]:
        """The batch of everything new, and the callbacks to run."""
        with self._lock:
            batch, callbacks = self._batch, list(self._callbacks)
            self._callbacks.clear()
            batch.requests += self._requests.values()
            self._requests = {}
            age_s = None if self._heard_s is None else max(0.0, now_s - self._heard_s)
            batch.now_s = now_s
            batch.link = replace(self._status, data_age_s=age_s)
            self._batch = Batch(now_s=now_s, link=self._status)
        return batch, callbacks
