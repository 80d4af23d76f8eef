"""Keys and values in 8 bits: their scales, their storage, and that text depends on nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_quant import KVQuantizer
from engine.kv_scales import LARGEST, Extremes, KVScales, KVScalesError
from engine.runner import ModelRunner
from tests import tiny_models
from tests.engine.driving import CPU, Driver, prompt, tiny
from tests.quality import score

STORAGE = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
QUANTIZED = tuple(STORAGE)
COUNT = 12


def ones(layers: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.ones(layers, heads)


def driver(
    kv_dtype: str,
    architecture: str = "llama",
    *,
    attention: str = "sdpa",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    calibration: int = 200,
    **changes: Any,
) -> Driver:
    """A driver whose pool holds keys and values in ``kv_dtype``, calibrated with random ids."""
    loaded, _ = tiny(architecture, **changes)
    runner = ModelRunner(
        loaded,
        device=CPU,
        dtype=dtype,
        attention=attention,
        measure=False,
        calibration_ids=prompt(calibration, seed=8),
    )
    made = Driver(loaded, runner=runner, block_size=block_size)
    runner.allocate_kv(4096 // block_size, block_size, kv_dtype)
    return made


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -0.5, 1e-45])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_a_scale_that_cannot_be_used_is_named(value: float, what: str) -> None:
    """A31: zero, not a number, infinite, negative, or too small to divide by."""
    k, v = ones(), ones()
    (k if what == "keys" else v)[1, 2] = value
    told = re.escape(str(float(torch.tensor(value))))
    with pytest.raises(
        KVScalesError, match=rf"scale of the {what} of layer 1, KV head 2 is {told}, it must be"
    ):
        KVScales(k, v)


def test_a_missing_layer_or_head_is_named() -> None:
    """A31: never replaced by 1.0."""
    spec = tiny("llama")[0].spec
    for shape, missing in (((1, 3), "layer 1, KV head 0"), ((2, 2), "layer 0, KV head 2")):
        with pytest.raises(KVScalesError, match=rf"scale of the values of {missing} is missing: .* 2 of 3"):
            KVScales(ones(), ones(*shape)).check(spec)
    with pytest.raises(KVScalesError, match="belong to another model: there are scales for 2 layers of 4 KV"):
        KVScales(ones(2, 4), ones(2, 4)).check(spec)
    sizes: dict[str, Any] = {"num_blocks": 2, "block_size": 4, "dtype": torch.float32, "device": CPU}
    with pytest.raises(KVScalesError, match="kv_dtype int8 needs scales, and none were given"):
        KVCache.allocate(spec, **sizes, kv_dtype="int8")
    with pytest.raises(KVScalesError, match="is missing"):
        KVCache.allocate(spec, **sizes, kv_dtype="int8", scales=KVScales(ones(1), ones(1)))
    with pytest.raises(ValueError, match="unknown kv_dtype 'int4'; there are model, fp8_e4m3, int8"):
        KVCache.allocate(spec, **sizes, kv_dtype="int4")


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("calibration", [200, 600])  # the model's context is 512 tokens
def test_calibration_makes_the_largest_number_of_a_head_the_largest_stored(
    kv_dtype: str, calibration: int
) -> None:
    d = driver("model", "qwen2", calibration=calibration)
    ids = prompt(calibration, seed=8)[:512]
    list(score(d.runner, ids))
    assert d.runner.kv is not None
    largest = [[float(layer[: len(ids), h].abs().max()) for h in range(3)] for layer in d.runner.kv.k]
    scales = d.runner.kv_scales(kv_dtype)
    torch.testing.assert_close(scales.k * LARGEST[STORAGE[kv_dtype]], torch.tensor(largest))
    assert len(scales.k.unique()) == len(scales.v.unique()) == 6


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_number_is_read_exactly(kv_dtype: str, compute: torch.dtype) -> None:
    storage = STORAGE[kv_dtype]
    scales = KVScales(0.04 * ones(1, 1), 0.05 * ones(1, 1))
    quantizer = KVQuantizer.of(scales, group=1, storage=storage, compute=compute, device=CPU)
    every = torch.arange(256, dtype=torch.uint8)
    want = every.view(storage).float()
    finite = want.isfinite()
    held = every if kv_dtype == "fp8_e4m3" else every.view(torch.int8)
    out = torch.empty(256, dtype=compute)
    quantizer.decode(held, out, torch.empty(256, dtype=torch.int16))
    gain = quantizer.after[0, 0, 0] / 0.05  # a power of two that was moved into the factors
    assert torch.equal((out.float() * gain)[finite], want[finite])
    assert torch.allclose(quantizer.before[0, :, 0], torch.tensor([0.04 * gain, 25.0, 20.0]))


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_the_write_and_the_read_use_the_same_scale(kv_dtype: str) -> None:
    """A31: keys with scale 0.04 and values with 0.05 come back within the storage's rounding, or clamped."""
    spec = replace(tiny("llama")[0].spec, num_layers=1, layer_windows=(None,))
    scales = KVScales(0.04 * ones(1), 0.05 * ones(1))
    kv = KVCache.allocate(
        spec, num_blocks=2, block_size=8, dtype=torch.float32, device=CPU, kv_dtype=kv_dtype, scales=scales
    )
    largest = LARGEST[STORAGE[kv_dtype]]
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, 15, 8, generator=generator)
    qkv[:, 9:12, 0], qkv[:, 12:, 0] = 100 * largest * 0.04, -100 * largest * 0.05  # out of range
    before = qkv.clone()
    q, k, v = kv.store(0, torch.tensor([3, 9, 0, 15, 4]), qkv)
    assert torch.equal(qkv, before)
    assert kv.quantizer is not None
    gain = kv.quantizer.after[0, 0, 0] / 0.05
    # What a query sees of a key, and what is returned of a value.
    torch.testing.assert_close(q, qkv[:, :9] * 0.04 * gain)
    got_k, got_v = kv.read(k) * 0.04 * gain, kv.finish(0, kv.read(v).repeat_interleave(3, dim=1).flatten(1))
    got_v = got_v.view(5, 9, 8)[:, ::3]
    step = 2.0**-4 if kv_dtype == "fp8_e4m3" else 0.0  # relative: half of the last of 3 bits
    for got, want, scale in ((got_k, before[:, 9:12], 0.04), (got_v, before[:, 12:], 0.05)):
        want = want.clamp(-largest * scale, largest * scale)
        assert ((got - want).abs() <= step * want.abs() + 0.501 * scale).all()
        assert (got - want).abs().sum() > 0
    assert torch.equal(kv.k[0][9], k[1])
    assert torch.equal(kv.v[0][15], v[3])
    assert not kv.k[0][1].any()


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_text_does_not_depend_on_chunks_or_blocks(kv_dtype: str, attention: str) -> None:
    """Attention sees what is stored of the step's own tokens too, so every way of cutting gives the same."""
    ids = prompt(70)
    found = set()
    for block_size in (1, 16, 128):
        d = driver(kv_dtype, attention=attention, block_size=block_size)
        found |= {tuple(d.generate(ids, COUNT, chunk=chunk)) for chunk in (1, 7, 64, 1000)}
    assert len(found) == 1
    # And it is not the text of the model's own precision, so something was quantized.
    assert found != {tuple(tiny_models.greedy(tiny("llama")[1], ids, COUNT))}


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_both_backends_read_the_same_text(kv_dtype: str) -> None:
    ids = prompt(70, seed=2)
    texts = [driver(kv_dtype, "qwen3", attention=name).generate(ids, COUNT) for name in ("naive", "sdpa")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_text_does_not_depend_on_batch_mates_or_shared_blocks(kv_dtype: str, attention: str) -> None:
    d = driver(kv_dtype, attention=attention)
    prompts = [prompt(n, seed=9) for n in (3, 200, 17, 64)]
    alone = [d.generate(ids, COUNT) for ids in prompts]
    together = [d.request(ids) for ids in prompts]
    assert d.run(together, COUNT, 50) == alone
    for chunk in (1, 30):
        warm = d.request(prompts[1])
        warm.block_table, warm.num_computed = together[1].block_table[:9], 9 * 16
        assert d.run([warm], COUNT, chunk) == [alone[1]]
        d.free += warm.block_table[9:]


def test_scales_are_calibrated_once_and_kept_until_the_windows_change() -> None:
    d = driver("int8")
    runner, calls = d.runner, 0
    forward = runner.decoder.forward

    def counted(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(*args)

    runner.decoder.forward = counted  # type: ignore[method-assign]
    before = runner.kv_scales("int8")
    runner.allocate_kv(8, 16, "fp8_e4m3")
    assert (calls, runner.kv_dtype) == (0, "fp8_e4m3")
    torch.testing.assert_close(runner.kv_scales("fp8_e4m3").k, before.k * 127 / 448)
    runner.set_window(4)
    assert runner.kv is None
    runner.allocate_kv(8, 16, "int8")
    assert calls == 1
    assert not torch.equal(runner.kv_scales("int8").v[1], before.v[1])
    runner.allocate_kv(8, 16)
    assert runner.kv_dtype == "model"


def test_a_head_without_a_scale_is_refused_when_it_is_calibrated() -> None:
    """A31: values that are all zero yield no scale, and calibration says of which layer and head."""
    loaded, _ = tiny("llama")
    weights = dict(loaded.weights)
    weights["layers.1.v_proj.weight"] = weights["layers.1.v_proj.weight"].clone()
    weights["layers.1.v_proj.weight"][8:16] = 0
    dead = replace(loaded, weights=weights)
    runner = ModelRunner(
        dead, device=CPU, dtype=torch.float32, measure=False, calibration_ids=prompt(30, seed=8)
    )
    with pytest.raises(KVScalesError, match=r"scale of the values of layer 1, KV head 1 is 0\.0"):
        runner.allocate_kv(8, 16, "int8")
    runner.allocate_kv(8, 16)
    untold = ModelRunner(loaded, device=CPU, dtype=torch.float32, measure=False)
    with pytest.raises(ValueError, match="needs a text to calibrate its scales with; none was given"):
        untold.allocate_kv(8, 16, "fp8_e4m3")


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_quantized_pool_holds_as_many_tokens_more_as_it_says(kv_dtype: str) -> None:
    for dtype, times in ((torch.bfloat16, 2), (torch.float32, 4)):
        d = driver(kv_dtype, dtype=dtype)
        runner, spec = d.runner, d.runner.spec
        assert runner.kv is not None
        held = sum(layer.nbytes for layer in runner.kv.k + runner.kv.v)
        assert held == runner.kv.nbytes == 256 * runner.kv_bytes_per_block(16, kv_dtype)
        budget = 1 << 20
        own = KVCache.max_blocks(budget, spec, block_size=16, dtype=dtype)
        assert KVCache.max_blocks(budget, spec, block_size=16, dtype=STORAGE[kv_dtype]) // own == times
        out = d.step((d.request(prompt(10)), 10))
        assert out.kv_bytes == 2 * 10 * spec.kv_bytes_per_token(STORAGE[kv_dtype])


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_bfloat16_reads_quantized_keys_near_float32(kv_dtype: str, attention: str) -> None:
    ids = prompt(60)
    want = torch.cat(list(score(driver(kv_dtype, attention=attention).runner, ids)))
    # Where bfloat16 rounds a key to the other side, e4m3 stores a number that is up to an eighth away.
    part = {"int8": 0.05, "fp8_e4m3": 0.15}[kv_dtype]
    for chunk in (1, 7, 100):
        d = driver(kv_dtype, attention=attention, dtype=torch.bfloat16)
        got = torch.cat(list(score(d.runner, ids, chunk)))
        assert float((got - want).abs().mean()) < part * float(want.std()), chunk


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_token_that_is_not_finite_fails_its_request_though_8_bits_cannot_say_so(kv_dtype: str) -> None:
    """A25: in a chunk that samples nothing, beside a request that goes on as if nothing were."""
    d = driver(kv_dtype)
    ids = prompt(40)
    want = d.generate(ids, COUNT)
    d.runner.decoder.embed[3] = math.nan
    try:
        bad, good = d.request([7, 3, *prompt(40)]), d.request(ids)
        out = d.step((bad, 20), (good, 40))
        assert out.nonfinite == [True, False]
        assert out.token_ids == [[], want[:1]]
        d.preempt(bad)
        assert d.run([good], COUNT) == [want]
    finally:
        d.runner.decoder.embed[3] = 0.0


def test_scrub_cleans_bytes_that_are_no_number() -> None:
    d = driver("fp8_e4m3", block_size=16)
    kv = d.runner.kv
    assert kv is not None
    kv.k[0][20], kv.v[1][21] = 0x7F, 0xFF
    kv.k[0][40], kv.k[0][22] = 0x7F, 0x7E
    kv.scrub([1])
    assert not kv.k[0][20].any()
    assert not kv.v[1][21].any()
    assert (kv.k[0][40] == 0x7F).all()  # of another block
    assert (kv.k[0][22] == 0x7E).all()  # 448


def test_extremes_are_those_of_each_head() -> None:
    k = torch.tensor([[[1.0, -3.0], [0.5, 0.0]], [[2.0, 2.0], [0.1, -0.25]]])  # [tokens, heads, dim]
    found = Extremes.of([k, 2 * k], [-k, k])
    assert found.k.tolist() == [[3.0, 0.5], [6.0, 1.0]]
    assert found.v.tolist() == [[3.0, 0.5], [3.0, 0.5]]
    assert found.scales(torch.int8).k[0, 0] == torch.tensor(3.0) / 127
    assert found.scales(torch.float8_e4m3fn).v[1, 1] == torch.tensor(0.5) / 448
