"""compressed-tensors checkpoints (LLM Compressor): float-, int- and pack-quantized weights.

Layouts, for a layer [out, in] (package compressed-tensors, compressors ``naive_quantized`` and
``pack_quantized``):

- float-quantized: weight float8 e4m3, int-quantized: weight int8; weight_scale [1], [out, 1],
  [out, in / group] or one a block; weight_zero_point of the same shape where it is not symmetric;
- pack-quantized: weight_packed int32 [out, ceil(in * bits / 32)] of codes plus 2^(bits - 1); weight_shape;
  weight_scale [out, groups]; weight_zero_point int32 [ceil(out * bits / 32), groups], offset alike;
  weight_g_idx where ``actorder`` is "group".

What activations are rounded to is noted and not followed: they keep the model's own precision, which is
nearer to what was quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.layers.precision.codes import pack_nibbles
from engine.layers.precision.weights import (
    Fp8BlockWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)
from engine.models.errors import ModelError
from engine.models.quantized.bits import unpack
from engine.models.quantized.scheme import FLOATS, Need, Settings, built, group_size

FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
_Strategy = Literal["tensor", "channel", "group", "block"]
_ARGUMENTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_GROUP_HARMLESS = ("output_activations", "targets")


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """Weights of one config group. ``group`` is -1 and ``block`` (0, 0) where they do not apply."""

    bits: int
    floating: bool
    packed: bool
    strategy: _Strategy
    group: int
    block: tuple[int, int]
    symmetric: bool
    group_order: bool
    activations: str

    @property
    def name(self) -> str:
        number = "fp8" if self.floating else f"int{self.bits}"
        how = f" {self.group}" if self.strategy == "group" else ""
        return f"compressed-tensors {number} {self.strategy}{how}" + (" packed" if self.packed else "")

    def needs(self, out: int, cols: int) -> dict[str, Need]:
        scale = self._scale_shapes(out, cols)
        found = {"weight_scale": Need(scale, FLOATS)}
        if self.packed:
            per_word = 32 // self.bits
            found["weight_packed"] = Need(((out, -(-cols // per_word)),), ("I32",))
            found["weight_shape"] = Need(((2,),), ("I64", "I32"))
            if not self.symmetric:
                words = -(-out // per_word)
                found["weight_zero_point"] = Need(((words, scale[0][1]),), ("I32",))
        else:
            found["weight"] = Need(((out, cols),), ("F8_E4M3",) if self.floating else ("I8",))
            if not self.symmetric:
                found["weight_zero_point"] = Need(scale, ("I8",))
        if self.group_order:
            found["weight_g_idx"] = Need(((cols,),), ("I32", "I64"))
        if self.activations != "none":
            for name in ("input_scale", "input_zero_point"):
                found[name] = Need(((1,), ()), (*FLOATS, "I8", "F8_E4M3"), optional=True, unused=True)
        return found

    def build(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        with built("compressed-tensors"):
            if self.floating:
                return self._float(out, tensors)
            group = self._group(cols)
            order = self._order(cols, group, tensors.get("weight_g_idx"))
            scales = self._per_group(tensors["weight_scale"], out)
            codes, zeros = self._integers(out, cols, tensors)
            if order is not None:
                codes = codes.index_select(1, order)
            if self.bits == 4:
                return Int4Weight(
                    pack_nibbles((codes + 8).view(torch.uint8)),
                    scales,
                    group,
                    zeros=None if zeros is None else (zeros + 8).to(torch.uint8),
                    order=order,
                )
            return Int8Weight(codes.contiguous(), scales, group, zeros=zeros, order=order)

    def _group(self, cols: int) -> int:
        return group_size(self.group if self.strategy == "group" else -1, cols)

    def _scale_shapes(self, out: int, cols: int) -> tuple[tuple[int, ...], ...]:
        if self.strategy == "tensor":
            return ((1,), ())
        if self.strategy == "block":
            return ((-(-out // self.block[0]), -(-cols // self.block[1])),)
        if self.strategy == "channel":
            return ((out, 1),)
        return ((out, cols // group_size(self.group, cols)),)

    def _float(self, out: int, tensors: Mapping[str, Tensor]) -> Fp8Weight | Fp8BlockWeight:
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if self.strategy == "block":
            return Fp8BlockWeight(codes, scales, self.block)
        if self.strategy == "group":
            return Fp8BlockWeight(codes, scales, (1, self._group(codes.shape[1])))
        return Fp8Weight(codes, scales.reshape(-1).expand(out).contiguous())

    def _per_group(self, values: Tensor, out: int) -> Tensor:
        """Scales or zeros as [groups, out]."""
        if self.strategy == "tensor":
            return values.reshape(1, 1).expand(1, out).contiguous()
        return values.t().contiguous()

    def _integers(self, out: int, cols: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Signed codes int8 [out, in] and zeros int16 [groups, out]."""
        if not self.packed:
            zeros = None if self.symmetric else tensors["weight_zero_point"]
            return tensors["weight"], None if zeros is None else self._per_group(zeros, out).to(torch.int16)
        stored = tensors["weight_shape"].tolist()
        if stored != [out, cols]:
            raise ValueError(f"weight_shape says {stored}, config.json says {[out, cols]}")
        offset = 1 << (self.bits - 1)
        codes = unpack(tensors["weight_packed"], self.bits, 1)[:, :cols].to(torch.int16) - offset
        if self.symmetric:
            return codes.to(torch.int8), None
        zeros = unpack(tensors["weight_zero_point"], self.bits, 0)[:out].to(torch.int16) - offset
        return codes.to(torch.int8), zeros.t().contiguous()

    def _order(self, cols: int, group: int, g_idx: Tensor | None) -> Tensor | None:
        """The input channels by their groups; None if they are so already, or never were in order.

        Raises ValueError. (-1 in all places is how the package says that no order was recorded.)
        """
        if g_idx is None or bool((g_idx == -1).all()):
            return None
        found = g_idx.long()
        straight = torch.arange(cols, device=found.device) // group
        if torch.equal(found, straight):
            return None
        order = found.argsort(stable=True)
        if not torch.equal(found[order], straight):
            raise ValueError(f"weight_g_idx does not put {group} input channels into each group")
        return order


def parse_group(name: str, values: Any, default_format: Any) -> CompressedScheme:
    """One of ``config_groups``. Raises `ModelError` naming what is not supported."""
    group = Settings(f"config group {name}", values, _GROUP_HARMLESS)
    form = group.one_of("format", FORMATS, default_format)
    if group.get("output_activations") is not None:
        raise ModelError(f"config group {name} quantizes the outputs of layers, which is not supported")
    activations = _activations(name, group.get("input_activations"))
    weights = Settings(f"the weights of config group {name}", group.get("weights"), _ARGUMENTS)
    group.finish()
    kind = weights.one_of("type", ("int", "float"), "int")
    floating, packed = kind == "float", form == "pack-quantized"
    wrong = ("int-quantized", "pack-quantized") if floating else ("float-quantized",)
    if form in wrong:
        raise ModelError(f"config group {name} holds {kind} weights in the format {form}")
    bits = weights.one_of("num_bits", (4, 8) if packed else (8,))
    weights.one_of("dynamic", (False,), False)
    symmetric = weights.one_of("symmetric", (True, False), True)
    if floating and not symmetric:
        raise ModelError(f"config group {name} holds float8 weights with zeros, which do not exist")
    size = weights.size("group_size", -1)
    strategy = weights.one_of("strategy", _strategies(floating, packed), "group" if size > 0 else "tensor")
    if (strategy == "group") != (size > 0):
        raise ModelError(f"config group {name} has the strategy {strategy} and the group size {size}")
    order = weights.one_of("actorder", (None, "group", "weight", "static", "dynamic", False))
    block = _block(name, weights.get("block_structure")) if strategy == "block" else (0, 0)
    if strategy != "block":
        weights.get("block_structure")
    weights.finish()
    by_group = order in ("group", "dynamic") and strategy == "group"
    return CompressedScheme(bits, floating, packed, strategy, size, block, symmetric, by_group, activations)


def _strategies(floating: bool, packed: bool) -> tuple[str, ...]:
    if packed:
        return ("channel", "group")
    return ("tensor", "channel", "group", "block") if floating else ("tensor", "channel", "group")


def _activations(name: str, values: Any) -> str:
    """What the checkpoint rounds activations to, for a note: ``none`` or such as ``float8 dynamic token``."""
    if values is None:
        return "none"
    settings = Settings(f"the activations of config group {name}", values, (*_ARGUMENTS, "block_structure"))
    kind = settings.one_of("type", ("int", "float"), "int")
    bits = settings.one_of("num_bits", (8,))
    how = "dynamic" if settings.one_of("dynamic", (True, False), False) else "static"
    strategy = settings.one_of("strategy", ("token", "tensor", "group", "channel"), "tensor")
    settings.one_of("symmetric", (True, False), True)
    settings.get("group_size")
    settings.one_of("actorder", (None, False))
    settings.finish()
    return f"{kind}{bits} {how} {strategy}"


def _block(name: str, value: Any) -> tuple[int, int]:
    parts = value.split("x") if isinstance(value, str) else value
    try:
        rows, cols = (int(part) for part in parts)
    except (TypeError, ValueError):
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise ModelError(f"block_structure of config group {name} is {value!r}, [rows, columns] is needed")
    return rows, cols
