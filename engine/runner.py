"""The model runner: one step's copies, forward pass and sampling.

A step has two halves. `ModelRunner.prepare` builds everything that the host builds: it may run while the step
before it is computed by another thread. `ModelRunner.compute` does the rest, one step after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionPlan, get_backend, probe
from engine.attention.base import Ints
from engine.batch import Batch, BatchBuilder, Plan, ScheduledRow
from engine.kv_cache import KVCache
from engine.models.decoder import Decoder
from engine.models.loader import LoadedModel
from engine.plan import Arena, Copy
from engine.sampling import Sampler
from engine.swap import CopyFailed, HostMemory
from engine.timing import Part, PartTimer, Timer
from engine.traffic import StepTraffic, TrafficModel
from ipc.messages import TokenLogprob

__all__ = ["CopyFailed", "ModelRunner", "Prepared", "StepOutput"]


@dataclass(slots=True)
class StepOutput:
    """What a step produced, one entry for each scheduled request in the plan's order.

    ``token_ids[i]`` is None where request i has tokens left to compute, or where its logits were not finite
    (then ``nonfinite[i]`` is true and the request must fail; the prefix cache must not keep its blocks).
    The times are seconds: building and staging indices, copying ``copied_blocks`` blocks from and to host
    memory, the model's forward pass, and choosing tokens, the wait for the device included. Parts of the
    forward pass (see `engine.timing.Part`) are None unless they were asked for. Bytes and operations are
    modelled (`engine.traffic`); ``kernels`` names the implementations that this step ran.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    nonfinite: list[bool]
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


@dataclass(slots=True)
class Prepared:
    """A step that is ready but for the tokens still pending when it was prepared."""

    batch: Batch
    attention: AttentionPlan
    positions: Tensor
    slots: Tensor
    wanted: Tensor | None  # the tokens whose logits are needed; None: all of them, in order
    kv: KVCache
    num_entries: int  # of the plan
    traffic: StepTraffic
    kernels: str
    prepare_s: float

    def fill(self) -> None:
        """Put pending tokens in their place. ValueError if one has not come, because its request ended."""
        self.batch.fill()


class ModelRunner:
    """Runs steps of one model over one KV pool.

    The step thread owns it. Only `compute` may run on another thread, one call at a time, and while it does
    the step thread may call `prepare` and nothing else.
    """

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
        check: bool = False,
    ) -> None:
        """Take a loaded model to ``device`` in ``dtype``, which is also that of the KV pool.

        No position reaches ``max_model_len`` (default: the model's own).
        ``measure`` chooses linear implementations by measuring them (some tenths of a second on a CPU).
        ``loaded.weights`` stays usable and holds nothing twice, unless no linear layer keeps weights as they
        were loaded; ``consume`` empties it, which then gives that memory back.
        ``check`` keeps checksums of blocks in host memory.
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
        self._host = HostMemory(device, check=check)

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
        self._host.keep_fitting(self.kv)
        self._builder = BatchBuilder(block_size, num_blocks)

    def free_kv(self) -> None:
        """Give the pool's memory back and forget all slots."""
        self._host.join()
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

    def set_forward_timing(self, on: bool) -> None:
        """Time the parts of the forward pass from the next step on, or stop doing so."""
        self.decoder.timer = PartTimer(self.device) if on else None

    def allocate_host(self, arena: Arena, num_blocks: int) -> None:
        """Give an arena of host memory ``num_blocks`` blocks, all empty; 0 frees it.

        It is kept as long as the pool has blocks of the same shape, and freed with them by `allocate_kv`.
        Raises MemoryError with the size if it does not fit, RuntimeError without a pool.
        """
        self._host.allocate(arena, num_blocks, self._pool())

    def host_nbytes(self, arena: Arena) -> int:
        """Bytes that an arena of host memory takes."""
        return self._host.nbytes(arena)

    def prepare(self, scheduled: Sequence[ScheduledRow]) -> Prepared:
        """Build what a step with at least one request needs. May run while another step is computed.

        A request's newest token may still be pending (see `engine.batch`). Raises RuntimeError without a
        pool, and ValueError for a plan that contradicts its requests.
        """
        kv = self._pool()
        assert self._builder is not None  # there whenever the pool is
        with torch.inference_mode():
            started = time.perf_counter()
            batch = self._builder.build(scheduled)
            attention = self._attention.plan(batch.rows, kv, self.spec, self._to_device)
            positions, slots = self._to_device(batch.positions), self._to_device(batch.slots)
            # All rows in order, as when only decoding, need no selection.
            every = len(batch.logit_tokens) == len(batch.ids)
            wanted = None if every else self._to_device(batch.logit_tokens)
            traffic = self._traffic.step(batch.rows.num_new, batch.rows.num_computed, len(batch.sampled))
            kernels = self._kernels(self.decoder.choice.form_for(len(batch.ids)).name)
            took = time.perf_counter() - started
        return Prepared(
            batch, attention, positions, slots, wanted, kv, len(scheduled), traffic, kernels, took
        )

    def compute(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> StepOutput:
        """Copy blocks, compute the tokens, and choose the next one of each request that lacks no more.

        Raises RuntimeError for a step that was not filled or belongs to another pool, `CopyFailed` for copies
        that failed, before anything else was done.
        """
        batch, kv = prepared.batch, prepared.kv
        if kv is not self.kv:
            raise RuntimeError("the KV pool was replaced since this step was prepared")
        if not batch.filled:
            raise RuntimeError("the step was not filled: call fill before compute")
        count = prepared.num_entries
        out = StepOutput([None] * count, [None] * count, [False] * count)
        with torch.inference_mode():
            copying, forward = Timer(self.device), Timer(self.device)
            started = time.perf_counter()
            if copies:
                out.copied_blocks = self._host.run(copies, kv, copying)
            ids = self._to_device(batch.ids)
            forward.start()
            logits = self.decoder.forward(
                ids, prepared.positions, prepared.slots, prepared.attention, kv, prepared.wanted
            )
            forward.stop()
            if batch.sampled:
                self._sample(logits, batch, kv, out)
            took = time.perf_counter() - started
        traffic = prepared.traffic
        out.weight_bytes, out.kv_bytes, out.flops = traffic.weight_bytes, traffic.kv_bytes, traffic.flops
        out.kernels, out.prepare_s = prepared.kernels, prepared.prepare_s
        out.copy_s = copying.elapsed_s() if copies else 0.0
        out.forward_s = forward.elapsed_s()
        out.sample_s = max(0.0, took - out.copy_s - out.forward_s)
        if self.decoder.timer is not None:
            parts = self.decoder.timer.seconds
            out.attention_s, out.linear_s, out.head_s = map(parts, (Part.ATTENTION, Part.LINEAR, Part.HEAD))
        return out

    def execute(self, plan: Plan, copies: Sequence[Copy] = ()) -> StepOutput:
        """Prepare and compute a step in one go. A plan without requests only makes the copies."""
        if plan.scheduled:
            prepared = self.prepare(plan.scheduled)
            prepared.fill()
            return self.compute(prepared, copies)
        out = StepOutput([], [], [])
        if copies:
            timer = Timer(self.device)
            with torch.inference_mode():
                out.copied_blocks = self._host.run(copies, self._pool(), timer)
            out.copy_s = timer.elapsed_s()
        return out

    def _pool(self) -> KVCache:
        if self.kv is None:
            raise RuntimeError("no KV pool: call allocate_kv first")
        return self.kv

    def _kernels(self, linear: str) -> str:
        act = str(self.decoder.activation_dtype).removeprefix("torch.")
        return f"linear={linear},activations={act}"

    def _sample(self, logits: Tensor, batch: Batch, kv: KVCache, out: StepOutput) -> None:
        if self._padded is not None:
            logits.index_fill_(1, self._padded, float("-inf"))
        sampled = self.sampler.sample(logits, batch.sampled_rows)
        for row, i in enumerate(batch.sampled):
            out.token_ids[i] = sampled.token_ids[row]
            out.logprobs[i] = sampled.logprobs[row]
            out.nonfinite[i] = sampled.nonfinite[row]
            if sampled.nonfinite[row]:
                kv.scrub(batch.blocks_of(i))

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
