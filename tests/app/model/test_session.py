"""What the panels read, from batches of rows."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from app.model.requests import RequestBook
from app.model.session import NO_TRAFFIC, SessionModel
from app.net.types import BlockView, LinkState, LinkStatus
from ipc.messages import ApplyEvent
from tests.app.builders import DEVICE, MODEL, batch, cfg, request_row, state, step_row


def session_with(seconds: float = 10.0, **step: object) -> SessionModel:
    """A session that saw 10 steps a second for ``seconds``, ending at its `now_s`."""
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(), cfg=cfg(), model=MODEL, device=DEVICE))
    for number in range(1, round(seconds * 10) + 1):
        t_s = 100.0 + (number - 1) / 10
        session.ingest(batch(t_s + 0.05, steps=[step_row(number, t_s, **step)]))
    session.ingest(batch(100.0 + seconds + 0.8))
    return session


def test_throughput_counts_tokens_of_each_half_second() -> None:
    session = session_with(decode_tok=4, prefill_tok=10)
    line = session.timeline
    inside = slice(2, -2)
    assert np.allclose(line.column("output_tok_s")[inside], 40.0)
    assert np.allclose(line.column("prefill_tok_s")[inside], 100.0)
    assert np.allclose(line.column("busy_share")[inside], 0.1)
    assert np.allclose(line.column("forward_s")[inside], 0.009)
    kpis = session.kpis()
    assert kpis.output_tok_s.value == pytest.approx(4 * 100 / 10.8, rel=0.01)
    assert kpis.output_tok_s.n == 100


def test_throughput_is_of_tokens_that_came_out_not_of_those_computed() -> None:
    """Four requests with drafts of three tokens, of which six hold, bring ten tokens a step."""
    session = session_with(
        decode_tok=4, output_tok=10, draft_reqs=4, drafted_tok=12, accepted_tok=6,
        drafted_at=[4, 4, 4], accepted_at=[3, 2, 1],
    )  # fmt: skip
    assert np.allclose(session.timeline.column("output_tok_s")[2:-2], 100.0)
    kpis = session.kpis()
    assert kpis.output_tok_s.value == pytest.approx(10 * 100 / 10.8, rel=0.01)
    assert kpis.draft_acceptance.value == pytest.approx(0.5)
    assert kpis.draft_length.value == pytest.approx(2.5)
    stats = session.step_stats(100.0)
    assert (stats["decode_tok"], stats["output_tok"], stats["drafted_tok"]) == (400, 1000, 1200)
    assert (stats["draft_acceptance"], stats["draft_length"]) == (pytest.approx(0.5), pytest.approx(2.5))


def test_drafts_are_told_place_by_place_and_with_what_they_cost() -> None:
    """Drafts of two lengths: a place counts by those that reached it. Old steps leave the window."""
    session = session_with()
    assert session.drafts() is None
    rows = [
        step_row(n, 190.0 + n / 100, draft_reqs=2, drafted_tok=5, accepted_tok=3, drafted_at=[2, 2, 1],
                   accepted_at=[2, 1, 0], draft_us=300, verify_us=5000)
        for n in range(1000, 1010)
    ]  # fmt: skip
    session.ingest(batch(201.0, steps=rows))
    drafts = session.drafts()
    assert drafts is not None
    assert (drafts.drafts, drafts.by_place) == (20, (1.0, 0.5, 0.0))
    assert (drafts.acceptance, drafts.length) == (pytest.approx(0.6), pytest.approx(2.5))
    assert (drafts.draft_s, drafts.verify_s) == (pytest.approx(0.0003), pytest.approx(0.005))
    session.ingest(batch(201.0 + session.window_s + 1))
    assert session.drafts() is None


def test_without_drafts_their_figures_are_undefined_not_zero() -> None:
    kpis = session_with().kpis()
    for figure in (kpis.draft_acceptance, kpis.draft_length):
        assert figure.value is None
        assert figure.why_none == "nothing was drafted in this window"


def test_kv_shares_add_up_and_waste_is_what_used_blocks_do_not_hold() -> None:
    session = session_with()
    line = session.timeline
    at = len(line.times()) // 2
    shares = [line.column(f"kv_{kind}_share")[at] for kind in ("used", "cached", "free")]
    assert shares == pytest.approx([0.2, 0.3, 0.5])
    assert line.column("kv_waste_share")[at] == pytest.approx(1 - 240 / (20 * 16))


def test_no_traffic_is_said_never_drawn_as_zero() -> None:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(), cfg=cfg(), device=DEVICE))
    for tick in range(1, 50):
        session.ingest(batch(100.0 + tick / 10))
    kpis = session.kpis()
    for figure in (kpis.output_tok_s, kpis.prefill_tok_s, kpis.hit_rate, kpis.bandwidth_share):
        assert figure.value is None
        assert NO_TRAFFIC in figure.why_none
    assert kpis.ttft_p99_s.value is None
    assert kpis.ttft_p99_s.why_none
    line = session.timeline
    assert len(line.times()) > 5
    for name in ("output_tok_s", "ttft_p50_s", "hit_rate", "step_mean_s"):
        assert np.isnan(line.column(name)).all()
    assert session.stages().n == 0
    assert session.roofline().verdict == "idle"


def test_a_stall_with_requests_running_is_zero_tokens_not_a_gap() -> None:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(running=3, waiting=2), cfg=cfg()))
    for tick in range(1, 40):
        session.ingest(batch(100.0 + tick / 10))
    assert session.timeline.column("output_tok_s")[-1] == 0.0
    assert session.timeline.column("waiting")[-1] == 2.0


def test_hit_rate_is_tokens_found_over_tokens_looked_up() -> None:
    session = session_with(query_tok=100, hit_tok=25)
    assert session.kpis().hit_rate.value == pytest.approx(0.25)
    assert session.timeline.column("hit_rate")[5] == pytest.approx(0.25)


def test_ttft_has_one_sample_for_each_request_with_a_token_whatever_its_rows() -> None:
    """C01: rows of 300 requests, 30 cancelled in the queue and 20 refused: 250 TTFT samples."""
    session = session_with(1.0)
    rows = []
    for rid in range(1, 251):
        done = request_row(rid, 100.0 + rid / 1000)
        live = request_row(rid, 100.0 + rid / 1000, state="decode", end_ns=None, finish=None, itl_us=[])
        rows += [live, live, done]
    rows += [request_row(250 + i, 100.2, tokens=0, sched_ns=None, finish="cancelled") for i in range(1, 31)]
    rows += [
        request_row(280 + i, 100.2, tokens=0, sched_ns=None, finish="error", code="too_long")
        for i in range(1, 21)
    ]
    session.ingest(batch(102.0, requests=rows))
    kpis = session.kpis()
    assert kpis.ttft_p50_s.n == 250
    assert kpis.ttft_p50_s.value == pytest.approx(0.050)
    assert kpis.tpot_p50_s.n == 250
    assert kpis.error_share.value == pytest.approx(20 / 270)
    for view in session.request_rows():
        if view.ttft_s is not None:
            assert view.queue_s is not None
            assert view.e2e_s is not None
            assert view.queue_s <= view.ttft_s <= view.e2e_s


def test_tpot_of_single_tokens_is_undefined() -> None:
    """C09: requests of one token give no TPOT sample and no zero."""
    session = session_with(1.0)
    session.ingest(batch(103.0, requests=[request_row(i, 101.0, tokens=1) for i in range(1, 21)]))
    figure = session.kpis().tpot_p50_s
    assert (figure.value, figure.n) == (None, 0)
    assert "two tokens" in figure.why_none


def test_a_live_window_holds_only_what_ended_inside_it() -> None:
    """C06: what came before the window, counters and requests alike, is not in its figures."""
    session = session_with(20.0)
    early = [request_row(i, 101.0) for i in range(1, 11)]
    late = [request_row(i, 118.0) for i in range(11, 14)]
    session.ingest(batch(120.9, requests=early + late))
    window = session.live_window(span_s=5.0)
    assert [row.rid for row in window.requests] == [11, 12, 13]
    assert window.step_stats["steps"] == pytest.approx(42, abs=2)
    assert [row.rid for row in session.live_window(newest=2).requests] == [12, 13]
    assert window.sessions == 1


def test_an_engine_restart_inside_the_window_is_marked_and_nothing_goes_negative() -> None:
    """C06: a restart starts new numbers; the window says so, and rates stay sums of its own rows."""
    session = session_with(5.0)
    session.ingest(batch(106.0, requests=[request_row(1, 105.0, state="decode", end_ns=None, finish=None)]))
    session.ingest(batch(107.0, new_session=True, state=state(), cfg=cfg()))
    rows = [step_row(i, 107.0 + i / 10) for i in range(1, 11)]
    session.ingest(batch(109.0, steps=rows, requests=[request_row(1, 107.5)]))
    window = session.live_window(span_s=8.0)
    assert window.sessions == 2
    views = [v for v in session.request_rows() if v.rid == 1]
    assert len(views) == 2
    assert {v.row.finish for v in views} == {"error", "length"}
    assert any("engine process" in gap.reason for gap in session.gaps)
    tok = session.timeline.column("output_tok_s")
    assert (tok[~np.isnan(tok)] >= 0).all()


def test_an_outage_lasts_from_the_end_of_an_engine_until_the_next_is_ready() -> None:
    """F09: idle time before the end is known, and a new process that loads its model measures nothing yet."""
    session = session_with(2.0)
    assert session.outage is None
    session.ingest(batch(110.0))  # alive and idle for eight seconds
    session.ingest(batch(110.1, link=LinkStatus(state=LinkState.DEAD, since_s=110.05)))
    session.ingest(batch(112.0, link=LinkStatus(state=LinkState.STARTING, since_s=112.0)))
    loading = LinkStatus(state=LinkState.LOADING, session="s2", since_s=114.0)
    session.ingest(batch(114.0, link=loading, new_session=True, state=state(phase="loading"), cfg=cfg()))
    assert not session.gaps
    going = session.outage
    assert going is not None
    assert (going.t0_s, going.t1_s) == (110.05, 114.0)
    ready = LinkStatus(state=LinkState.READY, session="s2", since_s=129.95)
    session.ingest(batch(130.0, link=ready, state=state()))
    assert [(gap.t0_s, gap.t1_s) for gap in session.gaps] == [(110.05, 129.95)]
    assert session.outage is None


def test_lost_step_rows_become_a_gap_unless_a_snapshot_brings_them() -> None:
    session = session_with(1.0)
    session.ingest(batch(102.0, steps=[step_row(15, 101.5)]))  # 11 to 14 are missing
    session.ingest(batch(102.1, resynced=True, steps=[step_row(12, 101.2), step_row(13, 101.3)]))
    assert not session.gaps
    session.ingest(batch(106.0))
    assert [gap.reason for gap in session.gaps] == ["2 step rows were lost"]
    filled = session_with(1.0)
    filled.ingest(batch(102.0, steps=[step_row(13, 101.3)]))
    filled.ingest(batch(102.1, resynced=True, steps=[step_row(11, 101.1), step_row(12, 101.2)]))
    filled.ingest(batch(106.0))
    assert not filled.gaps
    sums = filled.timeline.column("steps")
    assert np.nansum(sums) == 13


def test_requests_that_ended_unheard_leave_the_live_list() -> None:
    session = session_with(1.0)
    live = {"state": "decode", "end_ns": None, "finish": None}
    session.ingest(batch(102.0, requests=[request_row(i, 101.0, **live) for i in (1, 2, 3)]))
    session.ingest(batch(102.1, resynced=True, live=frozenset({2})))
    assert [view.rid for view in session.request_rows()] == [2]
    assert session.lost_requests == 2


def test_changed_requests_are_those_after_a_revision() -> None:
    session = session_with(1.0)
    session.ingest(batch(102.0, requests=[request_row(1, 101.0), request_row(2, 101.0)]))
    seen = session.requests_rev
    session.ingest(batch(102.1, requests=[request_row(3, 101.5)]))
    assert [view.rid for view in session.changed_requests(seen)] == [3]
    assert session.changed_requests(session.requests_rev) == []


def test_an_applied_change_is_a_marker_with_its_words() -> None:
    session = session_with(1.0)
    event = ApplyEvent(
        apply_id=4, from_rev=0, to_rev=1, result="ok", t_ns=101_000_000_000, at_step=9, took_us=1500,
        mode="step", patch={"prefix_cache": False, "max_num_seqs": 8},
    )  # fmt: skip
    session.ingest(batch(102.0, events=[event]))
    marker = session.markers[-1]
    assert marker.label == "prefix_cache = off, max_num_seqs = 8"
    assert (marker.t_s, marker.rev, marker.took_s, marker.ok) == (101.0, 1, 0.0015, True)


def test_an_event_that_changed_nothing_does_not_make_a_window_mixed() -> None:
    session = session_with(1.0)
    events = [
        ApplyEvent(
            apply_id=4 + i, from_rev=0, to_rev=i, result="ok", t_ns=101_000_000_000, at_step=9, took_us=1,
            mode="step", patch=patch,
        )
        for i, patch in enumerate(({}, {"max_num_seqs": 8}))
    ]  # fmt: skip
    session.ingest(batch(102.0, events=events))
    assert [marker.label for marker in session.live_window(5.0).markers] == ["max_num_seqs = 8"]


def test_engine_stamps_are_shifted_to_the_consoles_clock() -> None:
    session = SessionModel()
    link = LinkStatus(state=LinkState.READY, clock_offset_ns=50_000_000_000)
    session.ingest(batch(100.0, link=link, new_session=True, state=state()))
    session.ingest(batch(101.5, link=link, steps=[step_row(1, 150.5)], requests=[request_row(1, 150.5)]))
    session.ingest(batch(103.0, link=link))
    line = session.timeline
    drawn = line.times()[~np.isnan(line.column("steps"))]
    assert drawn.tolist() == [100.75]
    assert session.request_rows()[0].arrive_s == pytest.approx(100.5)


def test_a_step_longer_than_a_bin_is_spread_over_its_bins() -> None:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state()))
    long = step_row(1, 100.25, dur_us=1_000_000, prefill_tok=400, query_tok=400)
    session.ingest(batch(101.4, steps=[long]))
    session.ingest(batch(103.0))
    line = session.timeline
    at = np.isin(line.times(), (100.25, 100.75, 101.25))
    assert line.column("prefill_tok_s")[at].tolist() == pytest.approx([200.0, 400.0, 200.0])
    assert line.column("busy_share")[at].tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert line.column("steps")[at].sum() == pytest.approx(1.0)
    assert line.column("hit_rate")[at][0] == pytest.approx(0.0)
    assert np.isnan(line.column("hit_rate")[at][1:]).all()


def test_a_jump_of_the_wall_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: with time.time an hour back in mid-run, times still rise and no latency changes."""
    session = session_with(2.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    for tick in range(20):
        t_s = 103.0 + tick / 10
        session.ingest(
            batch(t_s + 0.1, steps=[step_row(100 + tick, t_s)], requests=[request_row(tick + 1, t_s - 1)])
        )
    assert (np.diff(session.timeline.times()) > 0).all()
    assert session.kpis().ttft_p99_s.value == pytest.approx(0.050)


def test_roofline_verdicts_follow_the_shares_of_the_peaks() -> None:
    def verdict(**step: object) -> str:
        return session_with(2.0, **step).roofline().verdict

    assert verdict(weight_bytes=90_000_000, kv_bytes=0, flops=1_000_000) == "memory-bound"
    assert verdict(weight_bytes=10_000_000, kv_bytes=0, flops=800_000_000) == "compute-bound"
    assert verdict(weight_bytes=1_000_000, kv_bytes=0, flops=1_000_000) == "overhead-bound"
    share = session_with(2.0, weight_bytes=40_000_000, kv_bytes=10_000_000).kpis().bandwidth_share
    assert share.value == pytest.approx(0.5)


def test_without_measured_peaks_the_verdict_is_unknown_and_the_share_undefined() -> None:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state()))
    session.ingest(batch(101.0, steps=[step_row(1, 100.5)]))
    assert session.roofline().verdict == "unknown"
    figure = session.kpis().bandwidth_share
    assert figure.value is None
    assert "not measured" in figure.why_none


def test_blocks_of_a_request_are_found_by_owner() -> None:
    session = session_with(1.0)
    owner = np.array([0, 7, 7, 9], np.uint32)
    view = BlockView(101.0, 16, np.array([0, 2, 2, 2], np.uint8), np.zeros(4, np.uint16), owner)
    session.ingest(batch(102.0, blocks=view))
    assert session.blocks_of(7) == [1, 2]
    assert session.blocks_of(8) == []


def test_batches_for_long_do_not_grow() -> None:
    """What is held after the bounds are reached stays: rows that come push out as many old ones."""
    session = SessionModel(history_s=30.0)
    session.ingest(batch(0.0, new_session=True, state=state(), device=DEVICE))
    session._book = RequestBook(most_ended=300, most_gaps=1000)

    def go_on(start: int, count: int) -> None:
        for tick in range(start, start + count):
            t_s = tick / 10
            row = request_row(tick + 1, t_s, tokens=2)
            session.ingest(batch(t_s + 0.1, steps=[step_row(tick + 1, t_s)], requests=[row]))

    go_on(0, 900)
    tracemalloc.start()
    try:
        go_on(900, 300)  # everything held from here on replaces what was allocated untraced
        kept = tracemalloc.take_snapshot()
        go_on(1200, 600)
        grown = tracemalloc.take_snapshot().compare_to(kept, "filename")
    finally:
        tracemalloc.stop()
    ours = [stat.size_diff for stat in grown if "/app/model/" in str(stat.traceback)]
    assert sum(ours) < 20_000
    assert len(session.request_rows()) == 300


def test_counters_beyond_31_bits_are_drawn_as_they_are() -> None:
    """E09: bytes above 2^40 and nanoseconds above 2^53 keep their size in figures and series."""
    session = session_with(3.0, weight_bytes=1 << 45, kv_bytes=1 << 44, flops=1 << 50)
    found = session.timeline.column("step_bytes_s")[2]
    assert found == pytest.approx(((1 << 45) + (1 << 44)) / 0.010)
    late = SessionModel()
    base_s = (1 << 55) * 1e-9
    late.ingest(batch(base_s, new_session=True, state=state()))
    late.ingest(batch(base_s + 0.2, steps=[step_row(1, base_s + 0.1)]))
    late.ingest(batch(base_s + 2.0))
    assert np.nansum(late.timeline.column("steps")) == 1


def test_a_dead_engine_has_no_running_requests_and_the_past_stays() -> None:
    session = session_with(3.0)
    drawn = np.nansum(session.timeline.column("output_tok_s"))
    session.ingest(batch(104.0, link=LinkStatus(state=LinkState.DEAD, reason="killed")))
    kpis = session.kpis()
    assert (kpis.running.value, kpis.waiting.value) == (None, None)
    assert kpis.running.why_none
    assert np.nansum(session.timeline.column("output_tok_s")) == drawn
    assert kpis.output_tok_s.value is not None
