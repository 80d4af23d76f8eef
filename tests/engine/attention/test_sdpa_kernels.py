"""Which of torch's kernels computes sdpa: on a GPU the one that its name says, for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from engine.attention import get_backend, probe, sdpa
from engine.attention.base import usable
from engine.attention.sdpa import Forced, SdpaAttention
from engine.attention_choice import resolve
from engine.knob import KnobContext
from tests.engine.attention.mixed_rows import check_mixed_rows
from tests.engine.driving import CPU, tiny

CUDA = torch.device("cuda")
EFFICIENT, FLASH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, SDPBackend | None]]:
    """Of each call, whether it had a mask, and the kernel that was forced."""
    seen: list[tuple[bool, SDPBackend | None]] = []
    forced: list[SDPBackend] = []
    run = F.scaled_dot_product_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        seen.append((attn_mask is not None, forced[-1] if forced else None))
        return run(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

    @contextmanager
    def kernel(backend: SDPBackend) -> Iterator[None]:
        forced.append(backend)
        yield
        forced.pop()

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(sdpa, "sdpa_kernel", kernel)
    return seen


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("causal", [EFFICIENT, FLASH])
def test_each_kind_of_call_has_its_kernel(
    calls: list[tuple[bool, SDPBackend | None]],
    monkeypatch: pytest.MonkeyPatch,
    causal: SDPBackend,
    window: int | None,
) -> None:
    monkeypatch.setattr(Forced, "on", lambda device, dtype: Forced(EFFICIENT, causal))
    check_mixed_rows(get_backend("sdpa", CPU), window, 16)
    assert {masked for masked, _ in calls} == ({True, False} if window is None else {True})
    assert all(kernel == (EFFICIENT if masked else causal) for masked, kernel in calls)


def test_on_a_cpu_the_choice_is_torchs(calls: list[tuple[bool, SDPBackend | None]]) -> None:
    check_mixed_rows(get_backend("sdpa", CPU), None, 16)
    assert {kernel for _, kernel in calls} == {None}


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has the GPU be one of that compute capability."""

    def be(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {major}.{minor}")

    return be


def test_its_name_says_what_runs(capability: Callable[[int, int], None]) -> None:
    assert SdpaAttention(CPU, torch.bfloat16).name == "sdpa"
    capability(9, 0)
    assert SdpaAttention(CUDA, torch.bfloat16).name == "sdpa_efficient_flash"
    assert SdpaAttention(CUDA, torch.float32).name == "sdpa_efficient"
    assert Forced.on(CUDA, torch.float16) == Forced(EFFICIENT, FLASH)
    capability(7, 5)
    assert SdpaAttention(CUDA, torch.float16).name == "sdpa_efficient"
    assert Forced.on(CUDA, torch.float16) == Forced(EFFICIENT, EFFICIENT)


def test_what_its_kernels_cannot_run_is_refused(capability: Callable[[int, int], None]) -> None:
    spec = replace(tiny("llama")[0].spec, head_dim=64)
    capability(7, 5)
    assert "8.0 or later" in str(probe("sdpa", spec, CUDA, torch.bfloat16))
    assert probe("sdpa", spec, CUDA, torch.float16) is None
    assert probe("sdpa", spec, CUDA, torch.float32) is None
    capability(9, 0)
    assert probe("sdpa", spec, CUDA, torch.bfloat16) is None
    odd = replace(spec, head_dim=20)
    assert "multiple of 8 in bfloat16, not 20" in str(probe("sdpa", odd, CUDA, torch.bfloat16))
    assert "at most 256" in str(probe("sdpa", replace(spec, head_dim=264), CUDA, torch.bfloat16))
    assert probe("sdpa", odd, CPU, torch.bfloat16) is None


@pytest.mark.parametrize(("dtype", "head_dim", "taken"), [
    (torch.float32, 64, "sdpa"), (torch.float16, 64, "sdpa"), (torch.bfloat16, 64, "naive"),
    (torch.float16, 20, "naive"),
])  # fmt: skip
def test_auto_finds_one_on_an_older_gpu(
    capability: Callable[[int, int], None], dtype: torch.dtype, head_dim: int, taken: str
) -> None:
    """An engine that is asked for nothing special starts with whatever model."""
    capability(7, 5)
    found, cannot = usable(replace(tiny("llama")[0].spec, head_dim=head_dim), CUDA, dtype)
    values = {"attention": "auto", "block_size": 16, "kv_dtype": "model"}
    assert resolve(values, KnobContext(device="cuda", attention=found)) == taken
    assert ("attention=sdpa" in cannot) == (taken == "naive")
