"""Drafts that were launched on the device, and what comes of them on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.graphs.driver import Arrival
from engine.graphs.newest import of_slot
from engine.speculation.proposals import DraftFailed
from engine.timing import Timer

if TYPE_CHECKING:
    from engine.speculation.rounds import Work


class LaunchedDrafts:
    """The drafts of one step, whose ids are on their way: see `engine.speculation.base.DraftSource`.

    ``longest``: rounds that they took. ``caught_up``: whether tokens were computed besides.
    """

    def __init__(
        self,
        work: Sequence[Work],
        arrival: Arrival,
        host: Tensor,
        span: Timer,
        clean: Callable[[], None],
        *,
        caught_up: bool,
    ) -> None:
        """host: where the arrival brings what `GraphedRounds.fetch` says. span: of all rounds. clean: what is
        to be done where something was not finite.
        """
        self.longest = max(each.count for each in work)
        self.caught_up = caught_up
        self._work = list(work)
        self._begins = [len(each.row.token_ids) - each.count for each in work]
        self._arrival = arrival
        self._host = host
        self._span = span
        self._clean = clean
        self.taken = False

    def move(self, accepted: Mapping[int, int]) -> None:
        """They were launched behind a step whose tokens are known now, and how many held of its drafts, by
        request: so it is known what the drafter has of each.
        """
        for i, each in enumerate(self._work):
            by, row, at = accepted.get(each.row.rid, 0), each.row, self._begins[i]
            came = each.request.token_ids[each.known : each.known + by + 1]
            if each.known and len(came) == by + 1:  # else it has ended
                row.token_ids[at - 1 : at] = came
                row.num_computed += by
                row.num_maybe = 0
                self._begins[i] += by

    def take(self) -> None:
        """See `DraftSource`. What the drafter has of each request gets the ids too, if it is still that."""
        if self.taken:
            return
        self._arrival.wait()
        for each, at in zip(self._work, self._begins, strict=True):
            ids, there = of_slot(self._host, each.row.slot, each.count), slice(at, at + each.count)
            if each.row.token_ids[there] == each.token_ids:
                each.row.token_ids[there] = ids
            each.token_ids[:] = ids
        self.taken = True

    def check(self) -> None:
        """Raise `DraftFailed`, once what was written is clean, if logits of a round were not finite."""
        bad = next((each.row.rid for each in self._work if min(each.token_ids) < 0), None)
        if bad is not None:
            self._clean()
            raise DraftFailed(f"its logits for request {bad} are not finite")

    @property
    def seconds(self) -> float:
        """What the rounds took on the device, which must have done them."""
        return self._span.elapsed_s()
