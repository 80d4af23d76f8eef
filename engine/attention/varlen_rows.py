"""A step's rows as kernels of variable-length attention take them, for `flash_attn` and `varlen` alike.

Such a kernel gets the tokens of all rows behind one another, int32 tensors that say where each row begins,
and either block tables (``tables``, and how many keys count) or the keys of all rows behind one another
(`Span.gather`). Its causal mask is aligned to the bottom right: a row's last query sees its last key.

Rows of a single token go in a call of their own. With one query for each row the kernels pack the heads that
share keys and split the keys over the device, which they do not as soon as one row is longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints, Rows, ToDevice
from engine.kv_cache import KVCache

Window = tuple[int, int]
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys that the rows of a `Span` see, by slot: the row's own behind one another, row after row."""

    slots: Tensor  # int64 [keys]
    cu_k: Tensor  # int32 [rows + 1]
    max_k: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that share a call: the step's tokens [first, last)."""

    first: int
    last: int
    cu_q: Tensor  # int32 [rows + 1], from 0 on
    cu_k: Tensor  # int32 [rows + 1], of all keys of each row
    lengths: Tensor  # int32 [rows], keys of each row
    tables: Tensor  # int32 [rows, most blocks]; blocks that are gone name block 0, which no query looks at
    max_q: int
    max_k: int

    def gather(self, rows: Rows, begin: int, window: int | None, block_size: int) -> Gather:
        """Where the keys lie that this span's rows, from ``begin`` of the step on, see through a window.

        Computed on the device: for many long rows the slots alone would be megabytes to copy.
        """
        here = slice(begin, begin + len(self.lengths))
        skip, lengths = first_keys(rows, window)[here], rows.lengths[here]
        count = lengths - skip
        total, device = int(count.sum()), self.lengths.device
        held = self.lengths.long()
        first = torch.zeros_like(held)
        if window is not None:
            first = (held - self.cu_q.diff().long() + 1 - window).clamp_(min=0)
        held = held - first
        cu = torch.zeros(len(held) + 1, dtype=torch.int64, device=device)
        torch.cumsum(held, 0, out=cu[1:])
        row = torch.repeat_interleave(torch.arange(len(held), device=device), held, output_size=total)
        at = torch.arange(total, device=device) - cu[row] + first[row]
        slots = self.tables[row, at // block_size].long() * block_size + at % block_size
        return Gather(slots, cu.int(), int(count.max()))


def first_keys(rows: Rows, window: int | None) -> Ints:
    """The oldest position that each row's first new token attends to."""
    if window is None:
        return np.zeros_like(rows.num_computed)
    return np.maximum(rows.num_computed + 1 - window, 0)


def spans(rows: Rows, to_device: ToDevice, most_keys: int | None = None) -> list[tuple[int, Span]]:
    """The calls of a step, each with the first of its rows: single tokens, then everything longer.

    More calls where rows of one would have over ``most_keys`` keys together.
    """
    cuts = {0, rows.num_single, len(rows.num_new)}
    if most_keys is not None:
        held = 0
        for row, keys in enumerate(rows.lengths.tolist()):
            held = keys if row in cuts else held + keys
            if held > most_keys:
                cuts.add(row)
                held = keys
    return [(begin, _span(rows, begin, end, to_device)) for begin, end in pairwise(sorted(cuts))]


def kernel_window(window: int | None, max_q: int) -> Window:
    """Keys to the left and right of a query's own position that it sees, -1 for all of them.

    Kernels count the keys beside the query, a model's window counts the query itself too. A single query sees
    no key behind itself anyway, and is computed faster where the kernel is not told so.
    """
    if window is not None:
        return window - 1, 0
    return (-1, -1) if max_q == 1 else (-1, 0)


def pages(kv: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer as [blocks, block_size, kv_heads, head_dim]."""
    shape = (kv.num_blocks, kv.block_size, *kv.k[layer].shape[1:])
    return kv.k[layer].view(shape), kv.v[layer].view(shape)


def probe_kernel(head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why such kernels cannot run on a device at all, whoever made them, or None."""
    if device.type != "cuda":
        return f"its kernels run on an NVIDIA GPU, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"its kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels need bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"its kernels need heads of at most {MAX_HEAD_DIM} and a multiple of 8, not {head_dim}"
    return None


def _span(rows: Rows, begin: int, end: int, to_device: ToDevice) -> Span:
    new, lengths = rows.num_new[begin:end], rows.lengths[begin:end]
    count, width = end - begin, -(-int(lengths.max()) // rows.block_size)
    sizes = (count + 1, count + 1, count, count * width)
    packed = np.zeros(sum(sizes) + sum(sizes) % 2, dtype=np.int32)  # one copy, in words of 64 bits
    cu_q, cu_k, held, tables, _ = np.split(packed, np.cumsum(sizes))
    cu_q[1:], cu_k[1:], held[:] = new.cumsum(), lengths.cumsum(), lengths
    tables.reshape(count, width)[:] = np.maximum(rows.tables[begin:end, :width], 0)
    there = to_device(packed.view(np.int64)).view(torch.int32)
    borders = pairwise(np.cumsum((0, *sizes)).tolist())
    starts, ends, keys, blocks = (there[a:b] for a, b in borders)
    first = int(rows.starts[begin])
    return Span(
        first, first + int(new.sum()), starts, ends, keys, blocks.view(count, width),
        max_q=int(new.max()), max_k=int(lengths.max()),
    )  # fmt: skip
