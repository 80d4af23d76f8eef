"""How amounts of memory are written."""

from __future__ import annotations

import pytest

from engine.sizes import counted, size


@pytest.mark.parametrize(
    ("num_bytes", "least", "digits", "text"),
    [
        (3 << 30, "GiB", ".2f", "3.00 GiB"),
        (50_000, "GiB", ".2f", "0.00 GiB"),
        (50_000, "MiB", ".2f", "0.05 MiB"),
        (3 << 29, "MiB", ".2f", "1.50 GiB"),
        (107, "B", ".4g", "107 B"),
        (0, "B", ".4g", "0 B"),
        (8192, "B", ".4g", "8 KiB"),
        (1_073_742, "B", ".4g", "1.024 MiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_it_has_one_of(
    num_bytes: int, least: str, digits: str, text: str
) -> None:
    assert size(num_bytes, least, digits) == text


def test_one_thing_is_not_told_as_many() -> None:
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
