"""Quantized weights as other packages pack them, held against what the packages' own code makes of them.

The files in tests/data/quantized hold both; make.py beside them says with which packages, and makes them.
Packages compute in the dtype of the scales, so our float32 weights, which are exact, must round to theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.linears import HEAD
from engine.models.loader import load_model
from engine.models.quantized import parse
from engine.models.quantized.bits import unpack
from engine.models.safetensors_file import STORED
from engine.runner import ModelRunner
from tests import tiny_models
from tests.engine.models.quantized_files import MODULES

FOLDER = Path(__file__).parents[2] / "data" / "quantized"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
CPU = torch.device("cpu")


class Stored(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    decompressed: Tensor


def read(name: str) -> Stored:
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    assert about["made_with"].startswith(name.split("-")[0])
    return Stored(about["quantization_config"], tensors, tensors.pop("decompressed"))


@pytest.mark.parametrize("name", FILES)
def test_weights_are_those_of_the_package(name: str) -> None:
    """Every number, and every tensor with the shape and dtype that the package wrote."""
    stored = read(name)
    out, cols = stored.decompressed.shape
    plan = parse(stored.config)
    full = {f"m.{part}": tensor for part, tensor in stored.tensors.items()}
    needs = plan.needs("m", out, cols)
    assert needs is not None
    assert set(full) <= set(needs)
    assert all(need.optional for each, need in needs.items() if each not in full)
    for each, tensor in full.items():
        assert tuple(tensor.shape) in needs[each].shapes
        assert tensor.dtype in [STORED[dtype] for dtype in needs[each].dtypes]
    weight = plan.weight("m", out, cols, full).dequantize()
    assert weight.dtype == torch.float32
    assert torch.equal(weight.to(stored.decompressed.dtype), stored.decompressed)


def test_every_package_and_layout_is_there() -> None:
    packages = {"auto-gptq", "autoawq", "compressed-tensors", "gptqmodel", "transformers"}
    assert {name for name in packages if any(file.startswith(name) for file in FILES)} == packages
    titles = {parse(read(name).config).name for name in FILES}
    for part in ("awq int4", "gptq v1 int4 group 16 desc_act", "gptq v1 int8", "gptq v2 int4", "fp8 tensor",
                 "fp8 channel", "fp8 group", "fp8 block", "int8 tensor", "int8 channel", "int8 group",
                 "int4 group 8 packed", "int8 channel packed", "fp8 blocks of"):  # fmt: skip
        assert any(part in title for title in titles), part


def test_zeros_of_zero_are_among_them() -> None:
    """Format v1 stores them minus 1, so that they borrow from their neighbours in a word."""
    for name, minus_one in (("gptqmodel-gptq-int4", True), ("gptqmodel-gptq_v2-int4-desc_act", False)):
        words = read(name).tensors["qzeros"].long()
        zeros = unpack(((words + (0x11111111 if minus_one else 0)) & 0xFFFFFFFF), 4, 1)
        assert bool((zeros == 0).any()), name


@pytest.mark.parametrize("name", FILES)
def test_a_model_of_such_layers_multiplies_with_the_weights_of_the_package(tmp_path: Path, name: str) -> None:
    """From a folder to what computes. All layers are the one of the file."""
    stored = read(name)
    side, cols = stored.decompressed.shape
    if side != cols:
        pytest.skip("no model consists of layers of such a shape")
    folder = tiny_models.build(
        tmp_path / "model", "llama", hidden_size=side, intermediate_size=side, num_hidden_layers=1,
        num_attention_heads=side // 4, num_key_value_heads=side // 4, head_dim=4,
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for module in (f"model.layers.0.{module}" for module in MODULES):
        del tensors[f"{module}.weight"]
        tensors |= {f"{module}.{part}": tensor.clone() for part, tensor in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored.config}))
    loaded = load_model(folder, dtype=torch.float32, device=CPU, progress=lambda *_: None)
    assert len(loaded.quantized) == len(MODULES)
    linears = ModelRunner(loaded, device=CPU, dtype=torch.float32, measure=False).decoder.linears
    unit = torch.eye(side)
    for place, linear in linears.items():
        if place == HEAD:
            continue
        with torch.inference_mode():
            multiplied = linear(unit).t().reshape(-1, side, side)
        for part in multiplied:
            assert torch.equal(part.to(stored.decompressed.dtype), stored.decompressed), place.name
