"""How far a draft may reach, and where the tokens that it brought end.

A step without a draft computes the newest token, at position ``num_tokens - 1``, and samples one. A draft of
k tokens computes k positions more and brings between one and k + 1 tokens. Every rule about that is here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from engine.speculation.base import Draft


def draft_room(num_tokens: int, max_total: int, covered_tokens: int) -> int:
    """Most tokens that a draft may have for a request with ``num_tokens`` known ones, 0 or more.

    max_total: the most tokens it may ever have, by ``max_tokens`` or the context, whichever is less. One of
    them is always the target's own. covered_tokens: how many its blocks hold, counting those that it could
    be given without taking any from others: a draft is never worth a preemption.
    """
    return max(0, min(max_total - num_tokens - 1, covered_tokens - num_tokens))


def share(rooms: Sequence[int], budget: int) -> list[int]:
    """Divide ``budget`` draft tokens over requests that have ``rooms``, first tokens of all before second.

    What comes early in a draft is the likeliest to be accepted, so nobody gets a further token while another
    who has room lacks one. Earlier requests come first among equals.
    """
    if sum(rooms) <= budget:
        return list(rooms)
    given = [0] * len(rooms)
    left = max(0, budget)
    level = 0
    while left:
        takers = [i for i, room in enumerate(rooms) if room > level][:left]
        for i in takers:
            given[i] += 1
        left -= len(takers)
        level += 1
    return given


def cut_draft(draft: Draft, room: int, stop_ids: Collection[int], vocab_size: int) -> Draft:
    """The part of a draft that is worth computing.

    Nothing beyond ``room``. Nothing from an id on that the target does not have. Nothing after an id that
    ends the request, but that id itself: only the target can say that it ends there.
    """
    for i, token in enumerate(draft.token_ids[:room]):
        if not 0 <= token < vocab_size:
            return draft.first(i)
        if token in stop_ids:
            return draft.first(i + 1)
    return draft.first(room)


def until_end(
    token_ids: Sequence[int],
    *,
    num_output: int,
    min_tokens: int,
    stop_ids: Collection[int],
    room: int,
) -> tuple[int, Literal["stop", "length"] | None]:
    """How many of a step's verified tokens count, and whether the last of them ends the request, and how.

    num_output: tokens that the output had before. room: how many it may still get. A stop id ends the request
    exactly where it stands, once more than ``min_tokens`` tokens were produced, that id among them; what was
    verified beyond it is dropped. A stop id in the last place there is room for is a stop.
    """
    for i, token in enumerate(token_ids[:room]):
        if token in stop_ids and num_output + i + 1 > min_tokens:
            return i + 1, "stop"
    if len(token_ids) >= room:
        return room, "length"
    return len(token_ids), None
