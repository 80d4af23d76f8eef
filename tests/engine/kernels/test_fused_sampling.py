"""Choosing tokens by kernels, where the engine chooses them: against torch's way, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.sample import reference_probabilities
from engine.ops import choice, packed_sampling
from engine.ops.triton_sampling import TritonSampling
from engine.request import Request
from engine.speculation.base import Draft
from engine.speculation.distribution import probabilities
from engine.speculation.verify import DraftSampler, Verified
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, cannot_run
from tests.engine.driving import CPU
from tests.engine.kernels.support import interpreted_only
from tests.engine.oracle import tiny

pytestmark = interpreted_only

VOCAB = 300
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
]


def sampler(fused: bool, vocab: int = VOCAB) -> DraftSampler:
    made = DraftSampler(vocab, frozenset({3}), CPU)
    made.fused = TritonSampling() if fused else None
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


def logits(rows: int) -> Tensor:
    """Scores of which the tokens that occurred, and the one that ends, are the largest of some rows."""
    out = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))
    out[:, [3, 8]] += 3.0
    return out


def test_every_setting_gives_what_torch_gives() -> None:
    """A10, A14: greedy, penalties, min_tokens, temperature and cuts, seeds, log-probabilities, and rows that
    are not finite, in one batch. The logits stay as they were."""
    scores = logits(len(SETTINGS) + 2)
    scores[-2, 40], scores[-1, 41] = float("nan"), float("inf")
    before = scores.clone()
    settings = [*SETTINGS, Sampling(temperature=0.8, seed=1), Sampling(presence_penalty=1.0)]
    plain, fused = (sampler(on).sample(scores, requests(settings)) for on in (False, True))
    # Both draw in the order of the ids, from the same tokens.
    same = range(len(settings))
    assert [fused.token_ids[i] for i in same] == [plain.token_ids[i] for i in same]
    assert [fused.logprobs[i] for i in same] == [plain.logprobs[i] for i in same]
    assert fused.nonfinite == plain.nonfinite == [False] * len(SETTINGS) + [True] * 2
    for i, s in enumerate(SETTINGS):
        if s.top_k > 1 and not s.frequency_penalty:
            law = reference_probabilities(scores[i], s.temperature, s.top_k, s.top_p, s.min_p)
            assert law[fused.token_ids[i]] > 0
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("equals", "vocab"), [(3, VOCAB), (60, VOCAB), (9, 9)])
def test_equals_at_the_border_of_a_cut_stay_on_both_ways(equals: int, vocab: int) -> None:
    """A28: as in transformers, be they few, or more than are looked for among the most likely ones, whatever
    their batch mates ask for. Tokens for a seed are the same, and so are the distributions."""
    scores = logits(1).clamp(max=0.5)[:, :vocab].expand(10, vocab).contiguous()
    scores[:, :equals] = 1.0
    scores[:, 1] = 2.0
    settings = [
        Sampling(temperature=1.0, top_k=2 + seed % 2, top_p=0.9 if seed % 5 == 0 else 1.0, seed=seed)
        for seed in range(20, 30)
    ]
    whole = [i for i, s in enumerate(settings) if s.top_p == 1.0]
    plain, fused = (sampler(on, vocab).sample(scores, requests(settings)).token_ids for on in (False, True))
    assert [plain[i] for i in whole] == [fused[i] for i in whole]
    assert set(plain) <= set(range(equals))
    assert len(set(plain)) > 2
    ours, theirs = (
        draw(scores[:2], settings[:2]) for draw in (probabilities, TritonSampling().probabilities)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert int((ours[1] > 0).sum()) == equals


def test_a_nucleus_without_top_k_is_drawn_from() -> None:
    """A seed may give another token than torch's way, but only one that the cut leaves, and no batch mate
    can change it."""
    settings = [Sampling(temperature=1.2, top_p=0.5, seed=seed) for seed in range(24)]
    scores = logits(1).expand(24, VOCAB).contiguous()
    made = sampler(True)
    ids = made.sample(scores, requests(settings)).token_ids
    allowed = reference_probabilities(scores[0], 1.2, 0, 0.5, 0.0).nonzero().squeeze(1).tolist()
    assert set(ids) <= set(allowed)
    assert len(set(ids)) > 3
    alone = [made.sample(scores[:1], [request]).token_ids[0] for request in requests(settings)[:4]]
    assert alone == ids[:4]


def verified(
    fused: bool, scores: Tensor, settings: Sequence[Sampling], drafts: list[Draft]
) -> list[Verified]:
    return sampler(fused).verify(scores, requests(settings), drafts)


@pytest.mark.parametrize("drawn", [False, True], ids=["matched", "judged"])
def test_drafts_stay_as_far_as_torch_lets_them(drawn: bool) -> None:
    """A19: drafts that say what the target says, and drafts held against the target's probabilities, with
    penalties that count what was drafted."""
    temperature, top_k = (1.0, 12) if drawn else (0.4, 0)
    settings = [
        Sampling(temperature=temperature, top_k=top_k, seed=seed, frequency_penalty=0.5 * (seed % 2))
        for seed in range(12)
    ]
    scores = logits(4 * len(settings))
    drafts = []
    for i in range(len(settings)):
        near = scores[4 * i : 4 * i + 3] + 0.7 * logits(3).flip(1)
        probs = probabilities(near, [Sampling(temperature=1.0, top_k=12)] * 3)
        tokens = probs.argmax(-1).tolist()
        drafts.append(Draft(tokens, probs if drawn else None))
    plain, fused = (verified(on, scores, settings, drafts) for on in (False, True))
    assert fused == plain
    assert len({each.accepted for each in fused}) > 1


def test_the_switch_leaves_greedy_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A01: flipped while a request runs; rows say which way chose."""
    monkeypatch.setattr(choice, "samples_by_triton", lambda device: True)
    expected = tiny("llama")
    assert "fused_sampling" not in cannot_run(expected.loaded)
    engine = Engine(expected.loaded, fused_sampling=True)
    rid = engine.submit(expected.prompts[2], Sampling(max_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.core.step()
    engine.set(fused_sampling=False)
    engine.run()
    assert engine.ids(rid) == expected.ids[2][:6]
    assert {"sample=triton" in step.kernels for step in engine.heard.steps} == {True, False}


def test_what_rows_need_goes_to_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for each would cost more than the kernel. Rows that are all greedy need nothing."""
    copies: list[int] = []
    send = packed_sampling.send

    def counted(words: Any, device: torch.device) -> Tensor:
        copies.append(words.size)
        return send(words, device)

    monkeypatch.setattr(packed_sampling, "send", counted)
    made, scores = sampler(True), logits(3)
    made.sample(scores[:2], requests([Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=1)]))
    assert copies == []
    drawn = [Sampling(temperature=0.5, seed=seed) for seed in range(3)]
    made.sample(scores, requests(drawn))
    assert len(copies) == 1
    made._adjust(scores, requests([Sampling(temperature=0.0, presence_penalty=1.0)] * 3))
    assert len(copies) == 2
    one = np.zeros(1, dtype=np.uint64)
    rows = TritonSampling().probabilities(scores, drawn)
    TritonSampling().reject(rows, rows[:2], [1, 2], [2], torch.ones(3, dtype=torch.bool), one, one)
    assert len(copies) == 4
