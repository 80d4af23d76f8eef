"""The figures of a smoke run, from rows whose phases and hit rates are known."""

from __future__ import annotations

import msgspec
import pytest

from app.lab.stats import LoadRow, summarize
from app.smoke_report import Change, Report, phases, summary


def _row(index: int, sched_ns: int | None, cached: int, finish: str = "length") -> LoadRow:
    return LoadRow(
        index=index,
        kind="chat",
        tag="t",
        prompt_tok=100,
        cached_tok=cached,
        output_tok=11,
        max_tokens=11,
        intended_ns=0,
        sent_ns=0,
        first_ns=200_000_000,
        last_ns=1_200_000_000,
        end_ns=1_200_000_000,
        arrive_engine_ns=0,
        sched_engine_ns=sched_ns,
        finish=finish,
    )


def _change(t_ns: int, value: bool, rev: int) -> Change:
    return Change(value=value, rev=rev, took_ms=1.0, running=2, t_ns=t_ns)


ROWS = [
    _row(0, 10, 80),
    _row(1, 999, 40),
    _row(2, 1000, 0),
    _row(3, 1999, 0),
    _row(4, 2000, 90),
    _row(5, None, 5),
]
CHANGES = [_change(1000, False, 1), _change(2000, True, 2)]


def test_rows_belong_to_the_phase_in_which_their_prefix_was_looked_up() -> None:
    found = phases([*ROWS, _row(6, 50, 100, finish="cancelled")], CHANGES)
    assert [(p.phase, p.requests, p.hit_rate) for p in found] == [
        ("on", 2, pytest.approx(0.6)),
        ("off", 2, 0.0),
        ("on_again", 1, pytest.approx(0.9)),
    ]
    assert found[0].ttft_p50_ms == pytest.approx(200)
    assert found[0].tpot_p50_ms == pytest.approx(100)


def test_a_phase_without_requests_has_no_figures() -> None:
    (on, off, again) = phases(ROWS[:2], CHANGES)
    assert on.requests == 2
    assert (off.requests, off.hit_rate, off.ttft_p50_ms) == (0, None, None)
    assert again.hit_rate is None


def test_the_summary_has_ten_lines_whatever_is_missing() -> None:
    empty = Report(failed="engine", why="no model")
    assert len(summary(empty).splitlines()) == 10
    assert "FAILED at engine: no model" in summary(empty)
    full = Report(ok=True, load=summarize(ROWS), phases=phases(ROWS, CHANGES), changes=CHANGES)
    text = summary(full)
    assert len(text.splitlines()) == 10
    assert "on 60.0 % hits" in text
    assert "off 0.0 % hits" in text
    assert "p50 200 ms" in text
    assert msgspec.json.decode(msgspec.json.encode(full))["phases"][1]["hit_rate"] == 0.0
