"""What a draft is, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.draw import MAX_ROUNDS
from engine.speculation import MAX_DRAFT as MAX_DRAFT

if TYPE_CHECKING:
    from engine.batch import RowRequest

# Numbers of the random streams of a position (`engine.draw.uniform`). Choosing a token without a draft takes
# those below MAX_ROUNDS; every other purpose has its own, as a draft, the decision about it and what replaces
# it must be independent of each other.
ACCEPT = 2 * MAX_ROUNDS
RESIDUAL = ACCEPT + 1
PROPOSE = ACCEPT + 2


class DraftSource(Protocol):
    """Where drafted tokens come from that the host does not know at first."""

    @property
    def taken(self) -> bool:
        """Whether it knows them by now."""
        ...

    def take(self) -> None:
        """Put them into the drafts that they belong to, once. Waits for them. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's newest one.

    ``source``: of those whose ids the device alone knows. Until `DraftSource.take` each is below 0, and says
    where on the device it is (`engine.graphs.newest.awaited`); after it, -1 is none, which never holds.
    probs: float32 [tokens, vocab_size], row i the distribution that token i was drawn from. None where tokens
    were not drawn from one that is known: the target's own choice at each place is compared with the draft
    then, so that not only the distribution but the text itself is that without drafts (see `verify`).
    """

    token_ids: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    source: DraftSource | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Draft:
        """The draft cut to its first ``count`` tokens, which the host knows."""
        if count >= len(self.token_ids):
            return self
        assert self.source is None
        return Draft(self.token_ids[:count], None if self.probs is None else self.probs[:count])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Proposes what may come next. What it keeps of a request is a memory aid: it never decides anything.

    A drafter keeps what it knows by slot and checks whose it is by rid. It **catches up** by itself: it may
    be asked about a request for the first time in the middle of its answer, again after steps in which it was
    not asked, in another slot after a preemption, and about one whose output was cut. It reads
    ``request.token_ids`` alone, which hold verified tokens only, so a rejected draft needs no undoing. A
    drafter that catches up over several steps proposes nothing meanwhile. Only one that drafts on the device
    is asked while a request's newest token is pending (see `engine.speculation.rounds`).
    """

    @property
    def name(self) -> str:
        """As the knob ``speculation`` calls it."""
        ...

    @property
    def sequential(self) -> bool:
        """Whether each further token of a draft costs another round of work."""
        ...

    def propose(self, requests: Sequence[RowRequest], k: Sequence[int]) -> list[Draft]:
        """A draft of at most ``k[i]`` tokens for each request; empty where there is nothing to propose."""
        ...

    def release(self, slot: int) -> None:
        """Forget a slot whose request finished or was preempted."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...
