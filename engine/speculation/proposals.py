"""How a draft model's logits become the tokens it proposes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draw import max_of_rows
from engine.sampling import is_greedy
from engine.speculation.distribution import draw_proposal
from engine.speculation.rows import DraftRow
from engine.speculation.verify import DraftSampler


class DraftFailed(Exception):
    """A drafter cannot go on. Says what happened."""


class ProposalSampler(DraftSampler):
    """Chooses draft tokens among the target's ``vocab_size``, without those in ``padded`` (int64)."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        padded: Tensor | None,
    ) -> None:
        super().__init__(vocab_size, eos_token_ids, device)
        self._padded = padded

    def propose(
        self, logits: Tensor, rows: Sequence[DraftRow], *, drawn: bool
    ) -> tuple[list[int], list[Tensor | None]]:
        """The next draft token of each row from float32 logits [rows, the draft model's vocabulary].

        As the target would choose it, from the same seed and position: a draft that is like the target then
        mostly says the same. With ``drawn``, rows that are not greedy are drawn by random numbers of their
        own, and come with the distribution [vocab_size] they were drawn from.
        Raises `DraftFailed` for logits that are not finite.
        """
        logits = logits[:, : self.vocab_size]
        if logits.shape[1] < self.vocab_size:
            logits = F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=float("-inf"))
        if self._padded is not None:
            logits = logits.index_fill(1, self._padded, float("-inf"))
        free = [i for i, row in enumerate(rows) if drawn and not is_greedy(row.sampling)]
        ids, probs = [0] * len(rows), list[Tensor | None]([None]) * len(rows)
        if len(free) < len(rows):
            bound = [i for i in range(len(rows)) if i not in set(free)]
            sampled = self.sample(self._some(logits, bound), [rows[i] for i in bound])
            for i, token in zip(bound, sampled.token_ids, strict=True):
                if token is None:
                    raise DraftFailed(f"its logits for request {rows[i].rid} are not finite")
                ids[i] = token
        if free:
            own = self._draw_freely(self._some(logits, free), [rows[i] for i in free])
            for i, token, distribution in zip(free, *own, strict=True):
                ids[i], probs[i] = token, distribution
        return ids, probs

    def _draw_freely(self, logits: Tensor, rows: Sequence[DraftRow]) -> tuple[list[int], Tensor]:
        finite = max_of_rows(logits)[0].isfinite()
        if not bool(finite.all()):
            raise DraftFailed(
                f"its logits for request {rows[int(finite.long().argmin())].rid} are not finite"
            )
        found = self._probabilities(self._adjusted(logits, finite, rows), rows)
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.num_tokens for row in rows], dtype=np.uint64)
        ids: list[int] = draw_proposal(found, seeds, positions).tolist()
        return ids, found

    def _some(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if len(rows) == logits.shape[0]:
            return logits
        return logits[torch.tensor(rows, device=self.device)]
