"""What the lossy knobs of the KV cache cost, on a fixed text, against the model's own precision.

Measured with the demo model in float32 over 742 tokens: int8 mean KL 0.016 nats, top-1 agreement 95 %;
fp8_e4m3 0.035 and 90 %; int8 with scales of 1.0 3.8 and 27 %; a window of 256 1.13 and 65 %. The bounds leave
room for the rounding of other CPUs.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine.calibration import calibration_ids
from engine.kv_scales import Extremes
from engine.models.loader import load_model
from engine.runner import ModelRunner
from tests import quality
from tests.engine.driving import CPU, prompt, tiny
from tests.public_domain import TEXT
from tests.quality import Quality, score


class Measured:
    """The demo model in float32, and its distributions over the text."""

    def __init__(self, file: Path) -> None:
        loaded = load_model(file, dtype=torch.float32, device=CPU, progress=lambda *_: None)
        self.ids = loaded.tokenizer.encode(TEXT, add_special=True)
        self.runner = ModelRunner(
            loaded,
            device=CPU,
            dtype=torch.float32,
            measure=False,
            calibration_ids=calibration_ids(loaded.tokenizer, loaded.spec.max_model_len),
            consume=True,
        )
        self.reference = quality.log_probabilities(self.runner, self.ids)

    def against(self, kv_dtype: str = "model", window: int = 0) -> tuple[Quality, torch.Tensor]:
        changed = quality.log_probabilities(self.runner, self.ids, kv_dtype=kv_dtype, window=window)
        return quality.compare(self.reference, changed, self.ids), changed


@pytest.fixture(scope="module")
def measured(demo_model: Path) -> Measured:
    return Measured(demo_model)


@pytest.mark.slow
@pytest.mark.demo_model
def test_eight_bits_a_key_keep_most_of_what_the_model_says(measured: Measured) -> None:
    """A31: int8 and fp8_e4m3 with calibrated scales stay near; int8 with scales of 1.0 would not."""
    assert len(measured.ids) > 600
    int8, _ = measured.against("int8")
    assert 0 < int8.mean_kl_nats < 0.04
    assert int8.mean_kl_nats < int8.p99_kl_nats < 0.4
    assert 0.92 < int8.top1_agreement < 1
    assert 0.95 < int8.perplexity_ratio < 1.08

    fp8, _ = measured.against("fp8_e4m3")
    assert int8.mean_kl_nats < fp8.mean_kl_nats < 0.08
    assert 0.86 < fp8.top1_agreement < 1
    assert 0.95 < fp8.perplexity_ratio < 1.12

    found = measured.runner._calibration._extremes
    assert found is not None
    try:
        measured.runner._calibration._extremes = Extremes(
            torch.full_like(found.k, 127.0), torch.full_like(found.v, 127.0)
        )
        assert (measured.runner.kv_scales("int8").k == 1).all()
        plain, _ = measured.against("int8")
    finally:
        measured.runner._calibration._extremes = found
    assert plain.mean_kl_nats > 20 * int8.mean_kl_nats
    assert plain.top1_agreement < int8.top1_agreement - 0.3


@pytest.mark.slow
@pytest.mark.demo_model
def test_a_window_costs_nothing_before_it_cuts_and_much_after(measured: Measured) -> None:
    """A33: up to 256 tokens nothing is cut off; from there on the text's start is missing."""
    found, changed = measured.against(window=256)
    assert 0.3 < found.mean_kl_nats < 3
    assert found.top1_agreement < 0.85
    assert found.perplexity_ratio > 1.2
    torch.testing.assert_close(changed[:256], measured.reference[:256], rtol=0, atol=1e-3)
    assert (changed[256] - measured.reference[256]).abs().max() > 0.1
    wide, _ = measured.against(window=len(measured.ids))
    assert wide.mean_kl_nats < 1e-6
    assert wide.top1_agreement == 1


def test_the_comparison_is_right_where_it_can_be_reckoned() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1], [0.2, 0.2, 0.6]]).log()
    found = quality.compare(p, q, [2, 0, 2])
    kl = [0.25 * math.log(2), 0.0, 0.2 * math.log(0.5) + 0.8 * math.log(0.8 / 0.6)]
    assert found.positions == 3
    assert found.mean_kl_nats == pytest.approx(sum(kl) / 3, rel=1e-5)
    assert found.p99_kl_nats == pytest.approx(0.98 * kl[0] + 0.02 * kl[2], rel=1e-4)
    assert found.top1_agreement == pytest.approx(2 / 3)
    # The text's tokens were 0.5 and 0.1 likely, now 0.25 and 0.1.
    assert found.perplexity_ratio == pytest.approx(math.sqrt(2), rel=1e-5)


def test_scoring_gives_the_same_logits_in_any_cut_and_refuses_what_is_too_long() -> None:
    loaded, reference = tiny("qwen3")
    runner = ModelRunner(loaded, device=CPU, dtype=torch.float32, measure=False)
    ids = prompt(70)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    runner.allocate_kv(18, 4)
    for chunk in (1, 33, 256):
        parts = list(score(runner, ids, chunk))
        assert [len(part) for part in parts[:-1]] == [chunk] * (len(parts) - 1)
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="a text of 73 tokens needs 19 blocks of 4, the pool has 18"):
        next(score(runner, prompt(73)))
    runner.allocate_kv(200, 4)
    with pytest.raises(ValueError, match="the longest context is 512 tokens"):
        next(score(runner, prompt(600)))
