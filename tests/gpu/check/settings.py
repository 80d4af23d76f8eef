"""What is measured: shapes of the model, of the batches and of the kernels, on a card and in a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = LLAMA_3_8B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "torch_dtype": "float32",
}  # fmt: skip

SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
"""Of a draft model for it, as Llama 3.2 1B has them."""

Weights = Literal["model", "fp8"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid: ``batch`` requests that each have ``context`` tokens."""

    batch: int
    context: int
    weights: Weights
    kv: Literal["model", "fp8_e4m3"]

    @property
    def name(self) -> str:
        kinds = {
            ("model", "model"): "bf16",
            ("fp8", "model"): "fp8 weights",
            ("fp8", "fp8_e4m3"): "fp8 weights and KV",
        }
        return f"{kinds[self.weights, self.kv]}, batch {self.batch}, {self.context}"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to a server at once."""

    requests: int
    prompt: int
    out: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments, and what follows from them."""

    device: Literal["cuda", "cpu"]
    tiny: bool
    deadline_s: float
    only: tuple[str, ...] | None
    out: Path
    lost: bool = False  # a process before this one was, in a stage that counts as failed
    began_s: float = field(default_factory=perf_counter)  # the first process; the clock is the machine's

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model."""
        return TINY if self.tiny else LLAMA_3_8B

    @property
    def draft_config(self) -> dict[str, Any]:
        """config.json of a smaller model with the same vocabulary."""
        return TINY | {"num_hidden_layers": 1} if self.tiny else LLAMA_3_8B | SMALL

    @property
    def grid(self) -> list[Cell]:
        """The cells, what is worth most first within each precision: converting weights takes time."""
        batches = (1, 3) if self.tiny else (1, 64, 8, 32, 128)
        contexts = (20, 70) if self.tiny else (1024, 4096)
        kinds: tuple[tuple[Weights, Literal["model", "fp8_e4m3"]], ...]
        kinds = (("model", "model"), ("fp8", "fp8_e4m3"), ("fp8", "model"))
        return [Cell(b, c, *kind) for kind in kinds for c in contexts for b in batches]

    @property
    def prompts(self) -> tuple[int, ...]:
        """Lengths for TTFT."""
        return (48, 96) if self.tiny else (2048, 8192)

    @property
    def block_size(self) -> int:
        return 16 if self.tiny else 64

    @property
    def load(self) -> Load:
        """What the server gets."""
        return Load(4, 24, 12) if self.tiny else Load(64, 512, 128)

    @property
    def flip_load(self) -> Load:
        """What it gets for each change of knobs, twice the prompt and an answer in front of it."""
        return Load(3, 12, 36) if self.tiny else Load(32, 128, 64)

    @property
    def server_pool_gib(self) -> float:
        return 0.02 if self.tiny else 24.0

    @property
    def parity_tokens(self) -> int:
        return 40 if self.tiny else 512

    @property
    def product(self) -> int:
        """Rows, columns and depth of the matrix product that is the ceiling."""
        return 128 if self.tiny else 8192

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers that are read and copied."""
        return 1 << 20 if self.tiny else 2 << 30
