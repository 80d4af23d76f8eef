"""Choosing tokens in C++: against the definitions in float64, torch's way, and the law of the draws."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine import draw
from engine.ops.native_sampling import NativeSampling
from engine.penalties import Occurrences, penalize
from engine.speculation.base import ACCEPT, RESIDUAL
from engine.speculation.rejection import reject
from ipc.messages import Sampling
from tests.engine.test_sampling import assert_distributed

BIG = 2**64 - 3
CUTS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5, min_p=0.05),
    Sampling(temperature=2.0, top_k=7),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.3, top_k=50, top_p=0.6, min_p=0.02),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, top_k=2000, top_p=0.999),
    Sampling(temperature=5.0, top_k=1500),
]
NEVER = float("-inf")


def randn(rows: int, n: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * scale


def chosen(
    scores: Tensor, each: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    made = [np.array(values, dtype=np.uint64) for values in (seeds, positions)]
    found: list[int] = NativeSampling().choose(scores, each, *made).tolist()
    return found


def exact_law(row: Tensor, s: Sampling) -> Tensor:
    """The distribution of one row in float64, from its definition: sorted, and cut one after the other."""
    weights = ((row.double() - row.max().double()) / s.temperature).exp()
    kept = weights
    if 0 < s.top_k < len(row):
        kept = kept.masked_fill(row < row.sort(descending=True).values[s.top_k - 1], 0.0)
    if s.top_p < 1.0:
        values, order = row.sort(descending=True)
        mass = kept[order]
        _, group = torch.unique_consecutive(values, return_inverse=True)
        of_group = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, mass)
        above = (of_group.cumsum(0) - of_group)[group]
        within = torch.empty_like(values, dtype=torch.bool)
        within[order] = (above < np.float32(s.top_p) * mass.sum()) | (group == 0)
        kept = kept.masked_fill(~within, 0.0)
    kept = kept.masked_fill(weights < s.min_p, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize("n", [1, 7, 100, 513, 2500, 49152, 50257, 151936])
def test_distributions_are_their_definition(n: int) -> None:
    """A28: the temperature counts once. Vocabularies beside vectors and stretches, ties, hidden tokens."""
    scores = randn(len(CUTS), n + 3, scale=3.0)[:, :n]
    if n > 10:
        scores[:, 5] = NEVER
        scores[:, 6:9] = scores[:, 9:10]
        scores[4] = (scores[4] * 2).round() / 2
    ours = NativeSampling().probabilities(scores, CUTS)
    for row, s in enumerate(CUTS):
        exact = exact_law(scores[row], s)
        assert torch.equal(ours[row] > 0, exact > 0), s
        torch.testing.assert_close(ours[row].double(), exact, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("n", [3, 2500, 49152])
def test_tokens_are_where_the_running_sum_passes_the_random_number(n: int) -> None:
    each = CUTS * 3
    scores = randn(len(each), n, scale=2.0, seed=3)
    seeds = [BIG, 2**63, *range(len(each) - 2)]
    positions = [2**40, *(100 + i for i in range(len(each) - 1))]
    got = chosen(scores, each, seeds, positions)
    u = draw.uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    for row, s in enumerate(each):
        exact = exact_law(scores[row], s)
        running = exact.cumsum(0)
        low = float(running[got[row]] - exact[got[row]])
        assert exact[got[row]] > 0
        assert low - 1e-6 <= u[row] <= float(running[got[row]]) + 1e-6


def test_random_numbers_are_those_of_the_engine() -> None:
    """Of n equal tokens number floor(u * n) is drawn: the first 17 bits of u show."""
    n, rows = 151936, 64
    seeds = np.array([0, 1, BIG, 2**63, 2**32 - 1, *range(5, rows)], dtype=np.uint64)
    positions = np.array([0, 2**31, 2**40, 2**63 - 1, 2**32 - 1, *range(5, rows)], dtype=np.uint64)
    got = chosen(torch.zeros(rows, n), [Sampling(temperature=1.0)] * rows, seeds.tolist(), positions.tolist())
    assert got == np.floor(draw.uniform(seeds, positions) * n).astype(int).tolist()


def test_the_engines_own_tokens_come_out() -> None:
    """Where torch's way draws in the order of the ids too: all but top-p without a small top-k."""
    each = [
        Sampling(temperature=t, top_k=k, min_p=p) for t in (0.6, 1.5) for k in (0, 1200) for p in (0.0, 0.1)
    ]
    scores = randn(len(each), 3000, scale=2.0, seed=4)
    seeds, positions = np.arange(len(each), dtype=np.uint64), np.full(len(each), 77, dtype=np.uint64)
    expected = draw.draw_all(scores.clone(), scores.amax(1), each, seeds, positions)
    assert chosen(scores, each, seeds.tolist(), positions.tolist()) == expected.tolist()
    few = [Sampling(temperature=t, top_k=k, top_p=p) for t in (0.6, 1.5) for k in (5, 64) for p in (0.5, 0.9)]
    expected = draw.draw_top_k(scores, scores.amax(1), few, seeds, positions)
    assert chosen(scores, few, seeds.tolist(), positions.tolist()) == expected.tolist()


@pytest.mark.parametrize("s", [CUTS[0], CUTS[2], CUTS[3], CUTS[4]], ids=["all", "top_k", "top_p", "each"])
def test_draws_follow_the_law(s: Sampling) -> None:
    """A28: by chi-square at one in 10,000; the law of another temperature is told apart."""
    rows, n = 20000, 9
    scores = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.0, 1.5, 0.0, 0.9, NEVER])
    got = chosen(scores.expand(rows, n), [s] * rows, [11] * rows, range(rows))
    counts = np.bincount(got, minlength=n)
    assert_distributed(counts, exact_law(scores, s).numpy())
    wrong = msgspec.structs.replace(s, temperature=s.temperature * 1.5)
    with pytest.raises(AssertionError):
        assert_distributed(counts, exact_law(scores, wrong).numpy())


def test_greedy_rows_take_the_first_of_the_most_likely() -> None:
    """A26: a tiny temperature is greedy."""
    for n, at in ((5000, (3000, 4100)), (513, (511, 512)), (513, (512, 512)), (7, (0, 6)), (1, (0, 0))):
        scores = randn(5, n, seed=5)
        scores[:, at[0]] = scores[:, at[1]] = 9.0
        each = [
            Sampling(temperature=0.0),
            Sampling(temperature=1e-30),
            Sampling(temperature=1.0, top_k=1),
            Sampling(temperature=1e-6, top_p=0.5),
            Sampling(temperature=1.0),  # or torch would be asked for the others
        ]
        assert chosen(scores, each, [1] * 5, [2] * 5)[:4] == [at[0]] * 4


def test_rows_that_are_not_finite_are_marked_and_others_are_not_touched() -> None:
    """A25: NaN and infinity anywhere in a row end that request only; all hidden is no choice."""
    scores = randn(6, 300, seed=6)
    scores[1, 299], scores[2, 0], scores[3] = float("nan"), float("inf"), NEVER
    scores[4, :299] = NEVER
    greedy, drawn = Sampling(temperature=0.0), Sampling(temperature=1.0)
    got = chosen(scores, [greedy, drawn, drawn, greedy, drawn, greedy], [0] * 6, [0] * 6)
    assert got == [int(scores[0].argmax()), -1, -1, -1, 299, int(scores[5].argmax())]


def test_a_row_depends_neither_on_its_neighbours_nor_on_threads() -> None:
    """A13."""
    rows = len(CUTS)
    scores = randn(rows, 700, scale=2.0, seed=7)
    seeds, positions = list(range(11, 11 + rows)), [3, 1, 4, 1, 5, 9, 2, 6]
    together, threads = chosen(scores, CUTS, seeds, positions), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert chosen(scores, CUTS, seeds, positions) == together
    finally:
        torch.set_num_threads(threads)
    for row in range(rows):
        alone = chosen(scores[row : row + 1], [CUTS[row]], [seeds[row]], [positions[row]])
        assert alone == [together[row]]
    turned = scores.t().contiguous().t()
    assert chosen(turned, CUTS, seeds, positions) == together


def test_penalties_are_those_of_torch_bit_for_bit() -> None:
    """A10: so that a greedy text with penalties is the same on both ways."""
    generator = np.random.default_rng(1)
    sizes = np.array([3, 40, 1], dtype=np.int64)
    tokens = np.concatenate([generator.choice(300, size, replace=False) for size in sizes])
    counts = generator.integers(0, 9, len(tokens)).astype(np.float32)
    factors = [np.array(values, dtype=np.float32) for values in ((1.3, 1, 1.7), (0.3, 0.1, 0), (0.7, 0, 0.1))]
    found = Occurrences([0, 2, 3], sizes, tokens, counts, *factors)
    scores = randn(4, 310, scale=2.0)[:, :301]
    expected, ours = scores.clone(), scores.clone()
    penalize(expected, found)
    NativeSampling().penalize(ours, found)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, scores)


@pytest.mark.parametrize("n", [5, 3000])
def test_drafts_are_judged_as_torch_does(n: int) -> None:
    """A19: the same drafts, the same random numbers; a place that is not finite ends a draft, and where p
    equals q p itself is drawn from."""
    lengths = [1, 4, 2, 3, 4, 1, 4, 4]
    total, count = sum(lengths), len(lengths)
    target = torch.softmax(randn(total + count, n, scale=2.0, seed=1), -1)
    places = torch.arange(total) + torch.arange(count).repeat_interleave(torch.tensor(lengths))
    proposal = 0.3 * torch.softmax(randn(total, n, scale=2.0, seed=2), -1) + 0.7 * target[places]
    tokens = torch.multinomial(proposal, 1, generator=torch.Generator().manual_seed(3)).squeeze(1).tolist()
    finite = torch.ones(len(target), dtype=torch.bool)
    finite[sum(lengths[:4]) + 4 + 1] = False
    proposal[sum(lengths[:5])] = target[sum(lengths[:5]) + 5]  # request 5 is the same as its proposal
    finite[sum(lengths[:5]) + 5] = False
    each = np.arange(count, dtype=np.uint64)
    at = np.concatenate([10 * r + np.arange(k + 1) for r, k in enumerate(lengths)]).astype(np.uint64)
    seeds = np.repeat(each, np.array(lengths) + 1)
    u_accept, u_own = (torch.from_numpy(draw.uniform(seeds, at, s)) for s in (ACCEPT, RESIDUAL))
    expected = reject(target, proposal, tokens, lengths, finite, u_accept, u_own)
    ours = NativeSampling().reject(target, proposal, tokens, lengths, finite, each, each * np.uint64(10))
    assert ours == expected
    assert 0 < sum(expected[0]) < total, "the case tests too little"
