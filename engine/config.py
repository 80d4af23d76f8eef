"""What an engine is started with: whatever needs a new process to change, and the first knob values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ipc.messages import KnobValue

GIB = 1 << 30


class ConfigError(ValueError):
    """A start value that cannot be used. Says which one, its value, and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Start values of one engine process.

    ``kv_pool_bytes`` fixes the KV pool. When it is None the pool takes
    ``gpu_memory_utilization`` of a GPU's memory less what is in use, what the largest step takes
    (see `engine.memory_profile`), the budget of CUDA graphs, and what a draft model and its pool will
    need; or on a CPU one eighth of the memory that is available, at most 2 GiB.
    ``max_model_len`` may only lower the model's own limit. ``check`` verifies the block ledger
    after every step. ``stall_after_s`` is how long work may wait with nothing done before the
    engine calls itself stalled. Running requests are told of anew every ``progress_interval_s``.
    """

    model: Path
    draft_model: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    kv_pool_bytes: int | None = None
    gpu_memory_utilization: float = 0.85
    max_model_len: int | None = None
    threads: int | None = None
    check: bool = False
    stall_after_s: float = 3.0
    block_view_interval_s: float = 0.1
    progress_interval_s: float = 0.5
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kv_pool_bytes is not None and self.kv_pool_bytes < 1:
            raise ConfigError(f"kv_pool_bytes is {self.kv_pool_bytes}; it must be at least 1")
        if not 0.05 <= self.gpu_memory_utilization <= 0.98:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in 0.05 to 0.98"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError(f"threads is {self.threads}; it must lie in 1 to 1024")
        if not self.stall_after_s > 0:
            raise ConfigError(f"stall_after_s is {self.stall_after_s}; it must be above 0")
