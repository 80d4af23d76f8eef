"""The shapes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from engine.attention.base import MAX_SHORT
from engine.batch import Batch

ROWS = (1, 2, 4, *range(8, 257, 8))
QUERIES = (1, 2, 3, 5, 9, MAX_SHORT)
NO_SLOT = -1  # of a token whose keys and values are written nowhere: nobody asked for it


Kind = Literal["logits", "tokens", "adjusted"]
"""What a graph ends with: logits, tokens chosen from them, or tokens chosen from logits with penalties."""
_NAMES: dict[Kind, str] = {"logits": "", "tokens": "+sample", "adjusted": "+penalties+sample"}


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Up to ``rows`` requests of up to ``queries`` new tokens each.

    Where tokens are chosen: ``drawn``, drafts are held against the probabilities that they were drawn from;
    ``logprobs``, log-probabilities are made too; ``moved``, rows lie behind drafts of the step before,
    see `engine.graphs.moving`.
    """

    rows: int
    queries: int
    kind: Kind = "logits"
    drawn: bool = False
    logprobs: bool = False
    moved: bool = False

    @property
    def feeds(self) -> bool:
        """Whether the next step can take the tokens chosen in it from the device."""
        return self.kind != "logits"

    @property
    def tokens(self) -> int:
        """Tokens that a replay computes, however few there are."""
        return self.rows * self.queries

    def __str__(self) -> str:
        rest = "+rejection" * self.drawn + "+logprobs" * self.logprobs + "+moved" * self.moved
        return f"{self.rows}x{self.queries}{_NAMES[self.kind]}{rest}"


def shape_of(batch: Batch, max_blocks: int) -> GraphShape | str:
    """The smallest shape that a step fits, for its logits, or in a word why it fits none.

    max_blocks: of a request, that the tables in static memory have room for.
    """
    rows = batch.rows
    if len(batch.logit_tokens) != len(batch.ids):
        return "prefill"
    count, most = len(rows.num_new), int(rows.num_new.max())
    if count > ROWS[-1] or most > QUERIES[-1]:
        return "large"
    if rows.tables.shape[1] > max_blocks:
        return "long"
    return GraphShape(ROWS[bisect_left(ROWS, count)], QUERIES[bisect_left(QUERIES, most)])
