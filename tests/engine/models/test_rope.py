"""RoPE frequencies against transformers, element for element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.errors import ModelError
from engine.models.rope import KINDS, RopeSpec
from engine.models.spec import ModelSpec
from tests import tiny_models

HEAD_DIM = 16
MORE_KINDS: dict[str, dict[str, Any]] = {
    **tiny_models.ROPE_KINDS,
    "longrope": tiny_models.longrope(HEAD_DIM, 64),
    "longrope with factor": {**tiny_models.longrope(HEAD_DIM, 64), "factor": 2.0, "attention_factor": 1.25},
    "yarn tuned": {
        **tiny_models.ROPE_KINDS["yarn"],
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
    },
    "yarn attention": {**tiny_models.ROPE_KINDS["yarn"], "attention_factor": 1.1},
    "yarn without factor": {**tiny_models.ROPE_KINDS["yarn"], "factor": None},
    "proportional": {
        "rope_type": "proportional",
        "factor": 2.0,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}


def _theirs(settings: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    config = tiny_models.config("llama", head_dim=HEAD_DIM, rope_parameters=dict(settings))
    if settings["rope_type"] == "default":
        return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(
            config
        )
    return ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, seq_len=seq_len)


def _ours(settings: dict[str, Any]) -> ModelSpec:
    config = tiny_models.config("llama", head_dim=HEAD_DIM).to_dict()
    del config["rope_parameters"]
    return ModelSpec.from_hf_config(config | {"rope_parameters": settings})


@pytest.mark.parametrize("name", MORE_KINDS)
def test_every_published_kind_equals_transformers(name: str) -> None:
    settings = MORE_KINDS[name]
    inv_freq, scaling = _ours(settings).rope.inv_freq()
    theirs, their_scaling = _theirs(settings)
    assert inv_freq.dtype == torch.float32
    assert torch.equal(inv_freq, theirs)
    assert scaling == pytest.approx(their_scaling, rel=1e-12)


def test_no_published_kind_is_forgotten() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(KINDS)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3"])
def test_the_old_spelling_means_the_same(name: str) -> None:
    """transformers 4 wrote rope_scaling with "type" or "rope_type", and rope_theta beside it."""
    settings = MORE_KINDS[name]
    config = tiny_models.config("llama", head_dim=HEAD_DIM).to_dict()
    del config["rope_parameters"]
    for key in ("type", "rope_type"):
        scaling = {k: v for k, v in settings.items() if k not in ("rope_type", "rope_theta")} | {key: name}
        old = config | {"rope_scaling": scaling, "rope_theta": settings["rope_theta"]}
        assert ModelSpec.from_hf_config(old).rope == _ours(settings).rope


def test_partial_rotation_rotates_the_first_part_of_a_head() -> None:
    rope = _ours({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}).rope
    assert rope.rotary_dim == HEAD_DIM // 2
    theirs, _ = _theirs(
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    assert torch.equal(rope.inv_freq()[0], theirs)


def test_dynamic_frequencies_follow_the_served_length_not_the_request() -> None:
    settings = MORE_KINDS["dynamic"]
    spec = _ours(settings)
    plain = 1.0 / spec.rope.theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert torch.equal(spec.served(512).rope.inv_freq()[0], plain.float())
    longer = spec.served(1024)
    assert longer.max_model_len == 1024
    assert torch.equal(longer.rope.inv_freq()[0], _theirs(settings, seq_len=1024)[0])
    for length in (1, 1025):  # a request has a token of its own and one of its answer
        with pytest.raises(ModelError, match=f"{length} tokens was asked for, this model allows 2 to 1024"):
            spec.served(length)


def test_longrope_serves_short_factors_until_a_longer_context_is_asked_for() -> None:
    settings = MORE_KINDS["longrope"]
    spec = _ours(settings)
    assert spec.max_model_len == 64  # not 512: with the short factors the model knows no more
    assert torch.equal(spec.rope.inv_freq()[0], _theirs(settings, seq_len=64)[0])
    long = spec.served(512)
    assert torch.equal(long.rope.inv_freq()[0], _theirs(settings, seq_len=512)[0])
    assert not torch.equal(long.rope.inv_freq()[0], spec.rope.inv_freq()[0])


def test_a_table_divides_each_frequency() -> None:
    factors = tuple(float(2**i) for i in range(HEAD_DIM // 2))
    table = RopeSpec("table", 1e4, HEAD_DIM, 512, short_factor=factors).inv_freq()[0]
    default = RopeSpec("default", 1e4, HEAD_DIM, 512).inv_freq()[0]
    torch.testing.assert_close(table, default / torch.tensor(factors))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "spiral"}, "unknown rope kind 'spiral'"),
        ({"rope_type": "table"}, "unknown rope kind 'table'"),
        ({"rope_type": "linear"}, "rope linear needs a factor"),
        ({"rope_type": "linear", "factor": 0.0}, "rope factor is 0.0"),
        ({"rope_type": "yarn", "factor": "big"}, "factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 factors, 8 are needed"),
        ({"rope_type": "longrope", "short_factor": ["x"], "long_factor": [1.0]}, "no list of numbers"),
        ({"rope_type": "default", "rope_theta": -1.0}, "theta is -1.0"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}, "beta_fast"),
        ({"full_attention": {"rope_type": "default"}}, "per kind of layer"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _ours(settings)
