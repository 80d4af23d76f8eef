"""What the engine publishes on ``tel``, and the picture of it that a snapshot hands out.

Only the I/O thread uses a `Publisher`. It numbers each topic's messages and keeps exactly what it has
published, so a snapshot and the sequence numbers in it always agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ipc import codec
from ipc import messages as m
from ipc.blockmap import BlockEncoder

if TYPE_CHECKING:
    from engine.loop import BlockView

FLUSH_S = 0.033
KEYFRAME_S = 2.0
SNAPSHOT_STEPS = 512
SNAPSHOT_ENDED = 256
LOG_LINES = 2000
APPLY_EVENTS = 1000
PREEMPTIONS = 1000
_ROWS_A_MESSAGE = 512
_REFUSALS_A_MESSAGE = 64
_ITL_BUDGET = 200_000  # token gaps that a snapshot's ended requests may hold together


class Publisher:
    """Numbers, batches and remembers telemetry. ``send`` takes the three frames of a message."""

    def __init__(self, send: Callable[[list[bytes]], object]) -> None:
        self._send = send
        self.seq: dict[str, int] = dict.fromkeys(m.TOPICS, 0)
        self.state = m.EngineState(phase="starting", since_ns=time.monotonic_ns(), cfg_rev=0)
        self.steps: deque[m.StepRow] = deque(maxlen=SNAPSHOT_STEPS)
        self.live: dict[int, m.RequestRow] = {}
        self.ended: deque[m.RequestRow] = deque(maxlen=SNAPSHOT_ENDED)
        self.applies: deque[m.ApplyEvent] = deque(maxlen=APPLY_EVENTS)
        self.preemptions: deque[m.Preempted] = deque(maxlen=PREEMPTIONS)
        self.log: deque[m.LogLine] = deque(maxlen=LOG_LINES)
        self._blocks = BlockEncoder()
        self._view: BlockView | None = None
        self._encoded: BlockView | None = None
        self._keyframe_at_s = 0.0
        self._new_steps: list[m.StepRow] = []
        self._new_requests: dict[int, m.RequestRow] = {}
        self._new_refusals: deque[m.Refusal] = deque(maxlen=_REFUSALS_A_MESSAGE)
        self._refused_n = 0
        self._flush_at_s: float | None = None
        self._ended_n = 0
        self._prefill_tok = 0
        self._decode_tok = 0

    # --- taking in -------------------------------------------------------------------------------

    def publish(self, message: m.Telemetry) -> None:
        """Send one message under its topic, now."""
        topic = codec.TOPIC_OF[type(message)]
        self.seq[topic] += 1
        self._send(codec.pack_telemetry(self.seq[topic], message))

    def step(self, row: m.StepRow, now_s: float) -> None:
        """Queue a step row; rows go out together, at most 33 ms late."""
        self._new_steps.append(row)
        self._prefill_tok += row.prefill_tok
        self._decode_tok += row.decode_tok
        self._schedule(now_s)

    def request(self, row: m.RequestRow, now_s: float) -> None:
        """Queue a request's row; an older one of it that has not gone out is replaced."""
        if row.message:
            row = msgspec.structs.replace(row, message=codec.clip(row.message))
        self._new_requests[row.rid] = row
        self._ended_n += row.state == "finished"
        self._schedule(now_s)

    def refused(self, refusal: m.Refusal, now_s: float) -> None:
        """Queue what is told of a refused request; of very many at once, the newest go out."""
        self._new_refusals.append(refusal)
        self._refused_n += 1
        self._schedule(now_s)

    def heartbeat(self, beat: m.Heartbeat) -> None:
        """Publish a heartbeat, with the last number of every other topic."""
        others = {topic: seq for topic, seq in self.seq.items() if topic != "hb"}
        self.publish(msgspec.structs.replace(beat, seq=others))

    def apply(self, event: m.ApplyEvent) -> None:
        """Publish the end of a configuration change."""
        self.flush()  # rows of steps before it go first
        event = msgspec.structs.replace(event, why=codec.clip(event.why))
        self.applies.append(event)
        self.publish(event)

    def preempted(self, event: m.Preempted) -> None:
        """Publish a preemption and keep it for snapshots."""
        self.preemptions.append(event)
        self.publish(event)

    def log_line(self, line: m.LogLine) -> None:
        """Publish a log line and keep it for `LogTail`."""
        self.log.append(line)
        self.publish(line)

    def set_state(self, state: m.EngineState) -> None:
        """Publish the engine's phase, with the totals since start."""
        self.state = msgspec.structs.replace(
            state,
            reason=codec.clip(state.reason),
            ended=self._ended_n,
            prefill_tok=self._prefill_tok,
            decode_tok=self._decode_tok,
        )
        self.publish(self.state)

    def block_view(self, view: BlockView) -> None:
        """Take the newest block map; it goes out with the next `tick`."""
        self._view = view

    # --- sending out -----------------------------------------------------------------------------

    def _schedule(self, now_s: float) -> None:
        if self._flush_at_s is None:
            self._flush_at_s = now_s + FLUSH_S

    @property
    def due_s(self) -> float | None:
        """When `tick` has something to send, in the caller's clock."""
        return self._flush_at_s

    def tick(self, now_s: float) -> None:
        """Send what is due."""
        if self._flush_at_s is not None and now_s >= self._flush_at_s:
            self.flush()
        view = self._view
        keyframe_due = now_s - self._keyframe_at_s >= KEYFRAME_S
        if view is None or (view is self._encoded and not keyframe_due):
            return
        self._encoded = view
        message = self._blocks.encode(
            view.state,
            view.fill,
            view.owner,
            t_ns=view.t_ns,
            block_size=view.block_size,
            num_host=view.num_host,
            force_key=keyframe_due,
        )
        if isinstance(message, m.BlockKeyframe):
            self._keyframe_at_s = now_s
        if message is not None:
            self.publish(message)

    def flush(self) -> None:
        """Send all queued rows."""
        self._flush_at_s = None
        steps, self._new_steps = self._new_steps, []
        for start in range(0, len(steps), _ROWS_A_MESSAGE):
            rows = steps[start : start + _ROWS_A_MESSAGE]
            self.steps.extend(rows)
            self.publish(m.StepRows(rows=rows))
        requests, self._new_requests = list(self._new_requests.values()), {}
        for start in range(0, len(requests), _ROWS_A_MESSAGE):
            part = requests[start : start + _ROWS_A_MESSAGE]
            for row in part:
                self._remember(row)
            self.publish(m.RequestRows(rows=part))
        if self._new_refusals:
            refusals = m.Refusals(rows=list(self._new_refusals), total=self._refused_n)
            self._new_refusals.clear()
            self.publish(refusals)

    def _remember(self, row: m.RequestRow) -> None:
        if row.state != "finished":
            self.live[row.rid] = row
            return
        self.live.pop(row.rid, None)
        self.ended.append(row)

    def snapshot(
        self, command_id: int, cfg: m.Cfg, model: m.ModelInfo | None, device: m.DeviceInfo | None
    ) -> m.SnapshotReply:
        """All that was published, as of the sequence numbers in it."""
        blocks = self._blocks.sent
        return m.SnapshotReply(
            id=command_id,
            seq=dict(self.seq),
            state=self.state,
            cfg=cfg,
            steps=list(self.steps),
            requests=[*self._recent_ended(), *self.live.values()],
            blocks=blocks.keyframe() if blocks.frame else None,
            events=list(self.applies),
            preemptions=list(self.preemptions),
            device=device,
            model=model,
        )

    def _recent_ended(self) -> list[m.RequestRow]:
        rows: list[m.RequestRow] = []
        budget = _ITL_BUDGET
        for row in reversed(self.ended):
            budget -= len(row.itl_us)
            if budget < 0:
                break
            rows.append(row)
        return rows[::-1]
