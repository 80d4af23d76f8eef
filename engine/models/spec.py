"""The shape of a decoder of the Llama family, read from a Hugging Face ``config.json``.

`ModelSpec` says everything the decoder, the KV cache and the loader need to know about a model before a
single weight is read. What it cannot describe exactly it refuses by name (`ModelError`): a model that is
served with a setting ignored answers fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from engine.models.errors import ModelError
from engine.models.rope import RopeSpec

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers assumes where a config.json leaves a key out.
_DEFAULT_MAX_LEN = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_WINDOW = 4096
# Beyond any model there is: what a damaged file claims must not become a list of that length.
MAX_LAYERS, MAX_HEAD_DIM, MAX_SIZE = 4096, 8192, (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. Sizes count elements; ``vocab_size`` is the rows of the embedding.

    ``layer_windows`` holds one entry a layer: the number of last positions a token may attend to, itself
    included, or None for all. ``o_bias`` and ``mlp_bias`` are the biases of the attention output and of the
    three MLP projections.
    """

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_model_len",
        ):
            value = getattr(self, name)
            most = {"num_layers": MAX_LAYERS, "head_dim": MAX_HEAD_DIM}.get(name, MAX_SIZE)
            if not 1 <= value <= most:
                raise ModelError(f"{name} is {value}, it must be from 1 to {most}")
        if self.rope.rotary_dim > self.head_dim:
            raise ModelError(
                f"rope rotates {self.rope.rotary_dim} elements of heads that have {self.head_dim}"
            )
        self.rope.inv_freq()  # refuses settings that yield no frequencies, before any weight is read
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly: "
                "the configuration of the model is wrong"
            )
        if not 0.0 <= self.rms_norm_eps < 1.0:
            raise ModelError(f"rms_norm_eps is {self.rms_norm_eps}, it must be in [0, 1)")
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(f"{len(self.layer_windows)} attention windows for {self.num_layers} layers")

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one, None if every layer attends to everything."""
        return next((w for w in self.layer_windows if w is not None), None)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Distinct parameters; a tied head counts once."""
        return sum(_product(shape) for shape in self.weight_shapes().values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype.itemsize

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every tensor, in layer order. Linear weights are [out, in]."""
        h, f = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, h)}
        linears = {
            "q_proj": (self.q_size, h, self.qkv_bias),
            "k_proj": (self.kv_size, h, self.qkv_bias),
            "v_proj": (self.kv_size, h, self.qkv_bias),
            "o_proj": (h, self.q_size, self.o_bias),
            "gate_proj": (f, h, self.mlp_bias),
            "up_proj": (f, h, self.mlp_bias),
            "down_proj": (h, f, self.mlp_bias),
        }
        for i in range(self.num_layers):
            at = f"layers.{i}."
            shapes[at + "input_norm"] = (h,)
            if self.qk_norm:
                shapes[at + "q_norm"] = shapes[at + "k_norm"] = (self.head_dim,)
            for name, (rows, cols, bias) in linears.items():
                shapes[f"{at}{name}.weight"] = (rows, cols)
                if bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
            shapes[at + "post_norm"] = (h,)
        shapes["norm"] = (h,)
        if not self.tie_word_embeddings:
            shapes["head"] = (self.vocab_size, h)
        return shapes

    def served(self, max_model_len: int) -> ModelSpec:
        """This model served with contexts up to ``max_model_len`` tokens.

        Kinds of RoPE whose frequencies depend on the length (dynamic, longrope) are fixed here, once and for
        every position, so that a key never depends on the batch, the chunk or the request it was computed in.
        Raises `ModelError` above what the model can do, and below a token of a prompt and one of its answer.
        """
        limit = self.rope.longest(self.max_model_len)
        if not 2 <= max_model_len <= limit:
            raise ModelError(
                f"a context of {max_model_len} tokens was asked for, this model allows 2 to {limit}"
            )
        return replace(self, max_model_len=max_model_len, rope=replace(self.rope, served_len=max_model_len))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a parsed ``config.json``, of transformers 4 or 5. Raises `ModelError`."""
        try:
            return _from_hf(config)
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"config.json holds a value of the wrong kind: {error}") from error


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def _from_hf(config: Mapping[str, Any]) -> ModelSpec:
    arch = _architecture(config)
    if config.get("auto_map"):
        raise ModelError(_OWN_CODE)
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {act!r}; only silu is supported for the Llama family")
    layers = _int(config, "num_hidden_layers", MAX_LAYERS)
    heads = _int(config, "num_attention_heads")
    hidden = _int(config, "hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = 128 if arch == "qwen3" and "head_dim" not in config else hidden // heads
    head_dim = _int({"head_dim": head_dim}, "head_dim", MAX_HEAD_DIM)
    max_len = _int({"max_position_embeddings": _DEFAULT_MAX_LEN[arch], **config}, "max_position_embeddings")
    bias = bool(config.get("attention_bias", False)) if arch in ("llama", "qwen3") else False
    rope = RopeSpec.from_hf_config(config, head_dim=head_dim, max_position=max_len)
    return ModelSpec(
        architecture=arch,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or (8 if arch == "mistral" else heads)),
        head_dim=head_dim,
        intermediate_size=_int(config, "intermediate_size"),
        vocab_size=_int(config, "vocab_size"),
        max_model_len=rope.default_len(max_len),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_windows=_layer_windows(config, arch, layers),
        qkv_bias=bias or arch == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if arch == "llama" else False,
        qk_norm=arch == "qwen3",
    )


_OWN_CODE = (
    "this model wants to run code of its own (auto_map in config.json), which is never done; "
    "use a model of the architectures " + ", ".join(ARCHITECTURES)
)


def _architecture(config: Mapping[str, Any]) -> Architecture:
    kind = config.get("model_type")
    for arch in ARCHITECTURES:
        if kind == arch:
            break
    else:
        raise ModelError(f"unknown architecture {kind!r}; supported: {', '.join(ARCHITECTURES)}")
    classes = config.get("architectures")
    if classes and _CLASSES[arch] not in classes:
        raise ModelError(
            f"the model is a {', '.join(map(str, classes))}, only {_CLASSES[arch]} generates text here"
        )
    return arch


def _int(config: Mapping[str, Any], key: str, most: int = MAX_SIZE) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{key} in config.json is {value!r}, a whole number from 1 to {most} is needed")
    return value


def _layer_windows(config: Mapping[str, Any], arch: Architecture, layers: int) -> tuple[int | None, ...]:
    """Mistral: all layers alike. Qwen: the layers from ``max_window_layers`` on, or ``layer_types``."""
    if arch == "llama":
        return (None,) * layers
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    if arch != "mistral" and not config.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelError(
            f"sliding_window in config.json is {window!r}, a positive whole number or null is needed"
        )
    if arch == "mistral":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise ModelError(
            f"layer_types in config.json is {kinds!r}; sliding_attention or full_attention per layer"
        )
    if window is None and "sliding_attention" in kinds:
        raise ModelError("layer_types in config.json names sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
