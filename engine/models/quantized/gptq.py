"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them (arXiv 2210.17323), of 4 and 8 bits.

qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx int32
[in]: the group of each input channel. ``w = (code - zero) * scale``.

Zeros: format ``gptq`` (v1) stores each zero minus 1, ``gptq_v2`` stores it as it is. v1 writers subtract on
whole words, so that a zero of 0 borrows from its neighbour; adding on whole words undoes exactly that.

``desc_act``: channels were quantized in the order of their activations, so a group's channels lie scattered.
Here the columns are put in the order of their groups, once, and x follows at each product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.precision.codes import pack_nibbles
from engine.layers.precision.weights import Int4Weight, Int8Weight
from engine.models.errors import ModelError
from engine.models.quantized.bits import unpack
from engine.models.quantized.scheme import FLOATS, Need, Settings, built, group_size

HARMLESS = (
    "sym",  # the zeros are stored either way
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "mse",
    "act_group_aware",
    "model_name_or_path",
    "model_file_base_name",
    "model_seqlen",
    "meta",
    "tokenizer",
    "dataset",
    "backend",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "cache_block_outputs",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "batch_size",
    "pad_token_id",
    "modules_in_block_to_quantize",
    "lm_head",
)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """``stored_minus_one``: the zeros are those of format v1."""

    bits: int
    group: int
    desc_act: bool
    stored_minus_one: bool

    @property
    def name(self) -> str:
        version = "v1" if self.stored_minus_one else "v2"
        return f"gptq {version} int{self.bits} group {self.group}" + (" desc_act" if self.desc_act else "")

    def needs(self, out: int, cols: int) -> dict[str, Need]:
        per_word = 32 // self.bits
        if out % per_word or cols % per_word:
            raise ModelError(f"a GPTQ weight [{out}, {cols}] needs multiples of {per_word} channels")
        groups = cols // group_size(self.group, cols)
        return {
            "qweight": Need(((cols // per_word, out),), ("I32",)),
            "qzeros": Need(((groups, out // per_word),), ("I32",)),
            "scales": Need(((groups, out),), FLOATS),
            "g_idx": Need(((cols,),), ("I32", "I64"), optional=not self.desc_act),
        }

    def build(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> Int4Weight | Int8Weight:
        group = group_size(self.group, cols)
        order = self._order(cols, group, tensors.get("g_idx"))
        codes = unpack(tensors["qweight"], self.bits, 0)
        if order is not None:
            codes = codes.index_select(0, order)
        codes = codes.t().contiguous()
        zeros = unpack(self._zero_words(tensors["qzeros"]), self.bits, 1)
        with built("GPTQ"):
            if self.bits == 4:
                return Int4Weight(pack_nibbles(codes), tensors["scales"], group, zeros=zeros, order=order)
            return Int8Weight(
                (codes ^ 128).view(torch.int8),  # minus 128
                tensors["scales"],
                group,
                zeros=zeros.to(torch.int16) - 128,
                order=order,
            )

    def _zero_words(self, words: Tensor) -> Tensor:
        if not self.stored_minus_one:
            return words
        ones = 0x11111111 if self.bits == 4 else 0x01010101
        # In 64 bits, then cut to 32: an int32 sum that overflows wraps around in the same way.
        total = (words.long() + ones) & 0xFFFFFFFF
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    def _order(self, cols: int, group: int, g_idx: Tensor | None) -> Tensor | None:
        """The input channels by their groups; None if they are so already. Raises `ModelError`."""
        straight = torch.arange(cols) // group
        if g_idx is None or torch.equal(g_idx.long().cpu(), straight):
            return None
        if not self.desc_act:
            raise ModelError(
                "g_idx of this GPTQ checkpoint puts input channels into groups in another order, but its "
                "config.json says desc_act false: one of the two is wrong"
            )
        found = g_idx.long()
        order = found.argsort(stable=True)
        if not torch.equal(found[order].cpu(), straight):
            raise ModelError(
                f"g_idx of this GPTQ checkpoint does not put {group} input channels into each of "
                f"{cols // group} groups: it is damaged"
            )
        return order


def parse(config: Mapping[str, Any]) -> GptqScheme:
    """Raises `ModelError` for other bit widths, layouts and settings that differ between layers."""
    settings = Settings("the GPTQ quantization_config", config, HARMLESS)
    bits = settings.one_of("bits", (4, 8))
    if settings.get("is_marlin_format", False) is not False:
        raise ModelError("GPTQ weights in Marlin's layout are not supported; use the gptq or gptq_v2 format")
    settings.agreed("quant_method", "method", default="gptq")
    form = settings.agreed("checkpoint_format", "format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"the GPTQ layout {form!r} is not supported; supported: gptq, gptq_v2")
    settings.one_of("pack_dtype", ("int32",), "int32")
    if settings.get("dynamic"):
        raise ModelError("GPTQ settings that differ between layers (dynamic) are not supported")
    if settings.get("adapter") or settings.get("rotation"):
        raise ModelError("GPTQ checkpoints with adapters or rotated weights are not supported")
    group = settings.size("group_size", 128)
    desc_act = settings.one_of("desc_act", (True, False), False)
    settings.finish()
    return GptqScheme(bits, group, desc_act, stored_minus_one=form == "gptq")
