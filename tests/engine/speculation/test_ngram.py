"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.speculation.ngram import MAX_N, MIN_N, NgramDrafter
from ipc.messages import Sampling


def request(ids: list[int], rid: int = 1, slot: int = 0) -> Request:
    made = Request(rid, ids, Sampling())
    made.slot = slot
    return made


def searched(ids: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """What the definition says, by looking everywhere."""
    for n in range(min(max_n, len(ids) - 1), min_n - 1, -1):
        suffix = ids[-n:]
        for after in range(len(ids) - 1, n - 1, -1):
            if ids[after - n : after] == suffix:
                text = list(ids)
                for i in range(k):
                    text.append(text[after + i])
                return text[len(ids) :]
    return []


def propose(drafter: NgramDrafter, r: Request, k: int) -> list[int]:
    (draft,) = drafter.propose([r], [k])
    assert draft.probs is None
    return draft.token_ids


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), max_size=20),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_proposals_are_those_of_a_full_search(
    ids: list[int], growth: list[int], min_n: int, more: int, k: int
) -> None:
    """A text over four letters that grows by several tokens a step, for every range of n."""
    drafter = NgramDrafter(min_n, min_n + more)
    rng = random.Random(len(ids))
    r = request(ids)
    for count in [0, *growth]:
        r.token_ids += [rng.randrange(4) for _ in range(count)]
        assert propose(drafter, r, k) == searched(r.token_ids, k, min_n, min_n + more)


def test_the_longest_run_wins_then_the_most_recent() -> None:
    drafter = NgramDrafter()
    assert (MIN_N, MAX_N) == (2, 4)
    # 1 2 3 is found once, 2 3 twice; the longer run decides. One token is not looked for.
    assert propose(drafter, request([1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3], rid=1), 2) == [7, 9]
    assert propose(drafter, request([2, 3, 7, 9, 2, 3, 8, 5, 2, 3], rid=2), 2) == [8, 5]
    assert propose(drafter, request([3, 7, 9, 3], rid=3), 2) == []
    assert propose(drafter, request([5], rid=4), 2) == []


def test_a_copy_that_reaches_the_end_goes_on_in_itself() -> None:
    drafter = NgramDrafter()
    assert propose(drafter, request([9, 1, 2, 3, 1, 2, 3], rid=1), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert propose(drafter, request([4, 4, 4], rid=2), 3) == [4, 4, 4]


def test_ids_of_any_size_are_told_apart() -> None:
    """Token 0 and the largest ids; a text shorter than n never looks like one that begins with nothing."""
    big = (1 << 32) - 2
    assert propose(NgramDrafter(), request([0, 0, 5, 0, 0]), 1) == [5]
    assert propose(NgramDrafter(), request([big, 0, 7, big, 0]), 1) == [7]
    assert propose(NgramDrafter(3, 3), request([0, 5, 0, 0, 5]), 1) == []


def test_a_slot_that_changes_hands_or_a_text_that_shrinks_starts_anew() -> None:
    drafter = NgramDrafter()
    first = request([1, 2, 3, 1, 2], rid=1)
    assert propose(drafter, first, 1) == [3]
    assert propose(drafter, request([1, 2], rid=2), 1) == []
    assert propose(drafter, first, 1) == [3]
    first.token_ids[:] = [1, 2, 8, 1, 2]
    del first.token_ids[3:]
    first.token_ids[:] = [1, 2, 8]
    assert propose(drafter, first, 1) == []
    first.token_ids += [1, 2]
    assert propose(drafter, first, 1) == [8]
    first.slot = 7  # preempted and back in another slot
    assert propose(drafter, first, 1) == [8]


def test_a_request_asked_about_for_the_first_time_in_mid_answer_is_caught_up() -> None:
    """Steps without a question (k = 0, or none at all) change nothing about the next proposal."""
    rng = random.Random(5)
    asked, skipped = NgramDrafter(), NgramDrafter()
    r = request([rng.randrange(5) for _ in range(40)])
    for step in range(60):
        r.token_ids.append(rng.randrange(5))
        want = propose(asked, r, 4)
        if step % 7 == 0:
            assert propose(skipped, r, 4) == want
        elif step % 7 == 1:
            assert propose(skipped, r, 0) == []


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    """No call indexes more than its bound; until all is indexed nothing is proposed."""
    drafter = NgramDrafter(catch_up=100)
    ids = [*range(340), 5, 6, 7]
    one, two = request(ids, rid=1, slot=0), request([1, 2, 3, 1, 2], rid=2, slot=1)
    results = [[d.token_ids for d in drafter.propose([one, two], [2, 2])] for _ in range(5)]
    assert [r[0] for r in results] == [[], [], [], [8, 9], [8, 9]]
    assert [r[1] for r in results] == [[], [], [], [3, 1], [3, 1]]  # what is left of the fourth call's bound


def test_memory_is_bounded_and_what_is_recent_is_still_found() -> None:
    """300,000 different tokens through an index of 1,000: no more of each n, the last 500 all there."""
    drafter = NgramDrafter(max_indexed=1000, catch_up=1 << 30)
    r = request(list(range(2)))
    for first in range(2, 300_000, 10_000):
        r.token_ids += range(first, first + 10_000)
        propose(drafter, r, 4)
        assert drafter.num_entries <= 1000 * 3
    last = len(r.token_ids)
    for back, found in ((10, True), (490, True), (1500, False)):
        r.token_ids += [last - back, last - back + 1]
        assert (propose(drafter, r, 1) == [last - back + 2]) == found
        del r.token_ids[last:]


def test_what_leaves_is_forgotten() -> None:
    drafter = NgramDrafter()
    rows = [request([1, 2, 1, 2, 1], rid=i, slot=i) for i in range(5)]
    drafter.propose(rows, [1] * 5)
    assert drafter.num_entries > 0
    for r in rows[:4]:
        drafter.release(r.slot)
    drafter.release(99)
    assert 0 < drafter.num_entries <= 12
    drafter.clear()
    assert drafter.num_entries == 0
