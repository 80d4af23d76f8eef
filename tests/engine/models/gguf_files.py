"""GGUF files for tests, converted from the tiny Hugging Face folders as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch

_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Quant = gguf.GGMLQuantizationType


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an unsharded folder."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def neighbours(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The converter's reordering of q and k: the halves of each head interleaved."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def convert(
    folder: Path,
    path: Path,
    quant: Quant = Quant.F32,
    *,
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    leave_out: Callable[[str], bool] = lambda name: False,
    pack: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write the folder's model as GGUF. Matrices are stored as ``quant``, norms and biases as F32.

    ``settings`` replace or (None) drop keys; ``pack`` replaces the package's quantization.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    values = _settings(config, arch) | tokenizer_settings(folder) | dict(settings or {})
    for key, value in values.items():
        _add(writer, key, value)
    for name, tensor in hf_tensors(folder).items():
        if leave_out(name):
            continue
        data = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = neighbours(data, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            data = neighbours(data, config["num_key_value_heads"])
        kind = quant if data.ndim == 2 else Quant.F32
        packed = pack(data) if pack and data.ndim == 2 else gguf.quantize(np.ascontiguousarray(data), kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(config: dict[str, Any], arch: str) -> dict[str, Any]:
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        f"{arch}.rope.dimension_count": config["head_dim"],
    }


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The folder's byte-level tokenizer as GGUF settings."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["special"] for token in data["added_tokens"]}
    vocab = {token["content"]: token["id"] for token in data["added_tokens"]} | data["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [1 if i not in special else 3 if special[i] else 4 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
