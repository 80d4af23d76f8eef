"""Where the time of steps and requests goes."""

from __future__ import annotations

import numpy as np
import pytest

from app.model.session import SessionModel
from app.model.stages import FORWARD_PARTS, OVERLAPPED
from ipc.messages import StepRow
from tests.app.builders import batch, cfg, request_row, state, step_row

STACK = ("copy_s", "unsplit_s", "attention_s", "linear_s", "head_s", "rest_s", "sample_s", "other_s")


def session_of(rows: list[StepRow], **more: object) -> SessionModel:
    session = SessionModel()
    session.ingest(batch(100.0, new_session=True, state=state(), cfg=cfg()))
    session.ingest(batch(101.0, steps=rows, **more))
    session.ingest(batch(102.5))
    return session


def one_stack(session: SessionModel) -> dict[str, float]:
    """The chart's layers of the one bin that had steps."""
    line = session.timeline
    at = int(np.flatnonzero(~np.isnan(line.column("steps")))[0])
    return {name: float(line.column(name)[at]) for name in line.columns}


def test_stages_of_a_step_add_up_to_what_it_cost() -> None:
    times = session_of([step_row(1, 100.6, copy_us=250, publish_us=50)]).stages()
    assert times.n == 1
    assert times.mean_s["forward"] == pytest.approx(9e-3)
    assert times.total_mean_s == pytest.approx(10.05e-3)  # publishing lies between two steps
    assert times.mean_s["other"] == pytest.approx(10.05e-3 - (0.1 + 0.2 + 0.25 + 9 + 0.3 + 0.05) * 1e-3)
    shares = [times.share[s] for s in (*OVERLAPPED, "copy", "forward", "sample", "other")]
    assert sum(shares) == pytest.approx(1.0)
    assert times.outside_forward_share == pytest.approx(1 - 9 / 10.05)


def test_looking_for_drafts_is_planning() -> None:
    session = session_of([step_row(1, 100.6, draft_us=150, publish_us=50)])
    times = session.stages()
    assert times.mean_s["plan"] == pytest.approx(250e-6)
    assert times.mean_s["other"] == pytest.approx(10.05e-3 - (0.25 + 0.2 + 9 + 0.3 + 0.05) * 1e-3)
    assert one_stack(session)["exposed_plan_s"] == pytest.approx(250e-6)


def test_text_and_sockets_are_hidden_not_part_of_a_step() -> None:
    times = session_of([step_row(1, 100.6, tokenize_us=400, detokenize_us=200, send_us=600)]).stages()
    assert [times.share[s] for s in ("tokenize", "detokenize", "send")] == [None, None, None]
    assert times.mean_s["send"] == pytest.approx(6e-4)
    assert times.hidden_mean_s == pytest.approx(12e-4)
    assert times.total_mean_s == pytest.approx(10.05e-3)


def test_what_overlap_hides_is_work_but_not_exposed() -> None:
    """100 + 200 + 100 µs of work, 300 of them under a forward pass: a quarter of each is exposed."""
    row = step_row(1, 100.6, dur_us=9600, publish_us=100, overlap_us=300)
    session = session_of([row])
    times = session.stages()
    assert times.total_mean_s == pytest.approx(9.6e-3)  # publishing happened inside
    assert times.mean_s["prepare"] == pytest.approx(2e-4)
    assert times.share["prepare"] == pytest.approx(0.5e-4 / 9.6e-3)
    assert times.hidden_mean_s == pytest.approx(3e-4 + 1e-4)  # and the detokenizing of another thread
    shares = [times.share[s] for s in (*OVERLAPPED, "copy", "forward", "sample", "other")]
    assert sum(shares) == pytest.approx(1.0)
    found = one_stack(session)
    assert found["exposed_prepare_s"] == pytest.approx(0.5e-4)
    assert found["hidden_s"] == pytest.approx(3e-4)


def test_more_overlap_than_known_work_hides_no_more_than_all_of_it() -> None:
    """Accepting a step's tokens is hidden too, and has no figure of its own."""
    times = session_of([step_row(1, 100.6, dur_us=9400, publish_us=0, overlap_us=900)]).stages()
    assert [times.share[s] for s in OVERLAPPED] == [0.0, 0.0, 0.0]
    assert all(share is None or 0 <= share <= 1 for share in times.share.values())


def test_the_layers_of_the_chart_add_up_with_and_without_a_split() -> None:
    split = {"attention_us": 2000, "linear_us": 5000, "head_us": 1000}
    for changes in ({}, split, {"overlap_us": 200}, {**split, "overlap_us": 350, "copy_us": 90}):
        found = one_stack(session_of([step_row(1, 100.6, **changes)]))
        layers = sum(found[name] for name in STACK) + sum(found[f"exposed_{s}_s"] for s in OVERLAPPED)
        assert layers == pytest.approx(found["whole_s"]), changes
        assert found["unsplit_s"] == pytest.approx(0.0 if "attention_us" in changes else 9e-3)


def test_parts_of_the_forward_pass_rest_on_the_steps_that_were_split() -> None:
    plain = [step_row(i, 100.5 + i / 100) for i in range(1, 4)]
    assert not set(FORWARD_PARTS) & set(session_of(plain).stages().mean_s)
    split = step_row(4, 100.56, attention_us=2000, linear_us=5000, head_us=1000)
    times = session_of([*plain, split]).stages()
    assert times.n == 4
    assert times.mean_s["attention"] == pytest.approx(2e-3)
    assert times.mean_s["rest"] == pytest.approx(1e-3)
    assert times.std_s["linear"] == pytest.approx(0.0)


def test_stages_of_requests_explain_their_time() -> None:
    """Queue is the wait without tokenizing; what nothing explains is said as other."""
    rows = [
        request_row(
            i, 100.0, tokens=3, tokenize_us=2000, plan_us=1000, prepare_us=1000, copy_us=500,
            forward_us=60_000, sample_us=1500, detokenize_us=700, send_us=300, preempted_us=5000,
        )
        for i in (1, 2)
    ]  # fmt: skip
    times = session_of([step_row(1, 100.6)], requests=rows).request_stages()
    assert times.n == 2
    assert times.total_mean_s == pytest.approx(0.091)
    assert times.mean_s["queue"] == pytest.approx(0.008)
    explained = [s for s, share in times.share.items() if share is not None]
    assert sum(times.mean_s[s] for s in explained) == pytest.approx(0.091)
    assert sum(times.share[s] for s in explained) == pytest.approx(1.0)
    assert times.share["send"] is None
    assert times.mean_s["other"] == pytest.approx(0.091 - 0.010 - 0.069)


def test_failed_and_never_scheduled_requests_are_in_no_stage() -> None:
    rows = [
        request_row(1, 100.0, finish="error"),
        request_row(2, 100.0, finish="cancelled"),
        request_row(3, 100.0, result_cached=True),
    ]
    assert session_of([], requests=rows).request_stages().n == 0


def test_a_baseline_keeps_the_stages_with_their_units() -> None:
    stats = session_of([step_row(1, 100.6, recompute_us=900, overlap_us=100)]).step_stats(100.0)
    assert stats["forward_mean_s"] == pytest.approx(9e-3)
    assert stats["recompute_share"] == pytest.approx(0.1)
    assert stats["hidden_mean_s"] == pytest.approx(2e-4)
    assert stats["send_share"] is None
    assert "attention_mean_s" not in stats


def test_answers_from_the_result_cache_are_counted_apart() -> None:
    """They would make every latency look better than any computation was."""
    good = [request_row(i, 100.0) for i in range(1, 6)]
    kept = [
        request_row(10 + i, 100.0, result_cached=True, itl_us=[], first_ns=100_000_000_100) for i in range(7)
    ]
    session = session_of([step_row(1, 100.6)], requests=good + kept)
    kpis = session.kpis()
    assert kpis.ttft_p50_s.n == kpis.tpot_p50_s.n == kpis.e2e_p50_s.n == 5
    assert kpis.ttft_p50_s.value == pytest.approx(0.050)
    assert kpis.result_cached.value == 7
    assert kpis.finished_req_s.n == 12
