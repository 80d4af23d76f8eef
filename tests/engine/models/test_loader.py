"""Loading Hugging Face folders: what transformers loads is loaded, and what must not be is refused."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.models.errors import ModelError
from engine.models.loader import LoadedModel, load_model
from tests import tiny_models

CPU = torch.device("cpu")


def load(path: Path, **options: Any) -> LoadedModel:
    options.setdefault("progress", lambda stage, done, total: None)
    return load_model(path, device=CPU, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "sharded", shards=3)


def _same(loaded: LoadedModel, folder: Path) -> None:
    """Every weight equals the one transformers loads, and none is left over."""
    theirs = dict(tiny_models.reference(folder).named_parameters())
    assert loaded.spec.num_params == sum(p.numel() for p in theirs.values())
    assert set(loaded.weights) == set(loaded.spec.weight_shapes())
    left = dict(theirs)
    for name, ours in loaded.weights.items():
        part = name.removeprefix("layers.")
        found = [n for n in left if _canonical(n) == name]
        assert len(found) == 1, part
        assert torch.equal(ours, left.pop(found[0])), name
    assert not left


def _canonical(hf_name: str) -> str:
    for long, short in (
        ("model.", ""),
        ("self_attn.", ""),
        ("mlp.", ""),
        ("embed_tokens.weight", "embed"),
        ("lm_head.weight", "head"),
        ("input_layernorm.weight", "input_norm"),
        ("post_attention_layernorm.weight", "post_norm"),
        ("norm.weight", "norm"),
    ):
        hf_name = hf_name.replace(long, short)
    return hf_name


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "shards": 3}], ids=["single", "tied sharded"]
)
def test_every_weight_equals_what_transformers_loads(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path = tiny_models.build(tmp_path / "m", architecture, **changes)
    loaded = load(path)
    _same(loaded, path)
    assert loaded.info.architecture == architecture
    assert loaded.info.format == "safetensors"
    assert loaded.info.weight_bytes == 4 * loaded.spec.num_params
    assert loaded.notes == ()


def test_biases_everywhere(tmp_path: Path) -> None:
    path = tiny_models.build(tmp_path / "m", attention_bias=True, mlp_bias=True)
    _same(load(path), path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_weights_come_in_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None
) -> None:
    path = tiny_models.build(tmp_path / "m", dtype=stored)
    loaded = load(path, dtype=asked)
    assert {w.dtype for w in loaded.weights.values()} == {asked or stored}
    raw = safetensors.torch.load_file(path / "model.safetensors")
    assert torch.equal(loaded.weights["head"], raw["lm_head.weight"].to(asked or stored))
    assert loaded.info.dtype == str(asked or stored).removeprefix("torch.")


def test_progress_counts_the_bytes_of_the_weights(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.staging.STAGING_BYTES", 4096)
    calls: list[tuple[str, int, int]] = []
    load(sharded, dtype=torch.bfloat16, progress=lambda *call: calls.append(call))
    reading = [(done, total) for stage, done, total in calls if stage == "reading weights"]
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))
    total = index["metadata"]["total_size"]
    assert reading[0] == (0, total)
    assert reading[-1] == (total, total)
    assert all(0 < b[0] - a[0] <= 4096 for a, b in itertools.pairwise(reading))
    assert calls[0][0] == "reading settings"


def test_names_stop_ids_and_hashes(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}', encoding="utf-8")
    loaded = load(folder)
    assert loaded.eos_token_ids == {tiny_models.EOS_ID, 3, 7}
    assert loaded.info.name == "tiny"
    assert loaded.info.has_chat_template
    assert len(loaded.info.sha256) == len(loaded.info.tokenizer_sha256) == 64
    other = tiny_models.build(folder.parent / "other", seed=1)
    assert load(other).info.sha256 != loaded.info.sha256
    assert load(other).info.tokenizer_sha256 == loaded.info.tokenizer_sha256


# --- I02: shards that are missing or do not hold what the index says -----------------------------------


def test_i02_a_missing_shard_is_named(sharded: Path) -> None:
    """I02: a shard that the index names is absent."""
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 file not to be found: model-00002-of-00004\.safetensors"):
        load(sharded)


def test_i02_a_renamed_shard_is_named(sharded: Path) -> None:
    """I02: a shard was renamed; its content under another name does not count."""
    (sharded / "model-00001-of-00004.safetensors").rename(sharded / "renamed.safetensors")
    with pytest.raises(ModelError, match=r"not to be found: model-00001-of-00004\.safetensors"):
        load(sharded)


def test_i02_an_index_that_names_a_tensor_not_in_its_file(sharded: Path) -> None:
    """I02: the index sends a tensor to the wrong shard, or forgets it."""
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    names = index["weight_map"]
    where = names["model.norm.weight"]
    names["model.norm.weight"] = next(name for name in names.values() if name != where)
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=r"not in their files: model\.norm\.weight"):
        load(sharded)
    del names["model.norm.weight"]
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=r"lacks 1 tensor: model\.norm\.weight"):
        load(sharded)


def test_i02_a_truncated_shard_is_refused_before_anything_is_read(sharded: Path) -> None:
    """I02: a half-downloaded shard never yields half a model."""
    path = sharded / "model-00003-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    stages: list[str] = []
    with pytest.raises(
        ModelError, match=r"model-00003-of-00004\.safetensors has \d+ bytes but its tensors end at"
    ):
        load(sharded, progress=lambda stage, done, total: stages.append(stage))
    assert "reading weights" not in stages


def test_i02_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    """I02: every needed tensor is loaded exactly once, and no tensor of another model is passed over."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    up = "model.layers.1.mlp.up_proj.weight"
    safetensors.torch.save_file({k: v for k, v in tensors.items() if k != up}, path)
    with pytest.raises(ModelError, match="lacks 1 tensor: " + up):
        load(folder)
    safetensors.torch.save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(72)}, path)
    with pytest.raises(ModelError, match=r"another kind of model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)
    safetensors.torch.save_file(tensors | {up: torch.zeros(96, 71)}, path)
    with pytest.raises(ModelError, match=up + r" has shape \[96, 71\], config.json says \[96, 72\]"):
        load(folder)
    safetensors.torch.save_file(tensors | {up: torch.zeros(96, 72, dtype=torch.float64)}, path)
    with pytest.raises(ModelError, match=up + " is stored as F64; supported: F32, F16, BF16"):
        load(folder)


def test_computed_and_tied_tensors_are_ignored_with_a_note(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path / "m", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.zeros(320, 72),
    }
    safetensors.torch.save_file(tensors | more, path)
    (note,) = load(folder).notes
    assert "lm_head.weight" in note
    assert "rotary_emb.inv_freq" in note


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 3]
)
def test_an_index_cannot_point_elsewhere(sharded: Path, name: Any) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="which is no safetensors file of this folder"):
        load(sharded)


# --- I03: files beside the model -----------------------------------------------------------------------


def test_i03_the_index_decides_over_stray_files(sharded: Path) -> None:
    """I03: an extra model.safetensors with random data beside the shards changes nothing and is noted."""
    before = load(sharded)
    random = {name: torch.randn_like(p) for name, p in tiny_models.reference(sharded).named_parameters()}
    safetensors.torch.save_file(random, sharded / "model.safetensors")
    after = load(sharded)
    assert all(torch.equal(w, after.weights[name]) for name, w in before.weights.items())
    assert any("model.safetensors" in note for note in after.notes)


def test_i03_a_stray_tensor_within_a_shard_is_ignored(sharded: Path) -> None:
    """I03: a tensor that is in a shard but not in the index does not win over the indexed one."""
    before = load(sharded)
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    other = sharded / next(name for name in index.values() if name != index["model.norm.weight"])
    tensors = safetensors.torch.load_file(other)
    safetensors.torch.save_file(tensors | {"model.norm.weight": torch.zeros(72)}, other)
    assert torch.equal(load(sharded).weights["norm"], before.weights["norm"])


def test_i03_several_files_without_an_index_are_refused(folder: Path) -> None:
    """I03: without an index nobody can say which file counts."""
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"model\.safetensors, other\.safetensors but no model"):
        load(folder)


# --- I10: files that can hold code ---------------------------------------------------------------------


class _Trap:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.target,)


def test_i10_pickled_weights_are_refused_and_never_run(folder: Path, tmp_path: Path) -> None:
    """I10: a pytorch_model.bin is never opened, with or without safetensors beside it."""
    ran = tmp_path / "ran"
    trap = pickle.dumps(_Trap(ran))
    (folder / "pytorch_model.bin").write_bytes(trap)
    assert any("pytorch_model.bin" in note for note in load(folder).notes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin can run code and is refused, convert it"):
        load(folder)
    with pytest.raises(ModelError, match=r"\.bin files can run code and are refused"):
        load(folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(trap)
    with pytest.raises(ModelError, match="no whole safetensors file"):
        load(folder)
    assert not ran.exists()
    pickle.loads(trap)  # noqa: S301  # the trap does work
    assert ran.exists()


def test_a_model_with_code_of_its_own_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="code of its own"):
        load(folder)


# --- I08: tokenizer and embedding of different sizes ---------------------------------------------------


def test_i08_fewer_tokens_than_rows_mark_the_rest_as_padding(folder: Path) -> None:
    """I08: rows of the embedding without a token are listed, so that the sampler never picks them."""
    tiny_models.write_tokenizer(folder, 318)
    loaded = load(folder)
    assert loaded.padded_ids.tolist() == [318, 319]
    assert any("2 of 320 embedding rows" in note for note in loaded.notes)
    assert loaded.tokenizer.token_bytes(319) == b""
    assert loaded.tokenizer.decode([319]) == ""


def test_i08_more_tokens_than_rows_are_refused_when_used(folder: Path) -> None:
    """I08: an id without an embedding is refused by name instead of reading past the end."""
    from engine.text import TextError

    tiny_models.write_tokenizer(folder, 330)
    loaded = load(folder)
    assert loaded.padded_ids.numel() == 0
    assert any("10 tokens have no embedding" in note for note in loaded.notes)
    last = loaded.tokenizer.token_text(329)
    with pytest.raises(TextError, match=f"{last}' \\(id 329\\), but the model has no ids from 320 on"):
        loaded.tokenizer.encode("hello " + last, add_special=True)
    assert max(loaded.tokenizer.encode("hello world", add_special=True)) < 320


# --- paths ---------------------------------------------------------------------------------------------


def test_e12_paths_with_spaces_and_any_script(tmp_path: Path) -> None:
    """E12: folders named in any script, with spaces, load like others."""
    from tests.engine.models import gguf_files

    place = tmp_path / "Модели ü 空 x"
    folder = tiny_models.build(place / "模型 #1", shards=2)
    assert load(folder).info.name == "模型 #1"
    single = tiny_models.build(place / "single")
    path = gguf_files.convert(single, place / "модель ü.gguf")
    assert load(path).info.name == "модель ü"


def test_files_must_lie_under_the_roots_after_links_are_resolved(folder: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "models", tmp_path / "elsewhere"
    inside.mkdir()
    outside.mkdir()
    with pytest.raises(ModelError, match="lies outside the folders that models may come from"):
        load(folder, roots=[inside])
    (inside / "link").symlink_to(folder)
    with pytest.raises(ModelError, match="lies outside"):
        load(inside / "link", roots=[inside])
    folder.rename(inside / "real")
    assert load(inside / "real", roots=[inside]).spec.num_layers == 2
    (inside / "real" / "model.safetensors").rename(outside / "model.safetensors")
    (inside / "real" / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors lies outside"):
        load(inside / "real", roots=[inside])
    (inside / "real" / "tokenizer.json").rename(outside / "tokenizer.json")
    (inside / "real" / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json lies outside"):
        load(inside / "real", roots=[inside])
    assert load(inside / "real").spec.num_layers == 2  # the operator may name any path


def test_what_is_no_model_says_so(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot be opened"):
        load(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"give the folder that holds config\.json"):
        load(folder / "model.safetensors")
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load(folder)


def test_a_folder_without_a_usable_tokenizer_says_so(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(
        json.dumps(data | {"decoder": {"type": "WordPiece"}}), encoding="utf-8"
    )
    with pytest.raises(ModelError, match=r"WordPiece|cannot be read"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no tokenizer\.json \(save it with transformers"):
        load(folder)


def test_settings_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8"):
        load(folder)
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(ModelError, match="chat template cannot be read"):
        load(folder)
    (folder / "tokenizer_config.json").write_bytes(b"\xff{}")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        load(folder)


def test_a_served_context_other_than_the_default(folder: Path) -> None:
    assert load(folder, max_model_len=100).info.max_model_len == 100
    with pytest.raises(ModelError, match="513 tokens was asked for"):
        load(folder, max_model_len=513)
