"""The mirror against the engine's own publisher, over a wire that loses, and reorders the two sockets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockView
from engine.publisher import SNAPSHOT_ENDED, Publisher
from ipc import codec
from ipc import messages as m
from ipc.mirror import Mirror
from tests.ipc.samples import cfg, request_row, state, step_row

BLOCKS = 40


class _Engine:
    """Drives a real `Publisher` at random; ``wire`` holds the frames that a client has not read yet."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wire: list[list[bytes]] = []
        self.publisher = Publisher(self.wire.append)
        self.now_s = 0.0
        self.step = self.rid = self.applies = self.logs = 0
        self.rev = 3
        self.live: dict[int, m.RequestRow] = {}
        self.view = BlockView(
            t_ns=0,
            block_size=16,
            state=np.zeros(BLOCKS, np.uint8),
            fill=np.zeros(BLOCKS, np.uint16),
            owner=np.zeros(BLOCKS, np.uint32),
        )

    def act(self) -> None:
        self.now_s += self.rng.random() * 0.05
        match self.rng.randrange(7):
            case 0 | 1:
                self.step += 1
                self.publisher.step(step_row(self.step, prefill_tok=2, decode_tok=3), self.now_s)
            case 2:
                self.rid += 1
                self.live[self.rid] = request_row(self.rid)
                self.publisher.request(self.live[self.rid], self.now_s)
            case 3 if self.live:
                rid = self.rng.choice(list(self.live))
                if self.rng.random() < 0.5:
                    self.live[rid] = request_row(rid, state="decode", output_tok=self.rng.randrange(99))
                    self.publisher.request(self.live[rid], self.now_s)
                else:
                    del self.live[rid]
                    self.publisher.request(request_row(rid, state="finished"), self.now_s)
            case 4:
                self.applies += 1
                self.rev += 1
                patch: dict[str, m.KnobValue] = {"n": self.rev}
                event = m.ApplyEvent(
                    apply_id=self.applies,
                    from_rev=self.rev - 1,
                    to_rev=self.rev,
                    result="ok",
                    t_ns=1,
                    at_step=self.step,
                    took_us=1,
                    mode="step",
                    patch=patch,
                )
                self.publisher.apply(event)
            case 5:
                self._change_blocks()
            case _:
                self.publisher.set_state(state(cfg_rev=self.rev, running=len(self.live)))
                self.logs += 1
                line = m.LogLine(n=self.logs, level="info", unix_ms=1, source="x", message="y")
                self.publisher.log_line(line)
        self.publisher.tick(self.now_s)

    def _change_blocks(self) -> None:
        old = self.view
        new = BlockView(
            t_ns=old.t_ns + 1,
            block_size=16,
            state=old.state.copy(),
            fill=old.fill.copy(),
            owner=old.owner.copy(),
        )
        for _ in range(self.rng.randint(0, 6)):
            where = self.rng.randrange(BLOCKS)
            new.state[where] = self.rng.randrange(6)
            new.fill[where] = self.rng.randrange(17)
            new.owner[where] = self.rng.randrange(1 << 32)
        self.view = new
        self.publisher.block_view(new)

    def snapshot(self) -> m.SnapshotReply:
        reply = self.publisher.snapshot(7, cfg(self.rev, n=self.rev), None, None)
        decoded = codec.decode_reply([codec.encode(reply)])
        assert isinstance(decoded, m.SnapshotReply)
        return decoded

    def settle(self) -> None:
        """Everything goes out, and a heartbeat by which a loss shows."""
        self._change_blocks()
        self.now_s += 3.0
        self.publisher.set_state(state(cfg_rev=self.rev, running=len(self.live)))
        self.publisher.tick(self.now_s)
        beat = m.Heartbeat(mono_ns=1, step=self.step, busy="idle", last_step_age_us=1, rss_bytes=1)
        self.publisher.heartbeat(beat)


def _read(mirror: Mirror, frames: list[list[bytes]]) -> None:
    for each in frames:
        mirror.frame(*codec.unpack_telemetry(each))


def _same(mirror: Mirror, engine: _Engine) -> None:
    publisher = engine.publisher
    assert not mirror.needs_snapshot
    assert not mirror.stale
    assert mirror.live == engine.live
    assert mirror.state == publisher.state
    assert mirror.cfg is not None
    assert (mirror.cfg.rev, mirror.cfg.values["n"]) == (engine.rev, engine.rev)
    assert list(mirror.steps) == sorted(mirror.steps)
    assert {row.step: row for row in publisher.steps}.items() <= mirror.steps.items()
    ended = [row.rid for row in publisher.ended]
    assert set(ended) <= mirror.ended.keys()
    assert set(mirror.applies) == {event.apply_id for event in publisher.applies}
    assert np.array_equal(mirror.blocks.state, engine.view.state)
    assert np.array_equal(mirror.blocks.fill, engine.view.fill)
    assert np.array_equal(mirror.blocks.owner, engine.view.owner)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    loss=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    before=st.integers(0, 60),
    actions=st.integers(1, 150),
)
def test_after_a_resync_the_mirror_equals_the_engine(
    seed: int, loss: float, before: int, actions: int
) -> None:
    """F02, F04: whatever was lost or came before the client did, totals are right after the resync."""
    engine, mirror = _Engine(seed), Mirror()
    rng = random.Random(seed + 1)
    for _ in range(before):
        engine.act()
    engine.wire.clear()  # the client was not there yet
    mirror.begin("one")
    on_its_way: list[m.SnapshotReply] = []
    for _ in range(actions):
        engine.act()
        if mirror.needs_snapshot and not on_its_way and rng.random() < 0.5:
            on_its_way.append(engine.snapshot())
        if rng.random() < 0.7:  # the two sockets are read in any order
            _read(mirror, [frame for frame in engine.wire if rng.random() >= loss])
            engine.wire.clear()
        if on_its_way and rng.random() < 0.4:
            mirror.snapshot(on_its_way.pop())
    _read(mirror, engine.wire)
    engine.wire.clear()
    if on_its_way:
        mirror.snapshot(on_its_way.pop())
    engine.settle()
    _read(mirror, engine.wire)
    if mirror.needs_snapshot:
        mirror.snapshot(engine.snapshot())
    _same(mirror, engine)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), early=st.integers(0, 40), late=st.integers(0, 40))
def test_without_losses_one_snapshot_is_enough(seed: int, early: int, late: int) -> None:
    """F04: what was read while the snapshot was on its way is neither lost nor a reason for another one."""
    engine, mirror = _Engine(seed), Mirror()
    mirror.begin("one")
    for _ in range(early):
        engine.act()
    _read(mirror, engine.wire)
    engine.wire.clear()
    reply = engine.snapshot()
    for _ in range(late):
        engine.act()
    _read(mirror, engine.wire)
    engine.wire.clear()
    mirror.snapshot(reply)
    assert not mirror.needs_snapshot
    engine.settle()
    _read(mirror, engine.wire)
    assert not mirror.gaps
    _same(mirror, engine)


def test_requests_that_ended_unheard_are_live_no_more() -> None:
    """F02: even when more have ended than a snapshot tells of."""
    engine, mirror = _Engine(5), Mirror()
    mirror.begin("one")
    mirror.snapshot(engine.snapshot())
    rids = range(1, 2 * SNAPSHOT_ENDED)
    for rid in rids:
        engine.publisher.request(request_row(rid), 0.0)
    engine.publisher.flush()
    _read(mirror, engine.wire)
    assert set(mirror.live) == set(rids)
    for rid in rids:
        engine.publisher.request(request_row(rid, state="finished"), 0.0)
    engine.settle()  # read by nobody
    mirror.expect_snapshot()
    mirror.snapshot(engine.snapshot())
    assert not mirror.live
    assert mirror.state is not None
    assert mirror.state.ended == len(rids), "totals do not depend on having heard each end"


def test_every_row_is_handed_on_once() -> None:
    engine, mirror = _Engine(1), Mirror()
    mirror.begin("one")
    seen: list[int] = []
    for n in range(300):
        engine.act()
        if n % 3 == 0:
            _read(mirror, engine.wire)
            engine.wire.clear()
        if mirror.needs_snapshot and n > 20:
            mirror.snapshot(engine.snapshot())
        seen += [row.step for row in mirror.take().steps]
    engine.publisher.flush()
    _read(mirror, engine.wire)
    seen += [row.step for row in mirror.take().steps]
    assert sorted(seen) == list(range(1, engine.step + 1))
    assert not mirror.gaps
    assert not mirror.take()


@pytest.mark.parametrize("topic", ["step", "req", "blk", "state"])
def test_a_gap_is_counted_and_marks_its_topic_until_the_snapshot(topic: m.Topic) -> None:
    """F02: silent drops at the high-water mark are seen."""
    engine, mirror = _Engine(2), Mirror()
    mirror.begin("one")
    mirror.snapshot(engine.snapshot())
    while engine.publisher.seq[topic] < 9:
        engine.act()
    frames = [(each, codec.unpack_telemetry(each)) for each in engine.wire]
    lost = [seq for _, (name, seq, _) in frames if name == topic and seq in (3, 4, 7)]
    _read(mirror, [each for each, (name, seq, _) in frames if not (name == topic and seq in lost)])
    assert mirror.gaps == {topic: 3}
    assert topic in mirror.stale or topic == "blk"  # a keyframe heals the map by itself
    assert mirror.needs_snapshot
    mirror.snapshot(engine.snapshot())
    assert not mirror.stale
    assert mirror.gaps == {topic: 3}, "what was lost stays counted"


def test_another_session_forgets_everything() -> None:
    engine, mirror = _Engine(3), Mirror()
    mirror.begin("one")
    mirror.snapshot(engine.snapshot())
    for _ in range(50):
        engine.act()
    _read(mirror, engine.wire)
    mirror.begin("one")
    assert mirror.steps, "the same engine: what is known stays"
    mirror.begin("two")
    assert mirror.take().new_session
    assert mirror.needs_snapshot
    assert not mirror.steps
    assert not mirror.live
    fresh = _Engine(4)
    fresh.act()
    fresh.settle()
    _read(mirror, fresh.wire)
    mirror.snapshot(fresh.snapshot())
    _same(mirror, fresh)


def test_refusals_come_once_also_where_they_were_kept_for_a_snapshot() -> None:
    wire: list[list[bytes]] = []
    publisher = Publisher(wire.append)
    mirror = Mirror()
    mirror.begin("s")

    def refuse(count: int) -> None:
        for _ in range(count):
            row = m.Refusal(t_ns=1, client="c", tag="", code="too_long", message="no")
            publisher.refused(row, now_s=1.0)
        publisher.flush()

    publisher.set_state(state())
    before = publisher.snapshot(1, cfg(), None, None)
    refuse(2)
    for frames in wire:
        mirror.frame(*codec.unpack_telemetry(frames))
    mirror.snapshot(before)
    assert (mirror.refused, len(mirror.take().refusals)) == (2, 2)
    wire.clear()
    refuse(1)
    mirror.frame(*codec.unpack_telemetry(wire[0]))
    assert (mirror.refused, len(mirror.take().refusals)) == (3, 1)
    mirror.begin("another")
    assert mirror.refused == 0
