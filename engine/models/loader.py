"""A model from disk into memory: safetensors folders, GGUF files, or random weights.

Everything is checked first (settings, headers, sizes, that each needed tensor is there exactly once with its
shape), then read tensor by tensor into place. Nothing that comes with a model is ever executed: weights are
read as numbers, and formats that can hold code (.bin, .pt, .pkl) are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.models import hf_tokenizer, safetensors_file
from engine.models.errors import ModelError
from engine.models.reading import Meter, Progress, allocate, listing, read_plain, resolve
from engine.models.spec import ModelSpec
from engine.text import Tokenizer
from ipc.messages import ModelInfo

LoadFormat = Literal["auto", "dummy"]

HASH_LIMIT_BYTES = 4 << 30  # larger models are not hashed: it would take longer than reading them
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_HARMLESS = ("rotary_emb.inv_freq",)  # computed, not learned; old checkpoints carry it


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``weights`` are on one device in one dtype, by canonical name.

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
    after symbolic links are resolved. ``progress`` is called on this thread. Raises `ModelError`.
    """
    from engine.models import dummy, gguf

    real = resolve(path, roots)
    progress("reading settings", 0, 0)
    try:
        if load_format == "dummy":
            return dummy.load(real, path, dtype, device, progress, max_model_len, roots)
        found = gguf.find(real)
        if found is not None:
            return gguf.load(resolve(found, roots), path, dtype, device, progress, max_model_len)
        if not real.is_dir():
            raise ModelError(f"{path} is neither a model folder nor a GGUF file" + _advice(real.suffix))
        return _load_folder(real, path, dtype, device, progress, max_model_len, roots)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _advice(suffix: str) -> str:
    if suffix in _CODE_SUFFIXES:
        return f": {suffix} files can run code and are refused, convert the model to safetensors"
    return ": give the folder that holds config.json" if suffix == ".safetensors" else ""


# --- a Hugging Face folder ------------------------------------------------------------------------


def read_spec(
    folder: Path, max_model_len: int | None, roots: Sequence[Path]
) -> tuple[ModelSpec, dict[str, object]]:
    """The model's shape and its parsed config.json. Raises `ModelError`."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json and is no GGUF file: it is not a model folder")
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        resolve(path, roots)
    config = hf_tokenizer.load_json(folder / "config.json")
    spec = ModelSpec.from_hf_config(config)
    return (spec if max_model_len is None else spec.served(max_model_len)), config


def _load_folder(
    folder: Path,
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: Progress,
    max_model_len: int | None,
    roots: Sequence[Path],
) -> LoadedModel:
    spec, config = read_spec(folder, max_model_len, roots)
    notes: list[str] = []
    placed = _place(folder, spec, roots, notes)
    progress("reading the tokenizer", 0, 0)
    tokenizer = hf_tokenizer.load(folder, config, spec.vocab_size)
    own = safetensors_file.DTYPES[placed["embed"][1].dtype]
    files = sorted({file for file, _ in placed.values()})
    with ThreadPoolExecutor(1) as background:
        digest = background.submit(hash_files, files)
        weights = _read(placed, dtype or own, device, progress)
        return finish(spec, weights, tokenizer, path, "safetensors", digest.result(), notes)


def _place(
    folder: Path, spec: ModelSpec, roots: Sequence[Path], notes: list[str]
) -> dict[str, tuple[Path, safetensors_file.Entry]]:
    """For each tensor of the spec its file and its place there. Raises `ModelError` naming what is amiss."""
    located, headers = _locate(folder, roots, notes)
    wanted = {_hf_name(name): name for name in spec.weight_shapes()}
    shapes = spec.weight_shapes()
    missing = sorted(name for name in wanted if name not in located)
    if missing:
        raise ModelError(f"{folder.name} lacks {len(missing)} tensors: {listing(missing)}")
    unexpected = sorted(name for name in located if name not in wanted)
    harmless = [
        name
        for name in unexpected
        if name.endswith(_HARMLESS) or (name == "lm_head.weight" and spec.tie_word_embeddings)
    ]
    if len(harmless) < len(unexpected):
        odd = [name for name in unexpected if name not in harmless]
        raise ModelError(
            f"{folder.name} holds {len(odd)} tensors that a {spec.architecture} with this config.json lacks, "
            f"so it is another kind of model: {listing(odd)}"
        )
    if harmless:
        notes.append(f"ignored tensors that are computed or tied: {listing(harmless)}")
    placed = {}
    for hf_name, name in wanted.items():
        entry = headers[located[hf_name]][hf_name]
        if entry.shape != shapes[name]:
            raise ModelError(
                f"{hf_name} has shape {list(entry.shape)}, config.json says {list(shapes[name])}"
            )
        if entry.dtype not in safetensors_file.DTYPES:
            supported = ", ".join(safetensors_file.DTYPES)
            raise ModelError(f"{hf_name} is stored as {entry.dtype}; supported: {supported}")
        placed[name] = (located[hf_name], entry)
    return placed


def _locate(
    folder: Path, roots: Sequence[Path], notes: list[str]
) -> tuple[dict[str, Path], dict[Path, dict[str, safetensors_file.Entry]]]:
    """Which file holds which tensor: the index decides if there is one."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    code = sorted(
        p.name for p in folder.iterdir() if p.suffix in _CODE_SUFFIXES and p.name != "training_args.bin"
    )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _weight_map(index)
    elif len(present) == 1:
        names = None
    elif present:
        raise ModelError(f"{folder.name} holds {listing(present)} but no {index.name} that says which to use")
    else:
        found = f"; {listing(code)} can run code and is refused, convert it to safetensors" if code else ""
        raise ModelError(f"{folder.name} holds no safetensors file{found}")
    used = sorted(set(names.values())) if names is not None else present
    absent = [name for name in used if name not in present]
    if absent:
        raise ModelError(f"the index names {len(absent)} files that are not there: {listing(absent)}")
    stray = [name for name in (*present, *code) if name not in used]
    if stray:
        notes.append(f"ignored files beside the model: {listing(stray)}")
    paths = {name: resolve(folder / name, roots) for name in used}
    headers = {path: safetensors_file.read_header(path) for path in paths.values()}
    if names is None:
        only = paths[used[0]]
        return dict.fromkeys(headers[only], only), headers
    astray = sorted(tensor for tensor, name in names.items() if tensor not in headers[paths[name]])
    if astray:
        raise ModelError(f"the index names tensors that are not in their files: {listing(astray)}")
    return {tensor: paths[name] for tensor, name in names.items()}, headers


def _weight_map(index: Path) -> dict[str, str]:
    names = hf_tokenizer.load_json(index, unique=True).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index.name} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index.name} names {name!r}, which is no safetensors file of this folder")
    return names


_OUTER = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_INNER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def _hf_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of a canonical name."""
    if name in _OUTER:
        return _OUTER[name]
    _, layer, rest = name.split(".", 2)
    if rest not in _INNER:
        block = "mlp" if rest.startswith(("gate", "up", "down")) else "self_attn"
        return f"model.layers.{layer}.{block}.{rest}"
    return f"model.layers.{layer}.{_INNER[rest]}"


def _read(
    placed: Mapping[str, tuple[Path, safetensors_file.Entry]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    meter = Meter("reading weights", sum(entry.nbytes for _, entry in placed.values()), progress)
    weights: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for name, (path, entry) in placed.items():
        by_file.setdefault(path, []).append((entry.offset, name))
    for path, items in by_file.items():
        with path.open("rb", buffering=0) as file:
            for offset, name in sorted(items):
                entry = placed[name][1]
                tensor = allocate(name, entry.shape, dtype, device)
                file.seek(offset)
                read_plain(file, safetensors_file.DTYPES[entry.dtype], tensor, meter)
                weights[name] = tensor
    return weights


# --- what every format shares ---------------------------------------------------------------------


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
) -> LoadedModel:
    """Put together what was loaded, with the tokenizer held against the embedding."""
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
        weight_bytes=sum(t.numel() * t.element_size() for t in weights.values()),
        kv_bytes_per_token=spec.kv_bytes_per_token(dtype),
        sha256=sha256,
        tokenizer_sha256=tokenizer.sha256,
        has_chat_template=tokenizer.has_chat_template,
    )
    return LoadedModel(
        spec=spec,
        weights=weights,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        info=info,
        padded_ids=torch.tensor(padded, dtype=torch.int64),
        notes=tuple(notes),
    )
