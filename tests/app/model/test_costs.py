"""What a change costs, how long it has yet to go, and which figures hold the pause that it made."""

from __future__ import annotations

import msgspec
import pytest

from app.model.costs import StageClock, first_awq_search
from app.model.memory import has_second_form
from app.model.session import SessionModel
from ipc.messages import ApplyEvent, KnobValue
from tests.app import builders as b

PLAIN: dict[str, KnobValue] = {"weight_dtype": "model", "int4_method": "awq", "high_precision": "head"}
AWQ = PLAIN | {"weight_dtype": "int4"}


@pytest.mark.parametrize(("now", "patch", "earlier", "asked"), [
    (PLAIN, {"weight_dtype": "int4"}, [], True),
    (PLAIN, {"weight_dtype": "int8"}, [], False),
    (PLAIN, {"weight_dtype": "int4", "int4_method": "rtn"}, [], False),
    (PLAIN, {"prefix_cache": False}, [], False),
    (AWQ | {"int4_method": "rtn"}, {"int4_method": "awq"}, [], True),
    (PLAIN, {"weight_dtype": "int4"}, [AWQ], False),  # the codes are kept
    (PLAIN | {"high_precision": "none"}, {"weight_dtype": "int4"}, [AWQ], True),  # but not the head's
    (PLAIN | {"high_precision": "ends"}, {"weight_dtype": "int4"}, [AWQ], False),
    (AWQ, {"high_precision": "none"}, [], True),
    (AWQ | {"high_precision": "sensitive"}, {"high_precision": "ends"}, [], True),
    ({}, {"weight_dtype": "int4"}, [], False),  # an engine without these knobs
])  # fmt: skip
def test_only_the_first_search_of_codes_takes_minutes(
    now: dict[str, KnobValue], patch: dict[str, KnobValue], earlier: list[dict[str, KnobValue]], asked: bool
) -> None:
    assert first_awq_search(now, patch, earlier) is asked


def test_the_time_left_is_that_of_the_stage_at_its_own_pace() -> None:
    clock = StageClock()

    def at(share: float, stage: str = "searching") -> object:
        return b.state(phase="applying", stage=stage, done_bytes=round(share * 1000), total_bytes=1000)

    clock.take(at(0.2), 10.0)  # type: ignore[arg-type]
    assert clock.left_s(at(0.2), 60.0) is None, "nothing was done yet"  # type: ignore[arg-type]
    assert clock.left_s(at(0.4), 12.0) is None, "too soon to tell"  # type: ignore[arg-type]
    clock.take(at(0.4), 30.0)  # type: ignore[arg-type]
    assert clock.left_s(at(0.4), 30.0) == pytest.approx(60.0)  # type: ignore[arg-type]
    assert clock.left_s(at(1.0), 40.0) is None, "it is through, and the change goes on"  # type: ignore[arg-type]
    clock.take(at(0.0, "converting"), 90.0)  # type: ignore[arg-type]
    assert clock.left_s(at(0.1, "converting"), 91.0) is None  # type: ignore[arg-type]
    assert clock.left_s(at(0.5, "converting"), 94.0) == pytest.approx(4.0)  # type: ignore[arg-type]


def applied(t_s: float, took_s: float, mode: str = "reload") -> ApplyEvent:
    return ApplyEvent(
        apply_id=1, from_rev=0, to_rev=1, result="ok", t_ns=round(t_s * 1e9), at_step=1, mode=mode,  # type: ignore[arg-type]
        took_us=round(took_s * 1e6), patch={"weight_dtype": "int8"},
    )  # fmt: skip


def test_a_figure_says_what_it_holds_of_a_pause_for_a_change() -> None:
    """A change from 101 to 110.7 s: one request waited for its first token, another one lost its place."""
    session = SessionModel()
    session.ingest(b.batch(100.0, new_session=True, state=b.state(), cfg=b.cfg()))
    waited = b.request_row(1, 102.0, first_ns=111 * b.S, last_ns=112 * b.S, end_ns=112 * b.S)
    displaced = b.request_row(
        2, 100.0, last_ns=112 * b.S, end_ns=112 * b.S, preempt_n=1, preempted_us=9_700_000,
        preempt_reason="rebuild",
    )  # fmt: skip
    later = b.request_row(3, 111.0)
    session.ingest(b.batch(113.0, requests=[waited, displaced, later], events=[applied(110.7, 9.7)]))
    kpis = session.kpis()
    assert (kpis.ttft_pause_s, kpis.tpot_pause_s) == (pytest.approx(9.7), pytest.approx(9.7))
    assert session.pause_s("ttft", 1.9) is None, "the request that waited is out of this window"
    session.ingest(b.batch(150.0))
    assert (session.kpis().ttft_pause_s, session.kpis().tpot_pause_s) == (None, None)


def test_a_change_between_two_steps_and_a_request_out_of_blocks_are_no_pause() -> None:
    session = SessionModel()
    session.ingest(b.batch(100.0, new_session=True, state=b.state(), cfg=b.cfg()))
    row = b.request_row(1, 101.0, preempt_n=1, preempted_us=700_000, preempt_reason="blocks")
    session.ingest(b.batch(103.0, requests=[row], events=[applied(101.03, 0.5, "step")]))
    assert (session.kpis().ttft_pause_s, session.kpis().tpot_pause_s) == (None, None)


MIB = 1 << 20
SMALL = msgspec.structs.replace(
    b.MODEL, num_params=134_515_008, vocab_size=49_152, hidden_size=576, num_layers=30,
    weight_bytes=2 * 134_515_008,
)  # fmt: skip


@pytest.mark.parametrize(("precision", "one", "two"), [
    ("model", 257, 770), ("int8, head kept", 156, 264), ("int4 awq, head kept", 108, 216),
    ("int8", 128, 236), ("int4 rtn, head and ends kept", 114, 232),
])  # fmt: skip
def test_a_second_form_of_weights_is_seen_in_every_precision(precision: str, one: int, two: int) -> None:
    """MiB of a model whose head is its embedding: in one form each, and with a float32 head beside."""
    told = [
        has_second_form(b.state(weight_bytes=size * MIB, weight_dtype=precision), SMALL)
        for size in (one, two)
    ]
    assert told == [False, True]
    assert not has_second_form(b.state(weight_bytes=770 * MIB, weight_dtype=""), SMALL), "half way"
    assert not has_second_form(b.state(weight_bytes=770 * MIB, weight_dtype="model"), None)
