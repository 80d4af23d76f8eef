"""AWQ checkpoints in the ``gemm`` layout, as AutoAWQ writes them (arXiv 2306.00978).

qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales [in / group, out];
``w = (code - zero) * scale``. Activation-aware scales are folded into other layers already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.layers.precision.codes import pack_nibbles
from engine.layers.precision.weights import Int4Weight
from engine.models.errors import ModelError
from engine.models.quantized.bits import unpack_awq
from engine.models.quantized.scheme import FLOATS, Need, Settings, built, group_size

HARMLESS = (
    "sym",  # the zeros are stored either way
    "meta",
    "lm_head",
    "backend",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "exllama_config",
    "modules_to_not_convert",
)


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """Groups of ``group`` input channels, -1 for the whole row."""

    group: int

    @property
    def name(self) -> str:
        return f"awq int4 group {self.group}"

    def needs(self, out: int, cols: int) -> dict[str, Need]:
        if out % 8 or cols % 2:
            raise ModelError(
                f"an AWQ weight [{out}, {cols}] needs multiples of 8 output and 2 input channels"
            )
        groups = cols // group_size(self.group, cols)
        return {
            "qweight": Need(((cols, out // 8),), ("I32",)),
            "qzeros": Need(((groups, out // 8),), ("I32",)),
            "scales": Need(((groups, out),), FLOATS),
        }

    def build(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> Int4Weight:
        codes = unpack_awq(tensors["qweight"]).t().contiguous()
        with built("AWQ"):
            return Int4Weight(
                pack_nibbles(codes),
                tensors["scales"],
                group_size(self.group, cols),
                zeros=unpack_awq(tensors["qzeros"]),
            )


def parse(config: Mapping[str, Any]) -> AwqScheme:
    """Raises `ModelError` for other layouts (gemv, marlin) and bit widths."""
    settings = Settings("the AWQ quantization_config", config, HARMLESS)
    settings.agreed("quant_method", "method", default="awq")
    settings.one_of("bits", (4,), settings.agreed("w_bit", "bits", default=None))
    version = settings.agreed("version", "format", "checkpoint_format", default="gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ModelError(f"the AWQ layout {version!r} is not supported; supported: gemm")
    settings.one_of("zero_point", (True,), True)
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.one_of("desc_act", (False,), False)
    group = settings.size("group_size", settings.agreed("q_group_size", "group_size", default=128))
    settings.finish()
    return AwqScheme(group)
