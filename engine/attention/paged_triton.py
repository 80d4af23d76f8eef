"""Attention by a Triton kernel that finds keys and values through the block tables: nothing is gathered.

Rows of few new tokens (decoding, drafts to verify) and long ones (prefill) get launches of their own, for
they want tiles of different shapes. Rows may be split along their keys, so that a small batch of long
contexts, or a short chunk behind a long prefix, keeps the whole device busy; how far is decided on the
device, once a step.

8-bit keys and values are widened in registers, and their scales are applied there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import (
    MAX_SHORT,
    AttentionBackend,
    AttentionPlan,
    Ints,
    Needs,
    Rows,
    ToDevice,
)
from engine.current_device import make_current
from engine.kernels import availability
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from engine.kernels.attention_parts import Parts
    from engine.kernels.paged_attention import Tiles

NAME = "paged"
PROGRAMS_A_PROCESSOR = 2  # of the kernel that are resident at once, more or less
INTERPRETED_PROGRAMS = 8  # so that rows are split where they are interpreted too


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot serve this model here, or None if it can."""
    reason = availability.probe(device)
    if reason is not None:
        return reason
    from engine.kernels import paged_attention

    return paged_attention.probe(spec.num_heads, spec.num_kv_heads, spec.head_dim, 1, dtype, dtype)


def make(device: torch.device) -> AttentionBackend:
    """The backend, where `probe` says that it can run."""
    return PagedAttention(device)


class PagedAttention:
    """See `engine.attention.base.AttentionBackend`."""

    name = NAME

    def __init__(self, device: torch.device) -> None:
        self._scratch = _Scratch(device)
        self._hopper, self._programs = False, INTERPRETED_PROGRAMS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._hopper = properties.major == 9
            self._programs = PROGRAMS_A_PROCESSOR * properties.multi_processor_count

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        make_current(kv.device)
        shape = rows.tables.shape
        cu, lengths, tables = _unpack(to_device(self.pack(rows, *shape)).view(torch.int32), *shape)
        short = int(np.searchsorted(rows.num_new, MAX_SHORT, side="right"))
        windows = dict.fromkeys(spec.layer_windows)
        groups: dict[int | None, list[_Group]] = {window: [] for window in windows}
        for first, last in ((0, short), (short, len(rows.num_new))):
            if first == last:
                continue
            here = slice(first, last)
            new = rows.num_new[here]
            tiles = self._tiles(spec, int(new.max()), kv)
            parts = self._parts(spec, new, tiles, captured=last == short)
            for window in windows:
                split = self._split(cu[first : last + 1], lengths[here], tiles, window, spec, parts)
                tokens = int(new.sum())
                groups[window].append(
                    _Group(cu[first : last + 1], lengths[here], tables[here], split, parts, tiles, tokens)
                )
        return _PagedPlan([(window, groups[window]) for window in spec.layer_windows], kv)

    def pack(self, rows: Rows, count: int, width: int) -> Ints:
        """Where rows begin [count + 1], their lengths [count] and tables [count, width], for one copy.

        All int32, in words of 64 bits. Rows beyond those that there are have no tokens.
        """
        there, have = rows.tables.shape
        total = 2 * count + 1 + count * width
        packed = np.zeros(total + total % 2, dtype=np.int32)
        ends = rows.starts + rows.num_new
        packed[1 : there + 1], packed[there + 1 : count + 1] = ends, ends[-1]
        packed[count + 1 : count + 1 + there] = rows.lengths
        packed[2 * count + 1 : total].reshape(count, width)[:there, :have] = rows.tables
        return packed.view(np.int64)

    def move(self, words: Tensor, by: Tensor) -> None:
        """Let rows that `pack` packed for ``len(by)`` rows lie ``by`` positions further, on the device."""
        count = len(by)
        words.view(torch.int32)[count + 1 : 2 * count + 1] += by

    def lengths(self, spec: ModelSpec, kv: KVCache) -> tuple[int, ...]:
        """Numbers of new tokens of a row that each need a kernel of their own; no others do."""
        from engine.kernels.paged_attention import SHORT_ROWS

        each = {self._tiles(spec, most, kv): most for most in range(SHORT_ROWS + 1, 0, -1)}
        return tuple(sorted(each.values()))

    def _tiles(self, spec: ModelSpec, max_queries: int, kv: KVCache) -> Tiles:
        from engine.kernels.paged_attention import tiles_for

        group = spec.num_heads // spec.num_kv_heads
        return tiles_for(group, spec.head_dim, max_queries, kv.k[0].itemsize, hopper=self._hopper)

    def _parts(self, spec: ModelSpec, new: Ints, tiles: Tiles, *, captured: bool) -> Parts:
        """Room for parts of rows with ``new`` tokens each, for no token where splitting them is of no use.

        There always is some, so that splitting or not is nothing to compile for. captured: a graph of the
        launch may serve rows of other lengths, so only how many there are counts.
        """
        from engine.kernels.attention_rows import most_splits

        if captured:
            splits = most_splits(len(new), spec.num_kv_heads)
        else:  # tiles of queries may be enough to keep a device busy
            there = int((-(-new // tiles.block_q)).sum())
            splits = min(most_splits(there, spec.num_kv_heads), self._programs // (there * spec.num_kv_heads))
        tokens = int(new.sum()) if splits > 1 else 0
        return self._scratch.parts(tokens, spec.num_heads, spec.head_dim, max(1, splits))

    def _split(
        self,
        cu: Tensor,
        lengths: Tensor,
        tiles: Tiles,
        window: int | None,
        spec: ModelSpec,
        parts: Parts,
    ) -> Tensor:
        """Tiles of keys that one program takes, int32 [1]. Nothing looks at it where nothing is split."""
        from engine.kernels.attention_rows import plan_splits

        split = torch.ones(1, dtype=torch.int32, device=lengths.device)
        if len(parts.values):
            plan_splits(
                cu, lengths, split,
                programs=self._programs, kv_heads=spec.num_kv_heads,
                block_q=tiles.block_q, block_n=tiles.block_n, window=window,
            ).run()  # fmt: skip
        return split


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that share a launch: int32 [rows + 1], [rows], [rows, most blocks], how they are cut, and how many
    new tokens they have."""

    cu: Tensor
    lengths: Tensor
    tables: Tensor
    split_tiles: Tensor
    parts: Parts
    tiles: Tiles
    tokens: int


class _PagedPlan:
    needs = Needs(scaled=False, new=False)

    def __init__(self, layers: Sequence[tuple[int | None, Sequence[_Group]]], kv: KVCache) -> None:
        from engine.kernels.paged_attention import paged_attention

        self._kernel = paged_attention
        self._layers = layers
        self._kv = kv

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        kv = self._kv
        window, groups = self._layers[layer]
        scales = None
        if kv.quantizer is not None:
            scales = kv.quantizer.k_scale[layer], kv.quantizer.v_scale[layer]
        out = q.new_empty(q.shape)
        for group in groups:
            for launch in self._kernel(
                q, kv.k[layer], kv.v[layer], out,
                cu_seqlens_q=group.cu, seq_lens=group.lengths, block_tables=group.tables,
                split_tiles=group.split_tiles, parts=group.parts, tiles=group.tiles, tokens=group.tokens,
                block_size=kv.block_size, window=window, scales=scales,
            ):  # fmt: skip
                launch.run()
        return out.flatten(1)


class _Scratch:
    """Memory for the parts of split rows, for all layers and steps. A plan keeps what it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._held = torch.empty(0, dtype=torch.float32, device=device)

    def parts(self, tokens: int, heads: int, head_dim: int, splits: int) -> Parts:
        """Room for ``splits`` parts of each of ``tokens`` tokens."""
        from engine.kernels.attention_parts import Parts

        count = tokens * heads * splits
        needed = count * (head_dim + 2)
        with self._lock:  # one step is planned while a shape of another is captured
            if len(self._held) < needed:
                self._held = torch.empty(needed, dtype=torch.float32, device=self._device)
            held = self._held
        values, sums = held[: count * head_dim], held[count * head_dim : needed]
        return Parts(values.view(tokens, heads, splits, head_dim), sums.view(tokens, heads, splits, 2))


def _unpack(held: Tensor, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows begin [count + 1], their lengths [count] and tables [count, width], from `pack` as int32."""
    total = 2 * count + 1 + count * width
    return held[: count + 1], held[count + 1 : 2 * count + 1], held[2 * count + 1 : total].view(count, width)
