"""What a case of `cases` is, the sizes that it is made of, and how far a result is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.engine.kernels.support import assert_close

Outputs = tuple[Tensor, ...]
BF16 = torch.bfloat16


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


def off_by(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def close(got: Tensor, exact: Tensor, factor: float = 1.0) -> float:
    assert_close(got, exact, got.dtype, factor=factor)
    return off_by(got, exact)
