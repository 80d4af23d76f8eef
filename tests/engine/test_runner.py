"""The runner against transformers: float32 greedy ids and logits are equal however the work is cut."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import sdpa
from engine.runner import ModelRunner
from ipc.messages import Sampling
from tests import tiny_models
from tests.engine.driving import CPU, Driver, logits_at_each_position, prompt, tiny

COUNT = 12


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_greedy_ids_equal_transformers_for_every_chunk_and_block_size(
    architecture: str, attention: str
) -> None:
    """Chunks of 1, 7, 64 and whole, blocks of 1, 16 and 128 tokens, in shuffled order in the pool."""
    loaded, reference = tiny(architecture)
    ids = prompt(70)
    want = tiny_models.greedy(reference, ids, COUNT)
    for block_size in (1, 16, 128):
        driver = Driver(loaded, attention=attention, block_size=block_size)
        for chunk in (1, 7, 64, 1000):
            assert driver.generate(ids, COUNT, chunk=chunk) == want, (block_size, chunk)


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_chunked_and_whole_prefill_give_equal_ids(attention: str) -> None:
    """A38: a prompt of 100 tokens in chunks of 1, 7, 16, 99, 100 and 512: edges inside a block and on one."""
    loaded, reference = tiny("llama")
    ids = prompt(100)
    want = tiny_models.greedy(reference, ids, COUNT)
    driver = Driver(loaded, attention=attention)
    for chunk in (1, 7, 16, 99, 100, 512):
        assert driver.generate(ids, COUNT, chunk=chunk) == want, chunk


def test_chunk_edges_inside_a_shared_prefix_change_nothing() -> None:
    """A38: a second request starts on blocks that the first computed, its chunks cut at any place."""
    loaded, reference = tiny("qwen3")
    ids = prompt(100)
    want = tiny_models.greedy(reference, ids, COUNT)
    driver = Driver(loaded)
    first = driver.request(ids)
    driver.run([first], 1)
    for chunk in (1, 7, 16, 99):
        for shared_blocks in (1, 5, 6):
            second = driver.request(ids)
            second.block_table = first.block_table[:shared_blocks]
            second.num_computed = shared_blocks * driver.block_size
            assert driver.run([second], COUNT, chunk) == [want]
            driver.free += second.block_table[shared_blocks:]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_logits_of_every_position_equal_transformers(architecture: str, chunk: int) -> None:
    loaded, reference = tiny(architecture)
    ids = prompt(90)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    for attention in ("naive", "sdpa"):
        got = logits_at_each_position(Driver(loaded, attention=attention), ids, chunk)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rope", sorted(tiny_models.ROPE_KINDS))
def test_every_kind_of_rope_equals_transformers(rope: str) -> None:
    loaded, reference = tiny("llama", rope=rope, max_position_embeddings=256)
    ids = prompt(150)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    got = logits_at_each_position(Driver(loaded), ids, 40)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 9},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
    ],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)
def test_variants_of_the_architecture_equal_transformers(changes: dict[str, object]) -> None:
    loaded, reference = tiny("llama", **changes)
    ids = prompt(40)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    got = logits_at_each_position(Driver(loaded), ids, 9)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_mixed_steps_give_each_request_the_ids_it_gets_alone(attention: str) -> None:
    """Decoding rows of very different lengths beside chunks of several sizes, joining and leaving."""
    loaded, reference = tiny("qwen2")
    rng = random.Random(5)
    prompts = [prompt(n, seed=9) for n in (3, 200, 17, 64, 1, 31, 350, 16)]
    wants = [tiny_models.greedy(reference, ids, COUNT) for ids in prompts]
    driver = Driver(loaded, attention=attention)
    requests = [driver.request(ids) for ids in prompts]
    while any(r.num_output < COUNT for r in requests):
        rows = []
        for request in requests:
            left = request.num_tokens - request.num_computed
            if request.num_output < COUNT and rng.random() < 0.8:
                rows.append((request, min(left, rng.choice((1, 5, 16, 100)))))
        rows.sort(key=lambda row: row[1] > 1)
        driver.step(*rows)
    assert [r.output_ids for r in requests] == wants


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Its blocks and slot are others after the preemption, and its slot's row held somebody else's."""
    loaded, reference = tiny("llama")
    ids = prompt(50)
    want = tiny_models.greedy(reference, ids, COUNT)
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.3),
    ):
        driver = Driver(loaded)
        if sampling != Sampling():
            want = driver.generate(ids, COUNT, sampling=sampling)
        request, other = driver.request(ids, sampling), driver.request(prompt(33))
        driver.run([request, other], 5)
        driver.preempt(request)
        driver.preempt(other)
        other.slot, request.slot = request.slot, other.slot
        driver.run([other], 8)
        assert driver.run([request], COUNT, 7) == [want]


def test_the_attention_backend_can_change_between_two_steps() -> None:
    loaded, reference = tiny("llama")
    ids = prompt(30)
    driver = Driver(loaded, attention="sdpa")
    request = driver.request(ids)
    for i in range(COUNT):
        driver.runner.set_attention(("naive", "sdpa")[i % 2])
        driver.run([request], i + 1)
    assert request.output_ids == tiny_models.greedy(reference, ids, COUNT)
    with pytest.raises(ValueError, match=r"unknown attention backend 'warp'; there are naive, sdpa"):
        driver.runner.set_attention("warp")
    assert driver.runner.attention_name == ("naive", "sdpa")[(COUNT - 1) % 2]


def _poison(driver: Driver, row: int, value: float) -> None:
    forward = driver.runner.decoder.forward

    def poisoned(*args: object) -> torch.Tensor:
        logits = forward(*args)  # type: ignore[arg-type]
        logits[row, 5] = value
        if value == -math.inf:
            logits[row] = value
        return logits

    driver.runner.decoder.forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1, top_p=0.9, logprobs=2)])
def test_a_nonfinite_logit_fails_its_own_row_only(value: float, sampling: Sampling) -> None:
    """A25: NaN, +inf, or nothing but -inf in row 1 of 3; rows 0 and 2 get the ids they get without it."""
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    wants = [driver.generate(prompt(9, seed=s), 1, sampling=sampling)[0] for s in range(3)]
    _poison(driver, 1, value)
    out = driver.step(*((driver.request(prompt(9, seed=s), sampling), 9) for s in range(3)))
    assert out.nonfinite == [False, True, False]
    assert out.token_ids == [[wants[0]], [], [wants[2]]]
    assert out.logprobs[1] == []


def test_keys_that_are_not_finite_do_not_reach_the_next_owner_of_their_block() -> None:
    """A25: the blocks of a failed request are cleaned, for a masked NaN still spoils whoever gets them."""
    loaded, reference = tiny("llama")
    driver = Driver(loaded, block_size=16, num_blocks=2)
    bad = driver.request(prompt(20))
    driver.step((bad, 20))
    assert driver.runner.kv is not None
    for cache in driver.runner.kv.k + driver.runner.kv.v:
        cache[bad.block_table[1] * 16 + 2 :] = math.nan
        cache[bad.block_table[1] * 16 + 1] = math.inf
    out = driver.step((bad, 1))
    assert out.nonfinite == [True]
    driver.preempt(bad)
    ids = prompt(4)
    assert driver.generate(ids, COUNT) == tiny_models.greedy(reference, ids, COUNT)


def test_padded_vocabulary_rows_are_never_chosen() -> None:
    """I08: neither as the best one nor by drawing."""
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    ids = prompt(20)
    best = driver.generate(ids, 1)[0]
    padded = replace(loaded, padded_ids=torch.tensor([best]))
    driver = Driver(loaded, runner=ModelRunner(padded, device=CPU, dtype=torch.float32, measure=False))
    assert driver.generate(ids, 1)[0] != best
    drawn = {driver.generate(ids, 1, sampling=Sampling(temperature=100.0, seed=s))[0] for s in range(300)}
    assert best not in drawn
    assert len(drawn) > 100


def test_a_plan_that_contradicts_its_requests_is_refused() -> None:
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    request = driver.request(prompt(10))
    with pytest.raises(ValueError, match=r"request 1: 11 new tokens up to 11 planned, but it has 10 tokens"):
        driver.step((request, 11))
    with pytest.raises(ValueError, match=r"request 1: 0 new tokens"):
        driver.step((request, 0))
    request.slot = -1
    with pytest.raises(ValueError, match="slot -1 was scheduled"):
        driver.step((request, 10))
    request.slot, request.block_table = 0, [10_000]
    with pytest.raises(ValueError, match="block 10000 is in a table, the pool has 256"):
        driver.step((request, 10))
    driver.runner.free_kv()
    with pytest.raises(RuntimeError, match="no KV pool"):
        driver.step((request, 10))


def test_a_step_without_requests_does_nothing() -> None:
    loaded, _ = tiny("llama")
    out = Driver(loaded).step()
    assert (out.token_ids, out.weight_bytes, out.flops) == ([], 0, 0)


def test_fusing_weights_holds_nothing_twice_and_leaves_them_usable() -> None:
    loaded, reference = tiny("qwen2")
    own = replace(loaded, weights=dict(loaded.weights))
    runner = ModelRunner(own, device=CPU, dtype=torch.float32, measure=False)
    q, k = (own.weights[f"layers.0.{name}_proj.weight"] for name in "qk")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    again = Driver(loaded, runner=ModelRunner(own, device=CPU, dtype=torch.float32, measure=False))
    ModelRunner(own, device=CPU, dtype=torch.float32, measure=False, consume=True)
    assert own.weights == {}
    ids = prompt(30)
    want = tiny_models.greedy(reference, ids, COUNT)
    assert again.generate(ids, COUNT) == want
    assert Driver(loaded, runner=runner).generate(ids, COUNT) == want


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_bfloat16_stays_near_float32_and_chunks_near_each_other(attention: str) -> None:
    """A38: in bfloat16 the logits of a chunked prompt stay within a bound of the float32 ones."""
    loaded, reference = tiny("llama")
    ids = prompt(60)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    spread = float(want.std())
    for chunk in (1, 7, 100):
        driver = Driver(loaded, attention=attention, dtype=torch.bfloat16)
        got = logits_at_each_position(driver, ids, chunk)
        assert float((got - want).abs().mean()) < 0.05 * spread, chunk


def test_parts_of_the_forward_pass_are_timed_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, reference = tiny("llama")
    ids = prompt(30)
    driver = Driver(loaded)
    runner, decoder = driver.runner, driver.runner.decoder
    out = driver.step((driver.request(ids), 30))
    assert out.attention_s is out.linear_s is out.head_s is None
    runner.set_forward_timing(True)
    assert driver.generate(ids, COUNT) == tiny_models.greedy(reference, ids, COUNT)

    def parts() -> tuple[float, float, float]:
        out = driver.step((driver.request(ids), 30))
        assert out.attention_s is not None
        assert out.linear_s is not None
        assert out.head_s is not None
        assert min(out.attention_s, out.linear_s, out.head_s) > 0
        assert out.attention_s + out.linear_s + out.head_s < out.forward_s
        return out.attention_s, out.linear_s, out.head_s

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any) -> Any:
            time.sleep(0.02)
            return call(*args)

        return slowed

    parts()
    # A part takes at least the time that is spent in it on purpose.
    for part, owner, name in (
        (0, sdpa._SdpaPlan, "attend"),
        (1, decoder.layers[0], "qkv"),
        (1, decoder.layers[1].mlp, "down"),
        (2, decoder, "head"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, slow(getattr(owner, name)))
            assert parts()[part] >= 0.02, name
    runner.set_forward_timing(False)
    assert driver.step((driver.request(ids), 30)).attention_s is None


def test_times_and_traffic_of_a_step_are_reported() -> None:
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    out = driver.step((driver.request(prompt(10)), 10), (driver.request(prompt(5)), 5))
    assert out.prepare_s > 0 < out.forward_s
    assert out.sample_s > 0
    assert out.kv_bytes == 2 * 15 * loaded.spec.kv_bytes_per_token(torch.float32)  # read and written once
    assert out.kernels == "linear=fp32,activations=float32"
