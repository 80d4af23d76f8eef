"""Small random Hugging Face folders of every supported architecture, written by transformers itself.

They are the other side of the oracle: what our engine loads from such a folder and computes must equal what
transformers computes from the same folder. Each folder holds config.json, safetensors (sharded if asked),
tokenizer.json with exactly the model's vocabulary and a chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 320
EOS_ID = 2  # <|im_end|>
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_TRAINING_TEXT = ["the quick brown fox jumps over the lazy dog and then the other one " * 3]


def longrope(head_dim: int, original_len: int) -> dict[str, Any]:
    """RoPE settings of kind longrope, whose factor lists have head_dim / 2 entries."""
    half = head_dim // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original_len,
        "short_factor": [1.0 + 0.01 * i for i in range(half)],
        "long_factor": [1.5 + 0.25 * i for i in range(half)],
    }


def config(architecture: str, **changes: Any) -> transformers.PretrainedConfig:
    """A small config: 2 layers, hidden 72, 9 query and 3 KV heads of 8, vocabulary 320, context 512."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": dict(ROPE_KINDS["default"]),
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        values["sliding_window"] = None
    return _CLASSES[architecture][0](**(values | changes))


def build(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Write a model with random weights to ``folder`` and return it.

    ``changes`` go to the config (``num_key_value_heads=1``, ``tie_word_embeddings=True``,
    ``rope_parameters=ROPE_KINDS["yarn"]``, ``sliding_window=8``, ...). ``shards`` > 1 writes an index and
    about that many files. Weights are large enough (std 0.3; norms and biases random too) that greedy ids
    vary from one step to the next and any forgotten part changes them.
    """
    settings = config(architecture, **changes)
    generator = torch.Generator().manual_seed(seed)
    model = _CLASSES[architecture][1](settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise)
    model = model.to(dtype).eval()
    folder.mkdir(parents=True, exist_ok=True)
    if shards > 1:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=size // shards + 1)
    else:
        model.save_pretrained(folder)
    write_tokenizer(folder, settings.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE, **tokenizer_config: Any) -> None:
    """Write a byte-level BPE tokenizer of exactly ``vocab_size`` tokens, of which 4 are special."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = BpeTrainer(
        vocab_size=min(vocab_size, 300),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<filler{i}>", normalized=False) for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    } | tokenizer_config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The folder as transformers loads it, in eval mode, with plain ("eager") attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
    )
    return model.eval()


def greedy(model: transformers.PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """``count`` greedy ids after ``ids`` as transformers chooses them, not stopping at EOS."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
        )
    return [int(token) for token in out[0, len(ids) :]]
