"""Attention through ``torch.nn.functional.scaled_dot_product_attention`` over gathered blocks.

Short rows (one new token, or a few where drafts are verified) are served together with those of equally many.
Their blocks are gathered into one tensor, padded to the longest. The query heads that share a KV head, and
the new tokens, are folded into the query length, so that each key is read once and no key is repeated. Rows
of very different lengths are split into buckets, for padding costs as much as real tokens do. Longer rows
(prefill, chunks) run one by one; without earlier context they read their keys straight from the step's
tensors.

torch has several kernels behind that function and takes whichever suits a call, by its version. On a GPU each
kind of call has one here, and fails where that cannot run (`Forced`); the backend's name says which. On a CPU
torch's choice stands.

Products run in the pool's ``compute_dtype``. Quantized blocks are gathered as they are stored and widened to
it, bucket by bucket, while they are still in a CPU's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention.base import GATHER_BYTES, MAX_SHORT, AttentionPlan, Ints, Needs, Rows, ToDevice
from engine.attention.varlen_rows import MIN_CAPABILITY, probe_kernel
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

BUCKET_COST_TOKENS = 512  # what one more bucket costs a layer, in gathered tokens
BUCKET_BYTES = (
    2 << 20
)  # of keys and values that a CPU gathers at once, so that they are still cached when used
QUERY_TILE = 512  # new tokens of a chunk that share one mask


@dataclass(slots=True)
class _Gathered:
    """Blocks of some rows, and the scratch memory that they are gathered to."""

    blocks: Tensor  # [blocks]
    flat_k: Tensor  # [blocks, elements of a block]
    flat_v: Tensor
    k: Tensor  # [rows, kv_heads, keys, head_dim], the same memory
    v: Tensor
    stored: Tensor | None  # [blocks, elements of a block], as a quantized pool holds them
    bits: Tensor

    def fill(self, kv: KVCache, paged_k: Tensor, paged_v: Tensor) -> None:
        """Read the blocks from one layer of the pool, [num_blocks, elements of a block]."""
        for paged, flat in ((paged_k, self.flat_k), (paged_v, self.flat_v)):
            if self.stored is None:
                torch.index_select(paged, 0, self.blocks, out=flat)
            else:
                torch.index_select(paged, 0, self.blocks, out=self.stored)
                kv.read(self.stored, flat, self.bits)


class _Scratch:
    """Memory for one gathering at a time. It is kept: fresh pages each time cost as much as the copy.

    All plans share it, for one gathering is read before the next is made. A plan holds on to the memory that
    it was given places in, so a later plan that needs more, and gets it, takes nothing away.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def place(self, blocks: Tensor, rows: int, kv: KVCache) -> _Gathered:
        """A place for ``blocks`` [rows * blocks per row] of ``rows`` rows."""
        block = kv.k[0][: kv.block_size]
        size = len(blocks) * block.numel()
        flat_k, flat_v = (self._take(name, size, kv.compute_dtype, kv) for name in ("k", "v"))
        k, v = (flat.view(rows, -1, *block.shape[1:]).transpose(1, 2) for flat in (flat_k, flat_v))
        stored, bits = None, flat_k
        if kv.quantizer is not None:
            stored = self._take("stored", size, block.dtype, kv).view(len(blocks), -1)
            bits = self._take("bits", size if kv.quantizer.needs_scratch else 0, torch.int16, kv)
        flat_k, flat_v = flat_k.view(len(blocks), -1), flat_v.view(len(blocks), -1)
        return _Gathered(blocks, flat_k, flat_v, k, v, stored, bits)

    def _take(self, name: str, size: int, dtype: torch.dtype, kv: KVCache) -> Tensor:
        held = self._held.get(name)
        if held is None or held.dtype != dtype or held.device != kv.device or len(held) < size:
            held = self._held[name] = torch.empty(size, dtype=dtype, device=kv.device)
        return held[:size]


@dataclass(slots=True)
class _Bucket:
    """Rows of ``new`` tokens each, tokens [first, last) of the step, their keys gathered to [rows, keys]."""

    first: int
    last: int
    new: int
    gathered: _Gathered  # padded with each row's own last block
    mask: Tensor  # [rows, 1, queries folded, keys], 0 or -inf; one query where all see the same


@dataclass(slots=True)
class _Tile:
    """Query tokens [first, last) of the step over keys [key_first, key_last) of their row."""

    first: int
    last: int
    key_first: int
    key_last: int
    mask: Tensor | None  # [queries, keys], 0 or -inf; None: causal, the first query sees the first key


@dataclass(slots=True)
class _Chunk:
    """A long row, the new tokens [first, last) of the step."""

    first: int
    last: int
    gathered: _Gathered | None  # None where all its keys are new
    tiles: list[_Tile]


Place = Callable[[Tensor, int], _Gathered]


@dataclass(frozen=True, slots=True)
class Forced:
    """torch's kernel for each kind of call: with a mask, and causal without."""

    masked: SDPBackend
    causal: SDPBackend

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Forced | None:
        """Of those that a GPU has; None on a CPU.

        FlashAttention takes no mask, 16 bits alone, and needs a newer GPU; the other takes all.
        """
        if device.type != "cuda":
            return None
        flash = dtype in (torch.bfloat16, torch.float16) and _is_new(device)
        other = SDPBackend.EFFICIENT_ATTENTION
        return cls(other, SDPBackend.FLASH_ATTENTION if flash else other)

    @property
    def name(self) -> str:
        """Of both."""
        names = {each.name.split("_")[0].lower(): None for each in (self.masked, self.causal)}
        return "_".join(names)


def probe(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it cannot serve this model here, or None if it can."""
    forced = Forced.on(device, dtype)
    if forced is None:
        return None
    multiple = 16 // dtype.itemsize
    if spec.head_dim % multiple:
        return (
            f"torch's efficient attention needs heads of a multiple of {multiple} in "
            f"{str(dtype).removeprefix('torch.')}, not {spec.head_dim}"
        )
    if forced.causal == SDPBackend.FLASH_ATTENTION or dtype == torch.bfloat16:  # older GPUs lack that type
        return probe_kernel(spec.head_dim, device, dtype)
    return None


def _is_new(device: torch.device) -> bool:
    """Whether a GPU runs FlashAttention, and calculates in bfloat16."""
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


class SdpaAttention:
    """See `engine.attention.base.AttentionBackend`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype`` is what a model computes in."""
        forced = Forced.on(device, dtype)
        self.name = "sdpa" if forced is None else f"sdpa_{forced.name}"
        self._scratch = _Scratch()

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        place = partial(self._scratch.place, kv=kv)
        group = spec.num_heads // spec.num_kv_heads
        per_window = {
            window: (
                _plan_buckets(rows, kv, group, window, to_device, place),
                _plan_chunks(rows, kv, window, to_device, place),
            )
            for window in dict.fromkeys(spec.layer_windows)
        }
        return _SdpaPlan(per_window, kv, spec)


class _SdpaPlan:
    def __init__(
        self,
        per_window: dict[int | None, tuple[list[_Bucket], list[_Chunk]]],
        kv: KVCache,
        spec: ModelSpec,
    ) -> None:
        self.parts = [per_window[window] for window in spec.layer_windows]
        from_step = any(chunk.gathered is None for _, chunks in self.parts for chunk in chunks)
        self.needs = Needs(new=from_step)
        # The pool by blocks: what is gathered is whole blocks, long runs of memory.
        self.kv = kv
        self.k, self.v = kv.paged[: spec.num_layers], kv.paged[spec.num_layers :]
        self.kv_heads = spec.num_kv_heads
        self.group = spec.num_heads // spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.forced = Forced.on(kv.device, kv.compute_dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        buckets, chunks = self.parts[layer]
        if self.forced is None:
            parts = [self._together(layer, q, bucket) for bucket in buckets]
            for chunk in chunks:
                parts += self._several(layer, q, k, v, chunk)
        else:
            parts = self._under(self.forced, layer, q, k, v)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _under(
        self, forced: Forced, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> list[Tensor]:
        """What `attend` computes, each kind of call under its own kernel: switching takes microseconds."""
        buckets, chunks = self.parts[layer]
        parts = []
        if buckets:
            with sdpa_kernel(forced.masked):
                parts += [self._together(layer, q, bucket) for bucket in buckets]
        for chunk in chunks:
            with sdpa_kernel(forced.causal if chunk.tiles[0].mask is None else forced.masked):
                parts += self._several(layer, q, k, v, chunk)
        return parts

    def _together(self, layer: int, q: Tensor, bucket: _Bucket) -> Tensor:
        tokens, new, gathered = bucket.last - bucket.first, bucket.new, bucket.gathered
        gathered.fill(self.kv, self.k[layer], self.v[layer])
        queries = q[bucket.first : bucket.last]
        if new == 1:
            folded = queries.view(tokens, self.kv_heads, self.group, self.head_dim)
            out = F.scaled_dot_product_attention(folded, gathered.k, gathered.v, attn_mask=bucket.mask)
            return out.reshape(tokens, -1)
        rows = tokens // new
        by_head = queries.view(rows, new, self.kv_heads, self.group, self.head_dim).transpose(1, 2)
        folded = by_head.reshape(rows, self.kv_heads, new * self.group, self.head_dim)
        out = F.scaled_dot_product_attention(folded, gathered.k, gathered.v, attn_mask=bucket.mask)
        by_token = out.view(rows, self.kv_heads, new, self.group, self.head_dim).transpose(1, 2)
        return by_token.reshape(tokens, -1)

    def _several(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, chunk: _Chunk
    ) -> list[Tensor]:
        if chunk.gathered is None:
            assert k is not None  # as `needs` says
            assert v is not None
            keys, values = (self.kv.read(new[chunk.first : chunk.last]) for new in (k, v))
            keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        else:
            chunk.gathered.fill(self.kv, self.k[layer], self.v[layer])
            keys, values = chunk.gathered.k, chunk.gathered.v
        keys = keys.repeat_interleave(self.group, dim=1)
        values = values.repeat_interleave(self.group, dim=1)
        out = []
        for tile in chunk.tiles:
            seen = slice(tile.key_first, tile.key_last)
            queries = q[tile.first : tile.last].transpose(0, 1).unsqueeze(0)
            result = F.scaled_dot_product_attention(
                queries,
                keys[:, :, seen],
                values[:, :, seen],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
            )
            out.append(result[0].transpose(0, 1).flatten(1))
        return out


def _plan_buckets(
    rows: Rows, kv: KVCache, group: int, window: int | None, to_device: ToDevice, place: Place
) -> list[_Bucket]:
    buckets = []
    block_bytes = 2 * kv.k[0][: rows.block_size].numel() * kv.compute_dtype.itemsize
    most = (BUCKET_BYTES if kv.device.type == "cpu" else GATHER_BYTES) // block_bytes
    for begin, end in _short_ranges(rows):
        new = int(rows.num_new[begin])
        lengths, tables = rows.lengths[begin:end], rows.tables[begin:end]
        oldest = _oldest_seen(lengths, new, window)
        first_block, last_block = oldest // rows.block_size, (lengths - 1) // rows.block_size
        counts = last_block - first_block + 1
        for first, last in _split(counts, max(1, BUCKET_COST_TOKENS // rows.block_size), most):
            here = slice(first, last)
            width = int(counts[here].max())
            wanted = first_block[here, None] + np.arange(width)
            blocks = np.take_along_axis(
                tables[here], np.minimum(wanted, last_block[here, None]), axis=1
            ).ravel()
            at = lengths[here] - first_block[here] * rows.block_size  # keys up to the last that counts
            mask = _bucket_mask(to_device(at), new, group, width * rows.block_size, window, kv)
            start = int(rows.starts[begin]) + first * new
            gathered = place(to_device(blocks), last - first)
            buckets.append(_Bucket(start, start + (last - first) * new, new, gathered, mask))
    return buckets


def _short_ranges(rows: Rows) -> list[tuple[int, int]]:
    """Ranges of rows of equally few new tokens."""
    short = int(np.searchsorted(rows.num_new[rows.num_single :] > MAX_SHORT, True)) + rows.num_single
    if short == rows.num_single:
        return [(0, short)] if short else []
    borders = np.flatnonzero(np.diff(rows.num_new[:short])) + 1
    return list(zip([0, *borders.tolist()], [*borders.tolist(), short], strict=True))


def _oldest_seen(lengths: Ints, new: int, window: int | None) -> Ints:
    """The oldest position that the first new token of each row attends to."""
    return np.zeros_like(lengths) if window is None else np.maximum(lengths - new + 1 - window, 0)


def _bucket_mask(ends: Tensor, new: int, group: int, keys: int, window: int | None, kv: KVCache) -> Tensor:
    """[rows, 1, queries, keys] for rows whose last new token sees the keys before ``ends`` [rows].

    Queries are ``new`` tokens of ``group`` heads each; a single token's heads share one line.
    """
    at = torch.arange(keys, device=kv.device)
    behind = torch.arange(new - 1, -1, -1, device=kv.device)
    last = ends.view(-1, 1, 1) - 1 - behind.view(1, -1, 1)  # the position of each query itself
    hidden = at > last
    if window is not None:
        hidden |= at <= last - window
    mask = _mask(hidden, kv.compute_dtype)
    return (mask if new == 1 else mask.repeat_interleave(group, dim=1)).unsqueeze(1)


def _split(counts: Ints, cost: int, most: int) -> list[tuple[int, int]]:
    """Ranges of rows to gather together; ``counts`` are their blocks, about falling.

    A new range starts where all rows from there on would otherwise be padded by more than ``cost`` blocks,
    and where the range would grow over ``most`` blocks.
    """
    ranges, first = [], 0
    values, total = counts.tolist(), len(counts)
    widest = values[0]
    for row in range(1, total):
        widest = max(widest, values[row])
        padded = (widest - values[row]) * (total - row) > cost
        if padded or widest * (row + 1 - first) > most:
            ranges.append((first, row))
            first, widest = row, values[row]
    ranges.append((first, total))
    return ranges


def _plan_chunks(
    rows: Rows, kv: KVCache, window: int | None, to_device: ToDevice, place: Place
) -> list[_Chunk]:
    chunks = []
    for r in np.flatnonzero(rows.num_new > MAX_SHORT).tolist():
        start, new, computed = int(rows.starts[r]), int(rows.num_new[r]), int(rows.num_computed[r])
        gathered, dropped = None, 0  # keys before the window are not even gathered
        if computed:
            if window is not None:
                dropped = max(0, computed + 1 - window) // rows.block_size
            table = rows.tables[r, dropped : -(-(computed + new) // rows.block_size)]
            gathered = place(to_device(table), 1)
        tiles = _plan_tiles(start, new, computed, dropped * rows.block_size, window, kv)
        chunks.append(_Chunk(start, start + new, gathered, tiles))
    return chunks


def _plan_tiles(
    start: int, new: int, computed: int, key_base: int, window: int | None, kv: KVCache
) -> list[_Tile]:
    """Tiles of a chunk at ``start`` of the step; its keys begin at position ``key_base``."""
    if computed == 0 and (window is None or new <= window):
        return [_Tile(start, start + new, 0, new, None)]
    firsts = range(0, new, QUERY_TILE)
    oldest = [0 if window is None else max(0, computed + first + 1 - window) for first in firsts]
    behind = [computed + first - old for first, old in zip(firsts, oldest, strict=True)]
    # What a query sees depends on its distance to a key alone, so all tiles share one mask, each from its own
    # column on. One for each would take gigabytes for a long chunk over a long context.
    most, side = max(behind), min(QUERY_TILE, new)
    distance = torch.arange(side, device=kv.device).unsqueeze(1) + most
    distance = distance - torch.arange(most + side, device=kv.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = _mask(hidden, kv.compute_dtype)
    tiles = []
    for first, old, seen in zip(firsts, oldest, behind, strict=True):
        last = min(first + QUERY_TILE, new)
        shared = mask[: last - first, most - seen : most + last - first]
        tiles.append(_Tile(start + first, start + last, old - key_base, computed + last - key_base, shared))
    return tiles


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
