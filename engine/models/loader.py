"""A model from disk into memory: safetensors folders, GGUF files, or random weights.

Everything is checked first (settings, headers, sizes, that each needed tensor is there exactly once with its
shape), then read tensor by tensor into place. Nothing that comes with a model is ever executed: weights are
read as numbers, and formats that can hold code (.bin, .pt, .pkl) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from engine.models import dummy, gguf, hf_folder
from engine.models.errors import ModelError
from engine.models.loaded import Asked, LoadedModel
from engine.models.reading import Progress, resolve

__all__ = ["LoadFormat", "LoadedModel", "load_model"]

LoadFormat = Literal["auto", "dummy"]


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    load_format: LoadFormat = "auto",
    progress: Progress,
    max_model_len: int | None = None,
    roots: Sequence[Path] = (),
) -> LoadedModel:
    """Load a Hugging Face folder, a GGUF file, or (``dummy``) random weights for a folder's config.json.

    ``dtype`` None keeps the file's own, bfloat16 for quantized files. ``max_model_len`` serves a different
    context than the default (see `ModelSpec.served`). With ``roots``, every file must lie under one of them
    after symbolic links are resolved. ``progress`` is called on this thread. Raises `ModelError`, MemoryError
    with what is needed and what there is.
    """
    real = resolve(path, roots)
    asked = Asked(path, dtype, device, progress, max_model_len, roots)
    progress("reading settings", 0, 0)
    try:
        if load_format == "dummy":
            return dummy.load(real, asked)
        found = gguf.find(real)
        if found is not None:
            return gguf.load(resolve(found, roots), asked)
        if not real.is_dir():
            raise ModelError(f"{path} is neither a model folder nor a GGUF file" + _advice(real.suffix))
        return hf_folder.load(real, asked)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _advice(suffix: str) -> str:
    if suffix in hf_folder.CODE_SUFFIXES:
        return f": {suffix} files can run code and are refused, convert the model to safetensors"
    return ": give the folder that holds config.json" if suffix == ".safetensors" else ""
