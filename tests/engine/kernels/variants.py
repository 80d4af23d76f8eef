"""Counts what a server would have to compile: ``python -m tests.engine.kernels.variants``.

Launches are only looked at, so what is computed is garbage. Needs a process that does not interpret.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.attention.paged_triton import PagedAttention
from engine.kernels.launch import Launch
from engine.kernels.warm import warm
from engine.kv_cache import KVCache
from engine.layers.precision import PrecisionChoice, QuantizedLinear, forms_triton, quantize_fp8
from engine.layers.precision.forms import REFERENCE, form_of
from engine.layers.precision.product import never
from engine.models.decoder import Decoder
from engine.models.linears import HEAD, LinearMaker, WeightStore
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
Key = tuple[object, ...]


class Server:
    """A decoder of which every part is a kernel, and the set of what its launches would be compiled as."""

    def __init__(self, architecture: str, *, fp8: bool = False) -> None:
        self.spec, self.decoder, self.kv = _made(architecture, **(FP8_SIZES if fp8 else {}))
        if fp8:
            _to_fp8(self.decoder)
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


def _made(architecture: str, **changes: int) -> tuple[ModelSpec, Decoder, KVCache]:
    loaded = tiny(architecture, **changes)[0]
    store = WeightStore(loaded.spec, dict(loaded.weights), {}, dtype=torch.float32, device=CPU)
    decoder = Decoder(store, LinearMaker(store, measure=False), max_len=128)
    decoder.ops = Ops(add_norm(), store_qkv(), gate())
    return loaded.spec, decoder, pool_of(loaded.spec, torch.float32, BLOCK_SIZE)


def _to_fp8(decoder: Decoder) -> None:
    """Bring the layers to fp8; products of 4 to 40 rows are those that take rows in 8 bits."""
    expanded, scaled = form_of("fp8", REFERENCE), form_of("fp8", forms_triton.OFFERED["fp8"][0])
    scaled = replace(scaled, refuses=never)  # which it would for want of a card
    choice = PrecisionChoice((1, 4, 41), (expanded, scaled, expanded), "fp8")
    for place, linear in decoder.linears.items():
        if place != HEAD:
            weight = quantize_fp8(torch.ones(linear.shape))
            decoder.set_linear(place, QuantizedLinear(weight, None, choice))


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
    found = {}
    for name, architecture in (("llama", "llama"), ("mistral", "mistral"), ("fp8", "llama")):
        server = Server(architecture, fp8=name == "fp8")  # mistral has windows
        server.warm()
        ahead = set(server.keys)
        rng = np.random.default_rng(0)
        fused = server.decoder.ops
        # In fp8 what one part leaves to a product is launched there, whichever of the parts are fused.
        mixed = (fused, replace(fused, norm=PLAIN.norm), replace(fused, gate=PLAIN.gate), PLAIN)
        with torch.inference_mode():
            for i, rows in enumerate(day(rng)):
                server.decoder.ops = mixed[i % 4] if name == "fp8" else fused
                server.step(rows)
                server.choose(min(len(rows), 64), rng)
        late = sorted(map(str, server.keys - ahead))
        kernels = sorted(str(key[0]) for key in ahead)
        found[name] = {"ahead": kernels, "late": late}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
