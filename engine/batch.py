"""From a step plan to the index tensors of one forward pass.

Each request keeps a slot, a row in persistent host buffers, for as long as it is scheduled; a step only copies
what changed. Building the indices takes a handful of numpy calls whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
