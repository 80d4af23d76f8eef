"""The model with random weights on the device, and steps of the engine's runner over it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import pool_limits
from engine.attention_choice import resolve
from engine.availability import available
from engine.batch import TextRow
from engine.calibration import calibration_ids
from engine.flight import Flight
from engine.knob import KnobContext
from engine.models.loader import load_model
from engine.ops.choice import FUSED, SAMPLING
from engine.runner import ModelRunner, StepOutput
from engine.weight_precision import WeightPrecision
from tests.gpu.check.settings import Settings

PRECISIONS = {
    "model": WeightPrecision(),
    "fp8": WeightPrecision("fp8", "", "head"),
}


@dataclass
class Rows:
    """A plan of a step, as `ModelRunner.execute` reads it."""

    scheduled: Sequence[TextRow] = ()


@dataclass(slots=True)
class Row(TextRow):
    """A request that decodes; ``num_pending``: of its tokens, the one that is on its way."""

    num_pending: int = 0

    @property
    def num_known(self) -> int:
        return self.num_tokens + self.num_pending


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


class Model:
    """One model and its runner, with everything switched on that the device has."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(settings.config))
        began = time.perf_counter()
        self.loaded = load_model(folder, device=device, load_format="dummy", progress=_silent)
        self.spec = self.loaded.spec
        self.dtype = self.loaded.weights["embed"].dtype
        backends, reasons = available(self.spec, device, self.dtype)
        context = KnobContext(device=settings.device, attention=backends, pools=pool_limits(device))
        values: dict[str, Any] = {"attention": "auto", "block_size": settings.block_size, "kv_dtype": "model"}
        self.runner = ModelRunner(
            self.loaded,
            device=device,
            dtype=self.dtype,
            attention=resolve(values, context),
            calibration_ids=calibration_ids(self.loaded.tokenizer, self.spec.max_model_len),
            progress=_silent,
        )
        self.off = {knob: reason for knob, reason in reasons.items() if not knob.startswith("attention=")}
        self.runner.set_fused({knob: knob not in self.off for knob in (*FUSED, SAMPLING)})
        self.runner.graphs.switch("cuda_graphs" not in self.off)
        self.made_s = time.perf_counter() - began

    def close(self) -> None:
        """Give the memory back."""
        self.runner.free_kv()
        self.loaded.weights.clear()
        self._folder.cleanup()

    def set_weights(self, kind: str) -> float:
        """Bring the weights to a precision; returns the seconds it took."""
        began = time.perf_counter()
        self.runner.set_precision(PRECISIONS[kind], _silent)
        return time.perf_counter() - began

    def allocate(self, tokens: int, kv_dtype: str) -> None:
        """A pool for so many tokens whose keys and values are random numbers."""
        size = self.settings.block_size
        self.runner.allocate_kv(-(-tokens // size) + 1, size, kv_dtype)
        kv = self.runner.kv
        assert kv is not None
        for layer in (*kv.k, *kv.v):
            if layer.is_floating_point():
                layer.normal_()
            else:
                layer.random_(0, 0x70)

    def rows(self, batch: int, context: int, room: int) -> list[Row]:
        """Requests that have ``context`` tokens computed and compute one more; room for ``room`` of them."""
        each = -(-(context + room) // self.settings.block_size)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, 256, (context + 1,), generator=generator).tolist()
        return [
            Row(
                list(ids),
                list(range(i * each, (i + 1) * each)),
                num_new=1,
                num_computed=context,
                rid=i,
                slot=i,
            )
            for i in range(batch)
        ]

    def advance(self, rows: list[Row]) -> StepOutput:
        """One step of decoding by itself; each request gets one token."""
        out = self.runner.execute(Rows(rows))
        for row, ids in zip(rows, out.token_ids, strict=True):
            row.token_ids.append(ids[0] if ids else 0)
            row.num_computed += 1
        return out

    def advance_behind(self, flight: Flight, rows: list[Row]) -> tuple[Flight, StepOutput]:
        """Launch a step behind one that was launched, of which each request then gets its token.

        As the engine's step thread does it: the device never waits for the host.
        """
        for row in rows:
            row.num_computed, row.num_pending = row.num_computed + 1, 1
        prepared = self.runner.prepare(rows)
        following = self.runner.launch(prepared) if flight.feeds(prepared) else None
        if following is None:
            raise RuntimeError("the step is not fed by the one before it")
        return following, self._landed(flight, rows)

    def begin(self, rows: list[Row]) -> Flight | None:
        """Launch the first of steps that follow each other; None where the host chooses tokens."""
        prepared = self.runner.prepare(rows)
        prepared.fill()
        return self.runner.launch(prepared)

    def end(self, flight: Flight, rows: list[Row]) -> None:
        """Let the last of them land."""
        self._landed(flight, rows)

    def _landed(self, flight: Flight, rows: list[Row]) -> StepOutput:
        out = flight.land()
        for row, ids in zip(rows, out.token_ids, strict=True):
            row.token_ids.append(ids[0] if ids else 0)
            row.num_pending = 0
        return out

    def release(self, rows: Sequence[TextRow]) -> None:
        for row in rows:
            self.runner.release(row.slot)


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds: of a step that follows the one before at once (``overlap``; None where that cannot be),
    of one by itself, and of its forward pass. ``out``: the last step.
    """

    overlapped_s: float | None
    alone_s: float
    forward_s: float
    out: StepOutput


def timed_steps(model: Model, rows: list[Row], steps: int, warm: int = 3) -> Timed:
    """Steps of decoding, ``steps`` of each kind."""
    for _ in range(warm):
        model.advance(rows)
    alone, forward = [], []
    for _ in range(steps):
        began = time.perf_counter()
        out = model.advance(rows)
        alone.append(time.perf_counter() - began)
        forward.append(out.forward_s)
    overlapped: list[float] = []
    flight = model.begin(rows)
    if flight is not None:
        for _ in range(warm + steps):
            began = time.perf_counter()
            flight, out = model.advance_behind(flight, rows)
            overlapped.append(time.perf_counter() - began)
        model.end(flight, rows)
    found = statistics.median(overlapped[warm:]) if overlapped else None
    return Timed(found, statistics.median(alone), statistics.median(forward), out)


def floor_s(out: StepOutput, ceilings: dict[str, Any], weights: str) -> float:
    """The least time for a step: its bytes at the read bandwidth, or its operations, whichever is longer."""
    flops = ceilings["fp8_flops_per_s"] if weights == "fp8" else None
    moved = (out.weight_bytes + out.kv_bytes) / ceilings["read_bytes_per_s"]
    return float(max(moved, out.flops / (flops or ceilings["bf16_flops_per_s"])))
