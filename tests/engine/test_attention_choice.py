"""What ``attention=auto`` stands for, and what an attention asks of the KV pool."""

from __future__ import annotations

from typing import Any

import pytest

from engine.attention_choice import resolve
from engine.knob import KnobContext, PoolLimits
from engine.knob_store import KnobStore, PatchRefused
from tests.engine.core_harness import Engine, load, tiny_folder

FLASH = PoolLimits(block_multiple=256, quantized=False)
POOLS = {"flash_attn": FLASH, "varlen": PoolLimits(quantized=False)}
WHY = "flash_attn reads blocks of a multiple of 256 tokens, and block_size is {}; set block_size to 256"


def context(*attention: str, device: Any = "cuda") -> KnobContext:
    return KnobContext(device=device, attention=attention, pools=POOLS)


@pytest.mark.parametrize(
    ("here", "changes", "taken"),
    [
        (("naive", "sdpa", "paged", "flash_attn", "varlen"), {}, "paged"),
        (("naive", "sdpa", "flash_attn", "varlen"), {"block_size": 512}, "flash_attn"),
        (("naive", "sdpa", "flash_attn", "varlen"), {}, "varlen"),
        (("naive", "sdpa", "flash_attn", "varlen"), {"block_size": 256, "kv_dtype": "int8"}, "sdpa"),
        (("naive", "flash_attn", "varlen"), {"kv_dtype": "int8"}, "naive"),
        (("naive", "sdpa", "paged", "flash_attn"), {"attention": "naive"}, "naive"),
    ],
)
def test_auto_is_the_first_that_can_run(here: tuple[str, ...], changes: dict[str, Any], taken: str) -> None:
    store = KnobStore(context(*here), changes)
    assert resolve(store.values, store.context) == taken


def test_auto_on_a_cpu_is_what_could_be_compiled_or_sdpa() -> None:
    for here, taken in ((("naive", "sdpa", "paged"), "paged"), (("naive", "sdpa"), "sdpa")):
        store = KnobStore(context(*here, device="cpu"))
        assert store["attention"] == "auto"
        assert resolve(store.values, store.context) == taken
    with pytest.raises(ValueError, match="finds none of paged, sdpa"):
        resolve(store.values, context("naive", device="cpu"))


def test_what_cannot_read_the_pool_is_refused_with_what_to_do() -> None:
    store = KnobStore(context("sdpa", "flash_attn"))
    assert store.validate({"attention": "flash_attn"}) == {"attention": WHY.format(16)}
    assert store.validate({"attention": "flash_attn", "block_size": 300}) == {"attention": WHY.format(300)}
    together = {"attention": "flash_attn", "block_size": 512}
    assert store.validate(together) == {}
    eight = store.validate({**together, "kv_dtype": "fp8_e4m3"})["attention"]
    assert eight.startswith("flash_attn reads keys and values in 16 bits, and kv_dtype is fp8_e4m3; set kv_")
    store.commit(store.propose(together, 0))
    assert store.validate({"block_size": 16}) == {"block_size": WHY.format(16)}
    assert store.validate({"block_size": 16, "attention": "auto"}) == {}
    assert store.validate({"max_num_seqs": 3}) == {}
    with pytest.raises(PatchRefused, match="set block_size to 256"):
        KnobStore(context("flash_attn"), {"attention": "flash_attn"})


def test_steps_name_what_auto_became() -> None:
    """It is resolved when values are applied; flipping it changes nothing that runs."""
    engine = Engine(load(tiny_folder("llama")))
    first = engine.submit([5, 6, 7])
    engine.run()
    engine.set(attention="sdpa")
    again = engine.submit([5, 6, 7])
    engine.run()
    engine.set(attention="naive")
    engine.submit([5, 6, 7])
    engine.run()
    engine.set(attention="auto")
    engine.submit([5, 6, 7])
    engine.run()
    ran = {step.cfg_rev: step.attention for step in engine.heard.steps}
    auto = resolve(engine.core.knobs.values, engine.core.knobs.context)
    assert list(ran.values()) == [auto, "sdpa", "naive", auto]
    assert engine.ids(first) == engine.ids(again)
