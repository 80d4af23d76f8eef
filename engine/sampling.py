"""From logits to token ids, for all rows of a step at once.

Order of operations on a row, as in transformers and vLLM: end tokens hidden below ``min_tokens``; repetition
penalty over prompt and output; presence and frequency penalties over the output only, the border being
``num_prompt`` whether or not the request was preempted; temperature; top-k; top-p; min-p. Each is applied
once. Log-probabilities are those of the model's own logits, before any of this.

A row's randomness is uniform numbers that depend on the request's seed and the position of the token alone,
put through the inverse of the distribution's cumulative sum. So neither batch mates nor chunks nor a
preemption can change it, and greedy rows touch no random numbers at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Ints
from engine.draw import U64s, draw_all, draw_top_k, max_of_rows
from engine.penalties import Occurrences, Penalties, SampledRequest, has_penalty, penalize
from ipc.messages import Sampling, TokenLogprob, TopLogprob

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it only overflows."""
TOP_K_ALONE = 1024  # up to this top_k, rows are cut to their most likely tokens before anything else
SCRATCH_ROWS = 64  # rows that are not plain are worked on so many at a time

_NEG_INF = float("-inf")


@dataclass(slots=True)
class Sampled:
    """One entry for each row given. ``token_ids[i]`` is None where ``nonfinite[i]``."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    nonfinite: list[bool]


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is taken, after penalties if there are any."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def is_plain(request: SampledRequest) -> bool:
    """Whether a row needs the largest logit and nothing else."""
    s = request.sampling
    return is_greedy(s) and s.logprobs is None and not has_penalty(s) and not is_short(request)


def is_short(request: SampledRequest) -> bool:
    """Whether it has not reached its ``min_tokens``, so that it must not end yet."""
    return request.num_tokens - request.num_prompt < request.sampling.min_tokens


class FusedSampling(Protocol):
    """Kernels that take the place of torch's operations on rows of scores."""

    name: str

    def choose(self, scores: Tensor, settings: Sequence[Sampling], seeds: U64s, positions: U64s) -> Tensor:
        """Ids int64 [rows] from float32 scores [rows, vocab_size], -1 where the largest is not finite."""
        ...

    def pack(self, settings: Sequence[Sampling], seeds: U64s, positions: U64s, rows: int) -> Ints:
        """What `choose_packed` reads of ``rows`` rows, greedy beyond the settings: [words, rows]."""
        ...

    def choose_packed(self, scores: Tensor, packed: Tensor, ids: Tensor) -> None:
        """`choose` into ids, with what was packed on the device. Launches only what depends on shapes."""
        ...

    def penalize(self, scores: Tensor, found: Occurrences) -> None:
        """Change scores in place as `engine.penalties.penalize` does."""
        ...

    def penalize_packed(
        self, scores: Tensor, cu: Tensor, tokens: Tensor, counts: Tensor, each: Tensor, *, max_tokens: int
    ) -> None:
        """`penalize` with what is on the device already. Launches only what depends on shapes.

        Row r has the tokens [cu[r], cu[r + 1]) (cu: int32 [rows + 1]), at most ``max_tokens``, of which
        ``counts`` says how often each is in the output, both int32; those below 0 stand for none. each:
        float32 [3, rows], repetition, presence and frequency.
        """
        ...

    def probabilities(self, scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
        """The distributions that rows which are not greedy are drawn from: float32 [rows, vocab_size]."""
        ...

    def reject(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Sequence[int],
        lengths: Sequence[int],
        finite: Tensor,
        seeds: U64s,
        positions: U64s,
    ) -> tuple[list[int], list[int]]:
        """As `engine.speculation.rejection.reject`, with the seed and first position of each request."""
        ...

    def probabilities_packed(self, scores: Tensor, packed: Tensor, out: Tensor) -> None:
        """`probabilities` into out, with what `pack` packed on the device. Launches only what depends on
        shapes.
        """
        ...

    def reject_packed(
        self,
        target: Tensor,
        proposal: Tensor,
        tokens: Tensor,
        cu: Tensor,
        finite: Tensor,
        seeds: Tensor,
        positions: Tensor,
        accepted: Tensor,
        own: Tensor,
    ) -> None:
        """`reject` with what is on the device already. Launches only what depends on shapes.

        Draft r is [cu[r], cu[r + 1]) (cu: int32 [requests + 1], from 0) of ``tokens`` int64 and of
        ``proposal``; its places in ``target`` and ``finite`` (bool) begin at cu[r] + r. A token of -1 ends it
        as if nothing had been proposed there. accepted: int32 [requests], own: int64 [requests].
        """
        ...


class Sampler:
    """Chooses tokens. Keeps, for each slot whose request has penalties, how often each token occurred.

    ``fused``: the kernels to choose with, None for torch's operations. Both draw from the same distributions
    with the same random numbers, but may come to another token for one of them.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.fused: FusedSampling | None = None
        self._penalties = Penalties()
        self._scratch = torch.empty(0, vocab_size, device=device)

    def release(self, slot: int) -> None:
        """Forget a slot's counts."""
        self._penalties.release(slot)

    def clear(self) -> None:
        """Forget all slots' counts."""
        self._penalties.clear()

    def sample(self, logits: Tensor, requests: Sequence[SampledRequest]) -> Sampled:
        """Choose the next token of each request from float32 logits [rows, vocab_size].

        The logits are not changed. The host waits for the device once, besides what top-k and top-p need.
        """
        if self.fused is not None:
            return self._sample_fused(self.fused, logits, requests)
        best, ids = max_of_rows(logits)
        # The drawn ones first, so that what is done to them is done to a range of rows.
        special = [i for i, request in enumerate(requests) if not is_plain(request)]
        special.sort(key=lambda i: is_greedy(requests[i].sampling))
        for first in range(0, len(special), SCRATCH_ROWS):
            some = special[first : first + SCRATCH_ROWS]
            at = torch.tensor(some, device=self.device)
            ids.index_copy_(0, at, self._choose(logits, best, at, [requests[i] for i in some]))
        top = top_logprobs(logits, ids, requests) if special else None
        # Finite or not, and the ids, in one transfer: -1 marks a row whose logits were not finite.
        return as_sampled(torch.where(best.isfinite(), ids, -1).tolist(), top)

    def _sample_fused(
        self, fused: FusedSampling, logits: Tensor, requests: Sequence[SampledRequest]
    ) -> Sampled:
        """`sample` by kernels: all rows, and once more those whose scores are changed before."""

        def choose(scores: Tensor, rows: Sequence[SampledRequest]) -> Tensor:
            seeds = np.array([row.seed for row in rows], dtype=np.uint64)
            positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
            return fused.choose(scores, [row.sampling for row in rows], seeds, positions)

        ids = choose(logits, requests)
        changed = [i for i, row in enumerate(requests) if has_penalty(row.sampling) or is_short(row)]
        for first in range(0, len(changed), SCRATCH_ROWS):
            some = changed[first : first + SCRATCH_ROWS]
            rows, at = [requests[i] for i in some], torch.tensor(some, device=self.device)
            scores = logits.index_select(0, at)
            self._adjust(scores, rows)
            ids[at] = torch.where(ids[at] < 0, -1, choose(scores, rows))
        top = top_logprobs(logits, ids.clamp(min=0), requests)
        return as_sampled(ids.tolist(), top)

    def _adjust(self, scores: Tensor, requests: Sequence[SampledRequest]) -> bool:
        """Hide ends and penalize in rows of scores. Whether there was anything to do."""
        changed = self._hide_ends(scores, requests)
        found = self.occurrences(requests)
        if found is not None:
            (penalize if self.fused is None else self.fused.penalize)(scores, found)
        return changed or found is not None

    def _choose(self, logits: Tensor, best: Tensor, at: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
        """Ids [rows] of the rows ``at`` of logits, of which the drawn ones come first."""
        if len(requests) > self._scratch.shape[0]:
            self._scratch = torch.empty(len(requests), self.vocab_size, device=self.device)
        scores = self._scratch[: len(requests)]
        torch.index_select(logits, 0, at, out=scores)
        # A row that is not finite gets some id, which nobody will see.
        scores.masked_fill_(~best[at].isfinite().unsqueeze(1), 0.0)
        changed = self._adjust(scores, requests)
        drawn = sum(not is_greedy(request.sampling) for request in requests)
        if not changed and not drawn:
            return max_of_rows(scores)[1]
        highest, ids = max_of_rows(scores)
        if drawn:
            ids[:drawn] = self._draw(scores[:drawn], highest[:drawn], requests[:drawn])
        return ids

    def occurrences(self, requests: Sequence[SampledRequest]) -> Occurrences | None:
        """What is penalized in rows of scores, row i for requests[i]; None if nothing is."""
        return self._penalties.of(requests)

    def hidden_ends(self, requests: Sequence[SampledRequest]) -> tuple[list[int], list[int]]:
        """The tokens that would end a request which has not reached its ``min_tokens``: rows, and tokens."""
        rows: list[int] = []
        tokens: list[int] = []
        for i, request in enumerate(requests):
            if is_short(request):
                ends = self.eos_token_ids.union(request.sampling.stop_token_ids)
                found = [token for token in ends if token < self.vocab_size]
                rows += [i] * len(found)
                tokens += found
        return rows, tokens

    def _hide_ends(self, scores: Tensor, requests: Sequence[SampledRequest]) -> bool:
        """Hide the tokens that would end a request which has not reached its ``min_tokens``."""
        rows, tokens = self.hidden_ends(requests)
        if rows:
            scores[torch.tensor(rows, device=self.device), torch.tensor(tokens, device=self.device)] = (
                _NEG_INF
            )
        return bool(rows)

    def _draw(self, scores: Tensor, highest: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
        """Draw from rows of scores, which are overwritten."""
        settings = [request.sampling for request in requests]
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        positions = np.array([request.num_tokens for request in requests], dtype=np.uint64)
        cut = [i for i, s in enumerate(settings) if 0 < s.top_k <= TOP_K_ALONE]
        if not cut:
            return draw_all(scores, highest, settings, seeds, positions)
        ids = torch.empty(len(requests), dtype=torch.int64, device=self.device)
        whole = [i for i, s in enumerate(settings) if not 0 < s.top_k <= TOP_K_ALONE]
        for rows, draw in ((cut, draw_top_k), (whole, draw_all)):
            if rows:
                at = torch.tensor(rows, device=self.device)
                every = len(rows) == len(requests)
                ids[at] = draw(
                    scores if every else scores[at],
                    highest if every else highest[at],
                    [settings[i] for i in rows],
                    seeds[rows],
                    positions[rows],
                )
        return ids


def as_sampled(host: list[int], top: Top | None = None) -> Sampled:
    """What is told of ids on the host, -1 for a row whose logits were not finite."""
    bad = [token < 0 for token in host]
    logprobs: list[TokenLogprob | None] = [None] * len(host)
    if top is not None:
        for i, found in top.to_host(host).items():
            logprobs[i] = None if bad[i] else found
    return Sampled([None if token < 0 else token for token in host], logprobs, bad)


@dataclass(slots=True)
class Top:
    """Log-probabilities of some rows, not read yet."""

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


def top_logprobs(logits: Tensor, ids: Tensor, requests: Sequence[SampledRequest]) -> Top | None:
    """Log-probabilities of ids [rows] and of the most likely ones, for requests that ask for them."""
    rows, counts = who_asks(requests, logits.shape[-1])
    if not rows:
        return None
    chosen = logits[rows]
    total = chosen.logsumexp(dim=-1, keepdim=True)
    values, top = chosen.topk(max(counts), dim=-1)
    picked = chosen.gather(1, ids[rows].unsqueeze(1)) - total
    return Top(rows, counts, picked.squeeze(1), values - total, top)


def who_asks(requests: Sequence[SampledRequest], vocab_size: int) -> tuple[list[int], list[int]]:
    """Which requests ask for log-probabilities, and for those of how many likely tokens each."""
    asked = [(i, request.sampling.logprobs) for i, request in enumerate(requests)]
    found = [(i, min(count, vocab_size)) for i, count in asked if count is not None]
    return [i for i, _ in found], [count for _, count in found]
