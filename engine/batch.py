"""From a step plan to the index tensors of one forward pass.

Each request keeps a slot, a row in persistent host buffers, for as long as it runs; a step only copies what
changed. Building the indices takes a handful of numpy calls whatever the number of tokens.

A batch may be built while the step before it still runs. Then the newest token of a request is pending: its
place is known, its id is not. `Batch.fill` puts the ids in once they are there. What a batch holds is its
own: nothing in it changes when requests or slots do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from engine.attention.base import MAX_SHORT, Ints, Rows
from engine.penalties import SampledRequest, has_penalty
from engine.request import NO_BLOCK
from engine.speculation.base import NO_DRAFT, Draft
from ipc.messages import Sampling


class RowRequest(SampledRequest, Protocol):
    """What the runner reads of a request. It never writes to one."""

    @property
    def num_computed(self) -> int: ...
    @property
    def num_known(self) -> int: ...  # num_tokens, and the pending one if there is one
    @property
    def num_maybe(self) -> int: ...  # drafted tokens that may come with the pending one, before it
    @property
    def block_table(self) -> list[int]: ...  # NO_BLOCK where a leading block has left every window


class ScheduledRow(Protocol):
    """One request of a step: ``num_new`` tokens from position ``num_computed`` on, then those of ``draft``.

    Only where the tokens reach the newest one may a draft follow them, and where that one is pending, only a
    draft which the device alone knows too.
    """

    @property
    def request(self) -> RowRequest: ...
    @property
    def num_new(self) -> int: ...
    @property
    def draft(self) -> Draft: ...


@dataclass(slots=True)
class TextRow:
    """A text to run through the model that is no request: for calibration and for scoring."""

    token_ids: list[int]
    block_table: list[int]
    num_new: int = 0
    num_computed: int = 0
    rid: int = 0
    slot: int = 0
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    draft: Draft = NO_DRAFT
    drafted: Sequence[int] = ()
    num_maybe: int = 0

    @property
    def request(self) -> TextRow:
        return self

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    num_prompt = num_known = num_tokens


class Plan(Protocol):
    """The part of a scheduler's step plan that the runner reads."""

    @property
    def scheduled(self) -> Sequence[ScheduledRow]: ...


@dataclass(slots=True)
class SampledRow:
    """What the sampler reads of a request, as it is when its step is launched.

    ``token_ids`` is only filled for a request with penalties, which count them. Where a step is staged behind
    one with drafts, up to ``num_maybe`` tokens more may be there by then.
    """

    rid: int
    slot: int
    sampling: Sampling
    seed: int
    num_prompt: int
    num_tokens: int
    token_ids: list[int] = field(default_factory=list)
    drafted: Sequence[int] = ()
    num_maybe: int = 0


@dataclass(slots=True)
class Batch:
    """One step on the host. Tokens of a request are neighbours, requests in the order of ``rows``.

    ``sampled`` lists the entries of the plan whose requests get tokens, ``sampled_rows`` what the sampler
    needs of each, and ``drafts`` what was drafted for it. Each has as many neighbouring rows of logits as its
    draft has tokens, and one; ``logit_tokens`` are the tokens of the step whose logits they are.
    ``order[r]`` is the entry of the plan that row r belongs to, ``drafted[r]`` how many of its tokens are
    drafted.

    A row whose pending token follows a draft is built as if nothing of that held: it may come to lie further,
    by up to ``reach[r]`` positions in its blocks, or else its request has ended.
    """

    ids: Ints  # [tokens], 0 where the id is still pending, below 0 where the device alone knows it (`Draft`)
    positions: Ints  # [tokens]
    slots: Ints  # [tokens], where in the pool their keys and values go
    rows: Rows
    order: list[int]
    drafted: Ints
    sampled: list[int]
    sampled_rows: list[SampledRow]
    drafts: list[Draft]
    logit_tokens: Ints
    requests: list[RowRequest]  # of the entries of ``sampled``
    pending: list[tuple[int, RowRequest, int]]  # place in ids, whose token, and which of its tokens
    reach: Ints  # [rows]
    sources: dict[int, int] = field(default_factory=dict)  # rid -> slot, see `source_of`

    def fill(self) -> None:
        """Put pending ids in their place and take what the sampler needs, now that every token is known.

        ValueError if a pending token has not come: its request ended, and must leave the step.
        """
        for at, request, position in self.pending:
            if position >= len(request.token_ids):
                raise ValueError(
                    f"request {request.rid} is in the step, but its token {position} never came; "
                    "prepare the step again without it"
                )
            self.ids[at] = request.token_ids[position]
        self.pending = []
        for row, request in zip(self.sampled_rows, self.requests, strict=True):
            if has_penalty(row.sampling):
                row.token_ids = request.token_ids[: row.num_tokens]
        self.requests = []

    @property
    def awaits_drafts(self) -> bool:
        """Whether there are drafts that only the device knows yet."""
        return any(draft.source is not None and not draft.source.taken for draft in self.drafts)

    def take_drafts(self) -> None:
        """Put drafted ids that are on their way from the device in their place. Waits for them."""
        first = 0
        for draft in self.drafts:
            if draft.source is not None:
                draft.source.take()
                at = int(self.logit_tokens[first]) + 1
                # What stands for no token (-1) is computed like any other, and never holds.
                self.ids[at : at + len(draft)] = np.maximum(draft.token_ids, 0)
            first += len(draft) + 1

    def text_of(self, i: int) -> Sequence[int]:
        """The known tokens of the request of ``sampled_rows[i]``; when filled, only of one with penalties."""
        return self.requests[i].token_ids if self.requests else self.sampled_rows[i].token_ids

    def source_of(self, request: SampledRequest) -> int:
        """The slot that a request's pending token is chosen for: its own, unless it came back meanwhile."""
        return self.sources.get(request.rid, request.slot)

    @property
    def filled(self) -> bool:
        """Whether `fill` was called."""
        return not self.requests and not self.pending

    @property
    def may_move(self) -> bool:
        """Whether nobody knows yet where all of its rows lie."""
        return any(row.num_maybe for row in self.sampled_rows)

    def move(self, accepted: Mapping[int, int]) -> None:
        """It is known how many tokens held of each draft that a row follows, by request.

        So it is known where the row lies; positions and slots stay as they were built and sent before.
        """
        row_of = {entry: row for row, entry in enumerate(self.order)}
        by = np.zeros_like(self.reach)
        for entry, sampled in zip(self.sampled, self.sampled_rows, strict=True):
            if sampled.num_maybe:
                by[row_of[entry]] = accepted[sampled.rid]
                sampled.num_tokens += accepted[sampled.rid]
                sampled.num_maybe = 0
        self.rows = replace(self.rows, num_computed=self.rows.num_computed + np.minimum(by, self.reach))
        self.reach = np.zeros_like(by)

    def blocks_of(self, entry: int) -> list[int]:
        """The blocks that an entry of the plan holds keys and values in, as of this step.

        As long as it may move, all that it may come to.
        """
        row = self.order.index(entry)
        used = -(-int(self.rows.lengths[row] + self.reach[row]) // self.rows.block_size)
        return [block for block in self.rows.tables[row, :used].tolist() if block != NO_BLOCK]


class BatchBuilder:
    """Builds batches for one pool. Slot rows are kept between steps and grow as needed.

    ``window`` is the largest attention window over all layers, None if a layer sees everything: blocks that
    lie wholly outside it need not be there. ``most_moved``: tokens beside a draft's that a row may have which
    follows one that nobody has judged, the newest among them.
    """

    def __init__(
        self, block_size: int, num_blocks: int, window: int | None = None, *, most_moved: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.window = window
        self._most_moved = most_moved
        self._tables: Ints = np.zeros((16, 16), dtype=np.int64)
        self._held: dict[int, list[int]] = {}  # slot -> the block table that its row holds

    def release(self, slot: int) -> None:
        """Forget a slot's row."""
        self._held.pop(slot, None)

    def build(self, scheduled: Sequence[ScheduledRow]) -> Batch:
        """Index arrays of a step with at least one request.

        Raises ValueError if a request has no new token, tokens that do not exist, a draft that nothing leads
        up to, or blocks that do not cover all that and what it attends to: then the plan is wrong, and
        nothing was changed.
        """
        count = len(scheduled)
        requests = [entry.request for entry in scheduled]
        num_new: Ints = np.fromiter((entry.num_new for entry in scheduled), np.int64, count)
        drafted: Ints = np.fromiter((len(entry.draft) for entry in scheduled), np.int64, count)
        num_computed: Ints = np.fromiter((request.num_computed for request in requests), np.int64, count)
        known: Ints = np.fromiter((request.num_known for request in requests), np.int64, count)
        reach: Ints = np.fromiter((request.num_maybe for request in requests), np.int64, count)
        finishing = num_new + num_computed == known
        self._check(requests, num_new, num_new + num_computed, known)
        if drafted.any():
            self._check_drafts(scheduled, drafted, finishing)
        if reach.any():
            self._check_moving(requests, reach, num_new, finishing)
        num_new += drafted
        lengths = num_new + num_computed
        covered = self._check_covered(requests, lengths)
        if reach.any():
            self._check_reach(requests, reach, num_new, lengths, covered)
            reach = np.minimum(reach, covered - lengths)
        # Equal small numbers of tokens side by side, the longest context first, so that attention finds its
        # buckets as ranges of rows.
        order = np.lexsort((-lengths, np.minimum(num_new, MAX_SHORT + 1)))
        for request in requests:
            self._hold(request)

        num_new, num_computed, lengths = num_new[order], num_computed[order], lengths[order]
        drafted, reach = drafted[order], reach[order]
        ends = num_new.cumsum()
        starts = ends - num_new
        width = int(-(-(lengths + reach).max() // self.block_size))
        tables = self._tables[[requests[i].slot for i in order], :width]
        if tables.max() >= self.num_blocks:  # would be an error of the whole device, not of this step
            raise ValueError(f"block {tables.max()} is in a table, the pool has {self.num_blocks}")
        self._check_window([requests[i] for i in order], tables, num_computed)
        row_of = np.repeat(np.arange(count), num_new)
        positions = np.arange(int(ends[-1])) + (num_computed - starts)[row_of]
        block, offset = np.divmod(positions, self.block_size)
        ids: list[int] = []
        pending: list[tuple[int, RowRequest, int]] = []
        for i in order.tolist():
            first, last = requests[i].num_computed, requests[i].num_computed + scheduled[i].num_new
            ids += requests[i].token_ids[first:last]
            if last > requests[i].num_tokens:  # the newest token is on its way
                pending.append((len(ids), requests[i], last - 1))
                ids.append(0)
            ids += scheduled[i].draft.token_ids
        asking_rows = np.flatnonzero(finishing[order])
        sampled = order[asking_rows].tolist()
        asking = [requests[i] for i in sampled]
        return Batch(
            ids=np.array(ids, dtype=np.int64),
            positions=positions,
            slots=tables[row_of, block] * self.block_size + offset,
            rows=Rows(starts, num_new, num_computed, tables, int((num_new == 1).sum()), self.block_size),
            order=order.tolist(),
            drafted=drafted,
            sampled=sampled,
            sampled_rows=[
                SampledRow(
                    r.rid, r.slot, r.sampling, r.seed, r.num_prompt, r.num_known, num_maybe=r.num_maybe
                )
                for r in asking
            ],
            drafts=[scheduled[i].draft for i in sampled],
            logit_tokens=_last_tokens(ends[asking_rows], drafted[asking_rows] + 1),
            requests=asking,
            pending=pending,
            reach=reach,
        )

    def _check(self, requests: Sequence[RowRequest], num_new: Ints, lengths: Ints, known: Ints) -> None:
        wrong = (num_new < 1) | (lengths > known)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {requests[i].rid}: {num_new[i]} new tokens up to {lengths[i]} planned, but it has "
                f"{known[i]} tokens"
            )

    def _check_drafts(self, scheduled: Sequence[ScheduledRow], drafted: Ints, finishing: Ints) -> None:
        for i in np.flatnonzero(drafted).tolist():
            request, source = scheduled[i].request, scheduled[i].draft.source
            if not finishing[i] or (request.num_known != request.num_tokens and source is None):
                raise ValueError(
                    f"request {request.rid}: {drafted[i]} tokens are drafted behind a token that is not "
                    "computed in this step, or not known yet"
                )

    def _check_moving(
        self, requests: Sequence[RowRequest], maybe: Ints, num_new: Ints, finishing: Ints
    ) -> None:
        wrong = (maybe > 0) & ((num_new > self._most_moved) | ~finishing)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {requests[i].rid}: {num_new[i]} new tokens planned behind {maybe[i]} drafted ones; "
                "only its newest token may be before it is known how many of those hold"
            )

    def _check_reach(
        self, requests: Sequence[RowRequest], maybe: Ints, num_new: Ints, lengths: Ints, covered: Ints
    ) -> None:
        """One token may come to lie beyond the blocks, of several some might count that do."""
        wrong = (num_new > 1) & (maybe > covered - lengths)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {requests[i].rid}: tokens up to {lengths[i]} planned behind {maybe[i]} drafted "
                f"ones, but its blocks have room for {covered[i]} tokens; draft less"
            )

    def _check_covered(self, requests: Sequence[RowRequest], lengths: Ints) -> Ints:
        """How many tokens the blocks of each hold."""
        blocks: Ints = np.fromiter(
            (len(request.block_table) for request in requests), np.int64, len(requests)
        )
        covered: Ints = blocks * self.block_size
        wrong = covered < lengths
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {requests[i].rid}: tokens up to {lengths[i]} planned, drafts included, but it has "
                f"{blocks[i]} blocks of {self.block_size}"
            )
        return covered

    def _check_window(self, requests: Sequence[RowRequest], tables: Ints, num_computed: Ints) -> None:
        """Blocks are given up from the front, so the first one that is attended to stands for the rest."""
        oldest = np.zeros_like(num_computed)
        if self.window is not None:
            oldest = np.maximum(num_computed + 1 - self.window, 0)
        missing = tables[np.arange(len(tables)), oldest // self.block_size] == NO_BLOCK
        if missing.any():
            i = int(missing.argmax())
            raise ValueError(
                f"request {requests[i].rid} attends to positions from {oldest[i]} on, but its block "
                f"{oldest[i] // self.block_size} was given up"
            )

    def _hold(self, request: RowRequest) -> None:
        """Bring the slot's row up to the request's block table."""
        table, slot = request.block_table, request.slot
        held = self._held.get(slot)
        if held == table:  # equal ids are mostly the same objects, so this is a comparison of pointers
            return
        total = len(table)
        self._reserve(slot, total)
        kept = 0 if held is None else len(held)
        if held is not None and kept < total and table[:kept] == held:
            self._tables[slot, kept:total] = table[kept:]
        else:
            self._tables[slot, :total] = table
        self._held[slot] = list(table)

    def _reserve(self, slot: int, blocks: int) -> None:
        if slot < 0:
            raise ValueError(f"slot {slot} was scheduled; a running request has a slot of 0 or more")
        slots, width = self._tables.shape
        if slot < slots and blocks <= width:
            return
        while slots <= slot:
            slots *= 2
        while width < blocks:
            width *= 2
        grown = np.zeros((slots, width), dtype=np.int64)
        grown[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
        self._tables = grown


def _last_tokens(ends: Ints, counts: Ints) -> Ints:
    """The last ``counts[i]`` tokens before ``ends[i]``, of all i one after the other."""
    if int(counts.sum()) == len(counts):
        return ends - 1
    before = counts.cumsum() - counts
    return np.repeat(ends - counts - before, counts) + np.arange(int(counts.sum()))
