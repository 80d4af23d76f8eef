"""Choosing tokens by kernels, where the engine chooses them: against torch's way, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.sample import reference_probabilities
from engine.ops import choice, packed_sampling
from engine.ops.triton_sampling import TritonSampling
from ipc.messages import Sampling
from tests.engine.choosing_rows import check_drafts, check_equals, check_settings, logits, requests, sampler
from tests.engine.core_harness import Engine, cannot_run
from tests.engine.kernels.support import interpreted_only
from tests.engine.oracle import tiny

pytestmark = interpreted_only

VOCAB = 300


def test_every_setting_gives_what_torch_gives() -> None:
    """A10, A14: see `check_settings`. Both draw in the order of the ids, from the same tokens."""
    check_settings(TritonSampling(), VOCAB)


@pytest.mark.parametrize(("equals", "vocab"), [(3, VOCAB), (60, VOCAB), (9, 9)])
def test_equals_at_the_border_of_a_cut_stay_on_both_ways(equals: int, vocab: int) -> None:
    """A28: see `check_equals`."""
    check_equals(TritonSampling(), equals, vocab)


@pytest.mark.parametrize("drawn", [False, True], ids=["matched", "judged"])
def test_drafts_stay_as_far_as_torch_lets_them(drawn: bool) -> None:
    """A19: see `check_drafts`."""
    check_drafts(TritonSampling(), drawn)


def test_a_nucleus_without_top_k_is_drawn_from() -> None:
    """A seed may give another token than torch's way, but only one that the cut leaves, and no batch mate
    can change it."""
    settings = [Sampling(temperature=1.2, top_p=0.5, seed=seed) for seed in range(24)]
    scores = logits(1, VOCAB).expand(24, VOCAB).contiguous()
    made = sampler(TritonSampling(), VOCAB)
    ids = made.sample(scores, requests(settings)).token_ids
    allowed = reference_probabilities(scores[0], 1.2, 0, 0.5, 0.0).nonzero().squeeze(1).tolist()
    assert set(ids) <= set(allowed)
    assert len(set(ids)) > 3
    alone = [made.sample(scores[:1], [request]).token_ids[0] for request in requests(settings)[:4]]
    assert alone == ids[:4]


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
    made, scores = sampler(TritonSampling(), VOCAB), logits(3, VOCAB)
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
