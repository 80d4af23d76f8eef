"""Drafts from the request's own text: prompt lookup (arXiv 2304.04487, "LLMA"; vLLM's ``ngram``).

The last tokens of prompt and output are looked for earlier in the same text, the longest run first, and what
followed their most recent occurrence is proposed. It costs no model and pays where answers repeat: editing,
extraction, code, quotation.

Runs of ``max_n`` = 4 down to ``min_n`` = 2 tokens are tried. A single token occurs nearly everywhere and says
little about what follows it; two are the least that pay. Beyond four, a longer run hardly ever chooses
another place than four tokens do, and each length costs memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.speculation.base import NO_DRAFT, Draft

if TYPE_CHECKING:
    from engine.batch import RowRequest

MIN_N = 2
MAX_N = 4
MAX_INDEXED = 32_768  # tokens of one request that are looked up at most; its last half of them always are
CATCH_UP = 4_096  # tokens that one call indexes at most, over all requests: some seven milliseconds
_BITS = 32  # of a key, for one token
_TOKEN = (1 << _BITS) - 1


class NgramDrafter:
    """Prompt lookup with an index for each slot, so that a step costs the same whatever the context.

    Memory is at most ``max_indexed`` times about 400 bytes a slot. A long prompt is indexed over several
    calls, which propose nothing for that request meanwhile.
    """

    name = "ngram"
    sequential = False

    def __init__(
        self,
        min_n: int = MIN_N,
        max_n: int = MAX_N,
        *,
        max_indexed: int = MAX_INDEXED,
        catch_up: int = CATCH_UP,
    ) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-grams of {min_n} to {max_n} tokens; 1 <= min_n <= max_n is needed")
        if max_indexed < 2 or catch_up < 1:
            raise ValueError(
                f"max_indexed {max_indexed} must be at least 2 and catch_up {catch_up} at least 1"
            )
        self._masks = [(1 << (_BITS * n)) - 1 for n in range(max_n, min_n - 1, -1)]  # the longest first
        self._generation = max_indexed // 2
        self._catch_up = catch_up
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """See `Drafter`. All drafts are without probabilities."""
        budget = self._catch_up
        drafts: list[Draft] = []
        for request, count in zip(requests, k, strict=True):
            if count < 1:
                drafts.append(NO_DRAFT)
                continue
            index = self._index_of(request)
            budget -= index.extend(request.token_ids, budget, self._masks, self._generation)
            drafts.append(Draft(index.follow(request.token_ids, count, self._masks)))
        return drafts

    def release(self, slot: int) -> None:
        """Forget a slot."""
        self._indexes.pop(slot, None)

    def clear(self) -> None:
        """Forget all slots."""
        self._indexes.clear()

    @property
    def num_entries(self) -> int:
        """N-grams held, over all slots."""
        return sum(len(table) for i in self._indexes.values() for table in (*i.young, *i.old))

    def _index_of(self, request: RowRequest) -> _Index:
        index = self._indexes.get(request.slot)
        if index is None or index.rid != request.rid or not index.is_of(request.token_ids):
            index = self._indexes[request.slot] = _Index(request.rid, len(self._masks))
        return index


class _Index:
    """Where each n-gram of one request was followed by something, most recently.

    There is a table for each n, from a key that packs its tokens to the position after it. The newest token
    is left out, as nothing follows it. Two generations of tables bound the memory: when the young one is full
    it becomes the old one, and the old one is dropped.
    """

    __slots__ = ("count", "key", "old", "rid", "young", "young_from")

    def __init__(self, rid: int, tables: int) -> None:
        self.rid = rid
        self.count = 0  # leading tokens that are indexed
        self.key = 0  # the last tokens of them, packed; ids are one more, so that 0 is no token
        self.young_from = 0
        self.young: list[dict[int, int]] = [{} for _ in range(tables)]
        self.old: list[dict[int, int]] = [{} for _ in range(tables)]

    def is_of(self, token_ids: list[int]) -> bool:
        """Whether what is indexed still leads up to the newest of these tokens, as far as one look tells."""
        if self.count == 0:
            return True
        return self.count < len(token_ids) and self.key & _TOKEN == token_ids[self.count - 1] + 1

    def extend(self, token_ids: list[int], budget: int, masks: list[int], generation: int) -> int:
        """Index up to ``budget`` more tokens, never the newest. Returns how many."""
        start = self.count
        end = min(len(token_ids) - 1, start + max(0, budget))
        key, widest = self.key, masks[0]
        at = start
        while at < end:
            if at - self.young_from >= generation:
                self.old, self.young = self.young, [{} for _ in masks]
                self.young_from = at
            stop = min(end, self.young_from + generation)
            tables = list(zip(self.young, masks, strict=True))
            for after, token in enumerate(token_ids[at:stop], at + 1):
                key = (key << _BITS | token + 1) & widest
                for table, mask in tables:
                    table[key & mask] = after
            at = stop
        self.key, self.count = key, end
        return end - start

    def follow(self, token_ids: list[int], count: int, masks: list[int]) -> list[int]:
        """What followed the last tokens before, ``count`` of it. [] where they are new, or not indexed yet.

        A copy that reaches the end of the text goes on in itself: what repeats is taken to go on repeating.
        """
        total = len(token_ids)
        if self.count != total - 1:
            return []
        suffix = self.key << _BITS | token_ids[-1] + 1
        for young, old, mask in zip(self.young, self.old, masks, strict=True):
            at = young.get(suffix & mask) or old.get(suffix & mask)
            if at is not None:
                found = token_ids[at : at + count]
                period = total - at
                while len(found) < count:
                    found.append(found[-period])
                return found
        return []
