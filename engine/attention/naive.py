"""The reference: softmax(q k^T / sqrt(d)) v written out, one request after the other, in float32.

Every other backend is held against this one. It materializes the scores, as attention was first computed
(arXiv 1706.03762), and so also serves as the baseline that faster kernels are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import AttentionPlan, Needs, Rows, ToDevice
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

QUERY_TILE = 256  # new tokens whose scores are held at once


@dataclass(slots=True)
class _Row:
    start: int  # its first token in the step
    num_new: int
    num_computed: int
    key_first: int  # position of the first key that is looked at
    slots: Tensor  # of its tokens from there on


class NaiveAttention:
    """See `engine.attention.base.AttentionBackend`."""

    name = "naive"

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        per_window = {
            window: [_plan_row(rows, r, window, kv, to_device) for r in range(len(rows.num_new))]
            for window in dict.fromkeys(spec.layer_windows)
        }
        return _NaivePlan(per_window, kv, spec)


def _plan_row(rows: Rows, r: int, window: int | None, kv: KVCache, to_device: ToDevice) -> _Row:
    size, length, computed = rows.block_size, int(rows.lengths[r]), int(rows.num_computed[r])
    # Blocks wholly before the window of the first new token may not be there any more.
    gone = 0 if window is None else max(0, computed + 1 - window) // size
    table = to_device(rows.tables[r, gone : -(-length // size)])
    slots = (table.unsqueeze(1) * size + torch.arange(size, device=kv.device)).flatten()
    first = gone * size
    return _Row(int(rows.starts[r]), int(rows.num_new[r]), computed, first, slots[: length - first])


class _NaivePlan:
    needs = Needs(new=False)

    def __init__(self, per_window: dict[int | None, list[_Row]], kv: KVCache, spec: ModelSpec) -> None:
        self.rows = per_window
        self.kv = kv
        self.windows = spec.layer_windows
        self.group = spec.num_heads // spec.num_kv_heads

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        window = self.windows[layer]
        for row in self.rows[window]:
            keys = self._per_head(self.kv.k[layer], row.slots)
            values = self._per_head(self.kv.v[layer], row.slots)
            for first in range(0, row.num_new, QUERY_TILE):
                last = min(first + QUERY_TILE, row.num_new)
                here = slice(row.start + first, row.start + last)
                queries = q[here].transpose(0, 1).float()
                at = row.num_computed - row.key_first  # positions count from the first key on
                positions = torch.arange(at + first, at + last, device=q.device)
                out[here] = _softmax_attention(queries, keys, values, positions, window)
        return out.flatten(1)

    def _per_head(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Cached vectors as float32 [heads, tokens, head_dim], each KV head repeated for its group."""
        read = self.kv.read(cache[slots])
        return read.float().transpose(0, 1).repeat_interleave(self.group, dim=0)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """q [heads, new, d] at ``positions`` [new] over k, v [heads, all, d]. Returns [new, heads, d]."""
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    behind = positions.unsqueeze(1) - torch.arange(k.shape[1], device=q.device)
    hidden = behind < 0
    if window is not None:
        hidden |= behind >= window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ v).transpose(0, 1)
