"""What knob values ask of memory, and the refusal with both numbers when there is not as much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import layout
from engine.bringup import explain
from engine.config import GIB, ConfigError
from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.layout import Layout, NoRoom, check_room, layout_of
from engine.lifetime import ExitCode
from engine.runner import ModelRunner
from ipc.messages import KnobValue
from tests.engine.core_harness import load, tiny_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(
        load(tiny_folder("llama", num_key_value_heads=8, num_attention_heads=8, num_hidden_layers=4)),
        device=CPU,
        dtype=torch.float32,
        measure=False,
        calibration_ids=[5, 6, 7],
    )


def wanted(runner: ModelRunner, pool_bytes: int = 1 << 20, **values: KnobValue) -> Layout:
    return layout_of(KnobStore(KnobContext(), values).values, runner, pool_bytes)


def test_arenas_are_there_only_for_what_uses_them(runner: ModelRunner) -> None:
    each = runner.kv_bytes_per_block(16, "model")
    plain = wanted(runner)
    assert (plain.num_blocks, plain.block_size, plain.bytes_per_block) == ((1 << 20) // each, 16, each)
    assert (plain.prefix_blocks, plain.swap_blocks, plain.host_bytes) == (0, 0, 0)
    assert wanted(runner, preemption="swap", swap_space_gib=0.25).swap_blocks == GIB // 4 // each
    host = wanted(runner, kv_host_gib=0.5)
    assert (host.prefix_blocks, host.host_bytes) == (GIB // 2 // each, GIB // 2 // each * each)
    assert wanted(runner, kv_host_gib=0.5, prefix_cache=False).prefix_blocks == 0


def test_eight_bits_hold_more_blocks_in_the_same_memory(runner: ModelRunner) -> None:
    model, small = wanted(runner), wanted(runner, kv_dtype="int8")
    assert small.num_blocks == 4 * model.num_blocks
    assert small.pool != model.pool
    assert wanted(runner, sliding_window=8).pool != model.pool


@pytest.mark.parametrize(("values", "message"), [
    ({"kv_pool_gib": 1e-7}, "a KV pool of 107 B does not hold even one block of 16 tokens, which takes "),
    ({"kv_host_gib": 1e-7}, "a host KV memory of .* does not hold even one block"),
    (
        {"preemption": "swap", "swap_space_gib": 0.001, "block_size": 1024, "kv_pool_gib": 0.1},
        "a swap space of 1.024 MiB does not hold even one block of 1024 tokens, which takes .* MiB",
    ),
    ({"kv_pool_gib": 4000.0, "block_size": 1}, "at most .* are possible; choose a larger block_size"),
    ({"kv_host_gib": 4000.0}, "at most .* are possible; choose a larger block_size or less memory"),
])  # fmt: skip
def test_what_holds_no_block_or_too_many_is_refused(
    runner: ModelRunner, values: dict[str, KnobValue], message: str
) -> None:
    """At the start it is an error of the configuration, not of the model."""
    with pytest.raises(ConfigError, match=message) as caught:
        wanted(runner, **values)
    assert explain(caught.value, running=False) == (ExitCode.BAD_CONFIG, str(caught.value))


def sized(**changes: Any) -> Layout:
    plain = Layout(
        num_blocks=100, block_size=16, kv_dtype="model", window=0, bytes_per_block=GIB // 100,
        prefix_blocks=0, swap_blocks=0,
    )  # fmt: skip
    return replace(plain, **changes)


@pytest.mark.parametrize(("then", "message"), [
    ({}, ""),
    ({"num_blocks": 290}, ""),  # 1 GiB is given back, 2 can be had
    ({"num_blocks": 400}, "the pool would take 4.00 GiB, 3.00 GiB can be had"),
    ({"prefix_blocks": 150}, ""),
    ({"prefix_blocks": 150, "swap_blocks": 150}, "host memory for KV blocks would take 3.00 GiB, 2.00 GiB"),
    ({"num_blocks": 200, "swap_blocks": 150}, "the pool and host memory for KV blocks would take 3.50 GiB"),
])  # fmt: skip
def test_a_shortage_names_what_is_needed_and_what_there_is(
    then: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "available_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(layout, "free_bytes", lambda device: 2 * GIB)
    if not message:
        check_room(CPU, sized(), sized(**then))
        return
    with pytest.raises(NoRoom, match=message):
        check_room(CPU, sized(), sized(**then))


def test_a_card_has_a_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "available_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(layout, "free_bytes", lambda device: 2 * GIB)
    check_room(torch.device("cuda"), sized(), sized(num_blocks=200, swap_blocks=150))


def test_an_arena_that_shrinks_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that others took meanwhile is no reason to refuse to give some back."""
    monkeypatch.setattr(layout, "available_bytes", lambda: 0)
    monkeypatch.setattr(layout, "free_bytes", lambda device: 0)
    check_room(CPU, sized(swap_blocks=300), sized(swap_blocks=200))
