"""A client's picture of an engine: a snapshot, then deltas. A pure state machine without sockets or clocks.

Feed every telemetry frame to `Mirror.frame` and every snapshot to `Mirror.snapshot`; whenever
`Mirror.needs_snapshot` is true, ask the engine for one (at most once a second). A missing sequence number
is counted and never papered over; the next snapshot makes the picture whole again: what arrived since it
was asked for is kept and applied on top of it, so that both sockets may be read in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ipc import messages as m
from ipc.blockmap import BlockMap, BlockMapError

_RETAINED_FRAMES = 20_000
MAX_PREEMPTIONS = 1000


def _retained() -> deque[tuple[m.Topic, int, m.Telemetry]]:
    """Frames kept for a snapshot that is on its way; the oldest fall out, which shows as a new gap."""
    return deque(maxlen=_RETAINED_FRAMES)


@dataclass(slots=True)
class Changes:
    """What is new since the last `Mirror.take`. Rows are in order of arrival.

    After a resync, ``steps`` may hold older rows that fill a hole; a reader that needs order rebuilds from
    `Mirror.steps`. A step number that is missing there was lost for good.
    """

    steps: list[m.StepRow] = field(default_factory=list)
    requests: list[m.RequestRow] = field(default_factory=list)
    applies: list[m.ApplyEvent] = field(default_factory=list)
    preemptions: list[m.Preempted] = field(default_factory=list)
    refusals: list[m.Refusal] = field(default_factory=list)
    logs: list[m.LogLine] = field(default_factory=list)
    gpus: list[m.GpuRow] = field(default_factory=list)
    state_changed: bool = False
    blocks_changed: bool = False
    cfg_changed: bool = False
    new_session: bool = False
    resynced: bool = False

    def __bool__(self) -> bool:
        flags = self.state_changed, self.blocks_changed, self.cfg_changed, self.new_session, self.resynced
        lists = self.steps, self.requests, self.applies, self.preemptions, self.refusals, self.logs, self.gpus
        return any((*lists, *flags))


class Mirror:
    """One engine as seen by one client. Not thread-safe: the thread that reads the sockets owns it.

    Public attributes are the present picture: ``state``, ``heartbeat``, ``cfg``, ``model``, ``device``,
    ``blocks`` (a `BlockMap`), ``steps`` (by step number, newest last), ``live`` and ``ended`` request rows
    by rid, ``applies``, ``preemptions`` (the newest, by rid and time), ``refused`` (how many requests were,
    as far as is known: a snapshot does not tell), ``gpus`` by uuid, ``gaps`` (frames lost per topic),
    ``stale`` (topics with a loss that no snapshot has healed yet).
    """

    def __init__(
        self, *, topics: Iterable[m.Topic] = m.TOPICS, max_steps: int = 50_000, max_ended: int = 20_000
    ) -> None:
        """``topics`` are those the client subscribes to: a loss of others is none."""
        self._topics = frozenset(topics)
        self._max_steps = max_steps
        self._max_ended = max_ended
        self.gaps: dict[str, int] = {}
        self.session = ""
        self._changes = Changes()
        self._clear()

    def _clear(self) -> None:
        self.state: m.EngineState | None = None
        self.heartbeat: m.Heartbeat | None = None
        self.cfg: m.Cfg | None = None
        self.model: m.ModelInfo | None = None
        self.device: m.DeviceInfo | None = None
        self.blocks = BlockMap()
        self.blocks_valid = False
        self.steps: dict[int, m.StepRow] = {}
        self.live: dict[int, m.RequestRow] = {}
        self.ended: dict[int, m.RequestRow] = {}
        self.applies: dict[int, m.ApplyEvent] = {}
        self.preemptions: dict[tuple[int, int], m.Preempted] = {}
        self.refused = 0
        self.gpus: dict[str, m.GpuRow] = {}
        self.stale: set[m.Topic] = set()
        self._last: dict[str, int] = {}  # per topic, the last sequence number in the picture
        self._heard: dict[str, int] = {}  # the last one received
        self._last_log = 0
        self._retained = _retained()
        self.needs_snapshot = True

    def begin(self, session: str) -> None:
        """A welcome was received. Another session than before means another engine: all is forgotten."""
        if session == self.session:
            self.expect_snapshot()
            return
        self.session = session
        self._clear()
        self._changes = Changes(new_session=True)

    def expect_snapshot(self) -> None:
        """Call before asking for a snapshot that ``needs_snapshot`` did not ask for."""
        self.needs_snapshot = True

    def frame(self, topic: m.Topic, seq: int, message: m.Telemetry) -> None:
        """Take in one telemetry message."""
        heard = self._heard.get(topic)
        # A topic first heard of before any snapshot is a late join, not a loss.
        if heard is not None and seq > heard + 1:
            self.gaps[topic] = self.gaps.get(topic, 0) + seq - heard - 1
        self._heard[topic] = max(seq, heard or 0)
        if isinstance(message, m.Heartbeat):
            for other, published in message.seq.items():
                if other in self._topics and published > self._heard.get(other, published):
                    self.gaps[other] = self.gaps.get(other, 0) + published - self._heard[other]
                    self._heard[other] = published
        self._advance(topic, seq, message)

    def _advance(self, topic: m.Topic, seq: int, message: m.Telemetry) -> None:
        last = self._last.get(topic)
        if last is not None and seq <= last:
            return  # contained in the snapshot already
        if last is not None and seq != last + 1:
            self.stale.add(topic)
            self.needs_snapshot = True
        self._last[topic] = seq
        if self.needs_snapshot:
            self._retained.append((topic, seq, message))
        self._apply(message)

    def snapshot(self, reply: m.SnapshotReply) -> None:
        """Rebuild the picture from a snapshot and what arrived after it."""
        self.state, self.cfg, self.model, self.device = reply.state, reply.cfg, reply.model, reply.device
        for row in reply.steps:
            if row.step not in self.steps:
                self._changes.steps.append(row)
            self.steps[row.step] = row
        self._trim_steps(sort=True)
        self._replace_requests(reply.requests)
        for event in reply.events:
            self._apply_event(event)
        for preemption in reply.preemptions:
            self._add_preemption(preemption)
        self._replace_blocks(reply.blocks)
        retained, self._retained = list(self._retained), _retained()
        self._last = dict(reply.seq)
        for topic, seq in reply.seq.items():
            self._heard.setdefault(topic, seq)
        self.stale.clear()
        self.needs_snapshot = False
        changes = self._changes
        changes.state_changed = changes.cfg_changed = changes.resynced = True
        for topic, seq, message in retained:
            self._advance(topic, seq, message)

    def take(self) -> Changes:
        """Everything new since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    # --- one message -----------------------------------------------------------------------------

    def _apply(self, message: m.Telemetry) -> None:
        match message:
            case m.StepRows():
                self._add_steps(message.rows)
            case m.RequestRows():
                for row in message.rows:
                    self._add_request(row)
            case m.Refusals():
                if message.total > self.refused:  # else it was kept for a snapshot and comes again
                    self.refused = message.total
                    self._changes.refusals += message.rows
            case m.Heartbeat():
                self.heartbeat = message
                self._compare(message.seq)
            case m.EngineState():
                self._set_state(message)
            case m.BlockKeyframe() | m.BlockDelta():
                self._add_blocks(message)
            case m.ApplyEvent():
                self._apply_event(message)
            case m.Preempted():
                self._add_preemption(message)
            case m.LogLine():
                if message.n > self._last_log:
                    self._last_log = message.n
                    self._changes.logs.append(message)
            case m.GpuRow():
                self.gpus[message.uuid] = message
                self._changes.gpus.append(message)

    def _compare(self, published: Mapping[str, int]) -> None:
        """Find topics whose newest messages did not arrive."""
        for topic in m.TOPICS:
            seq = published.get(topic, 0)
            if topic in self._topics and seq > self._last.get(topic, seq):
                self._last[topic] = seq
                self.stale.add(topic)
                self.needs_snapshot = True

    def _set_state(self, state: m.EngineState) -> None:
        self.state = state
        self.model = state.model or self.model
        self.device = state.device or self.device
        self._changes.state_changed = True

    def _add_steps(self, rows: Iterable[m.StepRow]) -> None:
        for row in rows:
            if row.step not in self.steps:
                self._changes.steps.append(row)
            self.steps[row.step] = row
        self._trim_steps(sort=False)

    def _trim_steps(self, *, sort: bool) -> None:
        if sort:
            self.steps = dict(sorted(self.steps.items()))
        while len(self.steps) > self._max_steps:
            del self.steps[next(iter(self.steps))]

    def _add_request(self, row: m.RequestRow) -> None:
        self._changes.requests.append(row)
        if row.state != "finished":
            if row.rid not in self.ended:
                self.live[row.rid] = row
            return
        self.live.pop(row.rid, None)
        self.ended[row.rid] = row
        while len(self.ended) > self._max_ended:
            del self.ended[next(iter(self.ended))]

    def _replace_requests(self, rows: Iterable[m.RequestRow]) -> None:
        """Take the live requests from ``rows``; whoever is missing there has ended unheard."""
        before = self.live
        self.live = {}
        for row in rows:
            if row.state == "finished":
                if row.rid not in self.ended:
                    self._add_request(row)
            else:
                self.live[row.rid] = row
                if before.get(row.rid) != row:
                    self._changes.requests.append(row)

    def _apply_event(self, event: m.ApplyEvent) -> None:
        if event.apply_id not in self.applies:
            self._changes.applies.append(event)
        self.applies[event.apply_id] = event
        if event.result == "ok" and self.cfg is not None and event.to_rev > self.cfg.rev:
            values = {**self.cfg.values, **event.patch}
            self.cfg = m.Cfg(id=self.cfg.id, rev=event.to_rev, values=values, knobs=self.cfg.knobs)
            self._changes.cfg_changed = True

    def _add_preemption(self, event: m.Preempted) -> None:
        key = event.rid, event.t_ns
        if key not in self.preemptions:
            self.preemptions[key] = event
            self._changes.preemptions.append(event)
        while len(self.preemptions) > MAX_PREEMPTIONS:
            del self.preemptions[next(iter(self.preemptions))]

    def _replace_blocks(self, key: m.BlockKeyframe | None) -> None:
        self.blocks, self.blocks_valid = BlockMap(), False
        if key is not None:
            self._add_blocks(key)
        self._changes.blocks_changed = True

    def _add_blocks(self, message: m.BlockKeyframe | m.BlockDelta) -> None:
        try:
            if isinstance(message, m.BlockKeyframe):
                self.blocks.load(message)
                self.blocks_valid = True
                self.stale.discard("blk")
            elif self.blocks_valid:
                self.blocks.apply(message)
            self._changes.blocks_changed = True
        except BlockMapError:
            self.blocks_valid = False  # shown as stale until the next keyframe
            self.stale.add("blk")
            self.needs_snapshot = True
