"""Sliding windows: the model's own and one that is set, and the blocks that have left every window."""

from __future__ import annotations

import math

import pytest
import torch

from engine.request import NO_BLOCK
from engine.runner import ModelRunner
from tests import tiny_models
from tests.engine.driving import CPU, Driver, logits_at_each_position, prompt, tiny

COUNT = 12


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_position_attends_to_the_last_window_tokens_only(attention: str, chunk: int) -> None:
    """A33: sliding window 8, blocks of 4; logits at lengths 1 to 20 against transformers' full mask."""
    loaded, reference = tiny("mistral", sliding_window=8)
    unlimited, _ = tiny("mistral")
    assert loaded.spec.sliding_window == 8
    ids = prompt(20)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    driver = Driver(loaded, attention=attention, block_size=4)
    got = logits_at_each_position(driver, ids, chunk)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    # The same weights without the window part from them at the first position that it cuts.
    free = logits_at_each_position(Driver(unlimited, attention=attention, block_size=4), ids, chunk)
    torch.testing.assert_close(free[:8], want[:8], rtol=1e-4, atol=1e-3)
    assert not torch.allclose(free[8], want[8], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_greedy_ids_with_a_sliding_window_equal_transformers(attention: str, length: int) -> None:
    """A33: generating across the window from prompts of W-1, W, W+1 tokens and more."""
    loaded, reference = tiny("mistral", sliding_window=8)
    ids = prompt(length)
    want = tiny_models.greedy(reference, ids, COUNT)
    for block_size in (1, 4, 16):
        driver = Driver(loaded, attention=attention, block_size=block_size)
        assert [driver.generate(ids, COUNT, chunk=chunk) for chunk in (1, 3, 100)] == [want] * 3


def test_layers_with_and_without_a_window_in_one_model() -> None:
    loaded, reference = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert loaded.spec.layer_windows == (None, 8)
    ids = prompt(30)
    want = tiny_models.greedy(reference, ids, COUNT)
    for attention in ("naive", "sdpa"):
        driver = Driver(loaded, attention=attention, block_size=4)
        assert [driver.generate(ids, COUNT, chunk=chunk) for chunk in (1, 7, 64)] == [want] * 3


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize(("own", "override", "effective"), [(None, 8, 8), (8, 20, 8), (8, 5, 5), (8, 0, 8)])
def test_a_window_that_is_set_is_the_smaller_of_both(
    own: int | None, override: int, effective: int, attention: str
) -> None:
    """A33: logits at lengths from 1 over W-1, W, W+1 to 20, and the greedy ids from there on."""
    loaded, _ = tiny("mistral", sliding_window=own)
    _, reference = tiny("mistral", sliding_window=effective)
    ids = prompt(20)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    runner = ModelRunner(loaded, device=CPU, dtype=torch.float32, attention=attention, measure=False)
    runner.set_window(override)
    assert runner.window == effective
    for chunk in (1, 5, 64):
        driver = Driver(loaded, runner=runner, block_size=4)
        got = logits_at_each_position(driver, ids, chunk)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        for length in (effective - 1, effective, effective + 1, 20):
            start = ids[:length]
            assert driver.generate(start, COUNT, chunk=chunk) == tiny_models.greedy(reference, start, COUNT)


def test_a_window_is_set_and_taken_back_layer_by_layer() -> None:
    loaded, reference = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ids = prompt(30)
    want = tiny_models.greedy(reference, ids, COUNT)
    driver = Driver(loaded, block_size=4)
    runner = driver.runner
    assert runner.window is None  # the first layer sees everything
    whole = driver.step((driver.request(ids), 30)).kv_bytes
    runner.set_window(6)
    assert (runner.window, runner.kv) == (6, None)
    driver = Driver(loaded, runner=runner, block_size=4)
    assert driver.generate(ids, COUNT) != want
    request = driver.request(ids)
    driver.step((request, 30))
    token = loaded.spec.kv_bytes_per_token(torch.float32)
    assert driver.step((request, 1)).kv_bytes == 7 * token  # 6 read, 1 written
    runner.set_window(0)
    driver = Driver(loaded, runner=runner, block_size=4)
    assert driver.generate(ids, COUNT) == want
    assert driver.step((driver.request(ids), 30)).kv_bytes == whole
    runner.set_window(0)
    assert runner.kv is not None  # nothing changed, so nothing was lost
    with pytest.raises(ValueError, match="sliding_window is -1"):
        runner.set_window(-1)


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("windows", ["all layers", "one of two"])
def test_blocks_that_left_every_window_are_never_touched(windows: str, chunk: int, attention: str) -> None:
    """A33: they are given up as soon as they may be, and all memory that is not the request's is NaN."""
    if windows == "all layers":
        loaded, reference = tiny("mistral", sliding_window=8)
        runner = ModelRunner(loaded, device=CPU, dtype=torch.float32, attention=attention, measure=False)
    else:  # the smaller window lets nothing go that the larger one sees
        loaded, _ = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
        runner = ModelRunner(loaded, device=CPU, dtype=torch.float32, attention=attention, measure=False)
        runner.set_window(12)
    ids = prompt(30)
    driver = Driver(loaded, runner=runner, block_size=4)
    want = (
        tiny_models.greedy(reference, ids, COUNT)
        if windows == "all layers"
        else driver.generate(ids, COUNT, chunk=chunk)
    )
    kv, window = runner.kv, runner.window
    assert kv is not None
    assert window is not None
    request, given_up = driver.request(ids), 0
    while request.num_output < COUNT:
        table = request.block_table
        for block in range(max(0, request.num_computed + 1 - window) // 4):
            given_up += table[block] != NO_BLOCK
            table[block] = NO_BLOCK
        new = min(chunk, request.num_tokens - request.num_computed)
        while len(table) * 4 < request.num_computed + new:
            table.append(driver.free.pop())
            for paged in kv.paged:
                paged[table[-1]] = 0
        others = torch.tensor([b for b in range(kv.num_blocks) if b not in table])
        for paged in kv.paged:
            paged[others] = math.nan
        driver.step((request, new))
    assert request.output_ids == want
    assert given_up >= (30 + COUNT - window) // 4 - 1
    request.block_table[: (request.num_computed + 1 - window) // 4 + 1] = [NO_BLOCK] * (given_up + 1)
    with pytest.raises(ValueError, match=r"attends to positions from \d+ on, but its block \d+ was given up"):
        driver.step((request, 1))
