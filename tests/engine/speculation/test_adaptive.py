"""Draft lengths: the best by its own estimates, never a losing one, and quick to change its mind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.adaptive import MARGIN, PROBE_FIRST, PROBE_MOST, AdaptiveDrafts
from engine.speculation.base import MAX_DRAFT

Cost = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """A CPU or GPU that reads all weights: 10 ms, and 0.6 ms more for each token."""
    return 0.010 + 0.0006 * tokens


def compute_bound(tokens: int) -> float:
    return 0.002 * tokens


class Simulation:
    """Requests with given acceptance, on a machine with given costs, decoded as the engine would."""

    def __init__(self, cost: Cost, *, round_s: float = 0.0, sequential: bool = False, seed: int = 0) -> None:
        self.cost, self.round_s, self.sequential = cost, round_s, sequential
        self.drafts = AdaptiveDrafts(sequential=sequential)
        self.rng = random.Random(seed)
        self.tokens = 0
        self.seconds = 0.0
        self.off: list[str] = []

    def step(self, acceptance: dict[int, float], most: int = 4, *, k: int | None = None) -> list[int]:
        """One step of all requests; ``k`` fixes all lengths instead of asking."""
        rids = list(acceptance)
        if k is None:
            choice = self.drafts.choose(rids, [most] * len(rids))
            chosen = choice.k
            self.off.append(choice.reason)
        else:
            chosen = [k] * len(rids)
        accepted = []
        for rid, count in zip(rids, chosen, strict=True):
            kept = 0
            while kept < count and self.rng.random() < acceptance[rid]:
                kept += 1
            accepted.append(kept)
        drafting = self.round_s * (max(chosen) if self.sequential else min(max(chosen), 1))
        took = self.cost(len(rids) + sum(chosen)) * self.rng.uniform(0.95, 1.05)
        self.drafts.observe_drafting(max(chosen), drafting)
        self.drafts.observe_step(len(rids) + sum(chosen), took)
        self.drafts.observe(rids, chosen, accepted)
        self.tokens += len(rids) + sum(accepted)
        self.seconds += took + drafting
        return chosen

    def run(self, steps: int, acceptance: dict[int, float], most: int = 4, *, k: int | None = None) -> float:
        """Tokens a second over so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step(acceptance, most, k=k)
        return (self.tokens - tokens) / (self.seconds - seconds)


observations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 300), st.floats(1e-4, 1.0)),
        st.tuples(st.just("draft"), st.integers(1, MAX_DRAFT), st.floats(0.0, 0.1)),
        st.tuples(st.just("seen"), st.integers(0, 5), st.tuples(st.integers(0, 16), st.integers(0, 16))),
        st.tuples(st.just("gone"), st.integers(0, 5), st.none()),
    ),
    max_size=60,
)


def observed(entries: list[tuple[str, int, object]], sequential: bool) -> AdaptiveDrafts:
    drafts = AdaptiveDrafts(sequential=sequential)
    for kind, number, value in entries:
        if kind == "step":
            assert isinstance(value, float)
            drafts.observe_step(number, value)
        elif kind == "draft":
            assert isinstance(value, float)
            drafts.observe_drafting(number, value)
        elif kind == "seen":
            assert isinstance(value, tuple)
            drafts.observe([number], [max(value)], [min(value)])
        else:
            drafts.release(number)
    return drafts


@settings(max_examples=100, deadline=None)
@given(observations, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 40), st.booleans())
def test_the_choice_is_the_best_by_its_own_estimates_and_never_a_losing_one(
    entries: list[tuple[str, int, object]], rooms: list[int], other: int, sequential: bool
) -> None:
    """Against all draft lengths there are, whatever was observed: lengths of up to 4 requests."""
    drafts = observed(entries, sequential)
    rids = list(range(len(rooms)))
    drafts.observe_step(len(rids) + other, 0.01)
    choice = drafts.choose(rids, rooms, other)
    assert all(0 <= k <= room for k, room in zip(choice.k, rooms, strict=True))
    plain = drafts.expected(rids, [0] * len(rids), other)
    assert choice.plain_tokens_per_s == pytest.approx(plain)
    rates = [
        drafts.expected(rids, k, other)
        for k in itertools.product(*(range(room + 1) for room in rooms))
        if any(k)
    ]
    if choice.probing:
        assert choice.k.count(0) >= len(rids) - 1 or not choice.reason
    elif any(choice.k):
        assert choice.reason == ""
        assert choice.tokens_per_s == pytest.approx(max(rates))
        assert choice.tokens_per_s >= plain * MARGIN * (1 - 1e-9)
    else:
        assert choice.reason
        assert choice.tokens_per_s == choice.plain_tokens_per_s
        assert max(rates, default=0.0) < plain * MARGIN * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(observations, st.booleans())
def test_equal_observations_give_equal_choices(
    entries: list[tuple[str, int, object]], sequential: bool
) -> None:
    one, other = observed(entries, sequential), observed(entries, sequential)
    for _ in range(40):
        assert one.choose([0, 1, 9], [4, 16, 2]) == other.choose([0, 1, 9], [4, 16, 2])


@pytest.mark.parametrize("requests", [1, 4])
def test_accepted_drafts_pay_and_come_near_the_best_fixed_length(requests: int) -> None:
    """Acceptance 0.9 where tokens are cheap: at least 95 % of the best fixed k, found by trying all."""
    acceptance = dict.fromkeys(range(requests), 0.9)
    best = max(Simulation(memory_bound).run(400, acceptance, k=k) for k in range(5))
    plain = Simulation(memory_bound).run(400, acceptance, k=0)
    adaptive = Simulation(memory_bound).run(400, acceptance)
    assert best > 2 * plain
    assert adaptive > 0.95 * best


@pytest.mark.parametrize("acceptance", [0.0, 0.03])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_drafts_that_fail_cost_less_than_three_percent(cost: Cost, acceptance: float) -> None:
    """Free prose: hardly anything is accepted. Tries now and then included, over 500 tokens."""
    share = dict.fromkeys(range(1), acceptance)
    simulation = Simulation(cost)
    plain = Simulation(cost).run(500, share, k=0)
    assert simulation.run(500, share) > 0.97 * plain
    assert sum(reason != "" for reason in simulation.off) > 450


def test_a_large_batch_turns_drafts_off_and_says_why() -> None:
    """64 requests where every token costs its time: acceptance is fair, still it loses; words and numbers."""
    simulation = Simulation(compute_bound)
    acceptance = dict.fromkeys(range(64), 0.6)
    simulation.run(60, acceptance)
    choice = simulation.drafts.choose(list(acceptance), [4] * 64)
    assert sum(choice.k) <= 1
    assert "over 64 requests" in choice.reason
    assert "times the time of a step of 64 tokens" in choice.reason
    assert "% of the first draft tokens hold" in choice.reason
    # The same requests, four at a time on a machine that waits for memory: on again.
    small = Simulation(memory_bound)
    few = dict.fromkeys(range(4), 0.6)
    small.run(60, few)
    assert small.drafts.choose(list(few), [4] * 4).reason == ""


def test_it_reacts_to_a_change_within_a_bounded_number_of_steps() -> None:
    """Off within 80 steps once drafts are refused; on again within the longest wait and a few tries."""
    simulation = Simulation(memory_bound)
    good, bad = {1: 0.95}, {1: 0.0}
    simulation.run(200, good)
    assert simulation.off[-1] == ""
    simulation.run(80, bad)
    simulation.run(400, bad)
    assert all(simulation.off[-400:])
    simulation.run(PROBE_MOST + 2 * PROBE_FIRST, good)
    assert simulation.off[-1] == ""
    assert sum(simulation.step(good)) >= 3


def test_one_request_drafts_beside_another_that_does_not() -> None:
    """Each has its own estimate: the editing one drafts long, the prose one hardly ever."""
    simulation = Simulation(memory_bound)
    both = {1: 0.9, 2: 0.0}
    simulation.run(150, both)
    chosen = [simulation.step(both) for _ in range(100)]
    assert sum(k[0] for k in chosen) > 300
    assert sum(k[1] for k in chosen) < 20


def test_a_draft_model_that_is_slow_is_asked_for_fewer_tokens() -> None:
    """Each round costs 3 ms of a 10 ms step: shorter drafts than where rounds are free, none at 30 ms."""
    share = {1: 0.8}
    lengths = []
    for round_s in (0.0, 0.003, 0.030):
        simulation = Simulation(memory_bound, round_s=round_s, sequential=True)
        simulation.run(300, share, most=8)
        lengths.append(sum(sum(simulation.step(share, most=8)) for _ in range(50)) / 50)
    assert lengths[0] > lengths[1] + 1 > lengths[2] + 1
    assert lengths[2] < 0.5


def test_a_place_that_never_holds_ends_the_draft_before_it() -> None:
    """The first two places always hold, the third never: k is 2, and 3 is only tried now and then."""
    drafts = AdaptiveDrafts(sequential=False)
    chosen = []
    for _ in range(300):
        (k,) = drafts.choose([1], [6]).k
        drafts.observe_step(1 + k, memory_bound(1 + k))
        drafts.observe([1], [k], [min(k, 2)])
        chosen.append(k)
    late = chosen[100:]
    assert sum(k == 2 for k in late) > 0.7 * len(late)
    assert min(late) >= 1
    assert drafts.acceptance[1] > 0.9 > 0.4 > drafts.acceptance[2]


def test_a_step_without_drafts_is_measured_before_any_draft() -> None:
    """Nothing is known at first, and of a batch of another size neither: one plain step each."""
    drafts = AdaptiveDrafts(sequential=False)
    first = drafts.choose([1], [4])
    assert first.k == [0]
    assert first.reason == "measuring a step of 1 token without drafts"
    drafts.observe_step(1, 0.01)
    assert drafts.choose([1], [4]).k == [4]
    assert drafts.choose([1, 2], [4, 4]).reason == "measuring a step of 2 tokens without drafts"
    drafts.observe_step(2, 0.0101)
    assert drafts.choose([1, 2], [4, 4]).k == [4, 4]


def test_without_room_nothing_is_drafted_and_nobody_is_tried() -> None:
    drafts = AdaptiveDrafts(sequential=False)
    drafts.observe_step(2, 0.01)
    for _ in range(100):
        choice = drafts.choose([1, 2], [0, 0])
        assert choice.k == [0, 0]
        assert not choice.probing
        assert choice.reason == "no request has room for a draft"
    assert drafts.choose([], []).k == []


def test_a_machine_that_becomes_slower_is_followed_at_all_sizes() -> None:
    """Steps of one token take twice as long; what is expected of five, not measured again, follows."""
    drafts = AdaptiveDrafts(sequential=False)
    for _ in range(50):
        drafts.observe_step(1, 0.010)
        drafts.observe_step(5, 0.012)
    for _ in range(50):
        drafts.observe_step(1, 0.020)
    assert drafts.cost.seconds(1) == pytest.approx(0.020, rel=0.05)
    assert 0.014 < drafts.cost.seconds(5) < 0.025


def test_requests_that_end_are_forgotten_and_impossible_numbers_refused() -> None:
    drafts = AdaptiveDrafts(sequential=False)
    drafts.observe_step(100, 0.01)
    for rid in range(1000):
        drafts.choose(list(range(rid, rid + 100)), [4] * 100)
        drafts.release(rid)
    assert drafts.num_requests == 99
    drafts.release(5)
    for drafted, accepted in ((2, 3), (MAX_DRAFT + 1, 0), (0, 1)):
        with pytest.raises(ValueError, match=f"request 7: {accepted} of {drafted}"):
            drafts.observe([7], [drafted], [accepted])
