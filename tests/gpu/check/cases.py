"""Every kernel of `engine.kernels` on a few inputs, each with the check of what it writes.

A case runs into memory that is poisoned first and leaves its inputs as they were, so that it can be run
again, in another process, or captured in a graph. Its check raises AssertionError, or returns how far off the
result is as a part of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.draw import uniform
from engine.kernels.attention_parts import Parts
from engine.kernels.linear import product, product_fp8
from engine.kernels.paged_attention import Tiles, paged_attention, tiles_for
from engine.kernels.penalties import penalize, reference_penalize
from engine.kernels.qkv import qk_norm_rope_kv_write, reference_qkv, reference_stored
from engine.kernels.quantize import quantize, reference_quantize
from engine.kernels.rejection_sample import match_drafts, rejection_sample
from engine.kernels.rmsnorm import add_rmsnorm, reference_add_rmsnorm
from engine.kernels.sample import probabilities, reference_probabilities, sample
from engine.kernels.silu_mul import reference_silu_mul, silu_mul
from engine.kernels.weight_only_gemm import dequantize, pack
from engine.layers.precision.quantize import quantize_fp8, quantize_int4, quantize_int8
from engine.layers.rope import RotaryTable
from engine.models.rope import RopeSpec
from engine.speculation.rejection import reject
from tests.engine.kernels.support import DEVICE, assert_close, assert_codes, poisoned, randn
from tests.engine.kernels.test_paged_attention import Step, step

Outputs = tuple[Tensor, ...]
BF16 = torch.bfloat16
ACCEPT, RESIDUAL = 64, 65


@dataclass(frozen=True)
class Case:
    run: Callable[[], Outputs]
    check: Callable[[Outputs], float]


@dataclass(frozen=True)
class Sizes:
    """Of the rows that kernels get."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128256
    nucleus: int = 8192  # of the vocabulary where top-p counts: the reference compares every score with every
    tokens: int = 257
    context: int = 1500
    block: int = 64


TINY = Sizes(
    hidden=96, intermediate=160, heads=4, kv_heads=2, dim=32, vocab=700, nucleus=300, tokens=3, context=40,
    block=16,
)  # fmt: skip


def _off(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def _close(got: Tensor, exact: Tensor, factor: float = 1.0) -> float:
    assert_close(got, exact, got.dtype, factor=factor)
    return _off(got, exact)


# --- elementwise ---------------------------------------------------------------------------------------


def _add_rmsnorm(s: Sizes, quantized: bool) -> Case:
    x, residual, weight = (
        randn(n, s.hidden, dtype=BF16, seed=i) for i, n in enumerate((s.tokens, s.tokens, 1))
    )

    def run() -> Outputs:
        kept = residual.clone()
        y = poisoned(*kept.shape, dtype=torch.uint8 if quantized else BF16)
        scale = poisoned(s.tokens, dtype=torch.float32)
        add_rmsnorm(x, kept, weight[0], 1e-5, y, scale if quantized else None).run()
        return (kept, y, scale) if quantized else (kept, y)

    def check(out: Outputs) -> float:
        kept, _ = reference_add_rmsnorm(x, residual, weight[0], 1e-5)
        assert_close(out[0], kept.double(), BF16)
        _, exact = reference_add_rmsnorm(None, out[0], weight[0], 1e-5)  # of what was kept, as it was rounded
        if quantized:
            assert_codes(out[1], out[2], exact)
            return 0.0
        return _close(out[1], exact, 2.0)

    return Case(run, check)


def _silu_mul(s: Sizes, quantized: bool) -> Case:
    gate_up = randn(s.tokens, 2 * s.intermediate, dtype=BF16)

    def run() -> Outputs:
        y = poisoned(s.tokens, s.intermediate, dtype=torch.uint8 if quantized else BF16)
        scale = poisoned(s.tokens, dtype=torch.float32)
        silu_mul(gate_up, y, scale if quantized else None).run()
        return (y, scale) if quantized else (y,)

    def check(out: Outputs) -> float:
        exact = reference_silu_mul(gate_up)
        if quantized:
            assert_codes(out[0], out[1], exact)
            return 0.0
        return _close(out[0], exact, 2.0)

    return Case(run, check)


def _quantize(s: Sizes, codes_dtype: torch.dtype) -> Case:
    x = randn(s.tokens, s.hidden, dtype=BF16, scale=3.0)

    def run() -> Outputs:
        codes, scale = poisoned(*x.shape, dtype=codes_dtype), poisoned(s.tokens, dtype=torch.float32)
        quantize(x, codes, scale).run()
        return codes, scale

    def check(out: Outputs) -> float:
        codes, scale = reference_quantize(x, "e4m3" if codes_dtype == torch.uint8 else "int8")
        assert torch.equal(out[1], scale), "scales differ from torch's"
        wrong = int((out[0] != codes).sum())
        assert wrong == 0, f"{wrong} of {codes.numel()} codes differ from torch's cast"
        return 0.0

    return Case(run, check)


def _qkv(s: Sizes, storage: torch.dtype, normed: bool) -> Case:
    qkv = randn(s.tokens, s.heads + 2 * s.kv_heads, s.dim, dtype=BF16, scale=2.0)
    table = RotaryTable(RopeSpec("default", 5e5, s.dim, 4096), 4096, DEVICE)
    generator = torch.Generator().manual_seed(4)
    positions = torch.randint(0, 4096, (s.tokens,), generator=generator).to(DEVICE)
    slots = torch.randperm(2 * s.tokens, generator=generator)[: s.tokens].to(DEVICE)
    norm = randn(s.heads + s.kv_heads, s.dim, dtype=BF16, seed=8) if normed else None
    scales = None
    if storage != BF16:
        scales = (
            torch.full((s.kv_heads,), 0.03, device=DEVICE),
            torch.full((s.kv_heads,), 0.05, device=DEVICE),
        )

    def run() -> Outputs:
        q = poisoned(s.tokens, s.heads, s.dim, dtype=BF16)
        pools = [poisoned(2 * s.tokens, s.kv_heads, s.dim, dtype=storage) for _ in range(2)]
        qk_norm_rope_kv_write(
            qkv, positions, slots, table.cos, table.sin, q, *pools, head_norm=norm, eps=1e-6, scales=scales
        ).run()
        return (q, *pools)

    def check(out: Outputs) -> float:
        q, k, v = reference_qkv(qkv, positions, table.cos, table.sin, s.heads, s.kv_heads, norm, 1e-6)
        if scales is None:
            for pool, exact in zip(out[1:], (k, v), strict=True):
                assert_close(pool[slots], exact, BF16, factor=2.0)
        else:
            want = reference_stored(v, scales[1], storage)
            assert torch.equal(out[2][slots], want), "values in 8 bits differ from torch's cast"
        written = torch.zeros(2 * s.tokens, dtype=torch.bool, device=DEVICE)
        written[slots] = True
        rest = out[1][~written]
        assert bool((rest.isnan() if rest.is_floating_point() else rest == 0xFF).all()), (
            "another slot was written"
        )
        return _close(out[0], q, 2.0)

    return Case(run, check)


# --- attention -----------------------------------------------------------------------------------------


def hopper() -> bool:
    return DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE)[0] == 9


def attend(
    x: Step, tiles: Tiles, *, splits: int, split_tiles: int = 2, scales: tuple[Tensor, Tensor] | None = None
) -> Callable[[], Outputs]:
    """What computes a step's attention into poisoned memory. Nothing in it goes through the host."""
    cu, lengths = x.cu, x.lengths
    split = torch.full((1,), split_tiles, dtype=torch.int32, device=DEVICE)
    tokens, heads, dim = x.q.shape

    def run() -> Outputs:
        out = poisoned(*x.q.shape, dtype=x.q.dtype)
        parts = None
        if splits > 1:
            parts = Parts(
                poisoned(tokens, heads, splits, dim, dtype=torch.float32),
                poisoned(tokens, heads, splits, 2, dtype=torch.float32),
            )
        for launch in paged_attention(
            x.q, x.k, x.v, out,
            cu_seqlens_q=cu, seq_lens=lengths, block_tables=x.tables, split_tiles=split, parts=parts,
            tiles=tiles, block_size=x.block_size, window=x.window, scales=scales,
        ):  # fmt: skip
            launch.run()
        return (out,)

    return run


def _attention(
    s: Sizes, rows: Sequence[tuple[int, int]], *, storage: torch.dtype = BF16, splits: int = 1,
    window: int | None = None,
) -> Case:  # fmt: skip
    x = step(rows, s.heads, s.kv_heads, s.dim, s.block, dtype=BF16, storage=storage, window=window)
    most = max(new for new, _ in rows)
    tiles = tiles_for(s.heads // s.kv_heads, s.dim, most, x.k.itemsize, hopper=hopper())
    scales = None
    if storage != BF16:
        scales = (
            torch.full((s.kv_heads,), 0.01, device=DEVICE),
            torch.full((s.kv_heads,), 0.02, device=DEVICE),
        )

    def check(out: Outputs) -> float:
        exact = x.exact(scales)
        off = _off(out[0], exact)
        assert off < 0.02, f"off by {off:.3g} of the largest number"
        return off

    return Case(attend(x, tiles, splits=splits, scales=scales), check)


# --- sampling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """Logits with settings of every kind, a row each."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @property
    def settings(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p


PLAIN = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0))
NUCLEUS = (*PLAIN, (1.3, 0, 0.9, 0.0), (0.9, 50, 0.8, 0.05))
"""Temperature, top-k, top-p and min-p of each row."""


def draws(vocab: int, rows: tuple[tuple[float, int, float, float], ...] = NUCLEUS) -> Draws:
    columns = list(zip(*rows, strict=True))

    def floats(i: int) -> Tensor:
        return torch.tensor(columns[i], dtype=torch.float32, device=DEVICE)

    seeds = torch.tensor([1, 42, 7, 1 << 40, 5], device=DEVICE)[: len(rows)]
    return Draws(
        randn(len(rows), vocab, scale=3.0),
        floats(0),
        floats(1).int(),
        floats(2),
        floats(3),
        seeds,
        seeds % 11,
    )


def _sample(d: Draws) -> Case:

    def run() -> Outputs:
        ids = poisoned(len(d.logits), dtype=torch.int64)
        sample(d.logits, *d.settings, d.seeds, d.positions, ids, greedy_below=1e-5).run()
        return (ids,)

    def check(out: Outputs) -> float:
        assert int(out[0][0]) == int(d.logits[0].argmax()), "the greedy token is another"
        numbers = uniform(
            d.seeds.cpu().numpy().astype(np.uint64), d.positions.cpu().numpy().astype(np.uint64)
        )
        for row in range(1, len(d.logits)):
            exact = _distribution(d, row)
            running, token = exact.cumsum(0), int(out[0][row])
            low = float(running[token] - exact[token])
            assert low - 1e-5 <= numbers[row] <= float(running[token]) + 1e-5, f"row {row}: token {token}"
        return 0.0

    return Case(run, check)


def _distribution(d: Draws, row: int) -> Tensor:
    """Of one row, in float64."""
    t, k, p, m = (float(column[row]) for column in d.settings)
    return reference_probabilities(d.logits[row], t, int(k), p, m)


def _probabilities(d: Draws) -> Case:
    settings = tuple(column[1:] for column in d.settings)

    def run() -> Outputs:
        out = poisoned(*d.logits[1:].shape, dtype=torch.float32)
        probabilities(d.logits[1:], *settings, out).run()
        return (out,)

    def check(out: Outputs) -> float:
        exact = torch.stack([_distribution(d, row) for row in range(1, len(d.logits))])
        torch.testing.assert_close(out[0].double(), exact, rtol=1e-4, atol=1e-7)
        return _off(out[0], exact)

    return Case(run, check)


def _penalize(s: Sizes) -> Case:
    scores = randn(2, s.vocab)
    prompts, outputs = [[3, 5, 9], [4]], [[5, 5, 7], [4, 4, 4]]
    tokens = [sorted({*a, *b}) for a, b in zip(prompts, outputs, strict=True)]
    settings = [(1.3, 0.5, 0.25), (0.8, -0.5, 1.0)]
    cu = torch.tensor([0, len(tokens[0]), len(tokens[0]) + len(tokens[1])], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor(tokens[0] + tokens[1], device=DEVICE)
    counts = [float(made.count(token)) for each, made in zip(tokens, outputs, strict=True) for token in each]
    times = torch.tensor(counts, device=DEVICE).int()
    columns = [
        torch.tensor(column, dtype=torch.float32, device=DEVICE) for column in zip(*settings, strict=True)
    ]

    def run() -> Outputs:
        out = scores.clone()
        penalize(out, cu, ids, times, *columns, max_tokens=8).run()
        return (out,)

    def check(out: Outputs) -> float:
        each = zip(scores, prompts, outputs, settings, strict=True)
        return _close(out[0], torch.stack([reference_penalize(row, a, b, *how) for row, a, b, how in each]))

    return Case(run, check)


def _judging(s: Sizes) -> Case:
    """Rejection sampling against the engine's own rule, and the comparison of drafts with what was chosen."""
    lengths, tokens = [2, 3], [1, 5, 2, 3, 4]
    target, proposal = (randn(n, s.vocab, seed=n).softmax(-1) for n in (7, 5))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    ids, chosen = torch.tensor(tokens, device=DEVICE), torch.tensor([1, 6, 9, 2, 3, 4, 8], device=DEVICE)
    finite = torch.ones(7, dtype=torch.int8, device=DEVICE)
    seeds, positions = torch.tensor([3, 9], device=DEVICE), torch.tensor([20, 31], device=DEVICE)

    def run() -> Outputs:
        counts, own = (poisoned(2, dtype=d) for d in (torch.int32, torch.int64))
        rejection_sample(
            target, proposal, ids, cu, finite, seeds, positions, counts, own, accept=ACCEPT, residual=RESIDUAL
        ).run()
        kept, after = (poisoned(2, dtype=d) for d in (torch.int32, torch.int64))
        match_drafts(chosen, ids, cu, kept, after, max_drafted=3).run()
        return counts, own, kept, after

    def check(out: Outputs) -> float:
        at = np.concatenate([p + np.arange(k + 1) for p, k in zip((20, 31), lengths, strict=True)]).astype(
            np.uint64
        )
        of = np.repeat(np.array([3, 9], dtype=np.uint64), [k + 1 for k in lengths])
        u = [torch.from_numpy(uniform(of, at, draw)).to(DEVICE) for draw in (ACCEPT, RESIDUAL)]
        want = reject(target, proposal, tokens, lengths, finite.bool(), *u)
        assert (out[0].tolist(), out[1].tolist()) == want, f"{out[0].tolist()}, {out[1].tolist()} for {want}"
        assert (out[2].tolist(), out[3].tolist()) == ([1, 3], [6, 8]), "drafts were matched wrongly"
        return 0.0

    return Case(run, check)


# --- products ------------------------------------------------------------------------------------------


def _product(s: Sizes, bits: int, rows: int) -> Case:
    cols = s.hidden // 128 * 128 or 128
    x, plain = randn(rows, cols, dtype=BF16), randn(256, cols, seed=3, scale=0.02)
    weight = quantize_int4(plain) if bits == 4 else quantize_int8(plain)
    packed = pack(weight)

    def run() -> Outputs:
        wide = poisoned(256, cols, dtype=BF16)
        dequantize(packed, wide).run()
        return product(x, packed), wide

    def check(out: Outputs) -> float:
        exact = weight.dequantize().double()
        assert_close(out[1], exact, BF16)
        norms = x.double().norm(dim=1, keepdim=True) * exact.norm(dim=1)
        off = float(((out[0].double() - x.double() @ exact.t()).abs() / norms).max())
        assert off < 4e-3, f"off by {off:.3g} of |x| |w|"
        return off

    return Case(run, check)


def _product_fp8(s: Sizes, rows: int) -> Case:
    x = randn(rows, s.hidden, dtype=BF16)
    weight = quantize_fp8(randn(256, s.hidden, seed=3, scale=0.02))

    def run() -> Outputs:
        codes, scale = poisoned(*x.shape, dtype=torch.uint8), poisoned(rows, dtype=torch.float32)
        quantize(x, codes, scale).run()
        return product_fp8(codes, scale, weight.codes, weight.scales, BF16), codes, scale

    def check(out: Outputs) -> float:
        numbers = out[1].view(torch.float8_e4m3fn).double() * out[2].double().unsqueeze(1)
        wide = weight.dequantize().double()
        norms = numbers.norm(dim=1, keepdim=True) * wide.norm(dim=1)
        off = float(((out[0].double() - numbers @ wide.t()).abs() / norms).max())
        assert off < 4e-3, f"off by {off:.3g} of |x| |w|"
        return off

    return Case(run, check)


def cases(s: Sizes) -> dict[str, Callable[[], Case]]:
    """What makes each case, by name. Nothing is made yet."""
    c, kinds = s.context, {"e4m3": torch.uint8, "int8": torch.int8}
    decode = [(1, c), (1, c // 2), (1, s.block + 1), (1, s.block), (1, s.block - 1), (1, 1)]
    verify = [(5, c // 2), (5, 5), (0, 40), (3, s.block)]
    chunks = [(1, c // 3), (s.tokens // 2 + 1, c), (s.tokens, s.tokens)]
    made: dict[str, Callable[[], Case]] = {
        "add_rmsnorm": lambda: _add_rmsnorm(s, False),
        "add_rmsnorm to e4m3": lambda: _add_rmsnorm(s, True),
        "silu_mul": lambda: _silu_mul(s, False),
        "silu_mul to e4m3": lambda: _silu_mul(s, True),
        "qkv": lambda: _qkv(s, BF16, False),
        "qkv with head norm": lambda: _qkv(s, BF16, True),
        "qkv to e4m3": lambda: _qkv(s, torch.uint8, False),
        "attention decode": lambda: _attention(s, decode),
        "attention decode split": lambda: _attention(s, decode, splits=8),
        "attention verify": lambda: _attention(s, verify, splits=4),
        "attention prefill": lambda: _attention(s, chunks),
        "attention window": lambda: _attention(s, decode, splits=4, window=s.block + 3),
        "sample": lambda: _sample(draws(s.nucleus)),
        "sample, whole vocabulary": lambda: _sample(draws(s.vocab, PLAIN)),
        "probabilities": lambda: _probabilities(draws(s.nucleus)),
        "penalize": lambda: _penalize(s),
        "rejection_sample and match_drafts": lambda: _judging(s),
        "product fp8": lambda: _product_fp8(s, s.tokens // 16 * 16 or 16),
    }
    for kind, dtype in kinds.items():
        made[f"quantize to {kind}"] = _later(_quantize, s, dtype)
        made[f"attention decode {kind}"] = _later(_attention, s, decode, storage=dtype, splits=4)
        made[f"attention prefill {kind}"] = _later(_attention, s, chunks, storage=dtype)
    for bits in (8, 4):
        for rows in (1, 17):
            made[f"product int{bits}, {rows} rows"] = _later(_product, s, bits, rows)
    return made


def _later(make: Callable[..., Case], *arguments: Any, **named: Any) -> Callable[[], Case]:
    return lambda: make(*arguments, **named)
