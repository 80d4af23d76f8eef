"""flash_attn and varlen against the reference, through stand-ins at the edge of their packages."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionBackend, Rows, flash_attn, get_backend, probe, varlen
from engine.attention.base import GATHER_BYTES, pool_limits, usable
from engine.attention.naive import NaiveAttention
from engine.attention.sdpa import SdpaAttention
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec
from tests.engine.attention import varlen_fakes as fakes
from tests.engine.driving import CPU, tiny

CUDA = torch.device("cuda")
BLOCK = 256
MIXED = [(1, 600), (1, 511), (1, 255), (1, 0), (5, 300), (5, 0), (17, 257), (40, 530), (300, 0)]
"""New and computed tokens of each row: decoding, verification, a later chunk, a prompt."""
STEPS = {"mixed": MIXED, "decode": MIXED[:4], "prefill": MIXED[7:]}


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None) -> ModelSpec:
    """Two layers, of which the second sees everything."""
    return replace(
        tiny("llama")[0].spec, num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        layer_windows=(window, None),
    )  # fmt: skip


def step(shapes: list[tuple[int, int]], block: int) -> tuple[Rows, int]:
    """The rows, over blocks in no order, and how many blocks there are."""
    new, computed = (np.array(column) for column in zip(*shapes, strict=True))
    counts = -(-(new + computed) // block)
    free = np.random.default_rng(5).permutation(int(counts.sum()) + 2)
    tables = np.zeros((len(shapes), int(counts.max())), dtype=np.int64)
    for r, count in enumerate(counts):
        tables[r, :count], free = free[:count], free[count:]
    return Rows(new.cumsum() - new, new, computed, tables, int((new == 1).sum()), block), int(
        counts.sum()
    ) + 2


def check(
    backend: AttentionBackend, spec: ModelSpec, shapes: list[tuple[int, int]], block: int = BLOCK
) -> None:
    """What a backend returns against the reference, over a pool whose other slots hold large numbers."""
    torch.manual_seed(11)
    rows, blocks = step(shapes, block)
    kv = KVCache.allocate(spec, num_blocks=blocks, block_size=block, dtype=torch.float16, device=CPU)
    q = torch.randn(int(rows.num_new.sum()), spec.num_heads + 1, spec.head_dim).half()[:, 1:]
    for layer in range(2):
        kv.k[layer].normal_(std=30.0)
        kv.v[layer].normal_(std=30.0)
        for r, length in enumerate(rows.lengths.tolist()):
            at = np.arange(length)
            slots = torch.from_numpy(rows.tables[r, at // block] * block + at % block)
            kv.k[layer][slots] = torch.randn(length, spec.num_kv_heads, spec.head_dim).half()
            kv.v[layer][slots] = torch.randn(length, spec.num_kv_heads, spec.head_dim).half()
    plan = backend.plan(rows, kv, spec, torch.from_numpy)
    want = NaiveAttention().plan(rows, kv, spec, torch.from_numpy)
    for layer in range(2):
        got = plan.attend(layer, q, None, None)
        torch.testing.assert_close(got, want.attend(layer, q.contiguous(), None, None), rtol=2e-3, atol=1e-3)


def a_card(monkeypatch: pytest.MonkeyPatch, major: int, minor: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put packages in place, given by the number of their version; every other one is missing."""
    kinds: dict[int, Any] = {2: fakes.flash_attn_2, 3: fakes.flash_attn_3, 4: fakes.flash_attn_4}

    def put(*numbers: int, major: int = 9) -> None:
        a_card(monkeypatch, major)
        flash_attn._load.cache_clear()
        for number, version in flash_attn.VERSIONS.items():
            there = SimpleNamespace(**{version.function: kinds[number]}) if number in numbers else None
            monkeypatch.setitem(sys.modules, version.module, there)

    yield put
    flash_attn._load.cache_clear()


def torch_has(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    a_card(monkeypatch, 9)
    monkeypatch.setattr(varlen, "_torch", lambda: attend)


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 16), (14, 2, 80)])
@pytest.mark.parametrize("window", [None, 1, 7, 256, 400])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_flash_attn_equals_the_reference(
    install: Callable[..., None], number: int, window: int | None, heads: tuple[int, int, int]
) -> None:
    install(number)
    backend = get_backend("flash_attn", CUDA)
    assert backend.name == f"flash_attn{number}"
    check(backend, spec_of(*heads, window), MIXED)


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 16), (14, 2, 80)])
@pytest.mark.parametrize("window", [None, 1, 7, 256, 400])
@pytest.mark.parametrize("attend", [fakes.varlen_attn_2_12, fakes.varlen_attn_2_11])
def test_varlen_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, attend: Any, window: int | None, heads: tuple[int, int, int]
) -> None:
    torch_has(monkeypatch, attend)
    backend = get_backend("varlen", CUDA)
    assert backend.name == ("varlen" if attend is fakes.varlen_attn_2_12 else "varlen_gather")
    check(backend, spec_of(*heads, window), MIXED)


@pytest.mark.parametrize("kind", STEPS)
def test_steps_of_one_kind_equal_the_reference(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    install(2)
    check(get_backend("flash_attn", CUDA), spec_of(4, 2, 16, 300), STEPS[kind])
    for attend, block in ((fakes.varlen_attn_2_12, BLOCK), (fakes.varlen_attn_2_11, 16)):
        torch_has(monkeypatch, attend)
        check(get_backend("varlen", CUDA), spec_of(4, 2, 16, 300), STEPS[kind], block)


def test_a_version_that_torch_was_told_to_run_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has(monkeypatch, fakes.varlen_attn_2_12)
    monkeypatch.setattr(fakes, "OTHERS_RUN", True)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    check(get_backend("varlen", CUDA), spec_of(4, 2, 16, None), MIXED)


def test_single_tokens_are_told_to_a_kernel_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go apart, and without a mask, so that the kernel packs heads and splits keys."""
    seen: list[tuple[int, tuple[int, int]]] = []

    def attend(*args: Any, window_size: tuple[int, int] = (-1, -1), **options: Any) -> torch.Tensor:
        seen.append((args[5], window_size))
        return fakes.varlen_attn_2_11(*args, window_size=window_size, **options)

    torch_has(monkeypatch, attend)
    check(get_backend("varlen", CUDA), spec_of(4, 2, 16, None), MIXED)
    assert set(seen) == {(1, (-1, -1)), (300, (-1, 0))}


def test_blocks_that_left_the_window_may_be_gone(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A33: their places in the table are -1, which no kernel may be given."""
    spec = replace(spec_of(4, 2, 16, 20), num_layers=1, layer_windows=(20,))
    kv = KVCache.allocate(spec, num_blocks=4, block_size=BLOCK, dtype=torch.float16, device=CPU)
    kv.k[0].normal_()
    kv.v[0].normal_()
    one = np.array([1])
    rows = Rows(
        one * 0, one, np.array([2 * BLOCK + 30]), np.array([[-1, -1, 3]]), num_single=1, block_size=BLOCK
    )
    q = torch.randn(1, 4, 16).half()
    want = NaiveAttention().plan(rows, kv, spec, torch.from_numpy).attend(0, q, None, None)
    install(2)
    backends = [get_backend("flash_attn", CUDA)]
    for attend in (fakes.varlen_attn_2_12, fakes.varlen_attn_2_11):
        torch_has(monkeypatch, attend)
        backends.append(get_backend("varlen", CUDA))
    for backend in backends:
        got = backend.plan(rows, kv, spec, torch.from_numpy).attend(0, q, None, None)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)


def test_the_stand_in_has_the_arguments_of_this_torch() -> None:
    real = varlen._torch()
    assert real is not None
    mine = inspect.signature(fakes.varlen_attn_2_12).parameters
    theirs = inspect.signature(real).parameters
    assert [(n, p.kind, p.default) for n, p in mine.items()] == [
        (n, p.kind, p.default) for n, p in theirs.items()
    ]


@pytest.mark.parametrize(
    ("major", "there", "taken"),
    [
        (8, (2, 3, 4), "flash_attn2"), (9, (2, 3, 4), "flash_attn3"), (9, (2, 4), "flash_attn2"),
        (10, (2, 3, 4), "flash_attn4"), (12, (2, 3, 4), "flash_attn2"),
    ],
)  # fmt: skip
def test_the_card_decides_which_package_runs(
    install: Callable[..., None], major: int, there: tuple[int, ...], taken: str
) -> None:
    install(*there, major=major)
    assert get_backend("flash_attn", CUDA).name == taken


def test_probe_says_what_is_missing(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(4, 2, 16, None)
    for name in ("flash_attn", "varlen"):
        assert "not on cpu" in str(probe(name, spec, CPU, torch.bfloat16))
        assert f"attention={name}" in usable(spec, CPU, torch.bfloat16)[1]
    install()
    assert "no flash-attn package can be used" in str(probe("flash_attn", spec, CUDA, torch.bfloat16))
    with pytest.raises(ValueError, match="no flash-attn package"):
        get_backend("flash_attn", CUDA)
    install(2)
    for name in ("flash_attn", "varlen"):
        assert probe(name, spec, CUDA, torch.bfloat16) is None
        assert "not float32" in str(probe(name, spec, CUDA, torch.float32))
        for dim in (264, 20):
            assert "a multiple of 8" in str(probe(name, replace(spec, head_dim=dim), CUDA, torch.bfloat16))
    torch_has(monkeypatch, None)
    assert "has no causal attention" in str(probe("varlen", spec, CUDA, torch.bfloat16))
    a_card(monkeypatch, 7, 5)
    assert "compute capability 7.5" in str(probe("varlen", spec, CUDA, torch.bfloat16))


def test_a_package_that_breaks_on_import_is_a_reason(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises, and short enough for the protocol."""

    def broken(name: str) -> None:
        raise TypeError("cutlass " * 500)

    install()
    monkeypatch.setattr(flash_attn.importlib, "import_module", broken)
    reason = str(probe("flash_attn", spec_of(4, 2, 16, None), CUDA, torch.bfloat16))
    assert "TypeError: cutlass" in reason
    assert len(reason) < 1024


def test_what_is_asked_of_the_pool_is_that_of_what_would_run(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiples() -> tuple[int, int]:
        limits = pool_limits(CUDA)
        assert not any(each.quantized for each in limits.values())
        return limits["flash_attn"].block_multiple, limits["varlen"].block_multiple

    install(2)
    assert multiples() == (256, 256)
    torch_has(monkeypatch, fakes.varlen_attn_2_11)
    install(3)
    assert multiples() == (1, 1)


def test_what_is_gathered_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share blocks look at more together than the pool has: each call gathers a part of it."""
    gathered: list[int] = []

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        gathered.append(len(args[1]))
        return fakes.varlen_attn_2_11(*args, **options)

    attend.__signature__ = inspect.signature(fakes.varlen_attn_2_11)  # type: ignore[attr-defined]
    torch_has(monkeypatch, attend)
    spec = spec_of(4, 2, 16, None)
    monkeypatch.setattr(varlen, "GATHER_BYTES", 800 * 2 * 2 * 16 * 2)
    check(get_backend("varlen", CUDA), spec, MIXED)
    assert max(gathered) <= 800
    assert len(gathered) > 4


def test_sdpa_on_a_card_gathers_a_bounded_part_at_once() -> None:
    """256 requests of 1600 tokens have 1.6 GiB of keys and values in a layer of this size."""
    spec, rows = spec_of(32, 8, 128, None), 256
    kv = KVCache.allocate(
        spec, num_blocks=8, block_size=16, dtype=torch.bfloat16, device=torch.device("meta")
    )
    tables = np.zeros((rows, 100), np.int64)
    shapes = Rows(np.arange(rows), np.ones(rows, np.int64), np.full(rows, 1599), tables, rows, 16)
    backend = SdpaAttention(kv.device, kv.compute_dtype)
    plan: Any = backend.plan(shapes, kv, spec, lambda ints: torch.from_numpy(ints).to("meta"))
    buckets, _ = plan.parts[0]
    assert sum(bucket.last - bucket.first for bucket in buckets) == rows
    sizes = [bucket.gathered.flat_k.nbytes + bucket.gathered.flat_v.nbytes for bucket in buckets]
    assert GATHER_BYTES // 2 < max(sizes) <= GATHER_BYTES
