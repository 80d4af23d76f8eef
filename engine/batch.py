"""From a step plan to the index tensors of one forward pass.

Each request keeps a slot, a row in persistent host buffers, for as long as it runs; a step only copies what
changed. Building the indices takes a handful of numpy calls whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.attention.base import Ints, Rows
from ipc.messages import Sampling


class RowRequest(Protocol):
    """What the runner reads of a request. It never writes to one."""

    @property
    def rid(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...  # prompt and output
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def slot(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def seed(self) -> int: ...


class ScheduledRow(Protocol):
    """One request of a step: ``num_new`` tokens from position ``num_computed`` on."""

    @property
    def request(self) -> RowRequest: ...
    @property
    def num_new(self) -> int: ...


class Plan(Protocol):
    """The part of a scheduler's step plan that the runner reads."""

    @property
    def scheduled(self) -> Sequence[ScheduledRow]: ...


@dataclass(slots=True)
class Batch:
    """One step on the host. Tokens of a request are neighbours, requests in the order of ``rows``.

    ``sampled`` lists, for each row of logits, the entry of the plan that it belongs to, and ``logit_tokens``
    the token of the step whose logits they are.
    """

    ids: Ints  # [tokens]
    positions: Ints  # [tokens]
    slots: Ints  # [tokens], where in the pool their keys and values go
    rows: Rows
    sampled: list[int]
    logit_tokens: Ints


class BatchBuilder:
    """Builds batches for one pool. Slot rows are kept between steps and grow as needed."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._tables: Ints = np.zeros((16, 16), dtype=np.int64)
        self._held: dict[int, list[int]] = {}  # slot -> the block table that its row holds

    def release(self, slot: int) -> None:
        """Forget a slot's row."""
        self._held.pop(slot, None)

    def build(self, scheduled: Sequence[ScheduledRow]) -> Batch:
        """Index arrays of a step with at least one request.

        Raises ValueError if a request has no new token, tokens that do not exist, or blocks that do not
        cover them: then the plan is wrong, and nothing was changed.
        """
        count = len(scheduled)
        requests = [entry.request for entry in scheduled]
        num_new: Ints = np.fromiter((entry.num_new for entry in scheduled), np.int64, count)
        num_computed: Ints = np.fromiter((request.num_computed for request in requests), np.int64, count)
        lengths = num_new + num_computed
        known: Ints = np.fromiter((request.num_tokens for request in requests), np.int64, count)
        self._check(requests, num_new, lengths, known)
        # Single tokens first, longest first, so that attention finds its buckets as ranges of rows.
        order = np.lexsort((-lengths, num_new > 1))
        for request in requests:
            self._hold(request)

        num_new, num_computed, lengths = num_new[order], num_computed[order], lengths[order]
        ends = num_new.cumsum()
        starts = ends - num_new
        width = int(-(-lengths.max() // self.block_size))
        tables = self._tables[[requests[i].slot for i in order], :width]
        if tables.max() >= self.num_blocks:  # would be an error of the whole device, not of this step
            raise ValueError(f"block {tables.max()} is in a table, the pool has {self.num_blocks}")
        row_of = np.repeat(np.arange(count), num_new)
        positions = np.arange(int(ends[-1])) + (num_computed - starts)[row_of]
        block, offset = np.divmod(positions, self.block_size)
        ids: list[int] = []
        for i in order.tolist():
            first = requests[i].num_computed
            ids += requests[i].token_ids[first : first + scheduled[i].num_new]
        finishing = np.flatnonzero(lengths == known[order])
        return Batch(
            ids=np.array(ids, dtype=np.int64),
            positions=positions,
            slots=tables[row_of, block] * self.block_size + offset,
            rows=Rows(starts, num_new, num_computed, tables, int((num_new == 1).sum()), self.block_size),
            sampled=order[finishing].tolist(),
            logit_tokens=ends[finishing] - 1,
        )

    def _check(self, requests: Sequence[RowRequest], num_new: Ints, lengths: Ints, known: Ints) -> None:
        covered = np.fromiter((len(request.block_table) for request in requests), np.int64, len(requests))
        wrong = (num_new < 1) | (lengths > known) | (covered * self.block_size < lengths)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {requests[i].rid}: {num_new[i]} new tokens up to {lengths[i]} planned, but it has "
                f"{known[i]} tokens and {covered[i]} blocks of {self.block_size}"
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
