"""Cases of the kernels that a layer is made of: elementwise ones, attention, and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.attention_parts import Parts
from engine.kernels.linear import product, product_fp8
from engine.kernels.paged_attention import Tiles, paged_attention, tiles_for
from engine.kernels.qkv import qk_norm_rope_kv_write, reference_qkv, reference_stored
from engine.kernels.quantize import quantize, reference_quantize
from engine.kernels.rmsnorm import add_rmsnorm, reference_add_rmsnorm
from engine.kernels.silu_mul import reference_silu_mul, silu_mul
from engine.kernels.weight_only_gemm import dequantize, pack
from engine.layers.precision.quantize import quantize_fp8, quantize_int4, quantize_int8
from engine.layers.rope import RotaryTable
from engine.models.rope import RopeSpec
from tests.engine.kernels.support import DEVICE, assert_close, poisoned, randn
from tests.engine.kernels.test_paged_attention import Step, step
from tests.gpu.check.case import BF16, Case, Outputs, Sizes, close, off_by


def quantized_as(y: Tensor, codes: Tensor, scale: Tensor) -> float:
    """That a kernel quantized, to the last bit, what it writes otherwise (y) as a launch of its own does."""
    want, want_scale = poisoned(*y.shape, dtype=codes.dtype), poisoned(len(y), dtype=torch.float32)
    quantize(y, want, want_scale).run()
    assert torch.equal(scale, want_scale), "scales differ from those in two launches"
    wrong = int((codes != want).sum())
    assert wrong == 0, f"{wrong} of {codes.numel()} codes differ from those in two launches"
    return 0.0


def add_rmsnorm_case(s: Sizes, quantized: bool) -> Case:
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
        if quantized:
            y = poisoned(*residual.shape, dtype=BF16)
            add_rmsnorm(x, residual.clone(), weight[0], 1e-5, y).run()
            return quantized_as(y, out[1], out[2])
        _, exact = reference_add_rmsnorm(None, out[0], weight[0], 1e-5)  # of what was kept, as it was rounded
        return close(out[1], exact, 2.0)

    return Case(run, check)


def silu_mul_case(s: Sizes, quantized: bool) -> Case:
    gate_up = randn(s.tokens, 2 * s.intermediate, dtype=BF16)

    def run() -> Outputs:
        y = poisoned(s.tokens, s.intermediate, dtype=torch.uint8 if quantized else BF16)
        scale = poisoned(s.tokens, dtype=torch.float32)
        silu_mul(gate_up, y, scale if quantized else None).run()
        return (y, scale) if quantized else (y,)

    def check(out: Outputs) -> float:
        if quantized:
            y = poisoned(s.tokens, s.intermediate, dtype=BF16)
            silu_mul(gate_up, y).run()
            return quantized_as(y, out[0], out[1])
        return close(out[0], reference_silu_mul(gate_up), 2.0)

    return Case(run, check)


def quantize_case(s: Sizes, codes_dtype: torch.dtype) -> Case:
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


def qkv_case(s: Sizes, storage: torch.dtype, normed: bool) -> Case:
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
        return close(out[0], q, 2.0)

    return Case(run, check)


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


def attention_case(
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
        off = off_by(out[0], exact)
        assert off < 0.02, f"off by {off:.3g} of the largest number"
        return off

    return Case(attend(x, tiles, splits=splits, scales=scales), check)


def product_case(s: Sizes, bits: int, rows: int) -> Case:
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


def product_fp8_case(s: Sizes, rows: int) -> Case:
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
