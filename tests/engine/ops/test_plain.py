"""The parts of a decoder as torch computes them: it gives what its formulas give, bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionPlan, Rows, get_backend
from engine.kv_cache import KVCache
from engine.kv_scales import KVScales
from engine.layers.norm import head_rms_norm, rms_norm
from engine.layers.rope import rotate_
from engine.models.decoder import Decoder
from engine.models.linears import LinearMaker, WeightStore
from engine.ops.plain import PLAIN
from tests.engine.driving import CPU, prompt, tiny

BLOCK_SIZE = 8


def written_out(
    decoder: Decoder, ids: Tensor, positions: Tensor, slots: Tensor, plan: AttentionPlan, kv: KVCache
) -> Tensor:
    """The forward pass, one operation after the other."""
    spec, eps, act = decoder.spec, decoder.spec.rms_norm_eps, decoder.activation_dtype
    rotated = spec.num_heads + spec.num_kv_heads
    x = F.embedding(ids, decoder.embed).to(act)
    cos, sin = decoder.rotary.at(positions, act)
    for i, layer in enumerate(decoder.layers):
        qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(
            -1, rotated + spec.num_kv_heads, spec.head_dim
        )
        qk = qkv[:, :rotated]
        if layer.head_norm is not None:
            qk.copy_(head_rms_norm(qk, layer.head_norm, eps))
        rotate_(qk, cos, sin)
        q, k, v = kv.store(i, slots, qkv)
        x = x + layer.out(kv.finish(i, plan.attend(i, q, k, v)))
        x = x + layer.mlp(rms_norm(x, layer.post_norm, eps))
    logits: Tensor = decoder.head(rms_norm(x, decoder.norm, eps))
    return logits


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kv_dtype", ["model", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_gives_what_its_formulas_give(
    architecture: str, kv_dtype: str, dtype: torch.dtype
) -> None:
    """A long row and its next token, with and without norms of heads, biases and scales."""
    loaded, _ = tiny(architecture)
    spec = loaded.spec
    store = WeightStore(spec, dict(loaded.weights), {}, dtype=dtype, device=CPU)
    decoder = Decoder(store, LinearMaker(store, measure=False), max_len=128)
    assert decoder.ops is PLAIN
    scales = KVScales(*(torch.full((spec.num_layers, spec.num_kv_heads), 0.02) for _ in range(2)))
    caches = [
        KVCache.allocate(
            spec, num_blocks=8, block_size=BLOCK_SIZE, dtype=dtype, device=CPU,
            kv_dtype=kv_dtype, scales=scales, compute_dtype=decoder.activation_dtype,
        )
        for _ in range(2)
    ]  # fmt: skip
    ids = torch.tensor([*prompt(40), 5])
    for first, last in ((0, 40), (40, 41)):
        here = torch.arange(first, last)
        new, computed = torch.tensor([last - first]).numpy(), torch.tensor([first]).numpy()
        rows = Rows(computed * 0, new, computed, torch.arange(8)[None].numpy(), int(first > 0), BLOCK_SIZE)
        plans = [get_backend("sdpa", CPU).plan(rows, kv, spec, torch.from_numpy) for kv in caches]
        with torch.inference_mode():
            want = written_out(decoder, ids[first:last], here, here, plans[0], caches[0])
            got = decoder.forward(ids[first:last], here, here, plans[1], caches[1], None)
        assert torch.equal(got, want)
        assert decoder.finite is not None
        assert decoder.finite.all()
    for a, b in zip(caches[0].k + caches[0].v, caches[1].k + caches[1].v, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_queries_come_without_a_scale_for_those_who_apply_it_themselves(kv_dtype: str) -> None:
    """Codes are the same either way; queries are what they were, and the scales are there to be used."""
    spec = tiny("llama")[0].spec
    shape = (spec.num_layers, spec.num_kv_heads)
    scales = KVScales(torch.full(shape, 0.25), torch.full(shape, 0.125))
    kv = KVCache.allocate(
        spec, num_blocks=1, block_size=8, dtype=torch.float32, device=CPU, kv_dtype=kv_dtype, scales=scales
    )
    qkv = torch.randn(3, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    slots = torch.tensor([4, 0, 7])
    _, k, v = kv.store(1, slots, qkv)
    q, plain_k, plain_v = kv.store(1, slots, qkv, scaled=False)
    assert torch.equal(q, qkv[:, : spec.num_heads])
    assert torch.equal(k, plain_k)
    assert torch.equal(v, plain_v)
    assert kv.quantizer is not None
    assert torch.equal(kv.quantizer.k_scale, scales.k)
    assert torch.equal(kv.quantizer.v_scale, scales.v)
