"""Rows to choose tokens for, and what any kernels that choose them have to agree with torch's way in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import Request
from engine.sampling import FusedSampling
from engine.speculation.base import Draft
from engine.speculation.distribution import probabilities
from engine.speculation.verify import DraftSampler
from ipc.messages import Sampling
from tests.engine.driving import CPU

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.0, logprobs=2),
    Sampling(temperature=0.0, repetition_penalty=1.8, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.0, min_tokens=9),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.3, top_k=7, seed=6, logprobs=0),
    Sampling(temperature=1.3, top_k=20, top_p=0.6, seed=7),
    Sampling(temperature=1.0, top_k=50, min_p=0.2, seed=8, frequency_penalty=0.5),
    Sampling(temperature=0.9, top_k=1, seed=9),
    Sampling(temperature=0.8, top_k=40, min_tokens=5, seed=3),
]


def sampler(fused: FusedSampling | None, vocab: int) -> DraftSampler:
    """One whose token 3 ends a text."""
    made = DraftSampler(vocab, frozenset({3}), CPU)
    made.fused = fused
    return made


def requests(settings: Sequence[Sampling]) -> list[Request]:
    """Requests of a prompt of four tokens and an output of three."""
    out = []
    for i, each in enumerate(settings):
        request = Request(i + 1, [5, 6, 7, 5], each)
        request.token_ids += [8, 8, 9]
        request.slot = i
        out.append(request)
    return out


def logits(rows: int, vocab: int) -> Tensor:
    """Scores of which the tokens that occurred, and the one that ends, are the largest of some rows."""
    out = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    out[:, [3, 8]] += 3.0
    return out


def check_settings(fused: FusedSampling, vocab: int) -> None:
    """Greedy, penalties, min_tokens, temperature and cuts, seeds, log-probabilities, and rows that are not
    finite, in one batch: all as torch's way has it. The logits stay as they were."""
    scores = logits(len(SETTINGS) + 2, vocab)
    scores[-2, 40], scores[-1, 41] = float("nan"), float("inf")
    before = scores.clone()
    settings = [*SETTINGS, Sampling(temperature=0.8, seed=1), Sampling(presence_penalty=1.0)]
    plain, found = (sampler(each, vocab).sample(scores, requests(settings)) for each in (None, fused))
    assert found == plain
    assert found.nonfinite == [False] * len(SETTINGS) + [True] * 2
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())


def check_equals(fused: FusedSampling, equals: int, vocab: int) -> None:
    """Equally likely tokens at the border of a cut stay, as in transformers, be they few, or more than
    torch's way looks for among the most likely ones, whatever their batch mates ask for. Tokens for a seed
    are the same, and so are the distributions."""
    scores = logits(1, max(vocab, 300)).clamp(max=0.5)[:, :vocab].expand(10, vocab).contiguous()
    scores[:, :equals] = 1.0
    scores[:, 1] = 2.0
    settings = [
        Sampling(temperature=1.0, top_k=2 + seed % 2, top_p=0.9 if seed % 5 == 0 else 1.0, seed=seed)
        for seed in range(20, 30)
    ]
    whole = [i for i, s in enumerate(settings) if s.top_p == 1.0]
    plain, found = (
        sampler(each, vocab).sample(scores, requests(settings)).token_ids for each in (None, fused)
    )
    assert [plain[i] for i in whole] == [found[i] for i in whole]
    for ids in (plain, found):
        assert set(ids) <= set(range(equals))
        assert len(set(ids)) > 2
    ours, theirs = (draw(scores[:2], settings[:2]) for draw in (fused.probabilities, probabilities))
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-7)
    assert int((ours[1] > 0).sum()) == equals


def check_drafts(fused: FusedSampling, drawn: bool) -> None:
    """Drafts that say what the target says, or that are held against the target's probabilities, with
    penalties that count what was drafted: as far as torch's way lets them stay."""
    vocab = 300
    temperature, top_k = (1.0, 12) if drawn else (0.4, 0)
    settings = [
        Sampling(temperature=temperature, top_k=top_k, seed=seed, frequency_penalty=0.5 * (seed % 2))
        for seed in range(12)
    ]
    scores = logits(4 * len(settings), vocab)
    drafts = []
    for i in range(len(settings)):
        near = scores[4 * i : 4 * i + 3] + 0.7 * logits(3, vocab).flip(1)
        probs = probabilities(near, [Sampling(temperature=1.0, top_k=12)] * 3).float()
        drafts.append(Draft(probs.argmax(-1).tolist(), probs if drawn else None))
    plain, found = (sampler(each, vocab).verify(scores, requests(settings), drafts) for each in (None, fused))
    assert found == plain
    assert len({each.accepted for each in found}) > 1
