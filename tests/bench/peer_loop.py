"""The side of a peer that runs in the peer's own environment: it waits for orders and answers with times.

Needs only msgspec beside the peer itself. One line of JSON an order and an answer, on standard input and
output; what a library prints goes to standard error instead. Between orders a peer does nothing, so that
peers can be loaded side by side and run in turn.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from tests.bench.timing import RequestTimes
from tests.bench.workloads import SHARED_TOKENS, Item, Plan


class Ceilings(msgspec.Struct, frozen=True):
    """What the machine reaches, measured as the engine starts: bytes read and operations, a second."""

    read_bytes_per_s: float
    flops_per_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The peer is loaded. ``note`` says what a reader of its figures must know."""

    version: str
    note: str = ""
    ceilings: Ceilings | None = None


class Order(msgspec.Struct, frozen=True):
    """Which repetition of the plan to run now."""

    workload: str
    arm: str
    index: int


class Times(msgspec.Struct, frozen=True, tag=True):
    """What was measured. Where a peer tells them, ``steps``: bytes moved and operations of each step, and
    ``weight_bytes``: bytes of weights that the last one read."""

    requests: list[RequestTimes]
    steps: list[tuple[int, int]] = []
    weight_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The order could not be carried out; the peer is still there."""

    reason: str


Reply = Ready | Times | Refused


class Peer(Protocol):
    """An engine with a model in it."""

    def about(self) -> Ready: ...

    def prepare(self, arm: str) -> None:
        """Make ready for an arm of a workload, untimed. Arms that name no prefix cache are run with it off
        by peers that lose by it."""

    def run(self, items: list[Item]) -> Times:
        """Hand all requests over at once; returns when the last token of the last one is there."""


def primer(items: list[Item]) -> list[Item]:
    """What a prefix cache is primed with: the tokens that all requests share, and one token out."""
    return [Item(items[0].ids[:SHARED_TOKENS], 1)]


def carry_out(peer: Peer, plan: Plan, order: Order) -> Times:
    """One order, after an untimed warm-up.

    Raises when a request has another number of tokens than asked, or when more tokens came from the prefix
    cache than these requests can share: those would be left from an earlier run.
    """
    items = plan.runs[order.workload][order.arm][order.index]
    peer.prepare(order.arm)
    peer.run(plan.warm_up)
    if order.arm == "cache_primed":
        peer.run(primer(items))
    times = peer.run(items)
    for number, (item, request) in enumerate(zip(items, times.requests, strict=True)):
        if len(request.token_s) != item.out:
            raise RuntimeError(f"request {number} has {len(request.token_s)} tokens instead of {item.out}")
    most = len(items) * SHARED_TOKENS if order.arm in ("cache_on", "cache_primed") else 0
    cached = sum(request.cached_tok for request in times.requests)
    if cached > most:
        raise RuntimeError(f"{cached} tokens from the prefix cache, at most {most} can be honest")
    return times


def serve(plan_file: str, make: Callable[[], Peer]) -> None:
    """Load the peer, say that it is ready, and carry out orders until standard input ends."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=Plan)
    peer = make()
    _send(channel, peer.about())
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        reply: Reply
        try:
            reply = carry_out(peer, plan, order)
        except Exception as error:
            traceback.print_exc()
            reply = Refused(f"{type(error).__name__}: {error}")
        _send(channel, reply)


def _send(channel: BinaryIO, reply: Reply) -> None:
    channel.write(msgspec.json.encode(reply) + b"\n")
    channel.flush()
