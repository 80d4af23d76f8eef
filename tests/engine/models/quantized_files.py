"""Quantized checkpoint folders made from plain ones, written from the formats' descriptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models.test_quantized_checkpoints import AWQ_PLACES, compressed, packed

GROUP = 16
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))

Pack = Callable[[int, int, torch.Generator, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""(out, in, random numbers, those that fused layers share) -> tensors by the last part of their names, and
the weight that they stand for, float32 [out, in]."""


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    title: str
    kind: str
    pack: Pack
    shared_order: bool = True  # layers that are fused draw the same order of their input channels


def quantize_folder(plain: Path, target: Path, fmt: Format) -> Path:
    """Write ``target`` with random codes, and change ``plain`` to the weights that they stand for."""
    shutil.copytree(plain, target)
    tensors = load_file(plain / "model.safetensors")
    low = dict(tensors)
    config = json.loads((plain / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            out, cols = low.pop(f"{name}.weight").shape
            seed = layer * 10 + MODULES.index(module)
            group = next(i for i, names in enumerate(FUSED) if module.split(".")[1] in names)
            shared = torch.Generator().manual_seed(1000 + layer * 10 + group if fmt.shared_order else seed)
            parts, weight = fmt.pack(out, cols, torch.Generator().manual_seed(seed), shared)
            low |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            tensors[f"{name}.weight"] = weight.contiguous()
    save_file(low, target / "model.safetensors")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": fmt.config}))
    return target


def codes_of(high: int, shape: tuple[int, ...], rng: torch.Generator, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=rng)


def scales_of(shape: tuple[int, ...], size: float, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    return ((0.5 + torch.rand(shape, generator=rng)) * size).to(dtype)


def grouped(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """codes [out, in], zeros and scales [groups, out]."""
    return (codes.float() - zeros.float()[group_of].t()) * scales.float()[group_of].t()


def awq(out: int, cols: int, rng: torch.Generator, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    groups = cols // GROUP
    codes, zeros = codes_of(16, (out, cols), rng), codes_of(12, (groups, out), rng, 4)
    scales = scales_of((groups, out), 0.06, rng, torch.float16)
    tensors = {
        "qweight": packed(codes.t(), 4, 1, AWQ_PLACES),
        "qzeros": packed(zeros, 4, 1, AWQ_PLACES),
        "scales": scales,
    }
    return tensors, grouped(codes, zeros, scales, torch.arange(cols) // GROUP)


def gptq(bits: int, minus_one: bool, desc_act: bool) -> Pack:
    def pack(
        out: int, cols: int, rng: torch.Generator, shared: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        top, groups = 1 << bits, cols // GROUP
        codes, zeros = codes_of(top, (out, cols), rng), codes_of(top * 3 // 4, (groups, out), rng, top // 4)
        scales = scales_of((groups, out), 1.0 / top, rng, torch.float16)
        group_of = torch.arange(cols) // GROUP
        if desc_act:
            group_of = group_of[torch.randperm(cols, generator=shared)]
        tensors = {
            "qweight": packed(codes.t(), bits, 0),
            "qzeros": packed(zeros - int(minus_one), bits, 1),
            "scales": scales,
            "g_idx": group_of.to(torch.int32),
        }
        return tensors, grouped(codes, zeros, scales, group_of)

    return pack


def int8_channels(
    out: int, cols: int, rng: torch.Generator, _: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    codes = codes_of(128, (out, cols), rng, -127)
    scales = scales_of((out, 1), 0.004, rng, torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes.float() * scales.float()


def fp8(strategy: str) -> Pack:
    def pack(
        out: int, cols: int, rng: torch.Generator, _: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        codes = (torch.randn(out, cols, generator=rng) * 50).to(torch.float8_e4m3fn)
        if strategy == "channel":
            scales = scales_of((out, 1), 0.006, rng, torch.bfloat16)
            return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()
        scales = scales_of((out // 16, cols // 32), 0.006, rng, torch.float32)
        wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide

    return pack


def packed_int(bits: int) -> Pack:
    def pack(
        out: int, cols: int, rng: torch.Generator, _: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        half, groups = 1 << (bits - 1), cols // GROUP
        codes, zeros = (
            codes_of(half, (out, cols), rng, -half),
            codes_of(half // 2, (out, groups), rng, -half // 2),
        )
        scales = scales_of((out, groups), 0.5 / half, rng, torch.bfloat16)
        tensors = {
            "weight_packed": packed(codes + half, bits, 1),
            "weight_scale": scales,
            "weight_zero_point": packed(zeros + half, bits, 0),
            "weight_shape": torch.tensor([out, cols]),
        }
        return tensors, grouped(codes, zeros.t(), scales.t(), torch.arange(cols) // GROUP)

    return pack


def _gptq_config(bits: int, form: str, desc_act: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": desc_act, "sym": False,
            "checkpoint_format": form}  # fmt: skip


def _packed_config(bits: int) -> dict[str, Any]:
    return compressed(
        "pack-quantized", num_bits=bits, type="int", strategy="group", group_size=GROUP, symmetric=False
    )


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
ACT = _gptq_config(4, "gptq", True)
ACT_TITLE = f"gptq v1 int4 group {GROUP} desc_act"
FORMATS: dict[str, Format] = {
    "awq": Format(AWQ_CONFIG, f"awq int4 group {GROUP}", "int4", awq),
    "gptq v1": Format(
        _gptq_config(4, "gptq", False), f"gptq v1 int4 group {GROUP}", "int4", gptq(4, True, False)
    ),
    "gptq v2": Format(
        _gptq_config(8, "gptq_v2", False), f"gptq v2 int8 group {GROUP}", "int8", gptq(8, False, False)
    ),
    "gptq desc_act": Format(ACT, ACT_TITLE, "int4", gptq(4, True, True)),
    "gptq desc_act, each its own order": Format(
        ACT, ACT_TITLE, "int4", gptq(4, True, True), shared_order=False
    ),
    "int8 channels": Format(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        "compressed-tensors int8 channel",
        "int8",
        int8_channels,
    ),
    "int4 packed": Format(
        _packed_config(4), f"compressed-tensors int4 group {GROUP} packed", "int4", packed_int(4)
    ),
    "fp8 channels": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        "compressed-tensors fp8 channel",
        "fp8",
        fp8("channel"),
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        "fp8 blocks of 16 x 32",
        "fp8",
        fp8("block"),
    ),
}
