"""Attention over the block tables themselves, in C++ on a CPU: nothing is gathered, nothing padded, no key
repeated.

Every row goes through it, single tokens, drafts and chunks, cut into items of a few tokens each. Keys and
values are widened to float32 as they are read, scores and sums are float32. What comes out for a token
depends neither on the other requests of a step nor on how its request's tokens are cut into steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionPlan, Ints, Needs, Rows, ToDevice
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec
from engine.native import Kernels, kernels, unavailable
from engine.native.kernels import address
from engine.native.structs import AttentionItems, AttentionLayer

ITEM_TOKENS = 32  # of a row whose keys are read once for all of them


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot serve this model here, or None if it can. The first call on a machine compiles it."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the C++ kernels need float32 or bfloat16, not {dtype}"
    return unavailable() or None


def make(device: torch.device) -> AttentionBackend:
    """The backend, where `probe` says that it can run."""
    return PagedAttention()


class PagedAttention:
    """See `engine.attention.base.AttentionBackend`."""

    name = "paged"

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        native = kernels()
        assert native is not None  # or `probe` gave the reason
        return NativePlan(native, rows, kv, spec)


class NativePlan:
    """See `engine.attention.base.AttentionPlan`.

    Whoever calls the library's attention by itself finds here what it is called with: where in memory it
    lies, ``items``, and the window of each layer, int64, 0 for none.
    """

    needs = Needs(scaled=False, new=False)

    def __init__(self, native: Kernels, rows: Rows, kv: KVCache, spec: ModelSpec) -> None:
        self._run = native.attention(kv.compute_dtype, kv.dtype)
        self._kv = kv
        self.address = address(self._run)
        self.windows = np.array([window or 0 for window in spec.layer_windows], dtype=np.int64)
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._indices = _items(rows)
        self._tables = np.ascontiguousarray(rows.tables)
        self.items = AttentionItems(
            len(self._indices[0]),
            *(each.ctypes.data for each in self._indices),
            self._tables.ctypes.data,
            self._tables.shape[1],
            rows.block_size,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        kv, (heads, kv_heads, head_dim) = self._kv, self._heads
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        out = torch.empty(q.shape[0], heads * head_dim, dtype=q.dtype)
        k_scales = v_scales = None
        if kv.quantizer is not None:
            k_scales = kv.quantizer.k_scale[layer].data_ptr()
            v_scales = kv.quantizer.v_scale[layer].data_ptr()
        self._run(
            ctypes.byref(self.items),
            ctypes.byref(
                AttentionLayer(
                    q.data_ptr(),
                    kv.k[layer].data_ptr(),
                    kv.v[layer].data_ptr(),
                    out.data_ptr(),
                    k_scales,
                    v_scales,
                    q.stride(0),
                    heads,
                    kv_heads,
                    head_dim,
                    int(self.windows[layer]),
                    head_dim**-0.5,
                )
            ),
            torch.get_num_threads(),
        )
        return out


def _items(rows: Rows) -> Sequence[Ints]:
    """First token, number of tokens, position and row of each item, the ones with most work first."""
    if rows.num_single == len(rows.num_new):  # an item each, and sorted by their length already
        return [rows.starts, rows.num_new, rows.num_computed, np.arange(rows.num_single)]
    per_row = -(-rows.num_new // ITEM_TOKENS)
    row = np.repeat(np.arange(len(rows.num_new)), per_row)
    nth = np.arange(len(row)) - np.repeat(per_row.cumsum() - per_row, per_row)
    at = nth * ITEM_TOKENS
    count = np.minimum(rows.num_new[row] - at, ITEM_TOKENS)
    position = rows.num_computed[row] + at
    order = np.argsort(-(count * (position + count)), kind="stable")
    return [
        np.ascontiguousarray(each[order], dtype=np.int64)
        for each in (rows.starts[row] + at, count, position, row)
    ]
