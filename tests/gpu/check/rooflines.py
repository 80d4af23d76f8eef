"""Each kernel's time beside the least that its bytes, or its operations, allow on this device.

Kernels that only read are held against the read bandwidth, those that write as much as they read against that
of a copy, products against whichever of bytes and operations takes longer. Calls go around over buffers of
twice the last cache, so that memory is what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.paged_triton import PROGRAMS_A_PROCESSOR
from engine.kernels.attention_parts import Parts
from engine.kernels.attention_rows import most_splits, plan_splits
from engine.kernels.linear import product, product_expanded, product_fp8
from engine.kernels.paged_attention import paged_attention, tiles_for
from engine.kernels.qkv import qk_norm_rope_kv_write
from engine.kernels.quantize import quantize
from engine.kernels.rejection_sample import rejection_sample, sums_for
from engine.kernels.rmsnorm import add_rmsnorm
from engine.kernels.sample import sample
from engine.kernels.silu_mul import silu_mul
from engine.kernels.vocabulary import Found
from engine.kernels.weight_only_gemm import pack
from engine.layers.precision.quantize import INT4_GROUP, quantize_fp8, quantize_int4, quantize_int8
from engine.layers.rope import RotaryTable
from engine.models.rope import RopeSpec
from engine.speculation.base import ACCEPT, RESIDUAL
from tests.gpu.check.case import BF16, Sizes
from tests.gpu.check.cases_layers import hopper
from tests.gpu.check.context import Context
from tests.gpu.check.correctness import sizes
from tests.gpu.check.timing import Work

BUDGET_S = 45.0
MOST_WIDENED = 64  # rows of a product that reads weights in few bits as they are


class Book:
    """Figures by name, until the time of the stage is spent."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.found = context.begin(kernels={}, not_run={})
        self.ceilings = context.ceilings()
        self._until_s = context.left_s - BUDGET_S

    def take(
        self, name: str, make: Callable[[], tuple[list[Work], float, float]], *, ceiling: str, flops: str = ""
    ) -> None:
        """Time what ``make`` gives: calls over different buffers, and bytes and operations of one of them."""
        context = self.context
        if not context.settings.tiny and context.left_s < max(10.0, self._until_s):
            self.found["not_run"][name] = "the time of this stage was spent"
            return
        try:
            calls, moved, operations = make()
            took = context.timer.kernel_s(calls)
        except Exception as error:  # the other kernels are still worth knowing about
            self.found["not_run"][name] = f"{type(error).__name__}: {error}"[:400]
        else:
            least = moved / self.ceilings[ceiling]
            if flops:
                least = max(least, operations / (self.ceilings[flops] or self.ceilings["bf16_flops_per_s"]))
            self.found["kernels"][name] = {
                "us": 1e6 * took, "least_us": 1e6 * least, "of_roofline": least / took,
                "gb_per_s": moved / took / 1e9,
            }  # fmt: skip
        context.timer.trim()


def run(context: Context) -> dict[str, Any]:
    book, s = Book(context), sizes(context)
    tiny = context.settings.tiny
    batches: dict[int, tuple[int, ...]] = {
        1024: (64, 32, 128, 1, 8, 256), 4096: (64, 32, 128, 1, 8, 256), 16384: (1, 8),
    }  # fmt: skip
    for length, several in ({40: (2,)} if tiny else batches).items():
        for batch in several:
            for kind, storage in (("bf16", BF16), ("e4m3", torch.uint8)):
                book.take(
                    f"attention decode {kind}, batch {batch}, {length}",
                    lambda b=batch, n=length, t=storage: _attention(context, s, b, 1, n, t),  # type: ignore[misc]
                    ceiling="read_bytes_per_s",
                )
    for queries in (2,) if tiny else (4, 8):
        batch, length = (2, 40) if tiny else (32, 1024)
        book.take(
            f"attention verify {queries}, batch {batch}, {length}",
            lambda q=queries, b=batch, n=length: _attention(context, s, b, q, n, BF16),  # type: ignore[misc]
            ceiling="read_bytes_per_s",
        )
    _elementwise(book, context, s, (3,) if tiny else (256, 2048, 64, 1))
    _products(book, context, s, (2,) if tiny else (1, 64, 256, 2048))
    for rows in (2,) if tiny else (1, 64):
        for how, temperature in (("greedy", 0.0), ("drawn", 0.8)):
            book.take(
                f"sample {how}, {rows} rows",
                lambda r=rows, t=temperature: _sample(context, s, r, t),  # type: ignore[misc]
                ceiling="read_bytes_per_s",
            )
        book.take(
            f"rejection_sample, {rows} requests",
            lambda r=rows: _rejection_sample(context, s, r),  # type: ignore[misc]
            ceiling="read_bytes_per_s",
        )
    if not book.found["kernels"]:
        raise RuntimeError(f"no kernel could be timed: {book.found['not_run']}")
    return book.found


def _attention(
    context: Context, s: Sizes, batch: int, queries: int, length: int, storage: torch.dtype
) -> tuple[list[Work], float, float]:
    """Decode or verification over scattered blocks, split as the engine splits it."""
    device, blocks = context.device, -(-length // s.block)
    pool_bytes = 2 * batch * length * s.kv_heads * s.dim * storage.itemsize
    tiles = tiles_for(s.heads // s.kv_heads, s.dim, queries, storage.itemsize, hopper=hopper())
    cu = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    q = torch.randn(batch * queries, s.heads, s.dim, device=device).to(BF16)
    splits = most_splits(batch, s.kv_heads)
    parts = None if splits == 1 else Parts.allocate(len(q), s.heads, s.dim, splits, device)
    split = torch.ones(1, dtype=torch.int32, device=device)
    processors = 4
    if context.timer.on_card:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    plan_splits(
        cu, lengths, split, programs=PROGRAMS_A_PROCESSOR * processors, kv_heads=s.kv_heads,
        block_q=tiles.block_q, block_n=tiles.block_n, window=None,
    ).run()  # fmt: skip
    scale = torch.full((s.kv_heads,), 0.01, device=device)
    calls: list[Work] = []
    for _ in range(context.timer.copies(pool_bytes)):
        shape = (batch * blocks * s.block, s.kv_heads, s.dim)
        k, v = (_numbers(shape, storage, device) for _ in range(2))
        tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
        launches = paged_attention(
            q, k, v, torch.empty_like(q),
            cu_seqlens_q=cu, seq_lens=lengths, block_tables=tables, split_tiles=split, parts=parts,
            tiles=tiles, block_size=s.block, scales=None if storage == BF16 else (scale, scale),
        )  # fmt: skip
        calls.append(lambda launches=launches: [launch.run() for launch in launches])  # type: ignore[misc]
    return calls, pool_bytes + 2 * q.nbytes, 0.0


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    return made.normal_() if dtype.is_floating_point else made.random_(0, 0x70)


def _elementwise(book: Book, context: Context, s: Sizes, tokens: tuple[int, ...]) -> None:
    """Kernels that read and write about as much."""
    device, copies = context.device, context.timer.copies
    weight = torch.ones(s.hidden, dtype=BF16, device=device)
    table = RotaryTable(RopeSpec("default", 5e5, s.dim, 4096), 4096, device)

    def rows(n: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
        return _numbers((n, cols), dtype, device)

    def norm(n: int, quantized: bool) -> tuple[list[Work], float, float]:
        moved = n * s.hidden * (2 * 2 + 2 + (1 if quantized else 2))
        calls: list[Work] = []
        for _ in range(copies(moved)):
            y = rows(n, s.hidden, torch.uint8 if quantized else BF16)
            scale = torch.empty(n, device=device) if quantized else None
            calls.append(add_rmsnorm(rows(n, s.hidden), rows(n, s.hidden), weight, 1e-5, y, scale).run)
        return calls, moved, 0.0

    def gate(n: int, quantized: bool) -> tuple[list[Work], float, float]:
        moved = n * s.intermediate * (4 + (1 if quantized else 2))
        calls: list[Work] = []
        for _ in range(copies(moved)):
            y = rows(n, s.intermediate, torch.uint8 if quantized else BF16)
            scale = torch.empty(n, device=device) if quantized else None
            calls.append(silu_mul(rows(n, 2 * s.intermediate), y, scale).run)
        return calls, moved, 0.0

    def write(n: int, quantized: bool) -> tuple[list[Work], float, float]:
        all_heads, storage = s.heads + 2 * s.kv_heads, torch.uint8 if quantized else BF16
        moved = n * s.dim * (2 * all_heads + 2 * s.heads + 2 * s.kv_heads * storage.itemsize)
        at = torch.arange(n, device=device)
        each = torch.full((s.kv_heads,), 0.05, device=device)
        calls: list[Work] = []
        for _ in range(copies(moved)):
            qkv = rows(n, all_heads * s.dim).view(n, all_heads, s.dim)
            pools = [_numbers((n, s.kv_heads, s.dim), storage, device) for _ in range(2)]
            q = torch.empty(n, s.heads, s.dim, dtype=BF16, device=device)
            scales = (each, each) if quantized else None
            calls.append(
                qk_norm_rope_kv_write(qkv, at % 4096, at, table.cos, table.sin, q, *pools, scales=scales).run
            )
        return calls, moved, 0.0

    def code(n: int) -> tuple[list[Work], float, float]:
        moved = 3 * n * s.hidden
        calls: list[Work] = [
            quantize(rows(n, s.hidden), rows(n, s.hidden, torch.uint8), torch.empty(n, device=device)).run
            for _ in range(copies(moved))
        ]
        return calls, moved, 0.0

    for n in tokens:
        for name, make in (("add_rmsnorm", norm), ("silu_mul", gate), ("qkv", write)):
            for quantized in (False, True):
                label = f"{name}{' to e4m3' if quantized else ''}, {n} tokens"
                book.take(label, lambda m=make, n=n, q=quantized: m(n, q), ceiling="copy_bytes_per_s")  # type: ignore[misc]
        book.take(f"quantize to e4m3, {n} tokens", lambda n=n: code(n), ceiling="copy_bytes_per_s")  # type: ignore[misc]


def _products(book: Book, context: Context, s: Sizes, tokens: tuple[int, ...]) -> None:
    """The four products of a layer in each precision of the weights."""
    qkv = (s.heads + 2 * s.kv_heads) * s.dim
    shapes = {
        "qkv": (qkv, s.hidden), "o": (s.hidden, s.heads * s.dim), "gate_up": (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
    }  # fmt: skip
    if context.settings.tiny:
        shapes = {"o": (64, 128)}
    # Bytes of a weight; in int4 with a scale in 16 bits and a zero in 8 for each group.
    width = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 3 / INT4_GROUP}
    for n in tokens:
        for name, (out, cols) in shapes.items():
            for kind, each in width.items():
                expands = kind in ("int8", "int4") and n > MOST_WIDENED
                book.take(
                    f"product {kind}{' expanded' if expands else ''} {name}, {n} rows",
                    lambda k=kind, e=each, o=out, c=cols, n=n: _product(context, k, n, o, c, e),  # type: ignore[misc]
                    ceiling="read_bytes_per_s",
                    flops="fp8_flops_per_s" if kind == "fp8" else "bf16_flops_per_s",
                )


def _product(
    context: Context, kind: str, n: int, out: int, cols: int, width: float
) -> tuple[list[Work], float, float]:
    device = context.device
    x = torch.randn(n, cols, device=device).to(BF16)
    moved = out * cols * width + n * (cols * (1 if kind == "fp8" else 2) + out * 2)
    calls: list[Work] = []
    for _ in range(context.timer.copies(int(out * cols * width), most=16)):
        plain = torch.empty(out, cols, dtype=BF16, device=device).normal_(std=0.02)
        if kind == "bf16":
            calls.append(lambda w=plain: F.linear(x, w))  # type: ignore[misc]
        elif kind == "fp8":
            weight = quantize_fp8(plain)
            codes = torch.empty(n, cols, dtype=torch.uint8, device=device)
            scale = torch.empty(n, device=device)
            quantize(x, codes, scale).run()
            calls.append(
                lambda w=weight, c=codes, e=scale: product_fp8(c, e, w.codes, w.scales, BF16)  # type: ignore[misc]
            )
        else:
            packed = pack(quantize_int4(plain) if kind == "int4" else quantize_int8(plain))
            multiply = product if n <= MOST_WIDENED else product_expanded
            calls.append(partial(multiply, x, packed))
    return calls, moved, 2.0 * n * out * cols


def _sample(context: Context, s: Sizes, rows: int, temperature: float) -> tuple[list[Work], float, float]:
    device, moved = context.device, rows * s.vocab * 4
    floats = [torch.full((rows,), value, device=device) for value in (temperature, 0.9, 0.0)]
    top_k = torch.full((rows,), 40, dtype=torch.int32, device=device)
    seeds = torch.arange(rows, device=device)
    calls: list[Work] = []
    for _ in range(context.timer.copies(moved)):
        logits, ids = torch.randn(rows, s.vocab, device=device), torch.empty_like(seeds)
        found = Found.allocate(rows, s.vocab, device)
        launches = sample(
            logits, floats[0], top_k, *floats[1:], seeds, seeds, ids, found, greedy_below=1e-5
        )  # fmt: skip
        calls.append(lambda launches=launches: [launch.run() for launch in launches])  # type: ignore[misc]
    return calls, moved, 0.0


def _rejection_sample(context: Context, s: Sizes, requests: int) -> tuple[list[Work], float, float]:
    """Drafts of four tokens of which none stays, so that a row of both distributions is read for each."""
    device, drafted, moved = context.device, 4, 2 * requests * s.vocab * 4
    cu = torch.arange(0, (requests + 1) * drafted, drafted, dtype=torch.int32, device=device)
    tokens = torch.arange(requests * drafted, device=device) % s.vocab
    finite = torch.zeros(requests * (drafted + 1), dtype=torch.int8, device=device)
    seeds = torch.arange(requests, device=device)
    kept, own = torch.empty_like(seeds, dtype=torch.int32), torch.empty_like(seeds)
    sums = sums_for(requests, s.vocab, device)
    calls: list[Work] = []
    for _ in range(context.timer.copies(moved)):
        target = torch.rand(len(finite), s.vocab, device=device)
        proposal = torch.rand(len(tokens), s.vocab, device=device)
        for rows in (target, proposal):
            rows /= rows.sum(-1, keepdim=True)
        launches = rejection_sample(
            target, proposal, tokens, cu, finite, seeds, seeds, kept, own, sums,
            accept=ACCEPT, residual=RESIDUAL,
        )  # fmt: skip
        calls.append(lambda launches=launches: [launch.run() for launch in launches])  # type: ignore[misc]
    return calls, moved, 0.0
