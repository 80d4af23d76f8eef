"""Every attention that can run here on one mixed step, beside the reference, and why the others cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention import Rows, get_backend, names, probe
from engine.attention.base import Ints
from engine.kv_cache import KVCache
from engine.models.spec import ModelSpec
from tests.gpu.check.context import Context

BLOCK = 256  # what every one of them reads
WINDOW = 300
ROWS = ((1, 600), (1, 255), (1, 0), (5, 300), (40, 530), (300, 0))
"""New and computed tokens of each row: decoding, verification, a later chunk, a prompt."""
MOST_OFF = 0.02  # of the largest number, in bfloat16


def run(context: Context) -> dict[str, Any]:
    """By name: what ran, and how far it is off over two layers, the second of them with a window."""
    device = context.device
    spec = replace(
        ModelSpec.from_hf_config(context.settings.config), num_layers=2, layer_windows=(None, WINDOW)
    )
    rows, kv, q, k, v = _step(spec, device)

    def to_device(ints: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ints)).to(device)

    def attend(name: str) -> tuple[str, list[Tensor]]:
        backend = get_backend(name, device)
        plan = backend.plan(rows, kv, spec, to_device)
        return backend.name, [plan.attend(layer, q, k[layer], v[layer]).float() for layer in range(2)]

    _, wanted = attend("naive")
    found: dict[str, Any] = {}
    for name in names():
        reason = probe(name, spec, device, torch.bfloat16)
        if reason is not None:
            found[name] = {"why_not": reason}
            continue
        try:
            ran, outs = attend(name)
        except Exception as error:  # what a probe did not foresee is what this is for
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            continue
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(outs, wanted, strict=True))
        found[name] = {"ran": ran, "off": off}
        if not off < MOST_OFF:  # nor is NaN
            found[name]["failed"] = f"off by {off:.3g} of the largest number"
    return found


def _step(spec: ModelSpec, device: torch.device) -> tuple[Rows, KVCache, Tensor, Tensor, Tensor]:
    """The rows over blocks in no order, the pool, and the step's queries, keys and values by layer."""
    new, computed = (np.array(column) for column in zip(*ROWS, strict=True))
    counts = -(-(new + computed) // BLOCK)
    free = np.random.default_rng(5).permutation(int(counts.sum()))
    tables = np.zeros((len(ROWS), int(counts.max())), dtype=np.int64)
    slots = []
    for r, count in enumerate(counts):
        tables[r, :count], free = free[:count], free[count:]
        at = np.arange(computed[r], computed[r] + new[r])
        slots.append(tables[r, at // BLOCK] * BLOCK + at % BLOCK)
    rows = Rows(new.cumsum() - new, new, computed, tables, int((new == 1).sum()), BLOCK)
    kv = KVCache.allocate(
        spec, num_blocks=int(counts.sum()), block_size=BLOCK, dtype=torch.bfloat16, device=device
    )
    for layer in (*kv.k, *kv.v):
        layer.normal_()
    own = torch.from_numpy(np.concatenate(slots)).to(device)
    k, v = (torch.stack([layer[own] for layer in pool]) for pool in (kv.k, kv.v))
    q = torch.randn(len(own), spec.num_heads, spec.head_dim, device=device).bfloat16()
    return rows, kv, q, k, v
