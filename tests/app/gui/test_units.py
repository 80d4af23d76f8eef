"""Numbers read with a unit, three figures, and a dash where there is none."""

from __future__ import annotations

import math

import pytest

from app import units
from app.units import MINUS, NBSP, NONE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"), (0.0000123, "12.3 µs"), (0.000999, "999 µs"), (0.00123, "1.23 ms"), (0.4123, "412 ms"),
        (1.2345, "1,234 ms"), (9.9996, "10.0 s"), (12.34, "12.3 s"), (119.0, "119 s"), (600.0, "10.0 min"),
        (7200.0, "2.00 h"), (None, NONE), (math.nan, NONE), (math.inf, NONE),
    ],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert str(units.seconds(value)).replace(NBSP, " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (98_362_432, "93.8 MiB"), (2**31, "2.00 GiB"),
                        (2**63 - 1, "8,192 PiB"), (None, NONE)]
)  # fmt: skip
def test_memory_is_binary(value: float | None, text: str) -> None:
    assert str(units.data(value)).replace(NBSP, " ") == text


def test_traffic_is_decimal_and_unknown_shares_are_no_zeros() -> None:
    assert str(units.bandwidth(3.4e9)).replace(NBSP, " ") == "3.40 GB/s"
    assert units.bandwidth(None) == (NONE, "GB/s")
    assert str(units.percent(0.0004)).replace(NBSP, " ") == "<0.1 %"
    assert str(units.percent(0.0)).replace(NBSP, " ") == "0.0 %"
    assert str(units.percent(0.714)).replace(NBSP, " ") == "71 %"


def test_changes_have_signs_and_are_undefined_against_nothing() -> None:
    assert units.change(77.0, 100.0) == f"{MINUS}23{NBSP}%"
    assert units.change(1.312, 1.0) == f"+31{NBSP}%"
    assert units.change(1.0, 1.0) == f"±0{NBSP}%"
    assert units.change(1.0, 0.0) == NONE
    assert units.change(None, 1.0) == NONE


@pytest.mark.parametrize("value", [0.000123, 0.0999, 0.999, 9.994, 9.996, 99.96, 999.4, 12345.6, 7e8])
def test_three_figures_stay_close(value: float) -> None:
    shown = float(units.significant(value).replace(",", ""))
    assert shown == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize("span", [0.003, 0.7, 1.0, 13.0, 999.0, 2e6])
def test_axis_steps_are_round_and_few(span: float) -> None:
    step = units.axis_step(span, 4)
    digit = step / 10 ** math.floor(math.log10(step) + 1e-12)
    assert round(digit, 6) in (1, 2, 5, 10)
    assert 1 <= span / step <= 4


def test_chosen_spans_read_short() -> None:
    assert [units.span(s).replace(NBSP, " ") for s in (30.0, 60.0, 300.0, 3600.0)] == [
        "30 s", "1 min", "5 min", "1 h",
    ]  # fmt: skip
