"""Choosing tokens by the kernels in C++, where the engine chooses them: against torch's way, row by row."""

from __future__ import annotations

import pytest

from engine.ops.native_sampling import NativeSampling
from tests.engine.choosing_rows import check_drafts, check_equals, check_settings

VOCAB = 6007


def test_every_setting_gives_what_torch_gives() -> None:
    """A10, A14, A25: see `check_settings`."""
    check_settings(NativeSampling(), VOCAB)


@pytest.mark.parametrize(("equals", "vocab"), [(3, VOCAB), (60, VOCAB), (9, 9)])
def test_equals_at_the_border_of_a_cut_stay_on_both_ways(equals: int, vocab: int) -> None:
    """A28: see `check_equals`."""
    check_equals(NativeSampling(), equals, vocab)


@pytest.mark.parametrize("drawn", [False, True], ids=["matched", "judged"])
def test_drafts_stay_as_far_as_torch_lets_them(drawn: bool) -> None:
    """A19: see `check_drafts`."""
    check_drafts(NativeSampling(), drawn)
