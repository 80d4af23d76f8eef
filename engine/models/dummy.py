"""Random weights for a model of which only config.json is there (``--load-format dummy``).

For trying out memory, speed and settings of a model before its weights are downloaded. The text is noise.
Weights have a standard deviation of 0.02, norms are 1, biases 0; they are the same each time on one kind of
device. A folder without tokenizer.json gets a byte-level stand-in, and a note that says so.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.models import hf_folder, hf_tokenizer
from engine.models.errors import ModelError
from engine.models.loaded import Asked, LoadedModel, finish
from engine.models.reading import Meter, Progress, allocate
from engine.models.spec import ModelSpec
from engine.text import Tokenizer

STD = 0.02
BYTE_TOKENIZER = "byte-fallback"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(folder: Path, asked: Asked) -> LoadedModel:
    """Make the model that the folder's config.json describes. See `engine.models.loader.load_model`."""
    if not folder.is_dir():
        raise ModelError(f"{asked.path} is no folder: dummy weights are made from a folder's config.json")
    spec, config = hf_folder.read_spec(folder, asked)
    if config.get("quantization_config"):
        raise ModelError(
            "random weights are only made for models in plain precision, config.json has a "
            "quantization_config; remove it there and choose weight_dtype instead"
        )
    notes = ["the weights are random (dummy): speed and memory are real, the text is noise"]
    if (folder / "tokenizer.json").is_file():
        tokenizer = hf_tokenizer.load(folder, config, spec.vocab_size)
    else:
        tokenizer = byte_tokenizer(spec.vocab_size)
        notes.append(f"there is no tokenizer.json, so texts are split into bytes ({BYTE_TOKENIZER})")
    dtype = asked.dtype
    if dtype is None:
        named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = _DTYPES.get(named.removeprefix("torch."), torch.bfloat16)
    weights = make_weights(spec, dtype, asked.device, asked.progress)
    return finish(spec, weights, tokenizer, asked.path, "dummy", "", notes)


def make_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress
) -> dict[str, torch.Tensor]:
    """Every tensor of the spec, by canonical name. Each has its own seed, drawn from its name."""
    shapes = spec.weight_shapes()
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    meter = Meter("making random weights", total, progress)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = allocate(name, shape, dtype, device)
        if name.endswith("norm"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
            tensor.normal_(0.0, STD, generator=torch.Generator(device).manual_seed(seed))
        weights[name] = tensor
        meter.add(tensor.numel() * dtype.itemsize)
    return weights


def byte_tokenizer(rows: int) -> Tokenizer:
    """One token a byte (ids 0 to 255), an end token, and filler up to ``rows`` so that any id can be sampled.

    Raises `ModelError` for models with fewer than 257 rows.
    """
    if rows < 257:
        raise ModelError(f"a vocabulary of {rows} is too small for the byte tokenizer, 257 are needed")
    alphabet = sorted(ByteLevel.alphabet())
    backend = Backend(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    backend.add_tokens([AddedToken(f"<{i}>", normalized=False) for i in range(257, rows)])
    return Tokenizer(
        backend,
        scheme="byte_level",
        rows=rows,
        bos_token_id=None,
        eos_token_ids={256},
        add_bos=False,
        chat_template=None,
        sha256=hashlib.sha256(f"{BYTE_TOKENIZER} {rows}".encode()).hexdigest(),
    )
