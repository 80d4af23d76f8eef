"""The KV pool: one K and one V tensor a layer, addressed by slot.

Slot ``s = block * block_size + offset`` holds the key and value of one token. Which block belongs to whom is
the block pool's affair; this file only owns the memory. Separate tensors for each layer, not one big one, so
that a write into a layer never makes a compiler or an allocator touch the others.

Whatever the precision, attention only ever sees keys and values as they are stored, those of the step's own
tokens too: where a prompt is cut into chunks, or what of it was cached, changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_quant import KVQuantizer
from engine.kv_scales import KVScales, KVScalesError
from engine.models.spec import ModelSpec
from engine.native.pages import zeros_in_large_pages
from engine.out_of_memory import allocating
from engine.sizes import counted

KV_DTYPES = ("model", "fp8_e4m3", "int8")
"""Precisions of keys and values by name; "model" is that of the weights."""


def storage_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands behind a name of `KV_DTYPES`. ValueError for another name."""
    dtypes = {"model": model_dtype, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    if name not in dtypes:
        raise ValueError(f"unknown kv_dtype {name!r}; there are {', '.join(KV_DTYPES)}")
    return dtypes[name]


def kv_bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of ``block_size`` tokens takes over all layers, keys and values together."""
    return spec.kv_bytes_per_token(dtype) * block_size


@dataclass(slots=True, weakref_slot=True)
class KVCache:
    """Keys and values of ``num_blocks * block_size`` tokens.

    ``k[layer]`` and ``v[layer]`` have shape ``[num_blocks * block_size, num_kv_heads, head_dim]``. Block 0 is
    a block like any other. The memory starts as zeros, for the value of a masked key is still multiplied by
    a weight of zero, and zero times garbage may be NaN.

    ``dtype`` is that of the storage: the model's, or 8 bits through ``quantizer``; float8 is held as bytes.
    ``compute_dtype`` is what attention works in.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    k: list[Tensor]
    v: list[Tensor]
    bytes_per_block: int
    quantizer: KVQuantizer | None

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str = "model",
        scales: KVScales | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Allocate the pool of a model in ``dtype``, whose keys and values are held in ``kv_dtype``.

        Attention over quantized keys and values works in ``compute_dtype``, by default that of the model.
        ValueError for sizes below 1 or an unknown kv_dtype, `KVScalesError` if it needs scales and not all
        are there, MemoryError with the size if it does not fit.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV pool needs at least 1 block of 1 token, got {num_blocks} blocks of {block_size} tokens"
            )
        storage = storage_dtype(kv_dtype, dtype)
        quantizer, compute = None, dtype
        if kv_dtype != "model":
            if scales is None:
                raise KVScalesError(f"kv_dtype {kv_dtype} needs scales, and none were given")
            scales.check(spec)
            group, compute = spec.num_heads // spec.num_kv_heads, compute_dtype or dtype
            quantizer = KVQuantizer.of(scales, group=group, storage=storage, compute=compute, device=device)
        shape = (num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        per_block = kv_bytes_per_block(spec, block_size, storage)
        held = torch.uint8 if storage == torch.float8_e4m3fn else storage
        size = num_blocks * per_block
        what = (
            f"a KV pool of {counted(num_blocks, 'block')} of {counted(block_size, 'token')} "
            f"({size / 2**30:.2f} GiB on {device})"
        )
        with allocating(what, device, size, "ask for fewer blocks"):
            both = _zeros(2 * spec.num_layers, shape, held, device)
        k, v = both[: spec.num_layers], both[spec.num_layers :]
        return cls(num_blocks, block_size, storage, compute, device, k, v, per_block, quantizer)

    @staticmethod
    def max_blocks(budget_bytes: int, spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
        """How many blocks of storage ``dtype`` fit in ``budget_bytes``; 0 if not even one does."""
        return max(0, budget_bytes) // kv_bytes_per_block(spec, block_size, dtype)

    def store(
        self, layer: int, slots: Tensor, qkv: Tensor, *, scaled: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the keys and values of new tokens to their slots.

        qkv: [tokens, heads + 2 * kv_heads, head_dim], which is not changed. Returns the queries in
        ``compute_dtype``, as attention wants them (``scaled``: times the scale of quantized keys), and keys
        and values as they are stored (see `read`).
        """
        kv_heads = self.k[layer].shape[1]
        heads = qkv.shape[1] - 2 * kv_heads
        if self.quantizer is None:
            qkv = qkv.to(self.dtype)
            q, new = qkv[:, :heads], qkv[:, heads:]
        elif scaled:
            both = qkv * self.quantizer.before[layer]
            q, new = both[:, :heads].to(self.compute_dtype), self.quantizer.encode(both[:, heads:])
        else:
            q = qkv[:, :heads].to(self.compute_dtype)
            new = self.quantizer.encode(qkv[:, heads:] * self.quantizer.before[layer, heads:])
        k, v = new[:, :kv_heads], new[:, kv_heads:]
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)
        return q, k, v

    def read(self, stored: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        """Stored keys or values in ``compute_dtype``, still without their scale if they are quantized.

        ``out`` and int16 ``scratch``, both at least as long, save memory from being taken anew.
        """
        if self.quantizer is None:
            return stored
        if out is None:
            out = torch.empty(stored.shape, dtype=self.compute_dtype, device=self.device)
        if scratch is None:
            size = stored.numel() if self.quantizer.needs_scratch else 0
            scratch = torch.empty(size, dtype=torch.int16, device=self.device)
        self.quantizer.decode(stored, out, scratch)
        return out

    def finish(self, layer: int, attended: Tensor) -> Tensor:
        """What attention returned, [tokens, heads * head_dim], with the scale of the values put in."""
        if self.quantizer is None:
            return attended
        after = self.quantizer.after[layer]
        return (attended.view(len(attended), len(after), -1) * after).flatten(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def paged(self) -> list[Tensor]:
        """Keys of each layer, then values of each: views [num_blocks, elements of a block]."""
        return [layer.view(self.num_blocks, -1) for layer in (*self.k, *self.v)]

    @property
    def words(self) -> list[Tensor]:
        """The same memory as `paged` in the widest integers that divide a block.

        For copies: an indexed copy on a CPU goes number by number, however small they are.
        """
        size = self.bytes_per_block // (len(self.k) + len(self.v))
        integers = (torch.int64, torch.int32, torch.int16, torch.uint8)
        return [layer.view(next(d for d in integers if size % d.itemsize == 0)) for layer in self.paged]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Replace non-finite keys and values in these blocks by 0, keeping all finite ones.

        Called for the blocks of a request whose logits were not finite: its blocks go to others, whose masked
        positions would otherwise multiply a weight of zero by what was left there.
        """
        if not blocks or self.dtype == torch.int8:
            return
        index = torch.tensor(list(blocks), device=self.device)
        for paged in self.paged:
            held = paged[index]
            if self.quantizer is None:
                paged[index] = torch.nan_to_num(held, nan=0.0, posinf=0.0, neginf=0.0)
            else:  # bytes of e4m3, which has two NaN and no infinities
                paged[index] = held.masked_fill(held & 0x7F == 0x7F, 0)


def _zeros(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    if device.type == "cpu" and sys.platform == "linux":  # where there are such pages
        return zeros_in_large_pages(count, shape, dtype)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
