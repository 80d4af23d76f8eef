"""What each precision does to the demo model's predictions on public-domain texts.

Run with ``-s`` to see the table: perplexity ratio, Kullback-Leibler divergence per token, top-1 agreement,
all against the model's own weights in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.precision import (
    ActivationStats,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from engine.models.loader import load_model
from tests.engine.precision.reference_model import Key, linears, log_probs
from tests.engine.precision.texts import CALIBRATION, EVALUATION


@dataclass(frozen=True)
class Quality:
    perplexity_ratio: float
    mean_kl: float
    p99_kl: float
    top1: float


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.timeout(900)
def test_quality_of_each_precision(demo_model: Path) -> None:
    """int8 and fp8 stay close; int4 loses, and guided by activations it loses much less than rounded."""
    model = load_model(demo_model, dtype=torch.float32, device=torch.device("cpu"), progress=lambda *_: None)
    assert not set(EVALUATION) & set(CALIBRATION)
    texts = [model.tokenizer.encode(text, add_special=True) for text in EVALUATION]
    weights = linears(model)
    stats = {key: ActivationStats(weight.shape[1]) for key, weight in weights.items()}
    with torch.inference_mode():
        for text in CALIBRATION:
            ids = model.tokenizer.encode(text, add_special=True)
            log_probs(model, ids, weights, lambda key, x: stats[key].add(x))
        exact = [log_probs(model, ids, weights) for ids in texts]

    def nll(found: list[Tensor]) -> float:
        losses = [
            -p[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for p, ids in zip(found, texts, strict=True)
        ]
        return float(torch.cat(losses).mean())

    def measured(quantized: Callable[[Key, Tensor], QuantizedWeight]) -> Quality:
        with torch.inference_mode():
            other = {key: quantized(key, weight).dequantize() for key, weight in weights.items()}
            found = [log_probs(model, ids, other) for ids in texts]
        p, q = torch.cat(exact), torch.cat(found)
        kl = (p.exp() * (p - q)).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float().mean()
        return Quality(
            math.exp(nll(found) - nll(exact)), float(kl.mean()), float(kl.quantile(0.99)), float(same)
        )

    def awq(key: Key, weight: Tensor) -> QuantizedWeight:
        return quantize_int4(weight, importance=stats[key].importance, inputs=stats[key].inputs)

    assert math.exp(nll(exact)) < 60  # otherwise the model itself was not computed rightly
    fp8 = measured(lambda _, weight: quantize_fp8(weight))
    int8 = measured(lambda _, weight: quantize_int8(weight))
    plain = measured(lambda _, weight: quantize_int4(weight))
    guided = measured(awq)
    print(f"\n{'':10} {'ppl ratio':>10} {'mean KL':>10} {'p99 KL':>10} {'top-1':>8}")
    for name, q in (("fp8", fp8), ("int8", int8), ("int4 rtn", plain), ("int4 awq", guided)):
        print(f"{name:10} {q.perplexity_ratio:10.4f} {q.mean_kl:10.5f} {q.p99_kl:10.4f} {q.top1:8.2%}")
    assert int8.mean_kl < 0.006
    assert int8.perplexity_ratio < 1.01
    assert fp8.mean_kl < 0.03
    assert fp8.perplexity_ratio < 1.03
    assert guided.mean_kl < 0.6 * plain.mean_kl
    assert guided.p99_kl < plain.p99_kl
    assert guided.top1 > plain.top1 + 0.08
    assert guided.perplexity_ratio < plain.perplexity_ratio
    assert guided.perplexity_ratio < 1.25
