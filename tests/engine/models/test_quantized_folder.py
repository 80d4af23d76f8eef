"""Quantized checkpoints from a folder to greedy ids, each beside a twin whose weights are plain numbers.

A checkpoint is made of random codes, packed by `tests.engine.models.quantized_files` from the formats'
descriptions; its twin is the same model with the weights that the codes stand for, in float32, as
transformers computes it. So every id must be the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.linear import JoinedLinear
from engine.models.errors import ModelError
from engine.models.loader import load_model
from ipc.messages import Sampling
from tests import tiny_models
from tests.engine.core_harness import Engine
from tests.engine.models.quantized_files import FORMATS, MODULES, Format, quantize_folder
from tests.engine.oracle import reference, tiny_prompts
from tests.quality import score

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
SAMPLING = Sampling(max_tokens=16, ignore_eos=True)
CPU = torch.device("cpu")


def load(folder: Path) -> Any:
    return load_model(folder, dtype=torch.float32, device=CPU, progress=lambda *_: None)


def made(tmp_path: Path, name: str, architecture: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """The quantized folder and its twin."""
    twin = tiny_models.build(tmp_path / "twin", architecture, **SIZES, **changes)
    return quantize_folder(twin, tmp_path / "low", FORMATS[name]), twin


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_those_of_the_plain_twin(tmp_path: Path, name: str) -> None:
    """A31: alone, batched, in chunks and from a warm cache."""
    low, twin = made(tmp_path, name, "qwen2" if name == "gptq v1" else "llama")
    loaded = load(low)
    prompts = tiny_prompts(3)
    expected = reference(loaded, tiny_models.reference(twin), prompts, SAMPLING.max_tokens)
    engine = Engine(loaded, prefill_chunk_tokens=16)
    for _ in range(2):
        expected.compare(engine.generate(prompts, SAMPLING))
    expected.compare([engine.generate([prompt], SAMPLING)[0] for prompt in prompts])
    fmt = FORMATS[name]
    assert loaded.info.quantization == fmt.title
    assert loaded.info.dtype == "float32"
    assert set(loaded.quantized) == {n for n in loaded.spec.weight_shapes() if n.endswith("_proj.weight")}
    assert loaded.info.weight_bytes < 0.8 * load(twin).info.weight_bytes
    steps = {step.kernels for step in engine.heard.steps}
    assert all(f"linear={fmt.kind}:" in kernels for kernels in steps)
    state = engine.core.state()
    assert state.weight_dtype == "model"
    assert state.original_bytes == 0
    assert state.model is not None
    assert state.model.quantization == fmt.title


@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "fp8 blocks"])
def test_bfloat16_stays_near_the_twin(tmp_path: Path, name: str) -> None:
    """Through the kernels that a user gets, which round more than float32 does."""
    low, twin = made(tmp_path, name)
    model = tiny_models.reference(twin)
    prompt = tiny_prompts(3)[0]
    with torch.inference_mode():
        want = model(torch.tensor([prompt])).logits[0]
    loaded = load_model(low, dtype=torch.bfloat16, device=CPU, progress=lambda *_: None)
    got = torch.cat(list(score(Engine(loaded).core.runner, prompt)))
    assert float((got - want).abs().mean()) < 0.08 * float(want.std())


def test_parts_that_cannot_be_one_weight_stay_side_by_side(tmp_path: Path) -> None:
    """One projection in plain numbers, and orders of input channels that differ (desc_act)."""
    low, twin = made(tmp_path, "gptq desc_act, each its own order")
    linears = Engine(load(low)).core.runner.decoder.linears
    assert {
        type(linear).__name__ for place, linear in linears.items() if place.part in ("qkv", "gate_up")
    } == {"JoinedLinear"}
    config = json.loads((low / "config.json").read_text())
    config["quantization_config"]["modules_in_block_to_quantize"] = [
        [module for module in MODULES if not module.endswith("q_proj")]
    ]
    (low / "config.json").write_text(json.dumps(config))
    tensors, plain = load_file(low / "model.safetensors"), load_file(twin / "model.safetensors")
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn.q_proj"
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{module}.{part}"]
        tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    save_file(tensors, low / "model.safetensors")
    loaded = load(low)
    assert "layers.0.q_proj.weight" not in loaded.quantized
    expected = reference(loaded, tiny_models.reference(twin), tiny_prompts(3), SAMPLING.max_tokens)
    engine = Engine(loaded)
    expected.compare(engine.generate(expected.prompts, SAMPLING))
    assert "&" in engine.core.runner.kernels


def test_parts_that_share_all_are_one_weight(tmp_path: Path) -> None:
    for name in ("awq", "gptq desc_act", "fp8 channels"):
        low, _ = made(tmp_path / name, name)
        linears = Engine(load(low)).core.runner.decoder.linears
        assert not any(isinstance(linear, JoinedLinear) for linear in linears.values()), name


def test_biases_of_zeros_that_old_writers_add_are_ignored(tmp_path: Path) -> None:
    low, _ = made(tmp_path, "gptq v1")
    tensors = load_file(low / "model.safetensors")
    extra = {f"model.layers.0.{module}.bias": torch.zeros(8, dtype=torch.float16) for module in MODULES}
    save_file(tensors | extra, low / "model.safetensors")
    assert any("zero" in note for note in load(low).notes)
    extra["model.layers.0.mlp.down_proj.bias"] += 1
    save_file(tensors | extra, low / "model.safetensors")
    with pytest.raises(ModelError, match=r"another kind of model: model.layers.0.mlp.down_proj.bias"):
        load(low)


def change(low: Path, edit: dict[str, torch.Tensor | None], **settings: Any) -> None:
    """Replace or (None) drop tensors, and settings of quantization_config."""
    tensors = load_file(low / "model.safetensors")
    for name, tensor in edit.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, low / "model.safetensors")
    config = json.loads((low / "config.json").read_text())
    config["quantization_config"] |= settings
    (low / "config.json").write_text(json.dumps(config))


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(("edit", "settings", "message"), [
    ({f"{DOWN}.scales": None}, {}, rf"lacks 1 tensor: {DOWN}.scales"),
    ({f"{DOWN}.scales": torch.zeros(8, 64, dtype=torch.float16)}, {}, rf"{DOWN}: .* scales hold 512 values"),
    ({f"{DOWN}.qweight": torch.zeros(4, 4, dtype=torch.int32)}, {}, rf"{DOWN}.qweight has shape \[4, 4\]"),
    ({f"{DOWN}.qweight": torch.zeros(128, 8, dtype=torch.int64)}, {}, "is stored as I64; supported: I32"),
    ({f"{DOWN}.weight": torch.zeros(64, 128)}, {}, rf"another kind of model: {DOWN}.weight"),
    ({}, {"bits": 3}, "bits of the AWQ quantization_config is 3; supported: 4"),
    ({}, {"quant_method": "quip"}, "weights quantized by 'quip' are not supported"),
    ({}, {"mystery": 1}, "settings that are not known here: mystery=1"),
    ({}, {"group_size": 48}, "64 input channels are no multiple of the group size 48"),
])  # fmt: skip
def test_what_is_amiss_is_named(
    tmp_path: Path, edit: dict[str, torch.Tensor | None], settings: dict[str, Any], message: str
) -> None:
    """A31, I02: a tensor or a scale that is missing, and settings that are not followed."""
    low, _ = made(tmp_path, "awq")
    change(low, edit, **settings)
    with pytest.raises(ModelError, match=message):
        load(low)


SCALES = {"awq": "scales", "gptq": "scales", "compressed-tensors": "weight_scale", "fp8": "weight_scale_inv"}


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_do_not_arrive_are_named(tmp_path: Path, name: str) -> None:
    """A31: in every format a scale of 0 or NaN is refused with its layer, and one that is missing is missed,
    never taken for 1."""
    low, _ = made(tmp_path, name)
    part = f"{DOWN}.{SCALES[FORMATS[name].config['quant_method']]}"
    good = load_file(low / "model.safetensors")[part]
    for bad in (0.0, float("nan"), float("inf")):
        scales = good.clone()
        scales.flatten()[5] = bad
        change(low, {part: scales})
        with pytest.raises(ModelError, match=rf"{DOWN}: .*damaged: scales hold 1 values that are 0 or not"):
            load(low)
    change(low, {part: good.flatten()[:1]})
    with pytest.raises(ModelError, match=rf"{part} has shape \[1\]"):
        load(low)
    change(low, {part: None})
    with pytest.raises(ModelError, match=rf"lacks 1 tensor: {part}"):
        load(low)
    change(low, {part: good})
    load(low)


def shard(low: Path) -> list[Path]:
    """Split the folder's file into three, with an index."""
    tensors = load_file(low / "model.safetensors")
    names, weight_map = sorted(tensors), dict[str, str]()
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for number, file in enumerate(files):
        own = names[number::3]  # so that the parts of a layer lie in different files
        save_file({name: tensors[name] for name in own}, low / file)
        weight_map |= dict.fromkeys(own, file)
    (low / "model.safetensors").unlink()
    (low / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [low / file for file in files]


def test_parts_of_a_layer_may_lie_in_different_shards(tmp_path: Path) -> None:
    """I02, I03: codes here, scales there; a stray file changes nothing, and a missing shard is named."""
    low, _ = made(tmp_path, "gptq desc_act")
    before = {name: weight.dequantize() for name, weight in load(low).quantized.items()}
    stray = {name: torch.zeros_like(tensor) for name, tensor in load_file(low / "model.safetensors").items()}
    files = shard(low)
    save_file(stray, low / "model.safetensors")
    loaded = load(low)
    assert loaded.quantized.keys() == before.keys()
    assert all(torch.equal(weight.dequantize(), before[name]) for name, weight in loaded.quantized.items())
    assert any("model.safetensors" in note for note in loaded.notes)
    files[1].unlink()
    with pytest.raises(ModelError, match=rf"1 file not to be found: {files[1].name}"):
        load(low)


def test_random_weights_are_not_made_for_a_quantized_model(tmp_path: Path) -> None:
    low, _ = made(tmp_path, "awq")
    with pytest.raises(ModelError, match="random weights are only made for models in plain precision"):
        load_model(low, device=CPU, load_format="dummy", progress=lambda *_: None)


def test_every_format_is_tried() -> None:
    methods = {fmt.config["quant_method"] for fmt in FORMATS.values()}
    assert methods == {"awq", "gptq", "compressed-tensors", "fp8"}
    assert all(isinstance(fmt, Format) for fmt in FORMATS.values())
