"""Whether kernels that were compiled here compute what they should: compilers and CPUs have faults too."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.native import panels
from engine.native.structs import AttentionItems, AttentionLayer

if TYPE_CHECKING:
    from engine.native.kernels import Kernels

TOLERANCE = 1e-4  # of the largest number; rounding of float32 sums stays far below
ROWS, COLS = 14, 70  # beside all blocks and vectors


def wrong(found: Kernels) -> str:
    """Which part is wrong and by how much, or "". Takes some milliseconds."""
    generator = torch.Generator().manual_seed(1)
    checks = {
        "products": _products,
        "products of codes": _codes,
        "norm": _norm,
        "activation": _activation,
        "attention": _attention,
        "distributions": _distributions,
    }
    for name, check in checks.items():
        got, expected = check(found, generator)
        error = float((got.double() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            return f"{name} are off by {error:.2g}"
    return ""


def _products(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = torch.randn(50, COLS, generator=generator).bfloat16()
    x = torch.randn(ROWS, COLS, generator=generator)
    packed = found.pack(weight)
    alone = torch.cat([found.linear(x[i : i + 1], packed) for i in range(ROWS)])
    got = torch.cat((found.linear(x, packed), alone, found.linear(x, found.pack(x))), dim=1)
    product = x.double() @ weight.double().t()
    return got, torch.cat((product, product, x.double() @ x.double().t()), dim=1)


def _codes(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int8 with a scale a channel and int4 in groups, the last one short; each by its largest number."""

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    out, group, x = 50, 32, torch.randn(ROWS, COLS, generator=generator)
    codes, nibbles, zeros = (
        ints(-128, 128, out, COLS),
        ints(0, 16, out, COLS),
        ints(0, 17, -(-COLS // group), out),
    )
    of_channel, of_group = (torch.rand(shape, generator=generator) for shape in (out, zeros.shape))
    zero, scale = (each.double().t().repeat_interleave(group, 1)[:, :COLS] for each in (zeros, of_group))
    width = found.panel_width
    cases = (
        (panels.int8(codes.to(torch.int8), of_channel, width), codes * of_channel.double()[:, None]),
        (panels.int4(nibbles.to(torch.uint8), of_group, zeros, group, width), (nibbles - zero) * scale),
    )
    got, expected = list[Tensor](), list[Tensor]()
    for packed, weight in cases:
        product = x.double() @ weight.t()
        size = float(product.abs().max())
        alone = torch.cat([found.linear(row[None], packed) for row in x])
        got += [found.linear(x, packed) / size, alone / size]
        expected += [product / size] * 2
    return torch.cat(got), torch.cat(expected)


def _norm(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, delta = (torch.randn(ROWS, COLS, generator=generator) for _ in range(2))
    weight, y = torch.randn(COLS, generator=generator), torch.empty(ROWS, COLS)
    total = (x + delta).double()
    found.add_norm[torch.float32](
        x.data_ptr(), delta.data_ptr(), weight.data_ptr(), y.data_ptr(), ROWS, COLS, 1e-5, 1
    )
    size = (total.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    return y, total / size * weight.double()


def _activation(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    both, y = torch.randn(ROWS, 2 * COLS, generator=generator), torch.empty(ROWS, COLS)
    found.silu_mul[torch.float32](both.data_ptr(), y.data_ptr(), ROWS, COLS, 1)
    gate, up = both.double().chunk(2, dim=1)
    return y, torch.nn.functional.silu(gate) * up


def _attention(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two query heads over one KV head, `ROWS` tokens behind 40 others, in blocks that lie backwards."""
    before, block, blocks = 40, 16, 4
    q = torch.randn(ROWS, 2, COLS, generator=generator)
    k, v = (torch.randn(blocks * block, 1, COLS, generator=generator) for _ in range(2))
    table = np.arange(blocks, dtype=np.int64)[::-1].copy()
    ints = [np.array([value], dtype=np.int64) for value in (0, ROWS, before, 0)]
    items = AttentionItems(1, *(each.ctypes.data for each in ints), table.ctypes.data, blocks, block)
    out = torch.empty(ROWS, 2, COLS)
    layer = AttentionLayer(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None, None,
        2 * COLS, 2, 1, COLS, 0, COLS**-0.5,
    )  # fmt: skip
    found.attention(torch.float32, torch.float32)(ctypes.byref(items), ctypes.byref(layer), 1)
    order = (torch.from_numpy(table)[:, None] * block + torch.arange(block)).flatten()[: before + ROWS]
    keys, values = (pool[order, 0].double() for pool in (k, v))
    unseen = torch.arange(before + ROWS) > before + torch.arange(ROWS)[:, None]
    scores = torch.einsum("thd,kd->htk", q.double(), keys) * COLS**-0.5
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return out, torch.einsum("htk,kd->thd", weights, values)


def _distributions(found: Kernels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each row's top half, of which the most likely that reach nine tenths, or what weighs a tenth."""
    scores = torch.randn(ROWS, COLS, generator=generator)
    cuts, top_k = torch.zeros(4, ROWS), COLS // 2
    cuts[0], cuts[2, ::2], cuts[2, 1::2], cuts[3, 1::2] = 1.5, 0.9, 1.0, 0.1
    cuts[1] = torch.tensor(top_k, dtype=torch.int32).view(torch.float32)
    out = torch.empty(ROWS, COLS)
    found.probabilities(scores.data_ptr(), COLS, ROWS, COLS, cuts.data_ptr(), out.data_ptr(), 1)
    values, order = (scores.double() / 1.5).sort(dim=-1, descending=True)
    weights = (values - values[:, :1]).exp()
    weights[:, top_k:] = 0.0
    before = weights.cumsum(dim=-1) - weights
    weights[::2].masked_fill_(before[::2] >= 0.9 * weights[::2].sum(dim=-1, keepdim=True), 0.0)
    weights[1::2].masked_fill_(weights[1::2] < 0.1, 0.0)
    return out, torch.zeros_like(weights).scatter_(1, order, weights / weights.sum(dim=-1, keepdim=True))
