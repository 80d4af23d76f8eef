"""Which attention runs for ``attention=auto``. Imports no torch.

It is settled when values are applied, never within a step, and each step names what ran.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.knob import KnobContext
from ipc.messages import KnobValue

AUTO = "auto"
ORDER: Mapping[str, tuple[str, ...]] = {
    "cuda": ("paged", "flash_attn", "varlen", "sdpa", "naive"),
    "cpu": ("paged", "sdpa"),
}
"""What `AUTO` stands for on each kind of device: the first that can run with the pool as it is.

On a GPU naive serves what no kernel takes: bfloat16 before compute capability 8.0, and heads of odd sizes.
"""


def resolve(values: Mapping[str, KnobValue], context: KnobContext) -> str:
    """The attention that knob values ask for, by its name. ValueError where `AUTO` finds none."""
    wanted = str(values["attention"])
    if wanted != AUTO:
        return wanted
    for name in ORDER[context.device]:
        if name in context.attention and not pool_reason(name, values, context):
            return name
    raise ValueError(f"attention=auto finds none of {', '.join(ORDER[context.device])} that can run here")


def pool_reason(name: str, values: Mapping[str, KnobValue], context: KnobContext) -> str:
    """Why an attention cannot read the KV pool that knob values ask for, or "" if it can."""
    limits = context.pools.get(name)
    if limits is None:
        return ""
    size, kv_dtype, multiple = values["block_size"], values["kv_dtype"], limits.block_multiple
    if isinstance(size, int) and size % multiple:
        return (
            f"{name} reads blocks of a multiple of {multiple} tokens, and block_size is {size}; set "
            f"block_size to {multiple}"
        )
    if kv_dtype != "model" and not limits.quantized:
        return f"{name} reads keys and values in 16 bits, and kv_dtype is {kv_dtype}; set kv_dtype to model"
    return ""
