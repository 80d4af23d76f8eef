"""A step before it is computed, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention import AttentionPlan
from engine.batch import Batch
from engine.graphs.switch import Way
from engine.kv_cache import KVCache
from engine.traffic import StepTraffic
from ipc.messages import TokenLogprob


@dataclass(slots=True)
class StepOutput:
    """What a step produced, one entry for each scheduled request in the plan's order.

    ``token_ids[i]`` is empty where request i has tokens left to compute, or where its logits were not finite
    (then ``nonfinite[i]`` is true and the request must fail; the prefix cache must not keep its blocks).
    Otherwise it holds the ``accepted[i]`` tokens of its draft that hold, and one of the model's own;
    ``logprobs[i]`` are as many.
    The times are seconds: building and staging indices, copying ``copied_blocks`` blocks from and to host
    memory, the model's forward pass, and choosing tokens, the wait for the device included. Where tokens are
    chosen in the graph that the step was replayed from, that belongs to its forward pass. Parts of the
    forward pass (see `engine.timing.Part`) are None unless they were asked for. Bytes and operations are
    modelled (`engine.traffic`); ``kernels`` names the implementations that this step ran.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob | None]]
    nonfinite: list[bool]
    accepted: list[int]
    prepare_s: float = 0.0
    copy_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    attention_s: float | None = None
    linear_s: float | None = None
    head_s: float | None = None
    copied_blocks: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    kernels: str = "none"
    dropped_nonfinite: bool = False  # whether that was so of any request that `keep` dropped

    def keep(self, entries: Sequence[int]) -> None:
        """Drop what belongs to other requests than these."""
        self.dropped_nonfinite = sum(self.nonfinite) > sum(self.nonfinite[i] for i in entries)
        for name in ("token_ids", "logprobs", "nonfinite", "accepted"):
            found = getattr(self, name)
            setattr(self, name, [found[i] for i in entries])

    @classmethod
    def of(cls, count: int) -> StepOutput:
        """Of ``count`` requests that have got nothing yet."""
        return cls([[] for _ in range(count)], [[] for _ in range(count)], [False] * count, [0] * count)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward pass takes beside the tokens' ids, on the device."""

    attention: AttentionPlan
    positions: Tensor
    slots: Tensor
    wanted: Tensor | None  # the tokens whose logits are needed; None: all of them, in order


@dataclass(slots=True)
class Prepared:
    """A step that is ready but for the tokens still pending when it was prepared.

    ``way`` is how it is computed, ``inputs`` what it runs with where it is not replayed.
    """

    batch: Batch
    inputs: Inputs | None
    way: Way
    kv: KVCache
    num_entries: int  # of the plan
    traffic: StepTraffic
    kernels: str
    prepare_s: float

    def fill(self) -> None:
        """Put pending tokens in their place. ValueError if one has not come, because its request ended."""
        self.batch.fill()

    def tell(self, out: StepOutput) -> None:
        """Put what is known of the step beforehand into its output."""
        traffic = self.traffic
        out.weight_bytes, out.kv_bytes, out.flops = traffic.weight_bytes, traffic.kv_bytes, traffic.flops
        out.kernels, out.prepare_s = self.kernels, self.prepare_s
