"""Penalties on scores, touching only the tokens that occurred. The rules are those of `engine.penalties`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import Launch, cdiv

_BLOCK = 256  # tokens of a row that one program scatters


@triton.jit(do_not_specialize_on_alignment=["cu", "tokens", "counts", "repetition", "presence", "frequency"])
def _penalize(
    scores,
    cu,
    tokens,
    counts,
    repetition,
    presence,
    frequency,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(cu + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.load(cu + row + 1)
    token = tl.load(tokens + at, mask=there, other=0)
    there = there & (token >= 0)
    count = tl.load(counts + at, mask=there, other=0).to(tl.float32)
    r = tl.load(repetition + row)
    score = tl.load(scores + row * stride + token, mask=there, other=0.0)
    score = tl.where(score > 0, score / r, score * r)
    taken_off = tl.load(frequency + row) * count + tl.load(presence + row) * (count > 0).to(tl.float32)
    tl.store(scores + row * stride + token, score - taken_off, mask=there)


def penalize(
    scores: Tensor,
    cu_tokens: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    max_tokens: int,
) -> Launch:
    """Change float32 scores [rows, vocabulary] in place.

    Row r has the distinct tokens [cu[r], cu[r + 1]) of ``tokens`` (int32 or int64), at most ``max_tokens``;
    ``counts`` (int32) says how often each occurred in the output. cu_tokens: int32 [rows + 1]. repetition,
    presence, frequency: float32 [rows]; 1, 0 and 0 change nothing, nor does a token below 0.
    """
    return Launch(
        _penalize,
        (scores.shape[0], cdiv(max_tokens, _BLOCK)),
        {
            "scores": scores,
            "cu": cu_tokens,
            "tokens": tokens,
            "counts": counts,
            "repetition": repetition,
            "presence": presence,
            "frequency": frequency,
            "stride": scores.stride(0),
        },
        {"BLOCK": _BLOCK},
    )


def reference_penalize(
    scores: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    """One row [vocabulary] of scores with its penalties, in float64, from the tokens themselves."""
    out = scores.double().clone()
    for token in set(prompt + output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= presence + frequency * output.count(token)
    return out
