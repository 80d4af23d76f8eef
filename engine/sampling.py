"""From logits to token ids, for all rows of a step at once.

Order of operations on a row, as in transformers and vLLM: end tokens hidden below ``min_tokens``; repetition
penalty over prompt and output; presence and frequency penalties over the output only, the border being
``num_prompt`` whether or not the request was preempted; temperature; top-k; top-p; min-p. Each is applied
once. Log-probabilities are those of the model's own logits, before any of this.

A row's randomness is one uniform number that depends on the request's seed and the position of the token
alone, put through the inverse of the distribution's cumulative sum. So neither batch mates nor chunks nor a
preemption can change it, and greedy rows touch no random numbers at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import RowRequest
from ipc.messages import Sampling, TokenLogprob, TopLogprob

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it only overflows."""
TOP_P_HEAD = 1024  # top-p looks at this many most likely tokens first and sorts all only if they are too few
MAX_SEGMENTS = 512  # a long row is reduced in two stages of about this many segments

_NEG_INF = float("-inf")


@dataclass(slots=True)
class Sampled:
    """One entry for each row given. ``token_ids[i]`` is None where ``nonfinite[i]``."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    nonfinite: list[bool]


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is taken, after penalties if there are any."""
    return sampling.temperature < GREEDY_BELOW


def is_plain(request: RowRequest) -> bool:
    """Whether a row needs the largest logit and nothing else."""
    s = request.sampling
    return (
        s.temperature < GREEDY_BELOW
        and s.logprobs is None
        and s.repetition_penalty == 1.0
        and s.presence_penalty == 0.0
        and s.frequency_penalty == 0.0
        and request.num_tokens - request.num_prompt >= s.min_tokens
    )


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of seed and position: 53 bits of a mix of both.

    The mix is the output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) applied to the seed, and
    again with the position added as the number of steps.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GAMMA)
        bits = _mix(state + (positions + np.uint64(1)) * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Chooses tokens. Keeps, for each slot whose request has penalties, how often each token occurred."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = device
        self._seen: dict[int, _Seen] = {}

    def release(self, slot: int) -> None:
        """Forget a slot's counts."""
        self._seen.pop(slot, None)

    def clear(self) -> None:
        """Forget all slots' counts."""
        self._seen.clear()

    def sample(self, logits: Tensor, requests: Sequence[RowRequest]) -> Sampled:
        """Choose the next token of each request from float32 logits [rows, vocab_size].

        The logits are not changed. The host waits for the device once.
        """
        best, ids = max_of_rows(logits)
        special = [i for i, request in enumerate(requests) if not is_plain(request)]
        top: _Top | None = None
        if special:
            rows = logits if len(special) == len(requests) else logits[special]
            chosen = [requests[i] for i in special]
            picked = self._pick(rows, chosen, best if rows is logits else best[special])
            if picked is not None:
                ids = ids.index_copy(0, torch.tensor(special, device=ids.device), picked)
            top = _top_logprobs(logits, ids, requests)
        # Finite or not, and the ids, in one transfer: -1 marks a row whose logits were not finite.
        host = torch.where(best.isfinite(), ids, -1).tolist()
        bad = [token < 0 for token in host]
        logprobs: list[TokenLogprob | None] = [None] * len(host)
        if top is not None:
            for i, found in top.to_host(host).items():
                logprobs[i] = None if bad[i] else found
        return Sampled([None if token < 0 else token for token in host], logprobs, bad)

    def _pick(self, logits: Tensor, requests: Sequence[RowRequest], best: Tensor) -> Tensor | None:
        """Ids [rows] of rows that are not plain; None if the plain choice stands for all of them."""
        adjusted = self._penalize(logits, requests)
        random = [i for i, request in enumerate(requests) if not is_greedy(request.sampling)]
        if adjusted is None and not random:
            return None
        scores = logits if adjusted is None else adjusted
        ids = max_of_rows(scores)[1]
        if random:
            at = torch.tensor(random, device=logits.device)
            finite = best[at].isfinite().unsqueeze(1)
            # A row that is not finite gets some id here, which nobody will see.
            rows = torch.where(finite, scores[at], 0.0)
            ids = ids.index_copy(0, at, draw(rows, [requests[i] for i in random]))
        return ids

    def _penalize(self, logits: Tensor, requests: Sequence[RowRequest]) -> Tensor | None:
        """Logits with end tokens hidden and penalties applied, or None where no row asks for that."""
        out: Tensor | None = None
        for i, request in enumerate(requests):
            s = request.sampling
            penalized = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
            hide = request.num_tokens - request.num_prompt < s.min_tokens
            if not (penalized or hide):
                continue
            if out is None:
                out = logits.clone()
            if penalized:
                _apply_penalties(out[i], self._counts(request), s)
            if hide:
                ends = [t for t in self.eos_token_ids.union(s.stop_token_ids) if t < self.vocab_size]
                out[i, ends] = _NEG_INF
        return out

    def _counts(self, request: RowRequest) -> _Seen:
        seen = self._seen.get(request.slot)
        if seen is None or seen.rid != request.rid or seen.num_tokens > request.num_tokens:
            seen = _Seen(request.rid, request.num_prompt, self.vocab_size, self.device)
            self._seen[request.slot] = seen
        seen.update(request.token_ids)
        return seen


class _Seen:
    """How often each token occurred in one request's prompt and output, brought up to date as it grows."""

    __slots__ = ("in_output", "in_prompt", "num_prompt", "num_tokens", "rid")

    def __init__(self, rid: int, num_prompt: int, vocab_size: int, device: torch.device) -> None:
        self.rid = rid
        self.num_prompt = num_prompt
        self.num_tokens = 0
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def update(self, token_ids: list[int]) -> None:
        device = self.in_output.device
        if self.num_tokens < self.num_prompt:
            self.in_prompt[torch.tensor(token_ids[: self.num_prompt], device=device)] = True
            self.num_tokens = self.num_prompt
        new = token_ids[self.num_tokens :]
        if new:
            at = torch.tensor(new, device=device)
            self.in_output.index_add_(0, at, torch.ones(len(new), device=device))
            self.num_tokens = len(token_ids)


def _apply_penalties(row: Tensor, seen: _Seen, s: Sampling) -> None:
    """Change one row of logits [vocab_size] in place."""
    generated = seen.in_output > 0
    if s.repetition_penalty != 1.0:
        r = s.repetition_penalty
        weaker = torch.where(row > 0, row / r, row * r)
        row.copy_(torch.where(seen.in_prompt | generated, weaker, row))
    if s.frequency_penalty != 0.0:
        row.sub_(seen.in_output, alpha=s.frequency_penalty)
    if s.presence_penalty != 0.0:
        row.sub_(generated.float(), alpha=s.presence_penalty)


def max_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its first index of each row of x [rows, n]. NaN counts as largest.

    Two stages: the first reads everything with a plain maximum, which CPUs do far faster than one with
    indices, and the second searches one segment.
    """
    rows, n = x.shape
    width = _segment_width(n)
    if width is None:
        values, at = x.max(dim=-1)
        return values, at
    parts = x.reshape(rows, n // width, width)
    segment = parts.amax(dim=-1).argmax(dim=-1)
    inside = parts[torch.arange(rows, device=x.device), segment]
    values, at = inside.max(dim=-1)
    return values, segment * width + at


def _segment_width(n: int) -> int | None:
    """A width that cuts n into equal segments, or None where n is short or has no such divisor."""
    if n < 4096:
        return None
    return next((w for w in range(-(-n // MAX_SEGMENTS), 4 * n // MAX_SEGMENTS + 1) if n % w == 0), None)


def draw(logits: Tensor, requests: Sequence[RowRequest]) -> Tensor:
    """Draw one id a row from softmax(logits / T), cut by top-k, top-p and min-p.

    logits: [rows, n], each finite or -inf, and not all -inf in a row.
    """
    settings = [request.sampling for request in requests]
    device = logits.device
    scaled = logits / torch.tensor([s.temperature for s in settings], device=device).unsqueeze(1)
    probabilities = cut(torch.softmax(scaled, dim=-1), settings)
    u = uniform(
        np.array([request.seed for request in requests], dtype=np.uint64),
        np.array([request.num_tokens for request in requests], dtype=np.uint64),
    )
    return inverse_cdf(probabilities, torch.from_numpy(u).to(device))


def cut(probabilities: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Set to 0 what top-k, top-p and min-p exclude. The rest is not normalized again.

    top-p keeps the smallest set of most likely tokens that reaches p of what top-k left; min-p keeps what has
    at least min_p times the probability of the most likely token. Equal probabilities at a border all stay.
    """
    limited = [i for i, s in enumerate(settings) if s.top_k or s.top_p < 1.0]
    if limited:
        every = len(limited) == len(settings)
        rows = probabilities if every else probabilities[limited]
        floor = _floor(rows, [settings[i] for i in limited])
        rows = torch.where(rows >= floor, rows, 0.0)
        at = torch.tensor(limited, device=rows.device)
        probabilities = rows if every else probabilities.index_copy(0, at, rows)
    if any(s.min_p > 0.0 for s in settings):
        min_p = torch.tensor([s.min_p for s in settings], device=probabilities.device).unsqueeze(1)
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = torch.where(probabilities >= floor, probabilities, 0.0)
    return probabilities


def _floor(p: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The least probability [rows, 1] that top-k and top-p keep."""
    n = p.shape[-1]
    top_k = [min(s.top_k, n) if s.top_k else n for s in settings]
    head = min(n, max((k for k in top_k if k < n), default=0))
    if any(s.top_p < 1.0 for s in settings):
        # A GPU sorts everything faster than the host could look at the result.
        head = n if p.device.type == "cuda" else min(n, max(head, TOP_P_HEAD))
    floor, enough = _floor_in_head(p, p.topk(head, dim=-1).values, top_k, settings)
    if head < n and not bool(enough.all()):
        floor, _ = _floor_in_head(p, p.sort(dim=-1, descending=True).values, top_k, settings)
    return floor


def _floor_in_head(
    p: Tensor, head: Tensor, top_k: Sequence[int], settings: Sequence[Sampling]
) -> tuple[Tensor, Tensor]:
    """The floor as far as the most likely ones, ``head`` [rows, m] falling, tell; and whether they do."""
    n, m = p.shape[-1], head.shape[-1]
    k = torch.tensor(top_k, device=p.device).unsqueeze(1)
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=p.device).unsqueeze(1)
    rank = torch.arange(m, device=p.device)
    kept = torch.where(rank < k, head, 0.0).double()
    reached = kept.cumsum(dim=-1)
    total = torch.where(k < n, reached[:, -1:], p.sum(dim=-1, keepdim=True, dtype=torch.float64))
    # A token is kept if those before it do not reach top_p yet.
    keep = ((reached - kept < top_p * total) | (top_p >= 1.0)) & (rank < k)
    last = keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    floor = head.gather(1, last)
    # Without top-k and top-p nothing is cut; with top-p the head must hold the border.
    unlimited = (k >= n) & (top_p >= 1.0)
    enough = unlimited | (k <= m) | (reached[:, -1:] >= top_p * total)
    return torch.where(unlimited, 0.0, floor), enough


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The index at which the running sum of each row of ``weights`` passes the part ``u`` of its total.

    weights: [rows, n], 0 or more, not all 0 in a row; an index of weight 0 is never returned. u: [rows], in
    [0, 1). Sums are float64 and run over segments first, then within one.
    """
    rows, n = weights.shape
    width = _segment_width(n) or n
    parts = weights.reshape(rows, n // width, width)
    sums = parts.sum(dim=-1, dtype=torch.float64)
    running = sums.cumsum(dim=-1)
    target = u.unsqueeze(1) * running[:, -1:]
    segment = _first_above(running, target, sums)
    at = torch.arange(rows, device=weights.device)
    inside = parts[at, segment].double()
    before = (running[at, segment] - sums[at, segment]).unsqueeze(1)
    index = _first_above(inside.cumsum(dim=-1) + before, target, inside)
    return segment * width + index


def _first_above(running: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """The first index [rows] whose running sum is above target [rows, 1], else the last with a weight."""
    n = weights.shape[-1]
    last = n - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    found = torch.searchsorted(running, target, right=True).squeeze(1)
    return torch.minimum(found, last)


@dataclass(slots=True)
class _Top:
    """Log-probabilities of some rows, still on the device."""

    rows: list[int]
    counts: list[int]
    chosen: Tensor  # [rows]
    values: Tensor  # [rows, most asked for]
    ids: Tensor

    def to_host(self, token_ids: Sequence[int]) -> dict[int, TokenLogprob]:
        chosen, values, ids = self.chosen.tolist(), self.values.tolist(), self.ids.tolist()
        return {
            row: TokenLogprob(
                token=max(token_ids[row], 0),
                logprob=chosen[i],
                top=[
                    TopLogprob(token=t, logprob=p)
                    for t, p in zip(ids[i][:count], values[i][:count], strict=True)
                ],
            )
            for i, (row, count) in enumerate(zip(self.rows, self.counts, strict=True))
        }


def _top_logprobs(logits: Tensor, ids: Tensor, requests: Sequence[RowRequest]) -> _Top | None:
    rows = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not rows:
        return None
    counts = [min(requests[i].sampling.logprobs or 0, logits.shape[-1]) for i in rows]
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    values, top = logprobs.topk(max(counts), dim=-1)
    return _Top(rows, counts, logprobs.gather(1, ids[rows].unsqueeze(1)).squeeze(1), values, top)
