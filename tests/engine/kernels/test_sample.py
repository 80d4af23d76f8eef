"""Choosing tokens: the kernels against the definitions, and against what the engine does on a CPU."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine import draw
from engine.kernels import rejection_sample as rejecting
from engine.kernels import vocabulary
from engine.kernels.penalties import penalize, reference_penalize
from engine.kernels.rejection_sample import (
    match_drafts,
    reference_rejection_sample,
    rejection_sample,
    sums_for,
)
from engine.kernels.sample import NOT_FINITE, probabilities, reference_probabilities, sample
from engine.kernels.uniform import uniform
from engine.kernels.vocabulary import Found
from engine.sampling import GREEDY_BELOW
from engine.speculation.base import ACCEPT, RESIDUAL
from engine.speculation.rejection import reject
from ipc.messages import Sampling
from tests.engine.kernels.support import DEVICE, poisoned, randn

BIG = 2**64 - 3


@triton.jit
def _uniform_all(seeds: Any, positions: Any, out: Any, DRAW: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(out + at, uniform(tl.load(seeds + at), tl.load(positions + at), DRAW))


def as_int64(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> Tensor:
    return torch.from_numpy(numbers.view(np.int64)).to(DEVICE)


@pytest.mark.parametrize("stream", [0, 1, 31, ACCEPT, RESIDUAL])
def test_random_numbers_are_those_of_the_engine_bit_for_bit(stream: int) -> None:
    seeds = np.array([0, 1, 7, BIG, 2**63, 123456789012345, 2**32 - 1, 3], dtype=np.uint64)
    positions = np.array([0, 0, 5, 2**31, 2**40, 2**63 - 1, 100, 2**32 - 1], dtype=np.uint64)
    out = poisoned(8, dtype=torch.float64)
    _uniform_all[(1,)](as_int64(seeds), as_int64(positions), out, stream, 8)
    assert out.cpu().numpy().tolist() == draw.uniform(seeds, positions, stream).tolist()


def settings_of(each: list[Sampling]) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p and min_p of rows, as the kernels take them."""

    def column(name: str) -> Tensor:
        dtype = torch.int32 if name == "top_k" else torch.float32
        return torch.tensor([getattr(s, name) for s in each], dtype=dtype, device=DEVICE)

    return tuple(column(name) for name in ("temperature", "top_k", "top_p", "min_p"))


def poisoned_found(logits: Tensor) -> Found:
    """Memory to work in, in which nothing that was there before may count."""
    made = Found.allocate(*logits.shape, logits.device)
    return Found(*(poisoned(*part.shape, dtype=part.dtype) for part in astuple(made)))


def chosen(logits: Tensor, each: list[Sampling], seeds: list[int], positions: list[int]) -> list[int]:
    ids = poisoned(len(each), dtype=torch.int64)
    for launch in sample(
        logits, *settings_of(each), as_int64(np.array(seeds, dtype=np.uint64)),
        torch.tensor(positions, device=DEVICE), ids, poisoned_found(logits), greedy_below=GREEDY_BELOW,
    ):  # fmt: skip
        launch.run()
    found: list[int] = ids.tolist()
    return found


CUTS = [
    Sampling(temperature=1.0, top_k=0, top_p=1.0),
    Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.05),
    Sampling(temperature=2.0, top_k=7, top_p=1.0),
    Sampling(temperature=0.7, top_k=0, top_p=0.8),
    Sampling(temperature=1.3, top_k=50, top_p=0.6, min_p=0.02),
    Sampling(temperature=1.0, top_k=0, top_p=1e-6),
    Sampling(temperature=1.0, top_k=2000, top_p=0.999),
]


@pytest.mark.parametrize("n", [1, 100, 2500])
def test_distributions_are_their_definition(n: int) -> None:
    """A28: the temperature counts once. Ties at the border, hidden tokens, and cuts on top of each other."""
    logits = randn(len(CUTS), n + 3, scale=3.0)[:, :n]
    if n > 10:
        logits[:, 5] = float("-inf")
        logits[:, 6:9] = logits[:, 9:10]
        logits[4] = (logits[4] * 2).round() / 2
    out = poisoned(len(CUTS), n, dtype=torch.float32)
    for launch in probabilities(logits, *settings_of(CUTS), out, poisoned_found(logits)):
        launch.run()
    for row, s in enumerate(CUTS):
        exact = reference_probabilities(logits[row], s.temperature, s.top_k, s.top_p, s.min_p)
        assert torch.equal(out[row] > 0, exact > 0), s
        torch.testing.assert_close(out[row].double(), exact, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("n", [3, 2500])
def test_tokens_are_where_the_running_sum_passes_the_random_number(n: int) -> None:
    each = CUTS * 2
    logits = randn(len(each), n, scale=2.0, seed=3)
    seeds, positions = list(range(len(each))), [100 + i for i in range(len(each))]
    got = chosen(logits, each, seeds, positions)
    u = draw.uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    for row, s in enumerate(each):
        exact = reference_probabilities(logits[row], s.temperature, s.top_k, s.top_p, s.min_p)
        running = exact.cumsum(0)
        low = float(running[got[row]] - exact[got[row]])
        assert exact[got[row]] > 0
        assert low - 1e-6 <= u[row] <= float(running[got[row]]) + 1e-6


def test_a_token_does_not_follow_from_how_its_row_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are programs of their own, whose sums are whole numbers. The largest score is in two of them,
    and the last is of a few scores."""
    each = [CUTS[4], CUTS[3]]
    logits = randn(len(each), 1100, scale=2.0, seed=8)
    logits[:, 300] = logits[:, 1090] = logits.amax(1) + 1.0
    logits[0, 1000:1050] = logits[0, 10]

    def drawn(segment: int) -> tuple[list[int], Tensor]:
        monkeypatch.setattr(vocabulary, "SEGMENT", segment)
        out = poisoned(*logits.shape, dtype=torch.float32)
        found = poisoned_found(logits)
        assert found.tops.shape[1] == -(-1100 // segment)
        for launch in probabilities(logits, *settings_of(each), out, found):
            launch.run()
        return chosen(logits, each, [3, 4], [6, 7]), out

    ids, law = drawn(4096)
    again, the_same = drawn(1024)
    assert again == ids
    assert torch.equal(law, the_same)


def test_the_engines_own_tokens_come_out() -> None:
    """Where the engine draws in the order of the ids too: without top-p, and with a top-k of many."""
    each = [
        Sampling(temperature=t, top_k=k, top_p=1.0, min_p=p)
        for t, k, p in ((0.6, 0, 0.0), (1.5, 0, 0.1), (0.9, 1200, 0.0), (2.0, 1200, 0.05))
    ]
    logits = randn(len(each), 3000, scale=2.0, seed=4)
    seeds, positions = np.arange(len(each), dtype=np.uint64), np.full(len(each), 77, dtype=np.uint64)
    expected = draw.draw_all(logits.clone(), logits.amax(1), each, seeds, positions)
    assert chosen(logits, each, seeds.tolist(), positions.tolist()) == expected.tolist()


def test_greedy_rows_take_the_first_of_the_most_likely() -> None:
    """A26: a tiny temperature is greedy."""
    logits = randn(4, 5000, seed=5)
    logits[:, 3000] = logits[:, 4100] = 9.0
    each = [
        Sampling(temperature=0.0),
        Sampling(temperature=1e-30),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1e-6, top_p=0.5),
    ]
    assert chosen(logits, each, [1] * 4, [2] * 4) == [3000] * 4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_are_not_finite_are_marked_and_others_are_not_touched() -> None:
    """A25: NaN and infinity anywhere in a row end that request only."""
    logits = randn(5, 300, seed=6)
    logits[1, 299] = float("nan")
    logits[2, 0] = float("inf")
    logits[3] = float("-inf")
    greedy, drawn = Sampling(temperature=0.0), Sampling(temperature=1.0)
    each = [greedy, drawn, drawn, greedy, greedy]
    got = chosen(logits, each, [0] * 5, [0] * 5)
    assert got[1:4] == [NOT_FINITE] * 3
    law = poisoned(3, 300, dtype=torch.float32).zero_()
    cuts = settings_of([drawn, Sampling(temperature=1.0, top_k=5, top_p=0.5), drawn])
    for launch in probabilities(logits[1:4], *cuts, law, poisoned_found(logits[1:4])):
        launch.run()
    assert law.isnan().all()
    assert got[0] == int(logits[0].argmax())
    assert got[4] == int(logits[4].argmax())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = randn(7, 700, scale=2.0, seed=7)
    seeds, positions = [11, 12, 13, 14, 15, 16, 17], [3, 1, 4, 1, 5, 9, 2]
    together = chosen(logits, CUTS, seeds, positions)
    for row in (0, 3, 4):
        alone = chosen(logits[row : row + 1], [CUTS[row]], [seeds[row]], [positions[row]])
        assert alone == [together[row]]


def test_penalties_touch_what_occurred_and_nothing_else() -> None:
    prompts = [[1, 2, 3, 3], [], [5], list(range(300))]
    outputs = [[3, 9], [7, 7, 7], [], list(range(250, 290))]
    settings = [(1.5, 0.3, 0.2), (1.0, 1.0, 0.5), (2.0, 0.0, 0.0), (1.2, -0.5, 0.1)]
    scores = randn(4, 310, scale=2.0)[:, :305]
    expected = [
        reference_penalize(scores[i], prompts[i], outputs[i], *settings[i]) for i in range(len(settings))
    ]
    distinct = [sorted({*p, *o}) for p, o in zip(prompts, outputs, strict=True)]
    distinct[2][:0] = [-1, -1]  # places of a list that nothing is at
    cu = torch.tensor([0] + [len(d) for d in distinct]).cumsum(0).to(torch.int32).to(DEVICE)
    tokens = torch.tensor([t for d in distinct for t in d], device=DEVICE)
    occurred = [o.count(t) for d, o in zip(distinct, outputs, strict=True) for t in d]
    counts = torch.tensor(occurred, dtype=torch.int32, device=DEVICE)
    r, p, f = torch.tensor(settings, dtype=torch.float32, device=DEVICE).t().contiguous()
    penalize(scores, cu, tokens, counts, r, p, f, max_tokens=300).run()
    torch.testing.assert_close(scores.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)


def drafts(n: int, lengths: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Target rows, proposals, and tokens drawn from them."""
    total = sum(lengths)
    target = torch.softmax(randn(total + len(lengths), n, scale=2.0, seed=1), -1)
    proposal = torch.softmax(randn(total, n, scale=2.0, seed=2), -1)
    places = torch.arange(total) + torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    proposal = 0.3 * proposal + 0.7 * target[places.to(DEVICE)]
    drawn = torch.multinomial(proposal.cpu(), 1, generator=torch.Generator().manual_seed(3))
    return target, proposal, drawn.squeeze(1).tolist()


def run_rejection(
    target: Tensor, proposal: Tensor, tokens: list[int], lengths: list[int], finite: Tensor, positions: Tensor
) -> tuple[list[int], list[int]]:
    count = len(lengths)
    accepted, own = poisoned(count, dtype=torch.int32), poisoned(count, dtype=torch.int64)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    sums = poisoned(*sums_for(count, target.shape[1], DEVICE).shape, dtype=torch.int64)
    for launch in rejection_sample(
        target, proposal, torch.tensor(tokens, dtype=torch.int64, device=DEVICE), cu, finite.to(torch.int8),
        torch.arange(count, device=DEVICE), positions, accepted, own, sums, accept=ACCEPT, residual=RESIDUAL,
    ):  # fmt: skip
        launch.run()
    return accepted.tolist(), own.tolist()


@pytest.mark.parametrize("n", [5, 3000, 4096])
def test_drafts_are_judged_as_the_engine_does(n: int) -> None:
    """The same drafts, the same random numbers; a place that is not finite ends a draft. Rows of one segment,
    of parts of two, and of two that are full."""
    lengths = [1, 4, 2, 3, 4, 1, 4, 4]
    target, proposal, tokens = drafts(n, lengths)
    finite = torch.ones(len(target), dtype=torch.bool, device=DEVICE)
    finite[sum(lengths[:4]) + 4 + 1] = False
    target[1] = proposal[0]  # where the residual of request 0 would be, had it not been all of p
    positions = torch.tensor([10 * r for r in range(len(lengths))], device=DEVICE)
    seeds = np.repeat(np.arange(len(lengths), dtype=np.uint64), np.array(lengths) + 1)
    at = np.concatenate([10 * r + np.arange(k + 1) for r, k in enumerate(lengths)]).astype(np.uint64)
    u_accept, u_own = (torch.from_numpy(draw.uniform(seeds, at, s)).to(DEVICE) for s in (ACCEPT, RESIDUAL))
    expected = reject(target, proposal, tokens, lengths, finite, u_accept, u_own)
    assert run_rejection(target, proposal, tokens, lengths, finite, positions) == expected
    exact = reference_rejection_sample(
        target, proposal, tokens, lengths, finite.tolist(), u_accept.tolist(), u_own.tolist()
    )
    assert exact == expected
    assert 0 < sum(expected[0]) < sum(lengths), "the case tests too little"


def test_a_draft_of_any_length_is_judged_and_none_at_all_is_an_empty_one() -> None:
    """More tokens than are looked at at once, as many, and none: then what follows is the target's own."""
    lengths = [0, 16, 33, 0, 17]
    target, proposal, _ = drafts(40, lengths)
    places = torch.arange(sum(lengths)) + torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    proposal = target[places.to(DEVICE)].contiguous()
    tokens = torch.multinomial(proposal.cpu(), 1, generator=torch.Generator().manual_seed(3)).squeeze(1)
    finite = torch.ones(len(target), dtype=torch.bool, device=DEVICE)
    finite[0 + 1 + 17 + 20] = False  # in the middle of the third
    positions = torch.tensor([3, 5, 7, 11, 2**31 - 5], device=DEVICE)
    seeds = np.repeat(np.arange(len(lengths), dtype=np.uint64), np.array(lengths) + 1)
    at = np.concatenate([p + np.arange(k + 1) for p, k in zip(positions.tolist(), lengths, strict=True)])
    u = [draw.uniform(seeds, at.astype(np.uint64), stream).tolist() for stream in (ACCEPT, RESIDUAL)]
    expected = reference_rejection_sample(target, proposal, tokens.tolist(), lengths, finite.tolist(), *u)
    assert expected[0] == [0, 16, 20, 0, 17], "what equals its proposal stays"
    assert run_rejection(target, proposal, tokens.tolist(), lengths, finite, positions) == expected


def test_without_any_draft_no_proposal_is_read() -> None:
    target = torch.softmax(randn(3, 70, scale=2.0), -1)
    none = torch.empty(0, 70, device=DEVICE)
    finite = torch.ones(3, dtype=torch.bool, device=DEVICE)
    positions = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    accepted, own = run_rejection(target, none, [], [0, 0, 0], finite, positions)
    seeds = np.arange(3, dtype=np.uint64)
    u = torch.from_numpy(draw.uniform(seeds, np.zeros(3, dtype=np.uint64), RESIDUAL)).to(DEVICE)
    assert accepted == [0, 0, 0]
    assert own == draw.inverse_cdf(target, u).tolist()


def test_what_follows_a_draft_does_not_depend_on_how_its_row_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are programs of their own, whose sums are whole numbers; the last is of one probability. Where
    p equals q but for rounding nothing may be left in one segment, and something in another."""
    lengths = [2, 3, 1, 2, 0, 1]
    target, proposal, tokens = drafts(1025, lengths)
    finite = torch.ones(len(target), dtype=torch.bool, device=DEVICE)
    finite[0] = finite[7] = False
    proposal[0] = target[0]
    proposal[0, :1024] *= 1 + 2**-20
    proposal[0, 1024] *= 0.5
    proposal[5] = target[7]
    positions = torch.arange(len(lengths), device=DEVICE)

    def judged(segment: int) -> tuple[list[int], list[int]]:
        monkeypatch.setattr(rejecting, "SEGMENT", segment)
        assert sums_for(1, 1025, DEVICE).shape[2] == -(-1025 // segment)
        return run_rejection(target, proposal, tokens, lengths, finite, positions)

    found = judged(2048)
    assert found[1][0] == 1024, "all that is left"
    assert judged(256) == judged(64) == found


def test_what_is_no_distribution_has_no_token() -> None:
    """A25: of zeros, or of NaN, no id comes out that could be taken for a token."""
    target = torch.zeros(2, 2100, device=DEVICE)
    target[1] = float("nan")
    finite = torch.ones(2, dtype=torch.bool, device=DEVICE)
    positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    _, own = run_rejection(target, target[:0], [], [0, 0], finite, positions)
    assert own == [-1, -1]


def test_padding_is_never_accepted_and_what_equals_its_proposal_is_drawn_from_it() -> None:
    target, proposal, tokens = drafts(40, [2, 2])
    tokens[1] = -1
    finite = torch.ones(len(target), dtype=torch.bool, device=DEVICE)
    # Request 1: p equals q at a place that counts as not finite, so that nothing is left of p - q.
    proposal[2] = target[3]
    finite[3] = False
    positions = torch.tensor([5, 9], device=DEVICE)
    accepted, own = run_rejection(target, proposal, tokens, [2, 2], finite, positions)
    assert accepted[0] <= 1
    assert accepted[1] == 0
    at = np.array([5 + accepted[0], 9], dtype=np.uint64)
    u = torch.from_numpy(draw.uniform(np.array([0, 1], dtype=np.uint64), at, RESIDUAL)).to(DEVICE)
    if accepted[0] == 1:  # drawn from all of p, for nothing was proposed there
        assert own[0] == int(draw.inverse_cdf(target[1:2], u[:1]))
    assert own[1] == int(draw.inverse_cdf(target[3:4], u[1:]))


def test_a_draft_holds_as_far_as_the_target_says_the_same() -> None:
    """Whole, half, and not at all; none; padded; and a place that is not finite, which matches nothing."""
    drafted = [[4, 5, 6], [4, 9, 6], [7], [], [8, -1, -1], [2, 3]]
    chosen_there = [[4, 5, 6, 1], [4, 5, 6, 2], [1, 3], [4], [8, -1, 3, 3], [2, NOT_FINITE, 5]]
    cu = torch.tensor([0] + [len(d) for d in drafted]).cumsum(0).to(torch.int32).to(DEVICE)
    tokens = torch.tensor([t for d in drafted for t in d], device=DEVICE)
    ids = torch.tensor([t for c in chosen_there for t in c], device=DEVICE)
    accepted, own = poisoned(6, dtype=torch.int32), poisoned(6, dtype=torch.int64)
    match_drafts(ids, tokens, cu, accepted, own, max_drafted=3).run()
    assert accepted.tolist() == [3, 1, 0, 0, 1, 1]
    assert own.tolist() == [1, 5, 1, 4, NOT_FINITE, NOT_FINITE]
