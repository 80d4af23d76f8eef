"""Drives a `ModelRunner` by hand, as a scheduler would: for tests of the runner alone."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.models.loader import LoadedModel, load_model
from engine.plan import ScheduledRequest, StepPlan
from engine.request import Request
from engine.runner import ModelRunner, StepOutput
from ipc.messages import Sampling
from tests import tiny_models

CPU = torch.device("cpu")


@functools.cache
def tiny(architecture: str = "llama", **changes: Any) -> tuple[LoadedModel, Any]:
    """A small random model, as our loader and as transformers load it. ``rope`` names a kind of scaling."""
    rope = changes.pop("rope", None)
    if rope is not None:
        changes["rope_parameters"] = tiny_models.ROPE_KINDS[rope]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.build(Path(folder) / "model", architecture, **changes)
        loaded = load_model(path, dtype=torch.float32, device=CPU, progress=lambda *_: None)
        return loaded, tiny_models.reference(path)


def prompt(length: int, seed: int = 0, vocab_size: int = tiny_models.VOCAB_SIZE) -> list[int]:
    """Random ids without the special ones."""
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(4, vocab_size) for _ in range(length)]


class Driver:
    """A runner, a pool whose blocks are handed out at random, and requests in slots of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        attention: str = "sdpa",
        block_size: int = 16,
        num_blocks: int | None = None,
        dtype: torch.dtype = torch.float32,
        runner: ModelRunner | None = None,
    ) -> None:
        self.runner = runner or ModelRunner(
            loaded, device=CPU, dtype=dtype, attention=attention, measure=False
        )
        self.block_size = block_size
        total = num_blocks or 4096 // block_size
        self.runner.allocate_kv(total, block_size)
        self.free = list(range(total))
        random.Random(block_size).shuffle(self.free)
        self.count = 0

    def request(
        self, ids: Sequence[int], sampling: Sampling | None = None, slot: int | None = None
    ) -> Request:
        self.count += 1
        request = Request(self.count, ids, sampling or Sampling())
        request.slot = self.count - 1 if slot is None else slot
        return request

    def step(self, *rows: tuple[Request, int]) -> StepOutput:
        """Run one step of (request, new tokens); single tokens must come first, as in a scheduler's plan."""
        for request, new in rows:
            needed = -(-(request.num_computed + new) // self.block_size)
            while len(request.block_table) < needed:
                request.block_table.append(self.free.pop())
        out = self.runner.execute(StepPlan(scheduled=[ScheduledRequest(r, new) for r, new in rows]))
        for (request, new), ids in zip(rows, out.token_ids, strict=True):
            request.num_computed += new
            request.token_ids += ids
        return out

    def preempt(self, request: Request) -> None:
        """Take the blocks away: everything has to be computed again."""
        self.free += request.block_table
        random.Random(len(self.free)).shuffle(self.free)
        request.block_table, request.num_computed = [], 0
        self.runner.release(request.slot)

    def run(self, requests: Sequence[Request], count: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Step all requests together, each with up to ``chunk`` tokens, until each has ``count`` new ids."""
        while True:
            rows = [(r, min(chunk, r.num_tokens - r.num_computed)) for r in requests if r.num_output < count]
            if not rows:
                return [r.output_ids for r in requests]
            rows.sort(key=lambda row: row[1] > 1)
            self.step(*rows)

    def generate(
        self, ids: Sequence[int], count: int, *, chunk: int = 1 << 30, sampling: Sampling | None = None
    ) -> list[int]:
        """``count`` ids after ``ids``, alone in every step."""
        request = self.request(ids, sampling)
        (out,) = self.run([request], count, chunk)
        self.preempt(request)
        return out


def logits_at_each_position(driver: Driver, ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Float32 logits [len(ids), vocab_size] of a prompt run in chunks, straight from the decoder."""
    request = driver.request(ids)
    parts = []
    forward = driver.runner.decoder.forward

    def all_rows(*args: Any) -> torch.Tensor:
        logits = forward(*args[:-1], None)
        parts.append(logits.clone())
        wanted = args[-1]
        return logits if wanted is None else logits[wanted]

    driver.runner.decoder.forward = all_rows  # type: ignore[method-assign]
    try:
        while request.num_computed < len(ids):
            driver.step((request, min(chunk, len(ids) - request.num_computed)))
    finally:
        driver.runner.decoder.forward = forward  # type: ignore[method-assign]
    return torch.cat(parts)
