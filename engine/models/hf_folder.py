"""Models from Hugging Face folders: config.json, safetensors (one file, or shards with an index), tokenizer.

The index decides which tensor comes from which file. Each tensor that the configuration implies must be there
once, with its shape; a tensor that no such model has means that the folder holds another kind of model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.models import hf_tokenizer, safetensors_file
from engine.models.errors import ModelError
from engine.models.loaded import Asked, LoadedModel, finish, hash_files
from engine.models.reading import Meter, allocate, listing, read_plain, resolve
from engine.models.spec import ModelSpec

CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_HARMLESS = ("rotary_emb.inv_freq",)  # computed, not learned; old checkpoints carry it


def read_spec(folder: Path, asked: Asked) -> tuple[ModelSpec, dict[str, object]]:
    """The model's shape and its parsed config.json. Raises `ModelError`."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json and is no GGUF file: it is not a model folder")
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        resolve(path, asked.roots)
    config = hf_tokenizer.load_json(folder / "config.json")
    return asked.served(ModelSpec.from_hf_config(config)), config


def load(folder: Path, asked: Asked) -> LoadedModel:
    """Load the folder. See `engine.models.loader.load_model`."""
    spec, config = read_spec(folder, asked)
    notes: list[str] = []
    placed = _place(folder, spec, asked.roots, notes)
    asked.progress("reading the tokenizer", 0, 0)
    tokenizer = hf_tokenizer.load(folder, config, spec.vocab_size)
    own = safetensors_file.DTYPES[placed["embed"][1].dtype]
    files = sorted({file for file, _ in placed.values()})
    with ThreadPoolExecutor(1) as background:
        digest = background.submit(hash_files, files)
        weights = _read(placed, asked.dtype or own, asked)
        return finish(spec, weights, tokenizer, asked.path, "safetensors", digest.result(), notes)


def _place(
    folder: Path, spec: ModelSpec, roots: Sequence[Path], notes: list[str]
) -> dict[str, tuple[Path, safetensors_file.Entry]]:
    """For each tensor of the spec its file and its place there. Raises `ModelError` naming what is amiss."""
    located, headers = _locate(folder, roots, notes)
    wanted = {hf_name(name): name for name in spec.weight_shapes()}
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
    for source, name in wanted.items():
        entry = headers[located[source]][source]
        if entry.shape != shapes[name]:
            raise ModelError(f"{source} has shape {list(entry.shape)}, config.json says {list(shapes[name])}")
        if entry.dtype not in safetensors_file.DTYPES:
            supported = ", ".join(safetensors_file.DTYPES)
            raise ModelError(f"{source} is stored as {entry.dtype}; supported: {supported}")
        placed[name] = (located[source], entry)
    return placed


def _locate(
    folder: Path, roots: Sequence[Path], notes: list[str]
) -> tuple[dict[str, Path], dict[Path, dict[str, safetensors_file.Entry]]]:
    """Which file holds which tensor: the index decides if there is one."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    code = sorted(
        p.name for p in folder.iterdir() if p.suffix in CODE_SUFFIXES and p.name != "training_args.bin"
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


def hf_name(name: str) -> str:
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
    asked: Asked,
) -> dict[str, torch.Tensor]:
    meter = Meter("reading weights", sum(entry.nbytes for _, entry in placed.values()), asked.progress)
    weights: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for name, (path, entry) in placed.items():
        by_file.setdefault(path, []).append((entry.offset, name))
    for path, items in by_file.items():
        with path.open("rb", buffering=0) as file:
            for offset, name in sorted(items):
                entry = placed[name][1]
                tensor = allocate(name, entry.shape, dtype, asked.device)
                file.seek(offset)
                read_plain(file, safetensors_file.DTYPES[entry.dtype], tensor, meter)
                weights[name] = tensor
    return weights
