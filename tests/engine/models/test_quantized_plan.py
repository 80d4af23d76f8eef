"""quantization_config: which layers are quantized, which tensors they need, and what is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.models.errors import ModelError
from engine.models.quantized import parse

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **changes,
    }


def grouped(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **changes}
    return compressed(config_groups={"group_0": group})


Q = "model.layers.3.self_attn.q_proj"
DOWN = "model.layers.12.mlp.down_proj"


@pytest.mark.parametrize("config", [AWQ, GPTQ, FP8, compressed()])
def test_all_linear_layers_but_the_head_are_quantized(config: dict[str, Any]) -> None:
    plan = parse(config)
    assert plan.scheme_for(Q) is plan.scheme_for(DOWN) is not None
    assert plan.scheme_for("lm_head") is None
    assert plan.needs("lm_head", 256, 256) is None
    with pytest.raises(ModelError, match="lm_head is not quantized"):
        plan.weight("lm_head", 256, 256, {})


def test_names_and_shapes_of_what_a_layer_needs() -> None:
    def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        needs = parse(config).needs(Q, 256, 384)
        assert needs is not None
        return {name.removeprefix(Q + "."): need.shapes[0] for name, need in needs.items()}

    assert shapes(AWQ) == {"qweight": (384, 32), "qzeros": (3, 32), "scales": (3, 256)}
    assert shapes(GPTQ) == {"qweight": (48, 256), "qzeros": (3, 32), "scales": (3, 256), "g_idx": (384,)}
    assert shapes(FP8) == {"weight": (256, 384), "weight_scale_inv": (2, 3)}
    assert shapes(compressed()) == {"weight": (256, 384), "weight_scale": (256, 1)}
    packed = compressed(
        format="pack-quantized",
        config_groups={"g": {"targets": ["Linear"], "weights": {**PACKED, "symmetric": False}}},
    )
    assert shapes(packed) == {
        "weight_packed": (256, 48),
        "weight_shape": (2,),
        "weight_scale": (256, 3),
        "weight_zero_point": (32, 3),
    }
    needs = parse(GPTQ).needs(Q, 256, 384)
    assert needs is not None
    assert not needs[Q + ".g_idx"].optional  # desc_act cannot be read without it


def test_fixed_scales_of_activations_are_known_and_not_read() -> None:
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    plan = parse(grouped(WEIGHTS, input_activations=static))
    needs = plan.needs(Q, 256, 384)
    assert needs is not None
    assert needs[Q + ".input_scale"].optional
    assert needs[Q + ".input_scale"].unused
    assert "float8 static tensor" in plan.notes[0]


def test_lists_of_layers_that_stay_plain_go_by_whole_parts_of_names() -> None:
    plan = parse({**AWQ, "modules_to_not_convert": ["layers.1", "self_attn.k", "down_proj"]})
    assert plan.scheme_for("model.layers.1.mlp.up_proj") is None
    assert plan.scheme_for("model.layers.11.mlp.up_proj") is not None
    assert plan.scheme_for("model.layers.2.self_attn.k_proj") is not None
    assert plan.scheme_for(DOWN) is None
    exact = parse(compressed(ignore=[Q, "re:.*mlp.*"]))
    assert exact.scheme_for(Q) is None
    assert exact.scheme_for(DOWN) is None
    assert exact.scheme_for("model.layers.3.self_attn.k_proj") is not None
    assert exact.scheme_for("lm_head") is not None  # it is a Linear, and this list does not name it


@pytest.mark.parametrize("pattern", [
    r".*lm_head", r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj$", r".*layers\.(0|1|2|3|10|11|12|13|14)\..*",
    r"(?!.*mlp).*q_proj", r".*(?:q|k|v|o)_proj.*", r".*\.layers\.[0-9]+\..*?proj",
])  # fmt: skip
def test_patterns_as_people_write_them_are_run(pattern: str) -> None:
    assert len(parse(compressed(ignore=[f"re:{pattern}"])).plain) == 1


def test_the_most_involved_pattern_that_is_run_takes_no_time() -> None:
    """Every way to match is tried, for each of a model's modules."""
    worst = parse(compressed(ignore=["re:" + ".*" * 4 + "(.|.)(.|.)!"]))
    began = time.perf_counter()
    assert worst.scheme_for("model.layers.10.self_attn.q_proj.and_a_longer_name_still") is not None
    assert time.perf_counter() - began < 5


def test_gptq_can_quantize_the_head_or_only_some_modules() -> None:
    for config in (GPTQ, AWQ):
        assert parse({**config, "lm_head": True}).scheme_for("lm_head") is not None
    plan = parse({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert plan.scheme_for(Q) is not None
    assert plan.scheme_for(DOWN) is None


def test_config_groups_that_name_modules_go_before_all_linear_ones() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": PACKED, "format": "pack-quantized"},
        "down": {"targets": ["re:.*down_proj$"], "weights": WEIGHTS, "format": "float-quantized"},
    }
    plan = parse(compressed(format="mixed-precision", config_groups=groups))
    down, other = plan.scheme_for(DOWN), plan.scheme_for(Q)
    assert down is not None
    assert other is not None
    assert down.name == "compressed-tensors fp8 channel"
    assert other.name == "compressed-tensors int4 group 128 packed"
    assert plan.name == f"{other.name}, {down.name}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "an object is needed"),
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes' are not supported; supported: awq, gptq"),
        ({}, "None are not supported"),
        ({"quant_method": ["awq"]}, r"\['awq'\] are not supported"),
        ({"quant_method": {"awq": 4}}, "are not supported"),
        ({**AWQ, "bits": 3}, r"bits of the AWQ .* is 3; supported: 4"),
        ({**AWQ, "version": "gemv"}, r"AWQ layout 'gemv' .* supported: gemm"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "zero_point": 1}, "zero_point"),
        ({**AWQ, "rotate": True}, r"not known here: rotate=True"),
        ({**AWQ, "w_bit": 8}, "contradict: w_bit=8, bits=4"),
        ({**AWQ, "method": "gptq"}, "contradict: quant_method='awq', method='gptq'"),
        ({**AWQ, "desc_act": True}, "desc_act"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "a list of names"),
        ({**GPTQ, "bits": 2}, r"bits of the GPTQ .* is 2; supported: 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "contradict"),
        ({**GPTQ, "is_marlin_format": True}, "Marlin"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "differ between layers"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "group_size": True}, "group_size"),
        ({**GPTQ, "desc_act": "yes"}, "desc_act"),
        ({**GPTQ, "modules_in_block_to_quantize": [[1]]}, "lists of names"),
        ({**FP8, "weight_block_size": None}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, True]}, "weight_block_size"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(transform_config={"config_groups": {}}), "rotated"),
        (compressed(config_groups={}), "config_groups"),
        (compressed(ignore=["re:(a+)+$"]), "too involved"),
        (compressed(ignore=["re:" + ".?" * 60 + "!"]), "too involved"),
        (compressed(ignore=["re:" + "(.|.)" * 60 + "!"]), "too involved"),
        (compressed(ignore=["re:" + ".*" * 8 + "!"]), "too involved"),
        (compressed(ignore=["re:.*" + "x" * 400]), "too involved"),
        (compressed(ignore=["re:("]), "no regular expression"),
        (grouped({**WEIGHTS, "num_bits": 4}), "num_bits"),
        (grouped({**WEIGHTS, "type": "int"}), "int weights in the format float-quantized"),
        (grouped({**WEIGHTS, "dynamic": True}), "dynamic"),
        (grouped({**WEIGHTS, "symmetric": False}), "float8 weights with zeros"),
        (grouped({**WEIGHTS, "strategy": "group"}), "strategy group and the group size -1"),
        (grouped({**WEIGHTS, "strategy": "block", "block_structure": "128"}), "block_structure"),
        (grouped({**WEIGHTS, "codebook": 3}), "codebook=3"),
        (grouped(WEIGHTS, output_activations={"num_bits": 8}), "outputs of layers"),
        (grouped(WEIGHTS, input_activations={"num_bits": 4}), "num_bits"),
        (grouped(WEIGHTS, targets=[]), "no targets"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(config)


def test_shapes_that_a_format_cannot_hold_are_refused_with_the_layer() -> None:
    with pytest.raises(ModelError, match=rf"{Q}: 200 input channels are no multiple of the group size 128"):
        parse(AWQ).needs(Q, 256, 200)
    with pytest.raises(ModelError, match=rf"{Q}: an AWQ weight \[250, 256\]"):
        parse(AWQ).needs(Q, 250, 256)
    with pytest.raises(ModelError, match="multiples of 8 channels"):
        parse(GPTQ).needs(Q, 250, 256)
