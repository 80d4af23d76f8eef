"""Random weights from a config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.models.errors import ModelError
from engine.models.loader import LoadedModel, load_model
from tests import tiny_models

CPU = torch.device("cpu")


def _load(folder: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return load_model(
        folder, dtype=dtype, device=CPU, load_format="dummy", progress=lambda stage, done, total: None
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds config.json and nothing else."""
    tiny_models.config("qwen2", dtype="float32").save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


def test_a_config_alone_makes_a_whole_model(folder: Path) -> None:
    loaded = _load(folder)
    shapes = loaded.spec.weight_shapes()
    assert {name: tuple(w.shape) for name, w in loaded.weights.items()} == shapes
    assert loaded.info.format == "dummy"
    assert loaded.info.dtype == "float32"  # what config.json says
    assert loaded.padded_ids.numel() == 0
    assert any("random (dummy)" in note for note in loaded.notes)
    assert any("byte-fallback" in note for note in loaded.notes)
    text = "hello é"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text, add_special=True)) == text
    assert not loaded.tokenizer.has_chat_template


def test_weights_are_small_random_and_the_same_each_time(folder: Path) -> None:
    first, second = _load(folder).weights, _load(folder).weights
    assert all(torch.equal(w, second[name]) for name, w in first.items())
    embed = first["embed"]
    assert embed.mean().abs() < 0.001
    assert 0.019 < embed.std() < 0.021
    assert bool((first["layers.0.input_norm"] == 1).all())
    assert bool((first["layers.0.q_proj.bias"] == 0).all())
    assert not torch.equal(first["layers.0.q_proj.weight"], first["layers.1.q_proj.weight"])
    assert _load(folder, torch.bfloat16).weights["embed"].dtype == torch.bfloat16


def test_the_folders_own_tokenizer_is_used(folder: Path) -> None:
    tiny_models.write_tokenizer(folder)
    loaded = _load(folder)
    assert loaded.tokenizer.has_chat_template
    assert not any("byte-fallback" in note for note in loaded.notes)


def test_what_dummy_needs_is_told(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200}), encoding="utf-8")
    with pytest.raises(ModelError, match="vocabulary of 200 is too small for the byte tokenizer"):
        _load(folder)
    with pytest.raises(ModelError, match="is no folder: dummy weights are made from"):
        _load(folder / "config.json")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        _load(folder)
