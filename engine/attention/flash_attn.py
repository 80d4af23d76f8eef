"""Attention by the flash-attn packages, where one is installed: they read keys through the block tables.

Three packages with one idea and three interfaces: ``flash_attn`` (FlashAttention 2, arXiv 2307.08691),
``flash_attn_interface`` (FlashAttention 3, Hopper, arXiv 2407.08608) and ``flash_attn.cute`` (FlashAttention
4, Hopper and Blackwell). Which of those that are installed is taken depends on the card alone; steps name it:
``flash_attn2``, ``flash_attn3`` or ``flash_attn4``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionPlan, Needs, Rows, ToDevice
from engine.attention.varlen_rows import Span, kernel_window, pages, probe_kernel, spans
from engine.knob import PoolLimits
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Call = Callable[[Function, Tensor, Tensor, Tensor, Span, int | None], Tensor]


def _call_2(
    attend: Function, q: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None
) -> Tensor:
    return _first(
        attend(
            q, keys, values,
            cu_seqlens_q=span.cu_q, cu_seqlens_k=span.cu_k, max_seqlen_q=span.max_q, max_seqlen_k=span.max_k,
            causal=True, window_size=_left_of(window), block_table=span.tables,
        )
    )  # fmt: skip


def _call_3(
    attend: Function, q: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None
) -> Tensor:
    return _first(
        attend(
            q, keys, values,
            cache_seqlens=span.lengths, page_table=span.tables, cu_seqlens_q=span.cu_q,
            max_seqlen_q=span.max_q, causal=True, window_size=_left_of(window),
        )
    )  # fmt: skip


def _call_4(
    attend: Function, q: Tensor, keys: Tensor, values: Tensor, span: Span, window: int | None
) -> Tensor:
    return _first(
        attend(
            q, keys, values,
            cu_seqlens_q=span.cu_q, max_seqlen_q=span.max_q, max_seqlen_k=span.max_k,
            seqused_k=span.lengths, page_table=span.tables, causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
    )  # fmt: skip


def _left_of(window: int | None) -> tuple[int, int]:
    """What these kernels are told beside ``causal``, which hides what lies to the right."""
    return (-1, -1) if window is None else kernel_window(window, 1)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output, where a version returns the sums of its softmax beside it."""
    return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True, slots=True)
class Version:
    """One of the packages: where its function is, how it is called, and what it asks for."""

    name: str
    module: str
    function: str
    call: Call
    block_multiple: int
    majors: tuple[int, ...]  # major compute capabilities that it has kernels for


VERSIONS = {
    2: Version("flash_attn2", "flash_attn", "flash_attn_varlen_func", _call_2, 256, (8, 9, 10, 12)),
    3: Version("flash_attn3", "flash_attn_interface", "flash_attn_with_kvcache", _call_3, 1, (9,)),
    4: Version("flash_attn4", "flash_attn.cute", "flash_attn_varlen_func", _call_4, 128, (9, 10, 11)),
}
ORDER = {9: (3, 2, 4)}  # by major compute capability: 4 splits no keys on Hopper
REASON_CHARS = 200  # of each package: a reason of three has to fit into the protocol
NEWEST_FIRST = (4, 3, 2)


@cache
def _load(version: int) -> Function | str:
    """The function of a version, or why there is none."""
    wanted = VERSIONS[version]
    try:
        found: Function = getattr(importlib.import_module(wanted.module), wanted.function)
    except Exception as error:  # whatever a package fails with must not end the engine's start
        return f"{wanted.module}.{wanted.function}: {type(error).__name__}: {error}"[:REASON_CHARS]
    return found


def _pick(major: int) -> tuple[Version, Function] | str:
    """The version that a card of this major compute capability runs, or why there is none."""
    why = []
    for number in ORDER.get(major, NEWEST_FIRST):
        version = VERSIONS[number]
        if major not in version.majors:
            continue
        found = _load(number)
        if not isinstance(found, str):
            return version, found
        why.append(found)
    return "no flash-attn package can be used: " + ("; ".join(why) or f"none has kernels for sm_{major}x")


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot serve this model here, or None if it can. Imports what is installed."""
    reason = probe_kernel(spec.head_dim, device, dtype)
    if reason is not None:
        return reason
    found = _pick(torch.cuda.get_device_capability(device)[0])
    return found if isinstance(found, str) else None


def limits(device: torch.device) -> PoolLimits:
    """What the version that is taken asks of the pool; where there is none, what FlashAttention 2 would."""
    found: tuple[Version, Function] | str = ""
    if device.type == "cuda":
        found = _pick(torch.cuda.get_device_capability(device)[0])
    version = VERSIONS[2] if isinstance(found, str) else found[0]
    return PoolLimits(block_multiple=version.block_multiple, quantized=False)


def make(device: torch.device) -> AttentionBackend:
    """The backend; ask `probe` first. ValueError with the reason where there is none."""
    found = _pick(torch.cuda.get_device_capability(device)[0])
    if isinstance(found, str):
        raise ValueError(found)
    return FlashAttention(*found)


class FlashAttention:
    """See `engine.attention.base.AttentionBackend`."""

    def __init__(self, version: Version, attend: Function) -> None:
        self.name = version.name
        self._call = version.call
        self._attend = attend

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        calls = [span for _, span in spans(rows, to_device)]
        return _FlashPlan(self._call, self._attend, calls, kv, spec)


class _FlashPlan:
    needs = Needs(new=False)

    def __init__(self, call: Call, attend: Function, calls: list[Span], kv: KVCache, spec: ModelSpec) -> None:
        self._call = call
        self._attend = attend
        self._calls = calls
        self._kv = kv
        self._windows = spec.layer_windows

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        keys, values = pages(self._kv, layer)
        window = self._windows[layer]
        outs = [
            self._call(self._attend, q[span.first : span.last], keys, values, span, window)
            for span in self._calls
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)
