"""Models as loaded and then served: greedy ids equal those of transformers for every kind of part."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import LoadedModel, load_model
from ipc.messages import Sampling
from tests import tiny_models
from tests.engine.core_harness import Engine
from tests.engine.models import gguf_files
from tests.engine.models.gguf_files import Quant

COUNT = 12
PROPORTIONAL = {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# name: (architecture, prompt tokens, served context or None for the default, config)
CASES: dict[str, tuple[str, int, int | None, dict[str, Any]]] = {
    "longrope short": ("llama", 20, None, {"rope_parameters": tiny_models.longrope(8, 64)}),
    "longrope long": ("llama", 100, 512, {"rope_parameters": tiny_models.longrope(8, 64)}),
    "dynamic": (
        "llama",
        40,
        None,
        {"rope_parameters": tiny_models.ROPE_KINDS["dynamic"], "max_position_embeddings": 64},
    ),
    "yarn": ("qwen2", 100, None, {"rope_parameters": tiny_models.ROPE_KINDS["yarn"]}),
    "proportional": ("llama", 50, None, {"rope_parameters": PROPORTIONAL}),
    "biases and tied head": (
        "llama",
        50,
        None,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "norms and biases": ("qwen3", 50, None, {"attention_bias": True}),
    "one KV head": ("mistral", 50, None, {"num_key_value_heads": 1}),
}


def _load(path: Path, max_model_len: int | None = None) -> LoadedModel:
    return load_model(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda stage, done, total: None,
        max_model_len=max_model_len,
    )


def _greedy(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    return Engine(loaded).generate([prompt], Sampling(max_tokens=count, ignore_eos=True))[0]


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(4, 300) for _ in range(length)]


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_transformers(tmp_path: Path, name: str) -> None:
    architecture, length, served, config = CASES[name]
    folder = tiny_models.build(tmp_path / "m", architecture, **config)
    ids = _greedy(_load(folder, served), _prompt(length), COUNT)
    assert ids == tiny_models.greedy(tiny_models.reference(folder), _prompt(length), COUNT)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_i05_a_gguf_file_speaks_like_its_safetensors_twin(tmp_path: Path, architecture: str) -> None:
    """I05: 20 greedy ids of the F16 file equal those of the same weights as safetensors."""
    folder = tiny_models.build(tmp_path / "m", architecture, dtype=torch.float16)
    file = gguf_files.convert(folder, tmp_path / "m.gguf", Quant.F16)
    ids = _greedy(_load(file), _prompt(30), 20)
    assert len(set(ids)) > 5
    assert ids == _greedy(_load(folder), _prompt(30), 20)
