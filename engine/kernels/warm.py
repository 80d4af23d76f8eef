"""Runs, before anybody waits, whatever a step may have to compile.

Triton compiles a kernel when it is first launched with sizes it was not compiled for, which takes seconds;
all requests would stand still meanwhile. A pass of nobody's tokens through the decoder, for each number of
rows that attention and forms of weights differ by, and products with each weight, for each number of rows
that those differ by, compile all that a step launches, whichever of its parts are fused. What was compiled
stays on the disk, so that only the first start after an installation takes long.

To be called when a model is loaded, and again when a knob has put other kernels, or another pool, in place.
Imports no triton.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, Ints, Rows
from engine.kv_cache import KVCache
from engine.layers.linear import JoinedLinear, LinearLayer
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.penalties import Occurrences
from engine.sampling import FusedSampling
from ipc.messages import Sampling

log = logging.getLogger(__name__)

PRODUCT_ROWS = (1, 17, 33, 65)
"""Rows for which products with weights in few bits differ: tiles of 16, 32 and 64, and expanded weights.

With many more rows, how many depends on the weight, the input channels are not shared among programs.
"""


@runtime_checkable
class Compiled(Protocol):
    """An attention backend that is compiled for the number of a row's new tokens."""

    def lengths(self, spec: ModelSpec, kv: KVCache) -> Sequence[int]:
        """Numbers of new tokens of a row that each need a kernel of their own; no others do."""
        ...


def warm(
    decoder: Decoder,
    attention: AttentionBackend,
    kv: KVCache,
    spec: ModelSpec,
    fused: FusedSampling | None,
    *,
    block: int,
    vocab_size: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Launch all that steps of this decoder may launch, on the calling thread's stream.

    spec: with the windows that are in force. block: one of the pool that belongs to nobody, which is written
    to. ``told`` hears how many parts were launched, and of how many. Returns the seconds that each part took,
    by what it was. RuntimeError, naming the kernel, if one cannot be launched here.
    """
    took: dict[str, float] = {}
    parts = list(_parts(decoder, attention, kv, spec, fused, block, vocab_size))
    for done, (name, run) in enumerate(parts):
        told(done, len(parts))
        started = time.perf_counter()
        with torch.inference_mode():
            run()
        if kv.device.type == "cuda":
            torch.cuda.synchronize(kv.device)
        took[name] = time.perf_counter() - started
    log.info("kernels are compiled: %s", ", ".join(f"{name} {s:.1f} s" for name, s in took.items()))
    return took


def _parts(
    decoder: Decoder,
    attention: AttentionBackend,
    kv: KVCache,
    spec: ModelSpec,
    fused: FusedSampling | None,
    block: int,
    vocab_size: int,
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What there is to run, and its name."""

    def forward(new: int) -> Tensor:
        rows, ids, slots = _nobody(new, kv, block)
        plan = attention.plan(rows, kv, spec, lambda ints: torch.from_numpy(ints).to(kv.device))
        return decoder.forward(ids, torch.arange(new, device=kv.device), slots, plan, kv, None)

    lengths = attention.lengths(spec, kv) if isinstance(attention, Compiled) else (1,)
    for new in sorted({*lengths, *decoder.table().starts}):
        yield f"{new} tokens", partial(forward, new)
    if _compiled_linears(decoder):
        yield "products", lambda: warm_products(decoder)
    if fused is not None:
        yield "sampling", lambda: _choose(fused, vocab_size, kv.device)


def warm_products(decoder: Decoder) -> None:
    """Launch products with the decoder's weights in few bits, by our kernels, of every number of rows that
    makes a difference, on the calling thread's stream.

    RuntimeError, naming the kernel, if one cannot be launched here.
    """
    for linear in _compiled_linears(decoder):
        from engine.kernels.weight_only_gemm import rows_unsplit

        out, cols = linear.shape
        for rows in sorted({*PRODUCT_ROWS, *linear.starts, rows_unsplit(out)}):
            linear(torch.zeros(rows, cols, dtype=decoder.activation_dtype, device=decoder.device))


def _compiled_linears(decoder: Decoder) -> list[LinearLayer]:
    """One of each kind and shape of the linear layers that our kernels serve."""
    parts: list[LinearLayer] = []
    for linear in decoder.linears.values():
        parts += linear.parts if isinstance(linear, JoinedLinear) else (linear,)
    ours = {(part.kernel(), part.shape): part for part in parts if "triton" in part.kernel()}
    return list(ours.values())


def _nobody(new: int, kv: KVCache, block: int) -> tuple[Rows, Tensor, Tensor]:
    """A row of ``new`` tokens that begins at 0, all of whose blocks are the one ``block``; ids and slots."""
    size = kv.block_size
    tables: Ints = np.full((1, -(-new // size)), block, dtype=np.int64)
    counts = np.array([new], dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    rows = Rows(zero, counts, zero, tables, int(new == 1), size)
    at = torch.arange(new, device=kv.device)
    return rows, torch.zeros_like(at), block * size + at % size


def _choose(fused: FusedSampling, vocab_size: int, device: torch.device) -> None:
    """Choose, penalize and judge one token of one row, and a draft of one token."""
    scores = torch.zeros(2, vocab_size, dtype=torch.float32, device=device)
    one = np.zeros(1, dtype=np.uint64)
    drawn = [Sampling(temperature=1.0, top_p=0.5)]
    ids: Ints = np.zeros(1, dtype=np.int64)
    each = np.ones(1, dtype=np.float32)
    fused.penalize(scores[:1], Occurrences([0], ids + 1, ids, each, each, each, each))
    fused.choose(scores[:1], drawn, one, one)
    target = fused.probabilities(scores, drawn * 2)
    fused.reject(target, target[:1], [0], [1], torch.ones(2, dtype=torch.bool, device=device), one, one)
