"""Makes the files beside it: linear weights as other packages pack them, and as those packages unpack them.

No test runs this, since it needs the packages; what they said is in the files. Each file holds the tensors of
one layer under the names of a checkpoint (qweight, weight_scale ...), ``decompressed`` [out, in] as the
package's own code computes it, and in its metadata the ``quantization_config`` that the package writes and
the versions of what made it. Codes, packing and unpacking are the package's; only the weights to be
quantized, their scales and their zeros are made here.

    python tests/data/quantized/make.py PACKAGE

PACKAGE is one of those below, in an environment that has it and torch (CPU). The files here were made with

    compressed-tensors 0.20.1                                   compressed-tensors
    compressed-tensors 0.13.0, transformers 5.24.0              compressed-tensors-0.13
    gptqmodel 7.7.0, transformers 5.24.0                        gptqmodel
    auto-gptq 0.7.1, transformers 4.51.3, tokenizers 0.21.4     auto-gptq
    autoawq 0.2.9, transformers 4.51.3, tokenizers 0.21.4       autoawq
    transformers 5.24.0                                         transformers

(compressed-tensors gave up ``weight_g_idx`` after 0.13; checkpoints with it are still about.)
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent
SIDE, GROUP = 64, 16


@dataclass(frozen=True)
class Case:
    """``decompressed`` is [out, in]."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    decompressed: Tensor


# --- weights to be quantized -------------------------------------------------------------------------


def weights(out: int = SIDE, cols: int = SIDE, seed: int = 0) -> Tensor:
    """Normal numbers, the last rows of them of one sign, so that some zeros are 0 and some the highest."""
    found = torch.randn(out, cols, generator=torch.Generator().manual_seed(seed)) * 0.05
    found[-5:-2] = found[-5:-2].abs() + 0.01
    found[-2:] = -found[-2:].abs() - 0.01
    return found


def group_ids(cols: int, group: int, *, scattered: bool = False) -> Tensor:
    """The group of each input channel, in order or (desc_act) drawn at random."""
    ids = torch.arange(cols) // group
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(5))
    return (ids[order] if scattered else ids).to(torch.int32)


def ranges(weight: Tensor, groups: Tensor, bits: int, least_zero: int = 0) -> tuple[Tensor, Tensor]:
    """Scales in float16 steps and zeros [out, groups], by the smallest and largest weight of each group."""
    top, scales, zeros = (1 << bits) - 1, [], []
    for group in range(int(groups.max()) + 1):
        own = weight[:, groups == group]
        low, high = own.amin(1).clamp(max=0.0), own.amax(1).clamp(min=0.0)
        scale = ((high - low) / top * 1.1 + 1e-4).half().float()
        scales.append(scale)
        zeros.append((-low / scale).round().clamp(least_zero, top))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def linear(weight: Tensor, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    layer.weight.data = weight.to(dtype).clone()
    return layer


def parts(module: nn.Module, *names: str) -> dict[str, Tensor]:
    return {name: getattr(module, name).detach().clone().contiguous() for name in names}


# --- packages ----------------------------------------------------------------------------------------


def gptqmodel() -> Iterator[Case]:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import FORMAT, METHOD
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    def settings(**values: Any) -> Any:
        return QuantizeConfig(offload_to_disk=False, **values)

    for bits, form, desc_act, group in (
        (4, "gptq", False, GROUP),
        (4, "gptq", True, GROUP),
        (4, "gptq_v2", True, GROUP),
        (4, "gptq_v2", False, -1),
        (8, "gptq", True, GROUP),
        (8, "gptq_v2", False, GROUP),
    ):
        config = settings(bits=bits, group_size=group, desc_act=desc_act, sym=False, format=FORMAT(form))
        weight, real = weights(seed=bits), SIDE if group == -1 else group
        ids = group_ids(SIDE, real, scattered=desc_act)
        shape: dict[str, Any] = {"in_features": SIDE, "out_features": SIDE, "bias": False}
        made = TorchLinear(bits=bits, group_size=group, sym=False, desc_act=desc_act, **shape)
        made.pack(linear(weight), *ranges(weight, ids, bits), ids)
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(made, config)
        tensors = parts(made, "qweight", "qzeros", "scales", "g_idx")
        read = TorchLinear(bits=bits, group_size=group, sym=False, desc_act=desc_act, **shape)
        for name, tensor in tensors.items():
            setattr(read, name, tensor.clone())
        if form == "gptq":
            convert_gptq_v1_to_v2_format_module(read, bits=bits, pack_dtype=torch.int32)
        plain = read.eval().dequantize_weight().t()
        order = " desc_act" if desc_act else " whole rows" if group == -1 else ""
        yield Case(f"gptqmodel {form} int{bits}{order}", config.to_dict(), tensors, plain)

    config = settings(bits=4, group_size=GROUP, sym=False, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    weight, ids = weights(seed=9), group_ids(SIDE, GROUP)
    layer = AwqTorchLinear(
        bits=4, group_size=GROUP, sym=False, desc_act=False, in_features=SIDE, out_features=SIDE
    )
    layer.pack(linear(weight), *(values.half() for values in ranges(weight, ids, 4)))
    tensors = parts(layer, "qweight", "qzeros", "scales")
    plain = dequantize_gemm(
        qweight=tensors["qweight"], qzeros=tensors["qzeros"], scales=tensors["scales"],
        bits=4, group_size=GROUP,
    )  # fmt: skip
    yield Case("gptqmodel awq int4", config.to_dict(), tensors, plain.t())


def auto_gptq() -> Iterator[Case]:
    from auto_gptq.modeling._base import BaseQuantizeConfig
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear as OldQuantLinear

    for bits, desc_act, kind in ((4, False, OldQuantLinear), (4, True, QuantLinear), (8, False, QuantLinear)):
        config = BaseQuantizeConfig(bits=bits, group_size=GROUP, desc_act=desc_act, sym=False)
        weight, ids = weights(seed=20 + bits), group_ids(SIDE, GROUP, scattered=desc_act)
        layer = kind(bits, GROUP, SIDE, SIDE, bias=False)
        # Its writer spoils the words of zeros of 0, so there are none.
        scales, zeros = ranges(weight, ids, bits, least_zero=1)
        top = (1 << bits) - 1
        wide, ids_long = scales[:, ids.long()], ids.long()
        codes = ((weight / wide).round() + zeros[:, ids_long]).clamp(0, top)
        layer.pack(linear((codes - zeros[:, ids_long]) * wide), scales, zeros, ids)
        tensors = parts(layer, "qweight", "qzeros", "scales", "g_idx")
        tensors["scales"] = tensors["scales"].half()
        read = kind(bits, GROUP, SIDE, SIDE, bias=False)
        read.load_state_dict(tensors)
        plain = read(torch.eye(SIDE, dtype=torch.float16)).t()
        order = " desc_act" if desc_act else ""
        yield Case(f"auto-gptq int{bits}{order}", config.to_dict(), tensors, plain)


def autoawq() -> Iterator[Case]:
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    weight, ids = weights(seed=30), group_ids(SIDE, GROUP)
    scales, zeros = (values.t().contiguous() for values in ranges(weight, ids, 4))
    layer = WQLinear_GEMM.from_linear(linear(weight), 4, GROUP, scales=scales, zeros=zeros)
    tensors = parts(layer, "qweight", "qzeros", "scales")
    plain = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    config = AwqConfig(q_group_size=GROUP).to_transformers_dict()
    yield Case("autoawq gemm int4", config, tensors, plain.t())


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    token = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    sides = 32
    for form, values, out, cols, activations in (
        ("float-quantized", {"strategy": "tensor"}, sides, sides, {**token, "strategy": "tensor"}),
        ("float-quantized", {"strategy": "channel"}, sides, sides, token),
        ("float-quantized", {"strategy": "group", "group_size": 8}, sides, sides, token),
        ("float-quantized", {"strategy": "block", "block_structure": [16, 8]}, sides, sides, token),
        ("float-quantized", {"strategy": "block", "block_structure": [12, 20]}, sides, sides, token),
        ("int-quantized", {"strategy": "tensor"}, sides, sides, token),
        ("int-quantized", {"strategy": "channel"}, sides, sides, token),
        ("int-quantized", {"strategy": "channel", "symmetric": False}, sides, sides, token),
        ("int-quantized", {"strategy": "group", "group_size": 8}, sides, sides, None),
        ("naive-quantized", {"strategy": "channel"}, sides, sides, None),
        ("pack-quantized", {"strategy": "group", "group_size": 8, "num_bits": 4}, sides, sides, None),
        ("pack-quantized", {"strategy": "group", "group_size": 8, "num_bits": 4, "symmetric": False},
         sides, sides, None),
        ("pack-quantized", {"strategy": "group", "group_size": 8, "num_bits": 4, "symmetric": False},
         23, 32, None),
        ("pack-quantized", {"strategy": "group", "group_size": 8, "num_bits": 4, "actorder": "weight"},
         sides, sides, None),
        ("pack-quantized", {"strategy": "channel", "num_bits": 4}, sides, sides, None),
        ("pack-quantized", {"strategy": "channel", "num_bits": 8, "symmetric": False}, sides, sides, None),
    ):  # fmt: skip
        floats = form == "float-quantized"
        kind = "float" if floats else "int"
        args = QuantizationArgs(**{"num_bits": 8, "type": kind, "symmetric": True, **values})
        inputs = None if activations is None else QuantizationArgs(**{**activations, "type": kind})
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        state = {"weight": weights(out, cols, seed=out + len(form)).bfloat16()}
        state |= _observed(state["weight"], args)
        codec = BaseCompressor.load_from_registry(form)
        stored = {name: tensor.contiguous() for name, tensor in codec.compress(state, scheme).items()}
        plain = codec.decompress(stored, scheme)["weight"]
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, format=form, ignore=["lm_head"],
            quantization_status="compressed",
        )  # fmt: skip
        yield Case(_title(form, args, (out, cols)), config.to_dict(), stored, plain)


def compressed_tensors_0_13() -> Iterator[Case]:
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    for symmetric in (True, False):
        args = QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=8, symmetric=symmetric, actorder="group"
        )
        weight = weights(32, 32, seed=41).bfloat16()
        ids = group_ids(32, 8, scattered=True)
        found = _observed(weight[:, ids.argsort(stable=True).long()], args)
        scale, zero = found["weight_scale"], found["weight_zero_point"]
        codec = PackedQuantizationCompressor()
        stored = codec.compress_weight(weight, scale, args, zero_point=zero, g_idx=ids)
        stored |= {"weight_scale": scale, "weight_g_idx": ids}
        plain = codec.decompress_weight(stored, args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, format="pack-quantized", ignore=["lm_head"],
            quantization_status="compressed",
        )  # fmt: skip
        yield Case(_title("pack-quantized", args, (32, 32)), config.to_dict(), stored, plain)


def _observed(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales and zeros by the package's own rule, of the smallest and largest weights."""
    from compressed_tensors.quantization.utils import calculate_qparams

    wide, strategy = weight.float(), str(args.strategy)
    if strategy == "tensor":
        low, high = wide.amin().reshape(1), wide.amax().reshape(1)
    elif strategy == "channel":
        low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    elif strategy == "group":
        grouped = wide.unflatten(1, (-1, args.group_size))
        low, high = grouped.amin(2), grouped.amax(2)
    else:
        rows, cols = args.block_structure
        tiles = [strip.split(cols, 1) for strip in wide.split(rows, 0)]
        low = torch.stack([torch.stack([tile.amin() for tile in strip]) for strip in tiles])
        high = torch.stack([torch.stack([tile.amax() for tile in strip]) for strip in tiles])
    scale, zero = calculate_qparams(low, high, args)
    return {"weight_scale": scale.bfloat16(), "weight_zero_point": zero}


def _title(form: str, args: Any, shape: tuple[int, int]) -> str:
    how = str(args.strategy)
    if how == "block":
        how += " {}x{}".format(*args.block_structure)
    how += "" if args.symmetric else " with zeros"
    how += f" actorder {args.actorder}" if args.actorder else ""
    odd = "" if shape[0] % 8 == 0 else f" {shape[0]} rows"
    return f"compressed-tensors {form} {args.num_bits} bits {how}{odd}"


def transformers() -> Iterator[Case]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize, _dequantize_fp8_weight
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    config = FineGrainedFP8Config(weight_block_size=(16, 8))
    quantizer = FineGrainedFP8HfQuantizer(config)
    stored = Fp8Quantize(quantizer).convert({"weight": weights(32, 32, seed=50)})
    plain = Fp8Dequantize(quantizer).convert(stored)["weight"]
    yield Case("transformers fp8 blocks", config.to_dict(), stored, plain)
    # Blocks at the edges are smaller; they are cut from a weight that blocks fill.
    cut = {"weight": stored["weight"][:28, :28].contiguous(), "weight_scale_inv": stored["weight_scale_inv"]}
    plain = _dequantize_fp8_weight(cut["weight"], cut["weight_scale_inv"], [16, 8], torch.float32)
    yield Case("transformers fp8 edge blocks", config.to_dict(), cut, plain)


PACKAGES: dict[str, tuple[Callable[[], Iterator[Case]], tuple[str, ...]]] = {
    "compressed-tensors": (compressed_tensors, ("compressed-tensors",)),
    "compressed-tensors-0.13": (compressed_tensors_0_13, ("compressed-tensors",)),
    "gptqmodel": (gptqmodel, ("gptqmodel", "transformers")),
    "auto-gptq": (auto_gptq, ("auto-gptq", "transformers")),
    "autoawq": (autoawq, ("autoawq", "transformers")),
    "transformers": (transformers, ("transformers",)),
}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in PACKAGES:
        sys.exit(f"usage: python make.py PACKAGE, one of: {', '.join(PACKAGES)}")
    make, needed = PACKAGES[sys.argv[1]]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in (*needed, "torch")]
    for case in make():
        about = {"quantization_config": case.config, "made_with": ", ".join(versions)}
        # One entry, for several are written in an order that changes from run to run.
        metadata = {"about": json.dumps(about, default=str)}
        plain = case.decompressed.detach().contiguous()
        path = FOLDER / f"{case.name.replace(' ', '-')}.safetensors"
        save_file({**case.tensors, "decompressed": plain}, path, metadata=metadata)
        print(f"{path.name}: {path.stat().st_size} bytes, {list(plain.shape)} {plain.dtype}")


if __name__ == "__main__":
    main()
