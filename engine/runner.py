"""The model runner: one step's forward pass and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.batch import Plan
from engine.kv_cache import KVCache
from engine.models.loader import LoadedModel
from ipc.messages import TokenLogprob


@dataclass(slots=True)
class StepOutput:
    """What a step produced, one entry for each scheduled request in the plan's order.

    ``token_ids[i]`` is None where request i has tokens left to compute, or where its logits were not finite
    (then ``nonfinite[i]`` is true and the request must fail). The three times are seconds of this step on the
    host's clock: index building and staging, the model's forward pass, and choosing tokens.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    nonfinite: list[bool]
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    weight_bytes: int = 0  # modelled traffic of this step, see engine.traffic
    kv_bytes: int = 0
    flops: int = 0
    kernels: str = field(default="")


class ModelRunner:
    """Runs steps of one model over one KV pool. Not thread-safe: the step thread owns it."""

    kv: KVCache | None

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str = "sdpa",
        max_model_len: int | None = None,
    ) -> None: ...

    @property
    def attention_name(self) -> str:
        """The attention backend that steps run with."""
        raise NotImplementedError

    @property
    def kernels(self) -> str:
        """The implementations that really run, comma separated, such as ``linear=bf16-fp32gemm``."""
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...

    def free_kv(self) -> None: ...

    def set_attention(self, name: str) -> None:
        """Change the attention backend from the next step on. ValueError with the reason if it cannot run."""

    def execute(self, plan: Plan) -> StepOutput:
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot. Call it when a request leaves its slot, finished or preempted."""
