"""The model runner: one step's forward pass and sampling."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBackend, get_backend, probe
from engine.attention.base import Ints
from engine.batch import Batch, BatchBuilder, Plan
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.sampling import Sampler
from engine.traffic import TrafficModel
from ipc.messages import TokenLogprob


@dataclass(slots=True)
class StepOutput:
    """What a step produced, one entry for each scheduled request in the plan's order.

    ``token_ids[i]`` is None where request i has tokens left to compute, or where its logits were not finite
    (then ``nonfinite[i]`` is true and the request must fail; the prefix cache must not keep its blocks).
    The times are seconds: building and staging indices, the model's forward pass, and choosing tokens, the
    wait for the device included. Bytes and operations are modelled (`engine.traffic`); ``kernels`` names the
    implementations that this step ran.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    nonfinite: list[bool]
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    kernels: str = "none"


class ModelRunner:
    """Runs steps of one model over one KV pool. Not thread-safe: the step thread owns it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str = "sdpa",
        max_model_len: int | None = None,
        measure: bool = True,
        consume: bool = False,
    ) -> None:
        """Take a loaded model to ``device`` in ``dtype``, which is also that of the KV pool.

        No position reaches ``max_model_len`` (default: the model's own).
        ``measure`` chooses linear implementations by measuring them (some tenths of a second on a CPU).
        ``loaded.weights`` stays usable and holds nothing twice, unless no linear layer keeps weights as they
        were loaded; ``consume`` empties it, which then gives that memory back.
        Raises ValueError with the reason if the attention backend cannot run.
        """
        self.spec = loaded.spec
        self.device = device
        self.dtype = dtype
        self.kv: KVCache | None = None
        self._attention = self._backend(attention)
        with torch.inference_mode():
            self.decoder = Decoder(
                loaded.spec,
                loaded.weights,
                dtype=dtype,
                device=device,
                max_len=max_model_len or loaded.spec.max_model_len,
                measure=measure,
            )
        if consume:
            loaded.weights.clear()
        self.sampler = Sampler(loaded.spec.vocab_size, loaded.eos_token_ids, device)
        self._padded = loaded.padded_ids.to(device) if loaded.padded_ids.numel() else None
        self._traffic = TrafficModel(
            loaded.spec, self.decoder.choice, embed_dtype=self.decoder.embed.dtype, kv_dtype=dtype
        )
        self._builder: BatchBuilder | None = None

    @property
    def attention_name(self) -> str:
        """The attention backend that steps run with."""
        return self._attention.name

    @property
    def kernels(self) -> str:
        """The implementations that run, such as ``linear=bf16:1+bf16-fp32gemm-packed:2,activations=float32``.

        The number after a linear implementation is the rows from which on it serves.
        """
        return self._kernels(self.decoder.choice.name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held, a second form of them included."""
        return self.decoder.weight_bytes

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Replace the pool by an empty one, the old one being freed first. MemoryError if it does not fit."""
        self.free_kv()
        self.kv = KVCache.allocate(
            self.spec, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )
        self._builder = BatchBuilder(block_size, num_blocks)

    def free_kv(self) -> None:
        """Give the pool's memory back and forget all slots."""
        self.kv = None
        self._builder = None
        self.sampler.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def set_attention(self, name: str) -> None:
        """Change the attention backend from the next step on. ValueError with the reason if it cannot run."""
        self._attention = self._backend(name)

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot. Call it when a request leaves its slot, finished or preempted."""
        self.sampler.release(slot)
        if self._builder is not None:
            self._builder.release(slot)

    def execute(self, plan: Plan) -> StepOutput:
        """Compute the planned tokens and choose the next token of each request whose last one is among them.

        Raises RuntimeError without a pool, and ValueError for a plan that contradicts its requests.
        """
        if self.kv is None or self._builder is None:
            raise RuntimeError("no KV pool: call allocate_kv before execute")
        count = len(plan.scheduled)
        out = StepOutput([None] * count, [None] * count, [False] * count)
        if count == 0:
            return out
        with torch.inference_mode():
            started = time.perf_counter()
            batch = self._builder.build(plan.scheduled)
            attention = self._attention.plan(batch.rows, self.kv, self.spec, self._to_device)
            ids, positions, slots = map(self._to_device, (batch.ids, batch.positions, batch.slots))
            # All rows in order, as when only decoding, need no selection.
            every = len(batch.logit_tokens) == len(batch.ids)
            wanted = None if every else self._to_device(batch.logit_tokens)
            prepared = time.perf_counter()
            timer = _DeviceTimer(self.device)
            logits = self.decoder.forward(ids, positions, slots, attention, self.kv, wanted)
            timer.stop()
            computed = time.perf_counter()
            if batch.sampled:
                self._sample(logits, plan, batch, out)
            ended = time.perf_counter()
        traffic = self._traffic.step(batch.rows.num_new, batch.rows.num_computed, len(batch.sampled))
        out.weight_bytes, out.kv_bytes, out.flops = traffic.weight_bytes, traffic.kv_bytes, traffic.flops
        out.kernels = self._kernels(self.decoder.choice.form_for(len(batch.ids)).name)
        out.prepare_s = prepared - started
        out.forward_s = timer.elapsed_s(computed - prepared)
        out.sample_s = max(0.0, ended - prepared - out.forward_s)
        return out

    def _kernels(self, linear: str) -> str:
        act = str(self.decoder.activation_dtype).removeprefix("torch.")
        return f"linear={linear},activations={act}"

    def _sample(self, logits: Tensor, plan: Plan, batch: Batch, out: StepOutput) -> None:
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        requests = [plan.scheduled[i].request for i in batch.sampled]
        sampled = self.sampler.sample(logits, requests)
        for row, i in enumerate(batch.sampled):
            out.token_ids[i] = sampled.token_ids[row]
            out.logprobs[i] = sampled.logprobs[row]
            out.nonfinite[i] = sampled.nonfinite[row]
            if sampled.nonfinite[row] and self.kv is not None:
                self.kv.scrub(plan.scheduled[i].request.block_table)

    def _backend(self, name: str) -> AttentionBackend:
        reason = probe(name, self.spec, self.device, self.dtype)
        if reason is not None:
            raise ValueError(reason)
        return get_backend(name)

    def _to_device(self, array: Ints) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class _DeviceTimer:
    """Time on the device between its creation and `stop`, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (_event(), _event())
            self._events[0].record()

    def stop(self) -> None:
        """The end of what is timed."""
        if self._events is not None:
            self._events[1].record()

    def elapsed_s(self, host_s: float) -> float:
        """Seconds. Call it once the host has waited for the device; ``host_s`` is the answer on a CPU."""
        if self._events is None:
            return host_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
