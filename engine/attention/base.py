"""The interface of attention backends, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.knob import PoolLimits
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec

Ints = NDArray[np.int64]
ToDevice = Callable[[Ints], Tensor]

MAX_SHORT = 17  # new tokens of a row that still counts as short: one, and the longest draft behind it

GATHER_BYTES = 256 << 20
"""Of keys and values of a layer that a GPU gathers at once, unless one row alone has more: what rows look at
together is no less than the pool, and many times that where they share blocks.
"""


@dataclass(slots=True)
class Rows:
    """The requests of one step, on the host, in the order of their tokens in the step's tensors.

    Row r computes ``num_new[r]`` tokens from position ``num_computed[r]`` on, which are the step's tokens
    [starts[r], starts[r] + num_new[r]). ``tables[r]`` lists its blocks, of which the first
    ceil(length / block_size) count; leading ones that no layer attends to may be -1, no block at all.
    Rows of up to `MAX_SHORT` new tokens come first, those of fewer before those of more, and rows of equally
    many are sorted by their length, longest first. The first ``num_single`` rows have one new token each.
    """

    starts: Ints
    num_new: Ints
    num_computed: Ints
    tables: Ints  # [rows, most blocks of a row]
    num_single: int
    block_size: int

    @property
    def lengths(self) -> Ints:
        """Tokens that each row has once the step is done: the keys that its last new token attends to."""
        return self.num_computed + self.num_new


@dataclass(frozen=True, slots=True)
class Needs:
    """In what form a plan wants the queries, keys and values of its step.

    ``scaled``: queries come multiplied by the scale of quantized keys, and what is returned has yet to be
    multiplied by that of the values (`KVCache.store`, `KVCache.finish`). Otherwise the plan does both itself.
    ``new``: it reads the step's new keys and values from what `attend` is given. Otherwise they may be None.
    """

    scaled: bool = True
    new: bool = True


class AttentionPlan(Protocol):
    """What a backend prepared for one step."""

    needs: Needs

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention of one layer, whose new keys and values are in the pool already.

        q: [tokens, heads, head_dim] in the pool's ``compute_dtype``. k, v: the step's new keys and values as
        they are stored, [tokens, kv_heads, head_dim] (see `KVCache.read`), if they are needed. Returns
        [tokens, heads * head_dim] in ``compute_dtype``.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention. Keeps nothing between steps but scratch memory.

    ``name`` says what runs, and so may say more than the name that it was asked for by (``flash_attn3``).
    """

    name: str

    def plan(self, rows: Rows, kv: KVCache, spec: ModelSpec, to_device: ToDevice) -> AttentionPlan:
        """Prepare one step: everything that does not depend on the layer, on the device.

        May run while another step of the same backend is computed: it gets places in scratch memory, and
        touches none of it.
        """
        ...


def names() -> tuple[str, ...]:
    """Every backend, the reference first."""
    return ("naive", "sdpa", "paged", "flash_attn", "varlen")


def probe(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot serve this model here, or None if it can."""
    from engine.attention import flash_attn, paged, sdpa, varlen

    if name not in names():
        return f"unknown attention backend {name!r}; there are {', '.join(names())}"
    if device.type not in ("cpu", "cuda"):
        return f"{name} attention runs on cpu and cuda, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{name} attention needs float32, bfloat16 or float16, not {dtype}"
    probes = {
        "sdpa": sdpa.probe, "paged": paged.probe, "flash_attn": flash_attn.probe, "varlen": varlen.probe,
    }  # fmt: skip
    return probes[name](spec, device, dtype) if name in probes else None


def usable(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backends that can serve this model here, and why others cannot, by ``attention=name``."""
    found = {name: probe(name, spec, device, dtype) for name in names()}
    cannot = {f"attention={name}": reason for name, reason in found.items() if reason is not None}
    return tuple(name for name, reason in found.items() if reason is None), cannot


def pool_limits(device: torch.device) -> dict[str, PoolLimits]:
    """What backends ask of the KV pool, those that take any left out."""
    from engine.attention import flash_attn, varlen

    return {"flash_attn": flash_attn.limits(device), "varlen": varlen.limits()}


def get_backend(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> AttentionBackend:
    """The backend of that name on a device; ask `probe` first. Raises KeyError for an unknown one.

    What it is called there may depend on the ``dtype`` that a model computes in.
    """
    from engine.attention import flash_attn, paged, varlen
    from engine.attention.naive import NaiveAttention
    from engine.attention.sdpa import SdpaAttention

    makers: dict[str, Callable[[], AttentionBackend]] = {
        "naive": NaiveAttention,
        "sdpa": lambda: SdpaAttention(device, dtype),
        "paged": lambda: paged.make(device),
        "flash_attn": lambda: flash_attn.make(device),
        "varlen": lambda: varlen.make(device),
    }
    return makers[name]()
