"""Which tokens of a draft the target model would have chosen itself.

A step with a draft of k tokens gives logits for k + 1 places: after the newest token, and after each token of
the draft. What is kept is the longest start of the draft that holds, and then one token of the target's own,
so a step brings at least what it would have brought without a draft. Two rules decide:

- The target chooses at every place as it always does, from the request's settings, seed and position, and the
  draft holds as far as it says the same (for greedy requests: prefix match). Equal logits give the text
  without drafts, whatever was drafted. It serves all greedy requests and all drafts without probabilities.
- A draft that was drawn from known probabilities q is held against the target's p by rejection sampling
  (arXiv 2211.17192, 2302.01318): token x stays with probability min(1, p(x) / q(x)), and the first that does
  not is replaced by one drawn from max(p - q, 0). Tokens are distributed as without drafts, and more of them
  are accepted, but which ones come out depends on the drafts, not on the seed alone.

Only the target's own choice can end a request; ids that do are no different from others here.

Logits are equal but for rounding: those of a row depend in their last bits on how many rows are computed
together, with drafts as with other requests. In 16 bits that can decide between two tokens that are all but
equally likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.draw import max_of_rows, uniform
from engine.penalties import SampledRequest
from engine.sampling import Sampled, Sampler, is_greedy, top_logprobs
from engine.speculation.base import ACCEPT, RESIDUAL, Draft
from engine.speculation.distribution import probabilities
from engine.speculation.rejection import reject
from engine.speculation.rows import DraftRow, draft_rows
from ipc.messages import TokenLogprob


@dataclass(slots=True)
class Verified:
    """What a step brought for one request: ``accepted`` tokens of its draft and one of the target's own.

    ``token_ids`` is empty where ``nonfinite``: logits at a place that counts were not finite, and the request
    must fail. ``nonfinite_beyond``: those at a place after the last token were not, so what the step wrote to
    the KV pool for rejected tokens must be scrubbed, not only overwritten.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    accepted: int
    nonfinite: bool = False
    nonfinite_beyond: bool = False


class DraftSampler(Sampler):
    """A sampler whose rows may lie inside a draft."""

    def verify(
        self, logits: Tensor, requests: Sequence[SampledRequest], drafts: Sequence[Draft]
    ) -> list[Verified]:
        """Choose the next tokens of each request from float32 logits [rows, vocab_size], not changed.

        Request i has ``len(drafts[i]) + 1`` neighbouring rows, one for each place, in the order of
        ``requests``. Raises ValueError where that is not the number of rows.
        """
        places = [draft_rows(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        total = sum(map(len, places))
        if total != logits.shape[0]:
            raise ValueError(f"{logits.shape[0]} rows of logits for {total} places of requests and drafts")
        drawn = [is_drawn(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        if not any(drawn):
            return self._match(logits, places, drafts)
        out: dict[int, Verified] = {}
        first = np.cumsum([0, *map(len, places)]).tolist()
        for method, kind in ((self._match, False), (self._reject, True)):
            some = [i for i, known in enumerate(drawn) if known == kind]
            if some:
                at = [row for i in some for row in range(first[i], first[i + 1])]
                part = logits if len(at) == total else logits[torch.tensor(at, device=self.device)]
                found = method(part, [places[i] for i in some], [drafts[i] for i in some])
                out.update(zip(some, found, strict=True))
        return [out[i] for i in range(len(drawn))]

    def _match(
        self, logits: Tensor, places: Sequence[list[DraftRow]], drafts: Sequence[Draft]
    ) -> list[Verified]:
        """Let the target choose at each place, and keep a draft as far as it says the same."""
        return match_drafts(self.sample(logits, [row for rows in places for row in rows]), drafts)

    def _reject(
        self, logits: Tensor, places: Sequence[list[DraftRow]], drafts: Sequence[Draft]
    ) -> list[Verified]:
        """Hold drafts against the probabilities that they were drawn from."""
        rows = [row for rows in places for row in rows]
        finite = max_of_rows(logits)[0].isfinite()
        target = self._probabilities(self._adjusted(logits, finite, rows), rows)
        proposal = torch.cat([draft.probs for draft in drafts if draft.probs is not None])
        tokens = [token for draft in drafts for token in draft.token_ids]
        lengths = [len(draft) for draft in drafts]
        if self.fused is None:
            u_accept, u_own = (self._uniform(rows, stream) for stream in (ACCEPT, RESIDUAL))
            accepted, own = reject(target, proposal, tokens, lengths, finite, u_accept, u_own)
        else:
            firsts = [each[0] for each in places]
            seeds = np.array([row.seed for row in firsts], dtype=np.uint64)
            positions = np.array([row.num_tokens for row in firsts], dtype=np.uint64)
            accepted, own = self.fused.reject(target, proposal, tokens, lengths, finite, seeds, positions)
        ids = [
            token
            for draft, kept, last in zip(drafts, accepted, own, strict=True)
            for token in _put_own(draft, kept, last)
        ]
        top = top_logprobs(logits, torch.tensor(ids, device=self.device), rows)
        found = {} if top is None else top.to_host(ids)
        good = finite.tolist()
        sampled = Sampled(
            [token if ok else None for token, ok in zip(ids, good, strict=True)],
            [found.get(row) for row in range(len(ids))],
            [not ok for ok in good],
        )
        out: list[Verified] = []
        first = 0
        for draft, kept in zip(drafts, accepted, strict=True):
            out.append(_verified(sampled, first, kept, len(draft)))
            first += len(draft) + 1
        return out

    def _adjusted(self, logits: Tensor, finite: Tensor, rows: Sequence[DraftRow]) -> Tensor:
        """A copy of logits with ends hidden below min_tokens, and with penalties."""
        scores = logits.masked_fill(~finite.unsqueeze(1), 0.0)
        self._adjust(scores, rows)
        return scores

    def _probabilities(self, scores: Tensor, rows: Sequence[DraftRow]) -> Tensor:
        """What rows that are not greedy are drawn from."""
        find = probabilities if self.fused is None else self.fused.probabilities
        return find(scores, [row.sampling for row in rows])

    def _uniform(self, rows: Sequence[DraftRow], purpose: int) -> Tensor:
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        return torch.from_numpy(uniform(seeds, positions, purpose)).to(self.device)


def is_drawn(request: SampledRequest, draft: Draft) -> bool:
    """Whether a draft is held against the probabilities that it was drawn from."""
    return draft.probs is not None and len(draft) > 0 and not is_greedy(request.sampling)


def match_drafts(sampled: Sampled, drafts: Sequence[Draft]) -> list[Verified]:
    """Keep drafts as far as they say what was chosen at each of their places, one after the other."""
    out: list[Verified] = []
    first = 0
    for draft in drafts:
        accepted = 0
        while accepted < len(draft) and sampled.token_ids[first + accepted] == draft.token_ids[accepted]:
            accepted += 1
        out.append(_verified(sampled, first, accepted, len(draft)))
        first += len(draft) + 1
    return out


def judge_drafts(
    sampled: Sampled,
    requests: Sequence[SampledRequest],
    drafts: Sequence[Draft],
    accepted: Sequence[int],
    own: Sequence[int],
) -> list[Verified]:
    """`match_drafts`, but for drafts that were drawn: of that of request i ``accepted[i]`` tokens stay, and
    ``own[i]`` follows them. Of such a place ``sampled`` only says whether its logits were finite.
    """
    out: list[Verified] = []
    first = 0
    for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        here = slice(first, first + len(draft) + 1)
        part = Sampled(sampled.token_ids[here], sampled.logprobs[here], sampled.nonfinite[here])
        first = here.stop
        if not is_drawn(request, draft):
            out += match_drafts(part, [draft])
            continue
        ids = _put_own(draft, accepted[i], own[i])
        part.token_ids = [None if bad else token for token, bad in zip(ids, part.nonfinite, strict=True)]
        out.append(_verified(part, 0, accepted[i], len(draft)))
    return out


def _put_own(draft: Draft, accepted: int, own: int) -> list[int]:
    """A token for each place of a draft; those after its end nobody will see."""
    return [*draft.token_ids[:accepted], own, *draft.token_ids[accepted:]]


def _verified(sampled: Sampled, first: int, accepted: int, drafted: int) -> Verified:
    """The result of one request whose rows start at ``first``."""
    end = first + accepted + 1
    beyond = any(sampled.nonfinite[end : first + drafted + 1])
    ids = [token for token in sampled.token_ids[first:end] if token is not None]
    if any(sampled.nonfinite[first:end]):
        return Verified([], [], 0, nonfinite=True, nonfinite_beyond=beyond)
    return Verified(ids, sampled.logprobs[first:end], accepted, nonfinite_beyond=beyond)
