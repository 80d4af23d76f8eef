"""The four workloads that every peer runs, as token ids of a real English text.

No stretch of the text is used twice: not in two requests, not in two repetitions, not in two arms of one
comparison. So a prefix cache that is warm from an earlier repetition cannot flatter anybody.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics

import msgspec

SHARED_TOKENS = 384  # of W3

TITLES = {
    "W1": "one stream, 128 tokens in, 128 out",
    "W2": "32 requests at once, 16-384 in, 16-192 out",
    "W3": "16 requests at once, 384 shared tokens and 32 more in, 32 out",
    "W4": "one request, 1024 in, 1 out",
}


class Item(msgspec.Struct, frozen=True):
    """One request: its prompt's token ids, and exactly how many tokens it generates."""

    ids: list[int]
    out: int


class Plan(msgspec.Struct, frozen=True):
    """``runs[workload][arm][repetition]`` is a list of requests; ``warm_up`` is run before, untimed."""

    model: str
    warm_up: list[Item]
    runs: dict[str, dict[str, list[list[Item]]]]


def english_text() -> str:
    """Python's own reference documentation, which every CPython carries: half a million characters."""
    return "\n\n".join(topics[name] for name in sorted(topics))


class _Text:
    """Hands out the ids of the text, each once."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._next = 0

    def take(self, n: int) -> list[int]:
        taken = list(self._ids[self._next : self._next + n])
        if len(taken) < n:
            raise ValueError(f"the text of {len(self._ids)} tokens is used up; run fewer repetitions")
        self._next += n
        return taken


def _requests(workload: str, text: _Text, seed: int) -> list[Item]:
    random_ = random.Random(seed)
    match workload:
        case "W1":
            return [Item(text.take(128), 128)]
        case "W2":
            sizes = [(random_.randint(16, 384), random_.randint(16, 192)) for _ in range(32)]
            return [Item(text.take(prompt), out) for prompt, out in sizes]
        case "W3":
            shared = text.take(SHARED_TOKENS)
            return [Item(shared + text.take(32), 32) for _ in range(16)]
        case "W4":
            return [Item(text.take(1024), 1)]
    raise ValueError(f"there is no workload {workload!r}; there are {', '.join(TITLES)}")


def arms(workload: str) -> tuple[str, ...]:
    """The arms of a workload: W3 without the prefix cache, with it, and with it primed; each on its own text.

    Primed: the shared tokens were computed once before, untimed. Peers that share only what is computed
    already gain nothing from requests that arrive together.
    """
    return ("cache_off", "cache_on", "cache_primed") if workload == "W3" else ("plain",)


def build(model: str, ids: Sequence[int], workloads: Sequence[str], repeats: int, seed: int) -> Plan:
    """Cut the text into requests. Every repetition of W2 has the same sizes, drawn from ``seed``."""
    text = _Text(ids)
    warm_up = [Item(text.take(48), 8) for _ in range(4)]
    runs = {
        workload: {arm: [_requests(workload, text, seed) for _ in range(repeats)] for arm in arms(workload)}
        for workload in workloads
    }
    return Plan(model, warm_up, runs)


def each(plan: Plan) -> Iterator[tuple[str, str, int, list[Item]]]:
    """All runs of a plan: workload, arm, repetition, requests."""
    for workload, by_arm in plan.runs.items():
        for arm, repetitions in by_arm.items():
            for index, items in enumerate(repetitions):
                yield workload, arm, index, items
