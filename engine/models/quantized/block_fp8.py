"""float8 checkpoints with a scale for each block of the weight, as DeepSeek-V3 and Qwen3 publish them.

weight float8 e4m3 [out, in], weight_scale_inv [ceil(out / rows), ceil(in / cols)];
``w = code * weight_scale_inv`` in spite of the name (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.layers.precision.weights import Fp8BlockWeight
from engine.models.errors import ModelError
from engine.models.quantized.scheme import FLOATS, Need, Settings, built

HARMLESS = ("quant_method", "modules_to_not_convert", "scale_fmt", "dequantize")


@dataclass(frozen=True, slots=True)
class BlockFp8Scheme:
    """Blocks of ``block = (rows, cols)``."""

    block: tuple[int, int]

    @property
    def name(self) -> str:
        return f"fp8 blocks of {self.block[0]} x {self.block[1]}"

    def needs(self, out: int, cols: int) -> dict[str, Need]:
        tiles = (-(-out // self.block[0]), -(-cols // self.block[1]))
        return {
            "weight": Need(((out, cols),), ("F8_E4M3",)),
            "weight_scale_inv": Need((tiles,), FLOATS),
        }

    def build(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> Fp8BlockWeight:
        with built("fp8"):
            return Fp8BlockWeight(tensors["weight"], tensors["weight_scale_inv"], self.block)


def parse(config: Mapping[str, Any]) -> BlockFp8Scheme:
    """Raises `ModelError` for scales of whole tensors and for fixed scales of activations."""
    settings = Settings("the fp8 quantization_config", config, HARMLESS)
    settings.one_of("fmt", ("e4m3",), "e4m3")
    settings.one_of("activation_scheme", ("dynamic",), "dynamic")
    settings.one_of("expert_dtype", ("fp8",), "fp8")
    block = settings.get("weight_block_size")
    sides = block if isinstance(block, list) else []
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ModelError(
            f"weight_block_size of the fp8 quantization_config is {block!r}; two whole numbers are needed, "
            "other fp8 layouts are supported as compressed-tensors"
        )
    settings.finish()
    return BlockFp8Scheme((sides[0], sides[1]))
