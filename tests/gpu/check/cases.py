"""Every kernel of `engine.kernels` on a few inputs, each with the check of what it writes.

A case runs into memory that is poisoned first and leaves its inputs as they were, so that it can be run
again, in another process, or captured in a graph. Its check raises AssertionError, or returns how far off the
result is as a part of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.check.case import BF16, Case, Sizes
from tests.gpu.check.cases_layers import (
    add_rmsnorm_case,
    attention_case,
    product_case,
    product_fp8_case,
    qkv_case,
    quantize_case,
    silu_mul_case,
)
from tests.gpu.check.cases_sampling import (
    PLAIN,
    draws,
    judging_case,
    penalize_case,
    probabilities_case,
    sample_case,
)


def cases(s: Sizes) -> dict[str, Callable[[], Case]]:
    """What makes each case, by name. Nothing is made yet."""
    c, kinds = s.context, {"e4m3": torch.uint8, "int8": torch.int8}
    decode = [(1, c), (1, c // 2), (1, s.block + 1), (1, s.block), (1, s.block - 1), (1, 1)]
    verify = [(5, c // 2), (5, 5), (0, 40), (3, s.block)]
    chunks = [(1, c // 3), (s.tokens // 2 + 1, c), (s.tokens, s.tokens)]
    made: dict[str, Callable[[], Case]] = {
        "add_rmsnorm": lambda: add_rmsnorm_case(s, False),
        "add_rmsnorm to e4m3": lambda: add_rmsnorm_case(s, True),
        "silu_mul": lambda: silu_mul_case(s, False),
        "silu_mul to e4m3": lambda: silu_mul_case(s, True),
        "qkv": lambda: qkv_case(s, BF16, False),
        "qkv with head norm": lambda: qkv_case(s, BF16, True),
        "qkv to e4m3": lambda: qkv_case(s, torch.uint8, False),
        "attention decode": lambda: attention_case(s, decode),
        "attention decode split": lambda: attention_case(s, decode, splits=8),
        "attention verify": lambda: attention_case(s, verify, splits=4),
        "attention prefill": lambda: attention_case(s, chunks),
        "attention window": lambda: attention_case(s, decode, splits=4, window=s.block + 3),
        "sample": lambda: sample_case(draws(s.nucleus)),
        "sample, whole vocabulary": lambda: sample_case(draws(s.vocab, PLAIN)),
        "probabilities": lambda: probabilities_case(draws(s.nucleus)),
        "penalize": lambda: penalize_case(s),
        "rejection_sample and match_drafts": lambda: judging_case(s),
        "product fp8": lambda: product_fp8_case(s, s.tokens // 16 * 16 or 16),
    }
    for kind, dtype in kinds.items():
        made[f"quantize to {kind}"] = _later(quantize_case, s, dtype)
        made[f"attention decode {kind}"] = _later(attention_case, s, decode, storage=dtype, splits=4)
        made[f"attention prefill {kind}"] = _later(attention_case, s, chunks, storage=dtype)
    for bits in (8, 4):
        for rows in (1, 17):
            made[f"product int{bits}, {rows} rows"] = _later(product_case, s, bits, rows)
    return made


def _later(make: Callable[..., Case], *arguments: Any, **named: Any) -> Callable[[], Case]:
    return lambda: make(*arguments, **named)
