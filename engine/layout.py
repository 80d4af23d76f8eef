"""What the knob values ask of memory: the KV pool and the arenas of host memory beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import GIB, ConfigError
from engine.memory import available_bytes, free_bytes
from engine.sizes import counted, size
from ipc.messages import MAX_BLOCKS, KnobValue

if TYPE_CHECKING:
    import torch

    from engine.runner import ModelRunner


class NoRoom(Exception):
    """Memory cannot hold what is asked for. Says what is needed and what can be had."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of the KV pool and of each arena, and what a block is. Zero blocks: not there.

    ``window`` is the override of the model's own attention windows, 0 for none.
    """

    num_blocks: int
    block_size: int
    kv_dtype: str
    window: int
    bytes_per_block: int
    prefix_blocks: int
    swap_blocks: int

    @property
    def pool(self) -> tuple[int, int, str, int]:
        """What the KV pool has to be built anew for."""
        return self.num_blocks, self.block_size, self.kv_dtype, self.window

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def host_bytes(self) -> int:
        return (self.prefix_blocks + self.swap_blocks) * self.bytes_per_block


def layout_of(values: Mapping[str, KnobValue], runner: ModelRunner, pool_bytes: int) -> Layout:
    """What knob values ask for; ``pool_bytes`` is the pool's size where they leave it open.

    ConfigError for a pool or an arena of not even one block, and for more blocks than the block map of the
    protocol can show.
    """
    block_size, kv_dtype = int(values["block_size"] or 0), str(values["kv_dtype"])
    per_block = runner.kv_bytes_per_block(block_size, kv_dtype)

    def blocks(num_bytes: int, what: str) -> int:
        count = num_bytes // per_block
        if count < 1:
            raise ConfigError(
                f"{what} of {size(num_bytes, 'B', '.4g')} does not hold even one block of {block_size} "
                f"tokens, which takes {size(per_block, 'B', '.4g')}"
            )
        return count

    def arena(knob: str, what: str) -> int:
        return blocks(_gib(values, knob), what)

    pool = _gib(values, "kv_pool_gib") or pool_bytes
    has_prefix = bool(values["prefix_cache"]) and bool(values["kv_host_gib"])
    layout = Layout(
        num_blocks=blocks(pool, "a KV pool"),
        block_size=block_size,
        kv_dtype=kv_dtype,
        window=int(values["sliding_window"] or 0),
        bytes_per_block=per_block,
        prefix_blocks=arena("kv_host_gib", "a host KV memory") if has_prefix else 0,
        swap_blocks=arena("swap_space_gib", "a swap space") if values["preemption"] == "swap" else 0,
    )
    total = layout.num_blocks + layout.prefix_blocks + layout.swap_blocks
    if total > MAX_BLOCKS:
        raise ConfigError(
            f"a KV pool of {size(pool)} and {size(layout.host_bytes)} of host memory have "
            f"{total} blocks of {counted(block_size, 'token')}, at most {MAX_BLOCKS} are possible; choose a "
            "larger block_size or less memory"
        )
    return layout


def check_room(device: torch.device, now: Layout, then: Layout, kept: int = 0) -> None:
    """Raise `NoRoom` if memory cannot hold ``then`` once what differs of ``now`` was given back.

    ``kept``: bytes of the device that no pool may take, for steps need them.
    """
    pool = host = freed_pool = freed_host = 0
    if then.pool != now.pool:
        pool, freed_pool = then.pool_bytes, now.pool_bytes
    if then.host_bytes != now.host_bytes:
        host, freed_host = then.host_bytes, now.host_bytes
    wanted = [
        ("the pool", pool, max(0, free_bytes(device) + freed_pool - kept)),
        ("host memory for KV blocks", host, available_bytes() + freed_host),
    ]
    if device.type == "cpu":  # one memory holds both
        both = available_bytes() + freed_pool + freed_host
        wanted.append(("the pool and host memory for KV blocks", pool + host, both))
    for what, needed, available in wanted:
        if needed > available:
            raise NoRoom(f"{what} would take {size(needed)}, {size(available)} can be had")


def _gib(values: Mapping[str, KnobValue], knob: str) -> int:
    return int(float(values[knob] or 0) * GIB)
