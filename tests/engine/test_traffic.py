"""The traffic model against a count made token by token, and against a published example."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.models.linears import NO_CODES, LinearTable
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec
from engine.traffic import StepTraffic, TrafficModel

LLAMA_3_8B = ModelSpec(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope=RopeSpec("default", 500000.0, 128, 8192),
    tie_word_embeddings=False,
    layer_windows=(None,) * 32,
)


def model(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> TrafficModel:
    shapes = [shape for name, shape in spec.weight_shapes().items() if name.startswith("layers")]
    params = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    head = spec.vocab_size * spec.hidden_size
    read = (params * dtype.itemsize,), (head * dtype.itemsize,)
    table = LinearTable((1,), *read, ("linear=plain",), (NO_CODES,))
    return TrafficModel(spec, table, embed_dtype=dtype, kv_dtype=dtype)


def step(traffic: TrafficModel, rows: list[tuple[int, int]], logit_rows: int) -> StepTraffic:
    new, computed = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return traffic.step(new, computed, logit_rows)


def test_llama_3_8b_in_bfloat16() -> None:
    """15.0 GB of weights a step; 64 requests at 2,048 tokens: 17.2 GB of KV, 1.03 TFLOP."""
    traffic = model(LLAMA_3_8B)
    out = step(traffic, [(1, 2047)] * 64, 64)
    assert out.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert out.kv_bytes == pytest.approx(17.2e9, rel=0.01)
    assert out.flops == pytest.approx(1.03e12, rel=0.01)
    assert step(traffic, [(2048, 0)], 1).flops == pytest.approx(29.7e12, rel=0.01)


@pytest.mark.parametrize("window", [None, 1, 8, 100])
def test_attention_is_counted_as_token_by_token(window: int | None) -> None:
    spec = replace(LLAMA_3_8B, layer_windows=(window,) * 16 + (None,) * 16)
    traffic = model(spec)
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = [(int(rng.integers(1, 40)), int(rng.integers(0, 40))) for _ in range(4)]
        pairs = {
            w: sum(min(p + 1, w or 1 << 30) for n, c in rows for p in range(c, c + n)) for w in (window, None)
        }
        read = {
            w: sum(
                len({k for p in range(c, c + n) for k in range(max(0, p + 1 - (w or 1 << 30)), p + 1)})
                for n, c in rows
            )
            for w in (window, None)
        }
        tokens = sum(n for n, _ in rows)
        out = step(traffic, rows, 0)
        assert out.kv_bytes == (16 * (read[window] + read[None]) + 32 * tokens) * 4 * spec.kv_size
        linear = 2 * tokens * spec.num_layers * traffic.layer_params
        assert out.flops - linear == 16 * 4 * spec.q_size * (pairs[window] + pairs[None])


def test_the_head_counts_only_where_logits_are_wanted() -> None:
    traffic = model(LLAMA_3_8B)
    without, with_one = step(traffic, [(5, 0)], 0), step(traffic, [(5, 0)], 1)
    assert with_one.weight_bytes - without.weight_bytes == 128256 * 4096 * 2
    assert with_one.flops - without.flops == 2 * 128256 * 4096
    assert step(traffic, [], 0) == StepTraffic(0, 0, 0)
