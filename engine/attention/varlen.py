"""torch's own attention over rows of different lengths (`torch.nn.attention.varlen`), on an NVIDIA GPU.

From torch 2.12 on it reads keys and values through block tables, in blocks of a multiple of 256 tokens.
Before that it has no block tables: the keys of each row are gathered first, behind one another and without
padding.
Steps say which: ``varlen`` or ``varlen_gather``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from engine.attention.base import GATHER_BYTES, AttentionBackend, AttentionPlan, Needs, Rows, ToDevice
from engine.attention.varlen_rows import Gather, Span, kernel_window, pages, probe_kernel, spans
from engine.knob import PoolLimits
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

BLOCK_MULTIPLE = 256  # tokens; of torch's FlashAttention 2 over block tables

Attend = Callable[..., Any]


@cache
def _torch() -> Attend | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _takes(attend: Attend) -> frozenset[str]:
    return frozenset(inspect.signature(attend).parameters)


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot serve this model here, or None if it can."""
    reason = probe_kernel(spec.head_dim, device, dtype)
    if reason is not None:
        return reason
    attend = _torch()
    if attend is None or "window_size" not in _takes(attend):
        return f"torch {torch.__version__} has no causal attention over rows of different lengths"
    return None


def limits() -> PoolLimits:
    """What it asks of the pool."""
    return PoolLimits(block_multiple=BLOCK_MULTIPLE if _is_paged() else 1, quantized=False)


def make(device: torch.device) -> AttentionBackend:
    """The backend, where `probe` says that it can run."""
    attend = _torch()
    assert attend is not None  # or `probe` gave the reason
    return VarlenAttention(attend)


def _is_paged() -> bool:
    attend = _torch()
    return attend is not None and {"block_table", "seqused_k"} <= _takes(attend)


def _runs_its_own() -> bool:
    """Whether torch runs the FlashAttention 2 that it brings, as long as nobody in the process changed that.

    Beside block tables it needs ``cu_seq_k`` too, which versions 3 and 4 refuse there.
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is None or current() in (None, "FA2")


class VarlenAttention:
    """See `engine.attention.base.AttentionBackend`."""

    def __init__(self, attend: Attend) -> None:
        """``attend`` is torch's function, with the arguments that this version of it has."""
        takes = _takes(attend)
        self._attend = attend
        self._paged = {"block_table", "seqused_k"} <= takes
        self._options = {"enable_gqa": True} if "enable_gqa" in takes else {}
        self.name = "varlen" if self._paged else "varlen_gather"

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        per_token = 2 * kv.k[0][0].numel() * kv.compute_dtype.itemsize
        calls = spans(rows, to_device, None if self._paged else GATHER_BYTES // per_token)
        gathers: dict[int | None, list[Gather]] = {}
        if not self._paged:
            for window in dict.fromkeys(spec.layer_windows):
                gathers[window] = [span.gather(rows, begin, window, kv.block_size) for begin, span in calls]
        return _VarlenPlan(self._attend, self._options, [span for _, span in calls], gathers, kv, spec)


class _VarlenPlan:
    needs = Needs(new=False)

    def __init__(
        self,
        attend: Attend,
        options: dict[str, bool],
        calls: list[Span],
        gathers: dict[int | None, list[Gather]],
        kv: KVCache,
        spec: ModelSpec,
    ) -> None:
        self._attend = attend
        self._options = options
        self._calls = calls
        self._gathers = gathers  # by window; empty where block tables are read
        self._kv = kv
        self._windows = spec.layer_windows
        self._takes_both = _runs_its_own()

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        window = self._windows[layer]
        if self._gathers:
            each = zip(self._calls, self._gathers[window], strict=True)
            outs = [self._gathered(layer, q, span, gather, window) for span, gather in each]
        else:
            outs = [self._in_place(layer, q, span, window) for span in self._calls]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)

    def _in_place(self, layer: int, q: Tensor, span: Span, window: int | None) -> Tensor:
        keys, values = pages(self._kv, layer)
        cu_k = span.cu_k if self._takes_both else None
        out: Tensor = self._attend(
            q[span.first : span.last], keys, values, span.cu_q, cu_k, span.max_q, span.max_k,
            window_size=kernel_window(window, span.max_q), seqused_k=span.lengths,
            block_table=span.tables, **self._options,
        )  # fmt: skip
        return out

    def _gathered(self, layer: int, q: Tensor, span: Span, gather: Gather, window: int | None) -> Tensor:
        keys, values = (held[layer].index_select(0, gather.slots) for held in (self._kv.k, self._kv.v))
        out: Tensor = self._attend(
            q[span.first : span.last], keys, values, span.cu_q, gather.cu_k, span.max_q, gather.max_k,
            window_size=kernel_window(window, span.max_q), **self._options,
        )  # fmt: skip
        return out
