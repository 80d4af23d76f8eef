"""Where drafts and what they bring are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.base import Draft
from engine.speculation.limits import cut_draft, draft_room, share, until_end


@pytest.mark.parametrize(
    ("known", "total", "covered", "room"),
    [
        (10, 20, 100, 9),  # nine drafts and the target's own token reach 20
        (19, 20, 100, 0),  # one token is left, and it is the target's
        (20, 20, 100, 0),
        (10, 100, 16, 6),  # a block of 16 holds positions 10 to 15 besides
        (16, 100, 16, 0),  # the newest token itself fits
        (17, 100, 16, 0),
    ],
)
def test_room_is_what_max_total_and_blocks_leave(known: int, total: int, covered: int, room: int) -> None:
    """A18: near max_tokens and at the end of a block the count is never negative and never one too many."""
    assert draft_room(known, total, covered) == room


@given(st.lists(st.integers(0, 16), max_size=12), st.integers(-2, 100))
def test_a_budget_is_shared_by_levels(rooms: list[int], budget: int) -> None:
    """All is given that can be; nobody has two more than another who still has room."""
    given_tokens = share(rooms, budget)
    assert sum(given_tokens) == min(max(budget, 0), sum(rooms))
    assert all(0 <= k <= room for k, room in zip(given_tokens, rooms, strict=True))
    lacking = [k for k, room in zip(given_tokens, rooms, strict=True) if k < room]
    if lacking:
        assert max(given_tokens) <= min(lacking) + 1


def test_a_draft_is_cut_at_room_ends_and_foreign_ids() -> None:
    """A16: EOS itself stays, for the target to judge; ids that the target does not have get nowhere."""
    draft = Draft([5, 2, 7, 8], torch.eye(4))
    cases = [
        (4, frozenset[int](), 10, [5, 2, 7, 8]),
        (3, frozenset[int](), 10, [5, 2, 7]),
        (0, frozenset[int](), 10, []),
        (4, frozenset({2}), 10, [5, 2]),
        (1, frozenset({2}), 10, [5]),
        (4, frozenset[int](), 8, [5, 2, 7]),
        (4, frozenset[int](), 5, []),
    ]
    for room, stops, vocab, want in cases:
        cut = cut_draft(draft, room, stops, vocab)
        assert cut.token_ids == want
        assert cut.probs is not None
        assert torch.equal(cut.probs, torch.eye(4)[: len(want)])
    assert cut_draft(Draft([-1, 3]), 2, (), 10).token_ids == []
    assert cut_draft(draft, 9, (), 10) is draft


@pytest.mark.parametrize(
    ("ids", "num_output", "min_tokens", "room", "want"),
    [
        ([5, 6, 7], 0, 0, 10, (3, None)),
        ([5, 2, 7], 0, 0, 10, (2, "stop")),
        ([2, 2, 2], 0, 0, 10, (1, "stop")),
        ([2, 2, 2], 0, 1, 10, (2, "stop")),  # the first is the min_tokens-th token, not beyond it
        ([2, 5, 2], 3, 5, 10, (3, "stop")),
        ([2, 5, 2], 3, 6, 10, (3, None)),
        ([5, 6, 7], 0, 0, 3, (3, "length")),
        ([5, 6, 7], 0, 0, 2, (2, "length")),
        ([5, 2, 7], 0, 0, 2, (2, "stop")),  # a stop in the last place is a stop
        ([5, 6, 2], 0, 0, 2, (2, "length")),  # beyond the last place there is nothing
        ([5], 0, 0, 1, (1, "length")),
    ],
)
def test_tokens_count_up_to_the_end(
    ids: list[int], num_output: int, min_tokens: int, room: int, want: tuple[int, str | None]
) -> None:
    """A16: several tokens of one step, an end at each place, with min_tokens and with max_tokens."""
    found = until_end(ids, num_output=num_output, min_tokens=min_tokens, stop_ids={2}, room=room)
    assert found == want
