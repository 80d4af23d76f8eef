"""Models from Hugging Face folders: config.json, safetensors (one file, or shards with an index), tokenizer.

The index decides which tensor comes from which file. Each tensor that the configuration implies must be there
once, with its shape; a tensor that no such model has means that the folder holds another kind of model.
Linear weights may be quantized as ``quantization_config`` says; they stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.layers.precision.weights import QuantizedWeight
from engine.models import hf_tokenizer, quantized, safetensors_file
from engine.models.errors import ModelError
from engine.models.loaded import Asked, LoadedModel, finish, hash_files
from engine.models.quantized import Need, QuantizationPlan
from engine.models.reading import Meter, allocate, listing, resolve
from engine.models.spec import ModelSpec
from engine.models.staging import Staging
from engine.sizes import counted

CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_BIAS_BYTES = 1 << 24
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
    stored = config.get("quantization_config")
    plan = quantized.parse(stored) if stored else None
    checkpoint = Checkpoint.open(folder, asked.roots, notes)
    wanted = _wanted(spec, plan)
    placed = _place(checkpoint, spec, wanted, notes)
    asked.progress("reading the tokenizer", 0, 0)
    tokenizer = hf_tokenizer.load(folder, config, spec.vocab_size)
    own = safetensors_file.DTYPES[placed["embed"].entry.dtype]
    files = sorted({place.file for place in placed.values()})
    with ThreadPoolExecutor(1) as background:
        digest = background.submit(hash_files, files)
        tensors = _read(placed, asked.dtype or own, asked)
        weights = {name: tensors.pop(name) for name in spec.weight_shapes() if name in tensors}
        low = {} if plan is None else _quantized(spec, plan, tensors)
        if plan is not None:
            notes += [f"the weights are quantized: {plan.name}", *plan.notes]
        return finish(
            spec, weights, tokenizer, asked.path, "safetensors", digest.result(), notes,
            quantized=low, quantization=plan.name[:4096] if plan is not None and low else "",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that must be there under a ``source`` name. ``name``: under which it is kept."""

    source: str
    name: str
    need: Need
    plain: bool  # read in the model's dtype, not as it is stored


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor to be read. ``dtype``: in which it is kept, None for the model's."""

    file: Path
    entry: safetensors_file.Entry
    dtype: torch.dtype | None


def _wanted(spec: ModelSpec, plan: QuantizationPlan | None) -> list[_Wanted]:
    """Every tensor of the model. Those of a quantized layer keep the names that they have in the file."""
    out = []
    for name, shape in spec.weight_shapes().items():
        source = hf_name(name)
        module = source.removesuffix(".weight")
        needs = plan.needs(module, *shape) if plan is not None and _is_linear(name) else None
        if needs is None:
            out.append(_Wanted(source, name, Need((shape,), tuple(safetensors_file.DTYPES)), plain=True))
        else:
            out += [_Wanted(part, part, need, plain=False) for part, need in needs.items()]
    return out


def _is_linear(name: str) -> bool:
    return name == "head" or name.endswith("_proj.weight")


def _quantized(
    spec: ModelSpec, plan: QuantizationPlan, tensors: dict[str, torch.Tensor]
) -> dict[str, QuantizedWeight]:
    """The weights that the plan makes of tensors, which are given up one by one."""
    out = {}
    for name, shape in spec.weight_shapes().items():
        module = hf_name(name).removesuffix(".weight")
        needs = plan.needs(module, *shape) if _is_linear(name) else None
        if needs is not None:
            parts = {part: tensors.pop(part) for part in needs if part in tensors}
            out[name] = plan.weight(module, shape[0], shape[1], parts)
    return out


def _place(
    checkpoint: Checkpoint, spec: ModelSpec, wanted: Sequence[_Wanted], notes: list[str]
) -> dict[str, _Placed]:
    """For each tensor its file and its place there. Raises `ModelError` naming what is amiss."""
    title, located = checkpoint.title, checkpoint.files
    missing = sorted(each.source for each in wanted if each.source not in located and not each.need.optional)
    if missing:
        raise ModelError(f"{title} lacks {counted(len(missing), 'tensor')}: {listing(missing)}")
    known = {each.source for each in wanted}
    unexpected = sorted(name for name in located if name not in known)
    harmless = [name for name in unexpected if _is_harmless(name, spec, checkpoint, known)]
    if len(harmless) < len(unexpected):
        odd = [name for name in unexpected if name not in harmless]
        raise ModelError(
            f"{title} holds {counted(len(odd), 'tensor')} that a {spec.architecture} with this config.json "
            f"lacks, so it is another kind of model: {listing(odd)}"
        )
    if harmless:
        notes.append(f"ignored tensors that are computed, tied or zero: {listing(harmless)}")
    placed = {}
    for each in wanted:
        if each.source not in located or each.need.unused:
            continue
        entry, need = checkpoint.entry(each.source), each.need
        if entry.shape not in need.shapes:
            raise ModelError(
                f"{each.source} has shape {list(entry.shape)}, config.json says {list(need.shapes[0])}"
            )
        if entry.dtype not in need.dtypes:
            supported = ", ".join(need.dtypes)
            raise ModelError(f"{each.source} is stored as {entry.dtype}; supported: {supported}")
        kept = None if each.plain else safetensors_file.STORED[entry.dtype]
        placed[each.name] = _Placed(located[each.source], entry, kept)
    return placed


def _is_harmless(name: str, spec: ModelSpec, checkpoint: Checkpoint, known: Collection[str]) -> bool:
    if name.endswith(_HARMLESS) or (name == "lm_head.weight" and spec.tie_word_embeddings):
        return True
    # Old GPTQ writers give every layer a bias, of zeros where the model has none.
    module = name.removesuffix(".bias")
    return module != name and f"{module}.qweight" in known and checkpoint.is_zero(name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which safetensors file of a folder holds which tensor."""

    title: str
    files: Mapping[str, Path]
    headers: Mapping[Path, Mapping[str, safetensors_file.Entry]]

    @classmethod
    def open(cls, folder: Path, roots: Sequence[Path], notes: list[str]) -> Checkpoint:
        """Read the index and the headers. Raises `ModelError`."""
        return cls(folder.name, *_locate(folder, roots, notes))

    def entry(self, name: str) -> safetensors_file.Entry:
        return self.headers[self.files[name]][name]

    def is_zero(self, name: str) -> bool:
        """Whether a tensor holds nothing but bits of zero."""
        entry = self.entry(name)
        with self.files[name].open("rb") as file:
            file.seek(entry.offset)
            return entry.nbytes <= MAX_BIAS_BYTES and not any(file.read(entry.nbytes))


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
        raise ModelError(f"the index names {counted(len(absent), 'file')} not to be found: {listing(absent)}")
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


def _read(placed: Mapping[str, _Placed], dtype: torch.dtype, asked: Asked) -> dict[str, torch.Tensor]:
    total = sum(place.entry.nbytes for place in placed.values())
    meter = Meter("reading weights", total, asked.progress)
    tensors: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for name, place in placed.items():
        by_file.setdefault(place.file, []).append((place.entry.offset, name))
    with Staging(asked.device) as staging:
        for path, items in by_file.items():
            with path.open("rb", buffering=0) as file:
                for offset, name in sorted(items):
                    place = placed[name]
                    tensor = allocate(name, place.entry.shape, place.dtype or dtype, asked.device)
                    file.seek(offset)
                    staging.read(file, safetensors_file.STORED[place.entry.dtype], tensor, meter)
                    tensors[name] = tensor
    return tensors
