"""Drafts with probabilities: the target's distribution, exactly, whatever the drafts are drawn from."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import msgspec
import numpy as np
import pytest
import torch

from engine.draw import uniform
from engine.request import Request
from engine.sampling import Sampler
from engine.speculation.base import ACCEPT, PROPOSE, RESIDUAL, Draft
from engine.speculation.distribution import draw_proposal, probabilities
from engine.speculation.rejection import reject
from engine.speculation.verify import DraftSampler
from ipc.messages import Sampling
from tests.engine.speculation.helpers import CPU, Chain, Propose, chi_square, generate, nothing, request

VOCAB = 5
LENGTH = 3  # tokens generated, so 125 texts
COUNT = 12_000

CASES: list[dict[str, float]] = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "min_p": 0.3, "top_k": 4},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.8, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    {"temperature": 2.0, "frequency_penalty": 1.5, "top_p": 0.8, "min_p": 0.1},
]


def scores_after(chain: Chain, text: list[int], prompt: int, s: Sampling) -> np.ndarray:
    """The definitions of the penalties, token by token."""
    out = chain.table[text[-1]].double().numpy().copy()
    output = text[prompt:]
    for token in set(text):
        out[token] = (
            out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        )
    for token in set(output):
        out[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    return out


def exact_next(scores: np.ndarray, s: Sampling) -> np.ndarray:
    """softmax(scores / T), then top-k, top-p and min-p by their definitions."""
    p = np.exp((scores - scores.max()) / s.temperature)
    p /= p.sum()
    if s.top_k:
        p[p < np.sort(p)[-min(s.top_k, len(p))]] = 0
    if s.top_p < 1:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= s.top_p * p.sum()]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def exact_texts(chain: Chain, prompt: list[int], s: Sampling) -> np.ndarray:
    """Probability of each text of LENGTH tokens, by all ways to get there."""
    out = np.zeros([chain.vocab_size] * LENGTH)
    for text in itertools.product(range(chain.vocab_size), repeat=LENGTH):
        p = 1.0
        for i in range(LENGTH):
            p *= exact_next(scores_after(chain, [*prompt, *text[:i]], len(prompt), s), s)[text[i]]
        out[text] = p
    return out


def drafting(q: Chain, temperature: float, most: int) -> Propose:
    """A drafter that is a chain model of its own: draws with its own numbers, and gives its probabilities."""
    table = torch.softmax(q.table / temperature, -1)
    cdf = table.double().cumsum(-1).tolist()

    def propose(r: Request, k: int) -> Draft:
        k = min(k, most)
        seeds = np.full(k, r.seed, np.uint64)
        numbers = uniform(seeds, np.arange(r.num_tokens, r.num_tokens + k, dtype=np.uint64), PROPOSE)
        ids = [r.token_ids[-1]]
        for u in numbers.tolist():
            ids.append(min(bisect_right(cdf[ids[-1]], u), VOCAB - 1))
        return Draft(ids[1:], table[ids[:-1]])

    return propose


def texts(chain: Chain, propose: Propose, settings: dict[str, float], count: int) -> tuple[np.ndarray, float]:
    """How often each text of LENGTH tokens came out over ``count`` seeds; the share of drafts accepted."""
    sampling = msgspec.convert({"max_tokens": LENGTH, **settings}, Sampling)
    counts = np.zeros([VOCAB] * LENGTH)
    sampler = DraftSampler(VOCAB, frozenset(), CPU)
    drafted = accepted = 0
    for first in range(0, count, 1000):
        made = []
        for seed in range(first, first + 1000):
            r = request(seed + 1, [1, 2])
            r.sampling, r.seed, r.max_total, r.slot = sampling, seed, 2 + LENGTH, seed - first
            made.append(r)
        d, a = generate(chain, sampler, made, propose)
        drafted, accepted = drafted + d, accepted + a
        for r in made:
            counts[tuple(r.output_ids)] += 1
    return counts, accepted / max(drafted, 1)


def merged(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells too rare to judge alone, put together; impossible ones stay apart."""
    counts, expected = counts.ravel(), expected.ravel()
    rare = (expected > 0) & (expected * counts.sum() < 20)
    if rare.any() and expected[rare].sum() * counts.sum() >= 5:
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return counts, expected


@pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_texts_are_distributed_as_the_target_says(settings: dict[str, float]) -> None:
    """12,000 seeds, texts of three tokens from drafts of another model, against the exact joint distribution.

    Accepted, replaced and bonus tokens all occur; the penalties count drafts that lie before a place.
    """
    chain, other = Chain(VOCAB, seed=3), Chain(VOCAB, seed=4)
    other.table = 0.6 * chain.table + 0.4 * other.table
    counts, share = texts(chain, drafting(other, 1.3, 2), settings, COUNT)
    assert 0.15 < share < 0.95
    prompt = [1, 2]
    expected = exact_texts(chain, prompt, msgspec.convert(settings, Sampling))
    statistic, limit = chi_square(*merged(counts, expected))
    assert statistic <= limit


def test_the_test_would_notice_drafts_that_are_taken_too_easily() -> None:
    """The draft model's own texts, and a first token accepted unchecked, are far outside the limit."""
    chain, other = Chain(VOCAB, seed=3), Chain(VOCAB, seed=4)
    other.table = 0.6 * chain.table + 0.4 * other.table
    expected = exact_texts(chain, [1, 2], Sampling(temperature=1.0))
    biased, _ = texts(other, nothing, {"temperature": 1.3}, 10_000)
    statistic, limit = chi_square(*merged(biased, expected))
    assert statistic > 3 * limit


def test_more_drafts_are_accepted_than_where_the_target_draws_by_itself() -> None:
    """Sum of min(p, q) by rejection; the target's own draw agrees with an independent draft less often."""
    chain = Chain(VOCAB, seed=3)
    own = drafting(chain, 1.0, 2)

    def without(r: Request, k: int) -> Draft:
        return Draft(own(r, k).token_ids)

    _, by_rejection = texts(chain, own, {"temperature": 1.0}, 3000)
    _, by_choice = texts(chain, without, {"temperature": 1.0}, 3000)
    assert by_rejection == 1.0  # p = q: nothing is ever refused
    assert by_choice < 0.8


def test_a_draft_of_another_support_is_refused_where_the_target_never_goes() -> None:
    """p and q do not overlap: all is refused and the target's own token comes; q where p is 0 stays out."""
    target = torch.tensor([[0.0, 0.4, 0.6, 0.0]] * 4)
    proposal = torch.tensor([[0.5, 0.0, 0.0, 0.5]] * 2)
    finite = torch.ones(4, dtype=torch.bool)
    u = torch.full((4,), 0.5, dtype=torch.float64)
    assert reject(target, proposal, [0, 3], [1, 1], finite, u * 0, u) == ([0, 0], [2, 2])


def test_equal_distributions_are_always_accepted_even_at_the_ends_of_the_unit_interval() -> None:
    p = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), -1)
    for u in (0.0, 1.0 - 2.0**-53):
        numbers = torch.full((3,), u, dtype=torch.float64)
        accepted, own = reject(
            p, p[:2].clone(), [7, 8], [2], torch.ones(3, dtype=torch.bool), numbers, numbers
        )
        assert accepted == [2]
        assert 0 <= own[0] < 50


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.4},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 3.0, "top_k": 700},
        {"temperature": 3.0, "top_k": 1500, "top_p": 0.97},
        {"temperature": 30.0, "top_p": 0.9},
    ],
    ids=str,
)
def test_probabilities_are_those_that_the_sampler_draws_from(settings: dict[str, float]) -> None:
    """3,000 tokens: the support is exactly that of 2,000 draws, and the nucleus needs more than one look."""
    n = 3000
    logits = torch.randn(1, n, generator=torch.Generator().manual_seed(1)) * 3
    sampling = msgspec.convert(settings, Sampling)
    (p,) = probabilities(logits, [sampling])
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    want = exact_next(logits[0].double().numpy(), sampling)
    np.testing.assert_array_equal(p.numpy() > 0, want > 0)
    np.testing.assert_allclose(p.numpy(), want, rtol=2e-4, atol=1e-9)
    rows = [request(i, [1, 2], seed=i, **settings) for i in range(2000)]
    drawn = Sampler(n, frozenset(), CPU).sample(logits.expand(2000, n).contiguous(), rows).token_ids
    assert (p[torch.tensor(drawn)] > 0).all()


def test_equal_scores_at_the_border_are_cut_as_the_sampler_cuts_them() -> None:
    """All six equal tokens stay for a small top_k, for top-p behind it, and for top-p alone: none is less
    likely than another."""
    logits = torch.zeros(1, 6)
    both = {"temperature": 1.0, "top_k": 4, "top_p": 0.4}
    (p,) = probabilities(logits, [msgspec.convert(both, Sampling)])
    rows = [request(i, [1, 2], seed=i, **both) for i in range(100)]
    drawn = Sampler(6, frozenset(), CPU).sample(logits.expand(100, 6).contiguous(), rows).token_ids
    assert set(p.nonzero().flatten().tolist()) == set(drawn)
    assert set(drawn) == set(range(6))
    assert p.tolist() == pytest.approx([1 / 6] * 6)
    assert int((probabilities(logits, [Sampling(temperature=1.0, top_k=4)]) > 0).sum()) == 6
    assert int((probabilities(logits, [Sampling(temperature=1.0, top_p=0.5)]) > 0).sum()) == 6


def test_a_proposal_is_drawn_from_its_probabilities_with_numbers_of_its_own() -> None:
    p = torch.softmax(torch.tensor([1.0, -0.5, 2.0, 0.3]), -1)
    positions = np.arange(20_000, dtype=np.uint64)
    seeds = np.full_like(positions, 9)
    ids = draw_proposal(p.expand(20_000, 4).contiguous(), seeds, positions)
    statistic, limit = chi_square(np.bincount(ids.numpy(), minlength=4).astype(float), p.double().numpy())
    assert statistic <= limit
    streams = [uniform(seeds, positions, purpose) for purpose in (0, ACCEPT, RESIDUAL, PROPOSE)]
    for a, b in itertools.combinations(streams, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
