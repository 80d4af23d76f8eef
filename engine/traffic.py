"""Modelled bytes and floating-point operations of a step, for the roofline.

The count is that of a decoder with grouped-query attention: every weight is read once a step, in the form and
precision that serves that number of tokens, cached keys and values once for each request, and each new token
is written once. Activations are left out: they are small and mostly stay in caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.models.linears import LinearTable
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Bytes of weights, of keys and values (read and written), and operations (a multiply-add is two)."""

    weight_bytes: int
    kv_bytes: int
    flops: int


class TrafficModel:
    """The traffic of one model's steps."""

    def __init__(
        self, spec: ModelSpec, linears: LinearTable, *, embed_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.linears = linears
        self.embed_row_bytes = spec.hidden_size * embed_dtype.itemsize
        self.kv_token_bytes = 2 * spec.kv_size * kv_dtype.itemsize  # one layer, keys and values
        self.layer_params = (
            spec.hidden_size * (spec.q_size + 2 * spec.kv_size)
            + spec.q_size * spec.hidden_size
            + 3 * spec.hidden_size * spec.intermediate_size
        )
        self.head_params = spec.vocab_size * spec.hidden_size
        # How many layers share each window; one entry for models without.
        self.windows = {w: spec.layer_windows.count(w) for w in dict.fromkeys(spec.layer_windows)}

    def step(
        self, num_new: NDArray[np.int64], num_computed: NDArray[np.int64], logit_rows: int
    ) -> StepTraffic:
        """Of a step whose request i computes num_new[i] tokens after num_computed[i] cached ones."""
        spec = self.spec
        tokens = int(num_new.sum())
        if tokens == 0:
            return StepTraffic(0, 0, 0)
        linears = self.linears
        weight_bytes = linears.layer_bytes[linears.index(tokens)] + tokens * self.embed_row_bytes
        if logit_rows:
            weight_bytes += linears.head_bytes[linears.index(logit_rows)]
        kv_bytes = spec.num_layers * tokens * self.kv_token_bytes
        flops = 2 * tokens * spec.num_layers * self.layer_params + 2 * logit_rows * self.head_params
        for window, layers in self.windows.items():
            read, pairs = _attended(num_new, num_computed, window)
            kv_bytes += layers * read * self.kv_token_bytes
            flops += layers * 4 * spec.q_size * pairs
        return StepTraffic(weight_bytes, kv_bytes, flops)


def _attended(
    num_new: NDArray[np.int64], num_computed: NDArray[np.int64], window: int | None
) -> tuple[int, int]:
    """Keys that one layer reads, and pairs of query and key that it computes."""
    length = num_computed + num_new
    if window is None:
        return int(length.sum()), int((num_new * num_computed + num_new * (num_new + 1) // 2).sum())
    # The query at position p sees min(p + 1, window) keys: a ramp, then a plateau.
    read = np.minimum(length, num_new + window - 1)
    ramp_end = np.clip(window, num_computed, length)
    ramp = (ramp_end * (ramp_end + 1) - num_computed * (num_computed + 1)) // 2
    return int(read.sum()), int((ramp + (length - ramp_end) * window).sum())
