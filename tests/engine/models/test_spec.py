"""Model descriptions read from config.json."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.errors import ModelError
from engine.models.spec import ModelSpec
from tests import tiny_models


@functools.cache
def _plain(architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = tiny_models.config(architecture).to_dict()
    return values


def _config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(_plain(architecture)) | changes


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_parts_of_each_architecture(architecture: str) -> None:
    spec = ModelSpec.from_hf_config(_config(architecture))
    assert (spec.qkv_bias, spec.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert not spec.o_bias
    assert not spec.mlp_bias
    assert spec.layer_windows == (None, None)
    assert (spec.q_size, spec.kv_size) == (72, 24)
    assert spec.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 24 * 2


def test_llama_biases_are_those_of_config() -> None:
    spec = ModelSpec.from_hf_config(_config(attention_bias=True, mlp_bias=True))
    assert spec.qkv_bias
    assert spec.o_bias
    assert spec.mlp_bias
    assert "layers.1.down_proj.bias" in spec.weight_shapes()


def test_a_tied_head_has_no_weight_of_its_own() -> None:
    assert "head" in ModelSpec.from_hf_config(_config()).weight_shapes()
    tied = ModelSpec.from_hf_config(_config(tie_word_embeddings=True))
    assert "head" not in tied.weight_shapes()


def test_windows_of_mistral_and_qwen() -> None:
    mistral = ModelSpec.from_hf_config(_config("mistral", sliding_window=8))
    assert mistral.layer_windows == (8, 8)
    qwen = _config("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1, layer_types=None)
    assert ModelSpec.from_hf_config(qwen).layer_windows == (None, 8)
    assert ModelSpec.from_hf_config(qwen).sliding_window == 8
    named = qwen | {"layer_types": ["sliding_attention", "full_attention"]}
    assert ModelSpec.from_hf_config(named).layer_windows == (8, None)
    assert (
        ModelSpec.from_hf_config(named | {"layer_types": None, "use_sliding_window": False}).sliding_window
        is None
    )


def test_what_config_leaves_out_is_as_transformers_assumes() -> None:
    config = _config("mistral")
    for key in (
        "sliding_window",
        "rms_norm_eps",
        "max_position_embeddings",
        "head_dim",
        "tie_word_embeddings",
    ):
        config.pop(key, None)
    spec = ModelSpec.from_hf_config(config)
    theirs = tiny_models.transformers.MistralConfig()
    assert spec.sliding_window == theirs.sliding_window
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.max_model_len == theirs.max_position_embeddings
    assert spec.head_dim == 72 // 9
    qwen = _config("qwen3")
    del qwen["head_dim"]
    assert ModelSpec.from_hf_config(qwen).head_dim == tiny_models.transformers.Qwen3Config().head_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "unknown architecture 'mamba'"),
        ({"model_type": None}, "unknown architecture None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "hidden_size in config.json is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0"),
        ({"vocab_size": True}, "vocab_size in config.json is True"),
        ({"num_key_value_heads": 4}, "9 attention heads cannot share 4 KV heads"),
        ({"rms_norm_eps": 2.0}, "rms_norm_eps is 2.0"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(_config(**changes))


_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9)),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_config_is_understood_or_refused(data: st.DataObject) -> None:
    config = _config(data.draw(st.sampled_from(tiny_models.ARCHITECTURES)))
    rope = dict(config["rope_parameters"])
    for _ in range(data.draw(st.integers(1, 3))):
        target = data.draw(st.sampled_from([config, rope]))
        known = [*target, "factor", "partial_rotary_factor", "rope_scaling", "layer_types", "sliding_window"]
        target[data.draw(st.sampled_from(known))] = data.draw(_ANYTHING)
    config.setdefault("rope_scaling", rope)
    try:
        spec = ModelSpec.from_hf_config(config)
    except ModelError:
        return
    assert spec.num_params > 0
    assert spec.rope.inv_freq()[0].shape == (spec.rope.rotary_dim // 2,)


def test_odd_windows_are_refused() -> None:
    with pytest.raises(ModelError, match=r"sliding_window in config.json is -1"):
        ModelSpec.from_hf_config(_config("mistral", sliding_window=-1))
    with pytest.raises(ModelError, match="layer_types"):
        ModelSpec.from_hf_config(
            _config(
                "qwen3", use_sliding_window=True, sliding_window=4, layer_types=["chunked", "full_attention"]
            )
        )
    with pytest.raises(ModelError, match="there is no sliding_window"):
        ModelSpec.from_hf_config(_config("qwen3", layer_types=["sliding_attention", "full_attention"]))
