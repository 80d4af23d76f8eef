"""Who sat where, when: the picture of the batch over time."""

from __future__ import annotations

import numpy as np
import pytest

from app.model.seats import CANCELLED, DECODE, FAILED, GOOD, PREFILL, RECOMPUTE, SWAPPED, WAITING, Bars
from app.model.session import SessionModel
from app.net.types import LinkState, LinkStatus
from ipc.messages import Preempted, RequestRow
from tests.app.builders import MS, S, batch, cfg, request_row, state, step_row

LIVE = {"end_ns": None, "finish": None, "itl_us": []}


def begun() -> SessionModel:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(), cfg=cfg(max_num_seqs=4)))
    return session


def of(bars: Bars, rid: int) -> list[tuple[int, int, float, float]]:
    """A request's bars in order: state, lane, from, to."""
    found = [
        (int(bars.kind[i]), int(bars.lane[i]), float(bars.t0_s[i]), float(bars.t1_s[i]))
        for i in np.flatnonzero(bars.rid == rid)
    ]
    return sorted(found, key=lambda bar: bar[2])


def preempted(rid: int, t_s: float, mode: str = "recompute") -> Preempted:
    return Preempted(t_ns=round(t_s * S), rid=rid, by=2, reason="blocks", mode=mode, lost_tok=64)


def test_a_request_waits_prefills_decodes_and_leaves() -> None:
    session = begun()
    session.ingest(batch(101.0, requests=[request_row(1, 100.1, tokens=10)]))
    bars = session.bars(0.0, 200.0)
    assert of(bars, 1) == [
        (WAITING, 0, pytest.approx(100.1), pytest.approx(100.11)),
        (PREFILL, 0, pytest.approx(100.11), pytest.approx(100.15)),
        (DECODE, 0, pytest.approx(100.15), pytest.approx(100.331)),
    ]
    assert (bars.end.tolist(), bars.end_lane.tolist()) == ([GOOD], [0])


def test_bars_of_one_lane_never_overlap() -> None:
    """However rows are batched: 300 requests, 8 at once, told of up to half a second late."""
    session, rng = begun(), np.random.default_rng(3)
    rows: list[tuple[float, RequestRow]] = []
    free = [100.0] * 8
    for rid in range(1, 301):
        seat = int(np.argmin(free))
        start = free[seat] + 0.01
        row = request_row(rid, start - 0.01, tokens=int(rng.integers(1, 30)))
        free[seat] = row.end_ns / S
        live = request_row(rid, start - 0.01, tokens=1, state="decode", **LIVE)
        rows += [(start + 0.06, live), (row.end_ns / S, row)]
    rows.sort(key=lambda pair: pair[0])
    now, at = 100.0, 0
    while at < len(rows):
        now += float(rng.uniform(0.05, 0.5))
        due = [row for t, row in rows[at:] if t <= now]
        at += len(due)
        session.ingest(batch(now, requests=due))
    bars = session.bars(0.0, 1e9)
    for queue in (True, False):
        mine = np.isin(bars.kind, (WAITING, RECOMPUTE, SWAPPED)) == queue
        for lane in np.unique(bars.lane[mine]):
            here = np.flatnonzero(mine & (bars.lane == lane))
            order = here[np.argsort(bars.t0_s[here])]
            assert (bars.t0_s[order][1:] >= bars.t1_s[order][:-1] - 2e-3).all()
    assert len(set(bars.rid.tolist())) == 300
    assert len(bars.end) == 300


def test_a_static_batch_leaves_seats_empty_until_the_slowest_ends() -> None:
    session = begun()
    lengths = (50, 5, 5)
    first = [request_row(i + 1, 100.1, tokens=n) for i, n in enumerate(lengths)]
    end_s = max(row.end_ns for row in first) / S
    second = request_row(
        4, 100.2, sched_ns=round(end_s * S) + MS, first_ns=round(end_s * S) + 2 * MS, tokens=1
    )
    session.ingest(batch(end_s + 1, requests=[*first, second]))
    bars = session.bars(0.0, 200.0)
    assert {of(bars, rid)[-1][1] for rid in (1, 2, 3)} == {0, 1, 2}
    seated = bars.kind != WAITING
    idle = [(bars.t1_s[seated & (bars.lane == lane)]).max() for lane in (1, 2)]
    assert all(t < end_s - 0.5 for t in idle)
    assert of(bars, 4)[0][3] >= end_s  # it waited for all of them


def test_a_preempted_request_waits_in_the_queue_and_comes_back() -> None:
    """The engine's own stamp begins the wait, and how long it waited ends it."""
    session = begun()
    session.ingest(batch(100.5, requests=[request_row(1, 100.0, tokens=5, state="decode", **LIVE)]))
    session.ingest(
        batch(
            100.8,
            preemptions=[preempted(1, 100.7, "swap")],
            requests=[request_row(1, 100.0, tokens=5, state="preempted", preempt_n=1, swap_n=1, **LIVE)],
        )
    )
    back = {"preempt_n": 1, "swap_n": 1, "preempted_us": 250_000, "tokens": 5, **LIVE}
    session.ingest(batch(101.0, requests=[request_row(1, 100.0, state="prefill", **back)]))
    session.ingest(batch(101.2, requests=[request_row(1, 100.0, state="decode", **back)]))
    session.ingest(batch(101.5))
    found = of(session.bars(0.0, 200.0), 1)
    assert [bar[0] for bar in found] == [WAITING, PREFILL, DECODE, SWAPPED, PREFILL, DECODE]
    assert found[3][2:] == (pytest.approx(100.7), pytest.approx(100.95))
    assert found[4][3] == pytest.approx(101.2)
    assert found[5][3] == pytest.approx(101.5)  # it still runs
    kept = session.preemptions[-1]
    assert (kept.event.mode, kept.t_s, kept.key[1]) == ("swap", pytest.approx(100.7), 1)


def test_a_preemption_whose_event_was_lost_is_seen_in_the_row() -> None:
    session = begun()
    session.ingest(batch(100.5, requests=[request_row(1, 100.0, tokens=5, state="decode", **LIVE)]))
    row = request_row(1, 100.0, tokens=5, state="preempted", preempt_n=1, **LIVE)
    session.ingest(batch(100.8, requests=[row]))
    session.ingest(batch(101.0))
    assert of(session.bars(0.0, 200.0), 1)[-1][0] == RECOMPUTE


def test_what_happened_within_one_batch_is_told_in_order() -> None:
    """Only the last row comes, with an event before its first token."""
    session = begun()
    row = request_row(
        1,
        100.0,
        tokens=2,
        preempt_n=1,
        preempted_us=20_000,
        first_ns=round(100.06 * S),
        sched_ns=round(100.01 * S),
    )
    session.ingest(batch(101.0, preemptions=[preempted(1, 100.02)], requests=[row]))
    found = of(session.bars(0.0, 200.0), 1)
    assert [bar[0] for bar in found] == [WAITING, PREFILL, RECOMPUTE, PREFILL, DECODE]
    assert found[2][2:] == (pytest.approx(100.02), pytest.approx(100.04))


def test_ends_tell_how() -> None:
    session = begun()
    rows = [
        request_row(1, 100.0),
        request_row(2, 100.0, finish="error"),
        request_row(3, 100.0, finish="cancelled"),
    ]
    rows.append(request_row(4, 100.0, tokens=0, sched_ns=None, finish="cancelled", end_ns=round(100.5 * S)))
    session.ingest(batch(101.0, requests=rows))
    bars = session.bars(0.0, 200.0)
    assert sorted(bars.end.tolist()) == [GOOD, CANCELLED, FAILED]
    assert of(bars, 4) == [(WAITING, pytest.approx(of(bars, 4)[0][1]), 100.0, 100.5)]


def test_only_what_is_in_view_is_given() -> None:
    session = begun()
    for i in range(200):
        session.ingest(batch(101.0 + i, requests=[request_row(i + 1, 100.0 + i, tokens=5)]))
    bars = session.bars(290.0, 301.0)
    assert 9 * 3 <= len(bars.rid) <= 13 * 3
    assert bars.rid.min() >= 188


def test_live_ones_end_with_their_engine_and_lost_ones_leave() -> None:
    session = begun()
    rows = [request_row(i, 100.0, tokens=3, state="decode", **LIVE) for i in (1, 2)]
    session.ingest(batch(100.5, requests=rows))
    session.ingest(batch(100.6, resynced=True, live=frozenset({2})))
    session.ingest(batch(101.0, link=LinkStatus(state=LinkState.DEAD)))
    session.ingest(batch(103.0, link=LinkStatus(state=LinkState.DEAD)))
    bars = session.bars(0.0, 200.0)
    assert bars.end.tolist() == [CANCELLED, FAILED]
    assert bars.t1_s.max() == pytest.approx(101.0)


def test_seats_busy_is_weighted_by_the_time_of_steps_and_by_the_seats_of_their_revision() -> None:
    session = begun()
    steps = [
        step_row(1, 100.1, running=4, dur_us=30_000),
        step_row(2, 100.2, running=1, dur_us=10_000, cfg_rev=1),
    ]
    session.ingest(batch(100.3, cfg=cfg(1, max_num_seqs=8)))
    session.ingest(batch(100.5, steps=steps))
    use = session.seat_use(100.0, 101.0)
    assert (use.busy, use.seats) == (pytest.approx(3.25), pytest.approx(5.0))
    assert use.share == pytest.approx(0.65)
    assert session.seat_use(50.0, 60.0) is None
    session.ingest(batch(101.5, steps=[step_row(3, 101.2, cfg_rev=9)]))
    assert session.seat_use(101.0, 102.0).share is None  # nobody knows how many seats there were


def test_bars_are_bounded() -> None:
    session = begun()
    session._seats.__init__(capacity=100)
    for i in range(300):
        session.ingest(batch(101.0 + i, requests=[request_row(i + 1, 100.0 + i, tokens=5)]))
    assert len(session.bars(0.0, 1e9).rid) == 100
