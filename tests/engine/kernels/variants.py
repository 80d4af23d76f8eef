"""Counts what a server would have to compile: ``python -m tests.engine.kernels.variants``.

Launches are only looked at, so what is computed is garbage. Needs a process that does not interpret.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from engine.attention.paged_triton import PagedAttention
from engine.kernels import availability
from engine.kernels import linear as products
from engine.kernels.launch import Launch
from engine.kernels.warm import warm
from engine.kv_cache import KVCache
from engine.layers.precision import (
    Kind,
    PrecisionChoice,
    QuantizedLinear,
    forms_triton,
    quantize,
    quantize_fp8,
)
from engine.layers.precision.forms import REFERENCE, form_of
from engine.layers.precision.product import never
from engine.models.decoder import Decoder
from engine.models.linears import HEAD, LinearMaker, Place, WeightStore
from engine.models.spec import ModelSpec
from engine.ops.base import Ops
from engine.ops.plain import PLAIN
from engine.ops.triton_ops import add_norm, gate, store_qkv
from engine.ops.triton_sampling import TritonSampling
from engine.penalties import Occurrences
from engine.speculation.base import MAX_DRAFT
from ipc.messages import Sampling
from tests.engine.driving import CPU, tiny
from tests.engine.kernels.aot import specialized
from tests.engine.kernels.serving import pool_of, rows_of

BLOCK_SIZE = 16
FP8_SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}  # multiples of 16
SIZES = {  # the down projection's channels are shared among programs
    "hidden_size": 128,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS: tuple[tuple[str, Kind | None, dict[str, int]], ...] = (
    ("llama", None, {}),
    ("mistral", None, {}),  # has windows
    ("llama", "fp8", FP8_SIZES),
    ("llama", "int8", SIZES),
    ("llama", "int4", SIZES),
)
COUNTS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 130, 700, 2000, 4300, 9000)  # rows of products
Key = tuple[object, ...]


class Server:
    """A decoder of which every part is a kernel, and the set of what its launches would be compiled as."""

    def __init__(self, architecture: str, kind: Kind | None, sizes: dict[str, int]) -> None:
        self.spec, self.decoder, self.kv = _made(architecture, kind, sizes)
        self.attention = PagedAttention(CPU)
        self.attention._programs = 264
        self.sampling = TritonSampling()
        self.keys: set[Key] = set()
        Launch.run = lambda launch: self._note(launch)  # type: ignore[method-assign]

    def _note(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            known = (launch.kernel.__name__, launch.num_warps, launch.num_stages)
            self.keys.add((*known, *map(str, specialized(launch))))

    def warm(self) -> None:
        warm(
            self.decoder, self.attention, self.kv, self.spec, self.sampling,
            block=1, vocab_size=self.spec.vocab_size,
        )  # fmt: skip

    def step(self, rows: list[tuple[int, int]]) -> None:
        step = rows_of(rows, BLOCK_SIZE)
        tokens = int(step.num_new.sum())
        plan = self.attention.plan(step, self.kv, self.spec, torch.from_numpy)
        # The places of a step lie behind each other in one array.
        held = torch.zeros(3 * tokens, dtype=torch.int64)
        ids, positions, slots = held.view(3, tokens)
        self.decoder.forward(ids, positions, slots, plan, self.kv, None)

    def multiply(self, rows: int) -> None:
        """Products of a step of many rows, which is computed nowhere else here."""
        for linear in self.decoder.linears.values():
            linear(torch.zeros(rows, linear.shape[1], dtype=self.decoder.activation_dtype))

    def choose(self, rows: int, rng: np.random.Generator) -> None:
        scores = torch.zeros(rows + 1, self.spec.vocab_size)
        settings = [Sampling(temperature=1.0)] * rows
        seeds = np.zeros(rows, dtype=np.uint64)
        sizes = rng.integers(1, 40, rows)
        tokens = np.zeros(int(sizes.sum()), dtype=np.int64)
        each = np.ones(rows, dtype=np.float32)
        counts = tokens.astype(np.float32)
        self.sampling.penalize(
            scores[:rows], Occurrences(list(range(rows)), sizes, tokens, counts, each, each, each)
        )
        self.sampling.choose(scores[:rows], settings, seeds, seeds)
        self.sampling.probabilities(scores[:rows], settings)
        finite = torch.ones(rows + 1, dtype=torch.bool)
        self.sampling.reject(scores, scores[:rows], [0] * rows, [rows], finite, seeds[:1], seeds[:1])


def _made(architecture: str, kind: Kind | None, sizes: dict[str, int]) -> tuple[ModelSpec, Decoder, KVCache]:
    loaded = tiny(architecture, **sizes)[0]
    store = WeightStore(loaded.spec, dict(loaded.weights), {}, dtype=torch.float32, device=CPU)
    decoder = Decoder(store, LinearMaker(store, measure=False), max_len=128)
    decoder.ops = Ops(add_norm(), store_qkv(), gate())
    for place in decoder.linears if kind is not None else ():
        if kind != "fp8" or place != HEAD:  # whose rows are no multiple of 16
            decoder.set_linear(place, _quantized(store, place, kind))
    return loaded.spec, decoder, pool_of(loaded.spec, torch.float32, BLOCK_SIZE)


def _quantized(store: WeightStore, place: Place, kind: Kind) -> QuantizedLinear:
    """By our kernels. Weights in four bits are written out for more than 64 rows; in fp8, products of 4 to 40
    rows are those that take rows in 8 bits.
    """
    if kind == "fp8":
        expanded, scaled = form_of("fp8", REFERENCE), form_of("fp8", forms_triton.OFFERED["fp8"][0])
        scaled = replace(scaled, refuses=never)  # which it would for want of a card
        by_rows = PrecisionChoice((1, 4, 41), (expanded, scaled, expanded), "fp8")
        return QuantizedLinear(quantize_fp8(store.plain(place)), store.bias(place), by_rows)
    widened, written = (form_of(kind, offer) for offer in forms_triton.OFFERED[kind])
    choice = PrecisionChoice((1,), (widened,), kind)
    if kind == "int4":
        choice = PrecisionChoice((1, 65), (widened, written), kind)
    return QuantizedLinear(quantize(store.plain(place), kind), store.bias(place), choice)


def day(rng: np.random.Generator) -> Iterator[list[tuple[int, int]]]:
    """Rows of steps: decoding in batches of many sizes, with drafts, and with chunks of prompts."""
    for batch in (1, 2, 3, 5, 8, 13, 40, 64, 129, 300):
        for most in (20, 4000):
            rows = [(1, int(n)) for n in rng.integers(0, most, batch)]
            yield rows
            yield [(int(rng.integers(1, MAX_DRAFT + 2)), n) for _, n in rows]
            yield [*rows, (int(rng.integers(18, 70)), most)]
            yield [*rows, (200, 0), (33, 16)]
    for most in range(1, 80, 3):
        yield [(most, 100)]


def main() -> int:
    availability.probe = lambda device: None
    # torch's product is none of ours, and takes seconds here.
    products.F = SimpleNamespace(linear=lambda x, weight, bias: x.new_zeros(len(x), len(weight)))  # type: ignore[assignment]
    found = {}
    for architecture, kind, sizes in MODELS:
        server = Server(architecture, kind, sizes)
        server.warm()
        ahead = set(server.keys)
        rng = np.random.default_rng(0)
        fused = server.decoder.ops
        # In fp8 what one part leaves to a product is launched there, whichever of the parts are fused.
        mixed = (fused, replace(fused, norm=PLAIN.norm), replace(fused, gate=PLAIN.gate), PLAIN)
        with torch.inference_mode():
            for i, rows in enumerate(day(rng) if kind in (None, "fp8") else ()):
                server.decoder.ops = mixed[i % 4] if kind == "fp8" else fused
                server.step(rows)
                server.choose(min(len(rows), 64), rng)
            for count in COUNTS if kind is not None else ():
                server.multiply(count)
        late = sorted(map(str, server.keys - ahead))
        kernels = sorted(str(key[0]) for key in ahead)
        found[f"{architecture} {kind or ''}".strip()] = {"ahead": kernels, "late": late}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
