"""Stand-ins for kernels of variable-length attention, at the edge of their packages.

Each has the arguments of the real function and refuses what that refuses; what it computes is attention in
float64, key by key as the packages document it: query i of a row of q queries and k keys sees keys
[i + k - q - left, i + k - q + right], and a causal one none to its right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
OTHERS_RUN = False  # whether torch was told to run another version than its own


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _check(q: Tensor, k: Tensor, v: Tensor, *ints: Tensor | None) -> None:
    _need(q.dtype in (torch.float16, torch.bfloat16), "only support fp16 and bf16 data type")
    _need(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    _need(all(t.stride(-1) == 1 for t in (q, k, v)), "input tensors must have contiguous last dimension")
    _need(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension at most 256 and a multiple of 8")
    _need(q.shape[1] % k.shape[-2] == 0, "heads of key/value must divide heads in query")
    for tensor in ints:
        _need(tensor is None or tensor.dtype == torch.int32, "lengths and tables must have dtype int32")
        _need(tensor is None or tensor.stride(-1) == 1, "lengths and tables must be contiguous")


def _paged(
    k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, multiple: int
) -> list[tuple[Tensor, Tensor]]:
    _need(k.dim() == 4 and k.shape[1] % multiple == 0, f"page block size must be divisible by {multiple}")
    _need(table.shape[0] == lengths.shape[0], "one line of the table for each row")
    _need(bool((table >= 0).all() and (table < len(k)).all()), "an illegal memory access was encountered")
    _need(int(lengths.max()) <= table.shape[1] * k.shape[1], "an illegal memory access was encountered")
    return [
        tuple(pool[line.long()].flatten(0, 1)[:n] for pool in (k, v))  # type: ignore[misc]
        for line, n in zip(table, lengths.tolist(), strict=True)
    ]


def _rows(
    q: Tensor, keys: list[tuple[Tensor, Tensor]], cu_q: Tensor, max_q: int, causal: bool, window: Window
) -> Tensor:
    _need(len(cu_q) == len(keys) + 1 and int(cu_q[0]) == 0 and int(cu_q[-1]) == len(q), "cu_seqlens_q")
    _need(int(cu_q.diff().max()) <= max_q, "a row has more queries than max_seqlen_q")
    out = torch.empty_like(q)
    for (k, v), first, last in zip(keys, cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        group = q.shape[1] // k.shape[1]
        here, k, v = q[first:last].double(), k.double(), v.double()
        scores = torch.einsum("qhd,khd->hqk", here, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        ahead = torch.arange(len(k)) - (torch.arange(len(here)) + len(k) - len(here)).unsqueeze(1)
        left, right = window
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if left is not None and left >= 0:
            hidden |= ahead < -left
        if right is not None and right >= 0:
            hidden |= ahead > right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
    return out


def varlen_attn_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
    max_k: int, *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.12 and 2.13."""
    _check(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
    heads = key.size(2) if block_table is not None else key.size(1)
    _need(enable_gqa or query.size(1) == heads, "Expect query and key/value to have the same number of heads")
    _need((return_aux, scale, num_splits) == (None, None, None), "not of this stand-in")
    assert block_table is not None
    assert seqused_k is not None
    _need((cu_seq_k is None) == OTHERS_RUN, "FA2 needs cu_seq_k for paged keys, FA3 and FA4 refuse it")
    keys = _paged(key, value, block_table, seqused_k, 256)
    _need(int(seqused_k.max()) <= max_k, "a row has more keys than max_k")
    return _rows(query, keys, cu_seq_q, max_q, False, window_size)


def varlen_attn_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """The same of torch 2.11: no block tables, and heads are shared without being told."""
    _check(query, key, value, cu_seq_q, cu_seq_k)
    _need((return_aux, scale) == (None, None), "not of this stand-in")
    _need(key.dim() == 3 and int(cu_seq_k[-1]) == len(key), "cu_seq_k")
    _need(int(cu_seq_k.diff().max()) <= max_k, "a row has more keys than max_k")
    sizes = cu_seq_k.diff().tolist()
    keys = list(zip(key.split(sizes), value.split(sizes), strict=True))
    return _rows(query, keys, cu_seq_q, max_q, False, window_size)


def flash_attn_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`flash_attn.flash_attn_varlen_func` of FlashAttention 2."""
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    assert block_table is not None
    lengths = cu_seqlens_k.diff()
    _need(int(lengths.max()) <= max_seqlen_k, "a row has more keys than max_seqlen_k")
    return _rows(q, _paged(k, v, block_table, lengths, 256), cu_seqlens_q, max_seqlen_q, causal, window_size)


def flash_attn_3(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    """`flash_attn_interface.flash_attn_with_kvcache` of FlashAttention 3."""
    _check(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q)
    assert page_table is not None
    assert cache_seqlens is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    keys = _paged(k_cache, v_cache, page_table, cache_seqlens, 1)
    return _rows(q, keys, cu_seqlens_q, max_seqlen_q, causal, window_size)


def flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    """`flash_attn.cute.flash_attn_varlen_func` of FlashAttention 4, which returns the sums' logarithm too."""
    _check(q, k, v, cu_seqlens_q, seqused_k, page_table)
    _need(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
    _need(-1 not in window_size, "an open window is None here")
    assert page_table is not None
    assert seqused_k is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    keys = _paged(k, v, page_table, seqused_k, 1)
    return _rows(q, keys, cu_seqlens_q, max_seqlen_q, causal, window_size), None
