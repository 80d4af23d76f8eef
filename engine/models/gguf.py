"""Models from GGUF files: llama (Llama and Mistral), qwen2 and qwen3.

Quantized tensors are expanded on the host by ``gguf.dequantize``, in parts that go on to the device through
staging memory while the next is expanded. llama.cpp's
converter reorders the q and k rows of the llama architecture, since it rotates neighbouring elements where
Hugging Face rotates halves; the rows are put back here, for that architecture only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engine.models import gguf_file, gguf_tokenizer
from engine.models.errors import ModelError
from engine.models.gguf_file import GgufFile, Tensor
from engine.models.loaded import Asked, LoadedModel, finish, hash_files
from engine.models.reading import Meter, allocate, listing, read_exactly
from engine.models.rope import RopeSpec
from engine.models.spec import Architecture, ModelSpec
from engine.models.staging import Staging
from engine.sizes import counted

ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
QUANTIZED = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K"}
PART_ELEMENTS = 1 << 17  # what dequantize makes of it stays in the cache: measured best from 2^16 to 2^20

_OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_INNER = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_ROPE_TABLE = "rope_freqs.weight"


def find(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or the only one in a folder without config.json."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(
            f"{path.name} holds several GGUF files, name one: {listing([f.name for f in files])}"
        )
    return files[0] if files else None


def load(path: Path, asked: Asked) -> LoadedModel:
    """Load the file ``path``. See `engine.models.loader.load_model`."""
    try:
        file = gguf_file.read(path)
        spec = asked.served(read_spec(file))
        asked.progress("reading the tokenizer", 0, 0)
        tokenizer = gguf_tokenizer.build(file.settings, spec.vocab_size)
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path.name} holds a setting of the wrong kind: {error}") from error
    placed = _place(file, spec)
    with ThreadPoolExecutor(1) as background:
        digest = background.submit(hash_files, [path])
        weights = _read(file, spec, placed, asked)
        return finish(spec, weights, tokenizer, asked.path, "gguf", digest.result(), [])


def read_spec(file: GgufFile) -> ModelSpec:
    """The model's shape from the settings and the tensors that are there. Raises `ModelError`."""
    settings, tensors = file.settings, file.tensors
    arch = settings.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"unknown GGUF architecture {arch!r}; supported: {', '.join(ARCHITECTURES)}")
    get = _Getter(settings, str(arch))
    if get.optional("expert_count", 0):
        raise ModelError(
            f"this {arch} has {get.optional('expert_count', 0)} experts; mixtures are not supported"
        )
    if settings.get("split.count", 0) > 1:
        raise ModelError(
            f"{file.path.name} is one of {settings['split.count']} parts: merge them into one file"
        )
    if _OUTER["embed"] not in tensors or len(tensors[_OUTER["embed"]].shape) != 2:
        raise ModelError(f"{file.path.name} has no tensor {_OUTER['embed']}")
    heads, hidden, layers = (
        get.int("attention.head_count"),
        get.int("embedding_length"),
        get.int("block_count"),
    )
    head_dim = int(get.optional("attention.key_length", hidden // heads))
    if int(get.optional("attention.value_length", head_dim)) != head_dim:
        raise ModelError("keys and values of different sizes are not supported")
    window = get.optional("attention.sliding_window", 0) or None
    max_len = get.int("context_length")
    rope = _rope(file, get, head_dim, max_len)
    return ModelSpec(
        architecture=ARCHITECTURES[arch],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(get.optional("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=get.int("feed_forward_length"),
        vocab_size=tensors[_OUTER["embed"]].shape[0],
        max_model_len=rope.default_len(max_len),
        rms_norm_eps=get.float("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_word_embeddings=_OUTER["head"] not in tensors,
        layer_windows=(window,) * layers,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=arch == "qwen3",
    )


class _Getter:
    """Settings of one architecture, by their names without its prefix."""

    def __init__(self, settings: Mapping[str, Any], arch: str) -> None:
        self._settings, self._arch = settings, arch

    def optional(self, key: str, default: Any) -> Any:
        value = self._settings.get(f"{self._arch}.{key}", default)
        if not isinstance(value, int | float | str):
            raise ModelError(f"{self._arch}.{key} differs from layer to layer, which is not supported")
        return value

    def int(self, key: str) -> int:
        value = self.optional(key, "missing")
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise ModelError(f"{self._arch}.{key} is {value!r}, a positive whole number is needed")
        return value

    def float(self, key: str) -> float:
        value = self.optional(key, "missing")
        if isinstance(value, str):
            raise ModelError(f"{self._arch}.{key} is {value!r}, a number is needed")
        return float(value)


def _rope(file: GgufFile, get: _Getter, head_dim: int, max_len: int) -> RopeSpec:
    kind = get.optional("rope.scaling.type", "none")
    factor = get.optional("rope.scaling.factor", get.optional("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" and factor != 1.0:
        kind = "linear"  # older files give a factor alone
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"unknown rope scaling {kind!r} in the GGUF file; supported: none, linear, yarn")
    table = _rope_table(file)
    if table and kind != "none":
        raise ModelError(f"the GGUF file scales rope twice, by {kind} and by {_ROPE_TABLE}")
    attention = get.optional("rope.scaling.attn_factor", 0.0)
    return RopeSpec(
        kind="table" if table else "default" if kind == "none" else kind,
        theta=float(get.optional("rope.freq_base", 10_000.0)),
        rotary_dim=int(get.optional("rope.dimension_count", head_dim)),
        max_position=max_len,
        factor=float(factor),
        original_len=int(get.optional("rope.scaling.original_context_length", max_len)),
        attention_factor=float(attention) or None,
        short_factor=table,
    )


def _rope_table(file: GgufFile) -> tuple[float, ...]:
    """The divisors of the frequencies: how GGUF files say Llama 3's scaling."""
    tensor = file.tensors.get(_ROPE_TABLE)
    if tensor is None:
        return ()
    if tensor.kind != 0 or len(tensor.shape) != 1 or tensor.shape[0] > 1024:
        raise ModelError(f"{_ROPE_TABLE} has shape {list(tensor.shape)}, a short list of float32 is needed")
    values = torch.empty(tensor.shape[0], dtype=torch.float32)
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        read_exactly(data, values.view(torch.uint8))
    return tuple(values.tolist())


# --- weights --------------------------------------------------------------------------------------


def _place(file: GgufFile, spec: ModelSpec) -> dict[str, Tensor]:
    """For each tensor of the spec its place in the file. Raises `ModelError` naming what is amiss."""
    shapes = spec.weight_shapes()
    wanted = {_gguf_name(name): name for name in shapes}
    missing = sorted(name for name in wanted if name not in file.tensors)
    if missing:
        raise ModelError(f"{file.path.name} lacks {counted(len(missing), 'tensor')}: {listing(missing)}")
    odd = sorted(name for name in file.tensors if name not in wanted and name != _ROPE_TABLE)
    if odd:
        raise ModelError(
            f"{file.path.name} holds tensors that this architecture does not have: {listing(odd)}"
        )
    placed = {}
    for gguf_name, name in wanted.items():
        tensor = file.tensors[gguf_name]
        if tensor.shape != shapes[name]:
            raise ModelError(
                f"{gguf_name} has shape {list(tensor.shape)}, the settings say {list(shapes[name])}"
            )
        end = tensor.offset + _nbytes(gguf_name, tensor)
        if end > file.size:
            raise ModelError(
                f"{file.path.name} has {file.size} bytes, {gguf_name} ends at {end}: download it again"
            )
        placed[name] = tensor
    return placed


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, *kind = name.split(".")
    return ".".join(("blk", layer, _INNER[part], *kind))


def _nbytes(name: str, tensor: Tensor) -> int:
    """Bytes the tensor takes in the file. Raises `ModelError` for kinds that are not supported, by name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.kind not in PLAIN and tensor.kind not in QUANTIZED:
        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        supported = ", ".join(["F32", "F16", "BF16", *QUANTIZED.values()])
        raise ModelError(
            f"{name} is stored as {known.get(tensor.kind, f'type {tensor.kind}')}; supported: {supported}"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    if not tensor.shape or tensor.shape[-1] % block:
        raise ModelError(
            f"{name} has rows of {tensor.shape[-1:]} elements, no multiple of its block of {block}"
        )
    return int(math.prod(tensor.shape) // block * block_bytes)


def _own_dtype(placed: Mapping[str, Tensor]) -> torch.dtype:
    return PLAIN.get(placed["layers.0.q_proj.weight"].kind, torch.bfloat16)


def _read(
    file: GgufFile,
    spec: ModelSpec,
    placed: Mapping[str, Tensor],
    asked: Asked,
) -> dict[str, torch.Tensor]:
    total = sum(_nbytes(name, tensor) for name, tensor in placed.items())
    meter = Meter("reading weights", total, asked.progress)
    dtype = asked.dtype or _own_dtype(placed)
    weights: dict[str, torch.Tensor] = {}
    with file.path.open("rb", buffering=0) as data, Staging(asked.device) as staging:
        for name, tensor in sorted(placed.items(), key=lambda item: item[1].offset):
            target = allocate(name, tensor.shape, dtype, asked.device)
            data.seek(tensor.offset)
            if tensor.kind in PLAIN:
                staging.read(data, PLAIN[tensor.kind], target, meter)
            else:
                _read_quantized(data, tensor.kind, target, staging, meter)
            if spec.architecture == "llama":
                target = _hf_rows(name, target, spec)
            weights[name] = target
    return weights


def _read_quantized(data: BinaryIO, kind: int, target: torch.Tensor, staging: Staging, meter: Meter) -> None:
    import gguf

    quant = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    flat = target.view(-1)
    per_part = PART_ELEMENTS // block * block
    codes = torch.empty(min(per_part, flat.numel()) // block * block_bytes, dtype=torch.uint8)
    for start in range(0, flat.numel(), per_part):
        part = flat[start : start + per_part]
        packed = codes[: part.numel() // block * block_bytes]
        read_exactly(data, packed)
        # As one long row: the package loops in Python over every sixteen rows.
        expanded = gguf.dequantize(packed.numpy().reshape(1, -1), quant)
        staging.put(torch.from_numpy(expanded).view(-1), part)
        meter.add(packed.numel())


def _hf_rows(name: str, tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Rows of q and k of each head: from pairs side by side to all first ones before all second ones."""
    if ".q_proj." in name:
        heads = spec.num_heads
    elif ".k_proj." in name:
        heads = spec.num_kv_heads
    else:
        return tensor
    pairs = tensor.view(heads, spec.head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
