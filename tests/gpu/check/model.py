"""The model with random weights on the device, and steps of the engine's runner over it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import pool_limits
from engine.attention_choice import resolve
from engine.availability import available
from engine.batch import TextRow
from engine.calibration import calibration_ids
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

    scheduled: list[TextRow] = field(default_factory=list)


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

    def rows(self, batch: int, context: int, room: int) -> list[TextRow]:
        """Requests that have ``context`` tokens computed and compute one more; room for ``room`` of them."""
        each = -(-(context + room) // self.settings.block_size)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, 256, (context + 1,), generator=generator).tolist()
        return [
            TextRow(
                list(ids),
                list(range(i * each, (i + 1) * each)),
                num_new=1,
                num_computed=context,
                rid=i,
                slot=i,
            )
            for i in range(batch)
        ]

    def advance(self, rows: list[TextRow]) -> StepOutput:
        """One step of decoding, as the engine's step thread would make it; each request gets one token."""
        out = self.runner.execute(Rows(rows))
        for row, ids in zip(rows, out.token_ids, strict=True):
            row.token_ids.append(ids[0] if ids else 0)
            row.num_computed += 1
        return out

    def release(self, rows: list[TextRow]) -> None:
        for row in rows:
            self.runner.release(row.slot)


def timed_steps(
    model: Model, rows: list[TextRow], steps: int, warm: int = 3
) -> tuple[float, float, StepOutput]:
    """Median seconds of a step and of its forward pass, and the last step."""
    for _ in range(warm):
        out = model.advance(rows)
    whole, forward = [], []
    for _ in range(steps):
        began = time.perf_counter()
        out = model.advance(rows)
        whole.append(time.perf_counter() - began)
        forward.append(out.forward_s)
    return statistics.median(whole), statistics.median(forward), out


def floor_s(out: StepOutput, ceilings: dict[str, Any], weights: str) -> float:
    """The least time for a step: its bytes at the read bandwidth, or its operations, whichever is longer."""
    flops = ceilings["fp8_flops_per_s"] if weights == "fp8" else None
    moved = (out.weight_bytes + out.kv_bytes) / ceilings["read_bytes_per_s"]
    return float(max(moved, out.flops / (flops or ceilings["bf16_flops_per_s"])))
