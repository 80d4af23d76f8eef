"""The KV pool: one K and one V tensor a layer, addressed by slot.

Slot ``s = block * block_size + offset`` holds the key and value of one token. Which block belongs to whom is
the block pool's affair; this file only owns the memory. Separate tensors for each layer, not one big one, so
that a write into a layer never makes a compiler or an allocator touch the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.spec import ModelSpec


def kv_bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of ``block_size`` tokens takes over all layers, keys and values together."""
    return spec.kv_bytes_per_token(dtype) * block_size


@dataclass(slots=True)
class KVCache:
    """Keys and values of ``num_blocks * block_size`` tokens.

    ``k[layer]`` and ``v[layer]`` have shape ``[num_blocks * block_size, num_kv_heads, head_dim]``. Block 0 is
    a block like any other. The memory starts as zeros, for the value of a masked key is still multiplied by
    a weight of zero, and zero times garbage may be NaN.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    k: list[Tensor]
    v: list[Tensor]
    bytes_per_block: int

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Allocate the pool. ValueError for sizes below 1, MemoryError with the size if it does not fit."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV pool needs at least 1 block of 1 token, got {num_blocks} blocks of {block_size} tokens"
            )
        shape = (num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        per_block = kv_bytes_per_block(spec, block_size, dtype)
        try:
            k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
            v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        except RuntimeError as error:  # torch.OutOfMemoryError is one; so is the CPU allocator's
            raise MemoryError(
                f"no memory for a KV pool of {num_blocks} blocks of {block_size} tokens "
                f"({num_blocks * per_block / 2**30:.2f} GiB on {device}); ask for fewer blocks"
            ) from error
        return cls(num_blocks, block_size, dtype, device, k, v, per_block)

    @staticmethod
    def max_blocks(budget_bytes: int, spec: ModelSpec, *, block_size: int, dtype: torch.dtype) -> int:
        """How many blocks fit in ``budget_bytes``; 0 if not even one does."""
        return max(0, budget_bytes) // kv_bytes_per_block(spec, block_size, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def paged(self) -> list[Tensor]:
        """Keys of each layer, then values of each: views [num_blocks, elements of a block]."""
        return [layer.view(self.num_blocks, -1) for layer in (*self.k, *self.v)]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Replace non-finite keys and values in these blocks by 0, keeping all finite ones.

        Called for the blocks of a request whose logits were not finite: its blocks go to others, whose masked
        positions would otherwise multiply a weight of zero by what was left there.
        """
        if not blocks:
            return
        index = torch.tensor(list(blocks), device=self.device)
        for paged in self.paged:
            paged[index] = torch.nan_to_num(paged[index], nan=0.0, posinf=0.0, neginf=0.0)
