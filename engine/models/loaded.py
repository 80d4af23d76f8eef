"""What loading a model is asked for, and what it yields, whatever the format."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.layers.precision.weights import QuantizedWeight
from engine.models.reading import Progress
from engine.models.spec import ModelSpec
from engine.text import Tokenizer
from ipc.messages import ModelInfo

HASH_LIMIT_BYTES = 4 << 30  # larger models are not hashed: it would take longer than reading them


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of `engine.models.loader.load_model`, as every format's loader takes them.

    ``path`` is as the user gave it; the loaders get the real path beside it.
    """

    path: Path
    dtype: torch.dtype | None
    device: torch.device
    progress: Progress
    max_model_len: int | None
    roots: Sequence[Path]

    def served(self, spec: ModelSpec) -> ModelSpec:
        """The spec for the context asked for. Raises `ModelError`."""
        return spec if self.max_model_len is None else spec.served(self.max_model_len)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``weights`` are on one device in one dtype, by canonical name.

    ``quantized``: the linear weights that the checkpoint holds in a low precision, by the same names.
    ``padded_ids`` (int64, on the CPU) are the rows of the embedding that no token belongs to: they must never
    be sampled. ``notes`` are for the log: what was found and ignored, or is not as usual.
    """

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    info: ModelInfo
    padded_ids: torch.Tensor
    notes: tuple[str, ...] = ()
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)


def hash_files(files: Sequence[Path]) -> str:
    """SHA-256 of the file, or of the files' names and hashes; "" for models above `HASH_LIMIT_BYTES`."""
    if sum(file.stat().st_size for file in files) > HASH_LIMIT_BYTES:
        return ""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def finish(
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    path: Path,
    file_format: str,
    sha256: str,
    notes: list[str],
    *,
    quantized: dict[str, QuantizedWeight] | None = None,
    quantization: str = "",
) -> LoadedModel:
    """Put together what was loaded, with the tokenizer held against the embedding.

    ``quantization`` names how the checkpoint's weights are quantized.
    """
    quantized = quantized or {}
    known = tokenizer.known_ids
    padded = [i for i in range(spec.vocab_size) if i not in known]
    beyond = sum(1 for i in known if i >= spec.vocab_size)
    if padded:
        notes.append(f"{len(padded)} of {spec.vocab_size} embedding rows belong to no token; never sampled")
    if beyond:
        notes.append(
            f"{beyond} tokens have no embedding (the model has {spec.vocab_size} rows); texts with them fail"
        )
    if not sha256 and file_format != "dummy":
        notes.append(f"not hashed: the weights exceed {HASH_LIMIT_BYTES >> 30} GiB")
    dtype = weights["embed"].dtype
    info = ModelInfo(
        name=(path.stem if file_format == "gguf" else path.resolve().name)[:4096] or "model",
        path=str(path)[:4096],
        architecture=spec.architecture,
        format=file_format,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        num_params=spec.num_params,
        weight_bytes=sum(t.nbytes for t in weights.values()) + sum(w.nbytes for w in quantized.values()),
        kv_bytes_per_token=spec.kv_bytes_per_token(dtype),
        sha256=sha256,
        tokenizer_sha256=tokenizer.sha256,
        has_chat_template=tokenizer.has_chat_template,
        quantization=quantization,
    )
    return LoadedModel(
        spec=spec,
        weights=weights,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        info=info,
        padded_ids=torch.tensor(padded, dtype=torch.int64),
        notes=tuple(notes),
        quantized=quantized,
    )
