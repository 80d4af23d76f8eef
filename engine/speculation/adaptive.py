"""How many tokens to draft for each request, none where drafts lose.

With acceptance a_1, a_2, ... of the places of a draft, each given that those before it were accepted, a step
with a draft of k tokens brings 1 + a_1 + a_1 a_2 + ... tokens on average (arXiv 2211.17192, where all a_i are
one). It costs what a step of so many tokens costs, and the draft. The numbers of tokens that bring most
tokens a second over the whole batch are taken: more drafts make a step slower for everybody, so they cannot
be chosen request by request.

Everything is estimated from what was seen, old observations fading, and from nothing else: equal observations
give equal choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.sizes import counted
from engine.speculation.acceptance import AcceptanceTable, Floats, Rows
from engine.speculation.base import MAX_DRAFT
from engine.speculation.costs import StepCost

MARGIN = 1.03  # drafts must promise to be this much faster, as estimates are noisy
PROBE_FIRST = 16  # steps without drafts after which a request is tried again
PROBE_MOST = 64  # and at most, after tries in vain, each of which doubles it
PROBE_SHARE = 0.01  # of the time may be lost by such tries
PROBE_SAVED = 1000  # steps without a try whose share may be saved up
DRAFT_RATE = 0.1  # how fast the expected cost of drafting follows what is measured


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens to draft for each request of a step.

    ``tokens_per_s`` and ``plain_tokens_per_s`` are what is expected of it, and of a step without drafts; 0
    before anything was measured. ``reason`` says why drafts are off, "" if they are on. ``probing``: one
    request gets one token nevertheless, to see whether it pays again.
    """

    k: list[int]
    tokens_per_s: float
    plain_tokens_per_s: float
    probing: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Idle:
    """``steps`` since a request's last draft, ``wait`` until it is tried again."""

    steps: int = 0
    wait: int = PROBE_FIRST


class AdaptiveDrafts:
    """Chooses draft lengths. ``sequential`` is the drafter's: whether a longer draft takes longer to make."""

    def __init__(self, *, sequential: bool) -> None:
        self.cost = StepCost()
        self._sequential = sequential
        self._round_s: float | None = None
        self._allowance_s = 0.0  # what tries may lose
        self._table = AcceptanceTable()
        self._idle: dict[int, _Idle] = {}

    # --- observations ---

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` computed tokens took ``seconds``, the making of drafts not included."""
        self.cost.observe(tokens, seconds)

    def observe_drafting(self, longest: int, seconds: float) -> None:
        """Making a step's drafts, the longest asked for having ``longest`` tokens, took ``seconds``."""
        rounds = self._rounds(longest)
        if rounds:
            once = seconds / rounds
            self._round_s = (
                once if self._round_s is None else self._round_s + DRAFT_RATE * (once - self._round_s)
            )

    def observe(self, rids: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Drafts of ``drafted[i]`` tokens were verified; nothing is learned of those that are empty.

        ValueError if the numbers contradict each other.
        """
        made = [entry for entry in zip(rids, drafted, accepted, strict=True) if entry[1] or entry[2]]
        for rid, count, kept in made:
            if not 0 <= kept <= count <= MAX_DRAFT:
                raise ValueError(
                    f"request {rid}: {kept} of {count} draft tokens accepted; a draft has at most {MAX_DRAFT}"
                )
            idle = self._idle.setdefault(rid, _Idle())
            idle.steps = 0
            idle.wait = max(idle.wait // 4, 1) if kept else min(2 * idle.wait, PROBE_MOST)
        if made:
            rows = self._table.rows([rid for rid, _, _ in made])
            self._table.observe(
                rows, np.array([count for _, count, _ in made]), np.array([kept for _, _, kept in made])
            )

    def pass_over(self, rids: Sequence[int]) -> None:
        """A step goes without drafts, and without `choose`: there are none, or nobody looked for any."""
        for rid in rids:
            self._idle.setdefault(rid, _Idle()).steps += 1

    def release(self, rid: int) -> None:
        """Forget a request that ended."""
        self._table.release(rid)
        self._idle.pop(rid, None)

    @property
    def num_requests(self) -> int:
        """Requests that something is remembered of."""
        return max(len(self._table), len(self._idle))

    @property
    def acceptance(self) -> list[float]:
        """The expected acceptance of each place of a draft, given those before it, over all requests."""
        out: list[float] = self._table.everywhere.tolist()
        return out

    # --- choice ---

    def choose(self, rids: Sequence[int], rooms: Sequence[int], other_tokens: int = 0) -> Choice:
        """How many tokens to draft for requests that each compute one token and sample the next.

        rooms: most tokens that each may draft. other_tokens: those of prompts that the step computes besides.
        """
        base = len(rids) + other_tokens
        none = [0] * len(rids)
        plain_s = self.cost.seconds(base)
        plain = len(rids) / plain_s if plain_s else 0.0
        limit = min(max(rooms, default=0), MAX_DRAFT)
        if limit < 1:
            return Choice(none, plain, plain, reason="no request has room for a draft")
        if not self.cost.is_known(base):
            return Choice(
                none, plain, plain, reason=f"measuring a step of {counted(base, 'token')} without drafts"
            )
        survival = self._table.survival(self._table.rows(rids))[:, :limit]
        survival[np.arange(limit) >= np.array(rooms)[:, None]] = -1.0  # no room
        k, rate = self._best(survival, base)
        reason = ""
        if rate < MARGIN * plain:
            reason = _why_not(survival, k, base, rate / plain)
            k, rate = none, plain
        self._allowance_s = (
            min(self._allowance_s, PROBE_SHARE * PROBE_SAVED * plain_s) + PROBE_SHARE * plain_s
        )
        probed = self._due(rids, rooms, k)
        if probed is not None:
            tried = [*k[:probed], 1, *k[probed + 1 :]]
            tried_rate = self.expected(rids, tried, other_tokens)
            step_s = self.cost.seconds(base + sum(tried)) + self._drafting_s(max(tried))
            lost_s = max(0.0, step_s * (1.0 - tried_rate / rate))
            if lost_s <= self._allowance_s:
                self._allowance_s -= lost_s
                return Choice(tried, tried_rate, plain, True, reason)
        return Choice(k, rate, plain, False, reason)

    def expected(self, rids: Sequence[int], k: Sequence[int], other_tokens: int = 0) -> float:
        """Tokens a second that are expected of a step with drafts of ``k`` tokens."""
        survival = self._table.survival(self._table.rows(rids))
        drafted = np.arange(MAX_DRAFT) < np.array(k)[:, None]
        tokens = len(rids) + float(survival[drafted].sum())
        seconds = self.cost.seconds(len(rids) + other_tokens + sum(k))
        return tokens / (seconds + self._drafting_s(max(k)))

    def _best(self, survival: Floats, base: int) -> tuple[list[int], float]:
        """The draft lengths, not all 0, of the highest expected rate, and that rate.

        survival: [requests, places], -1 where there is no room. A further draft token adds its survival,
        which never grows along a draft. So the best m tokens of a step are the m most likely ones, and only
        m has to be tried; and, where each round of drafting costs, the longest draft.
        """
        requests, limit = survival.shape
        best_rate = -1.0
        best: Rows = np.zeros(requests, dtype=np.int64)
        for longest in range(1, limit + 1) if self._sequential else (limit,):
            part = survival[:, :longest].ravel()
            order = np.argsort(-part, kind="stable")[: int((part >= 0).sum())]
            tokens = requests + part[order].cumsum()
            seconds = self.cost.seconds_of(base + np.arange(1, len(order) + 1))
            rates = tokens / (seconds + self._drafting_s(longest))
            at = int(rates.argmax())
            if rates[at] > best_rate:
                best_rate = float(rates[at])
                best = np.bincount(order[: at + 1] // longest, minlength=requests)
        k: list[int] = best.tolist()
        return k, best_rate

    def _due(self, rids: Sequence[int], rooms: Sequence[int], k: Sequence[int]) -> int | None:
        """Count the steps that requests go without a draft; the one whose turn it is to be tried again."""
        due: int | None = None
        longest = 0
        for i, (rid, room, count) in enumerate(zip(rids, rooms, k, strict=True)):
            idle = self._idle.setdefault(rid, _Idle())
            if count:
                idle.steps, idle.wait = 0, PROBE_FIRST
            elif room > 0:
                idle.steps += 1
                if idle.steps - idle.wait >= longest:
                    due, longest = i, idle.steps - idle.wait
        return due

    def _rounds(self, longest: int) -> int:
        return longest if self._sequential else min(longest, 1)

    def _drafting_s(self, longest: int) -> float:
        return (self._round_s or 0.0) * self._rounds(longest)


def _why_not(survival: Floats, k: Sequence[int], base: int, gain: float) -> str:
    """Words for a choice of ``k`` that promises ``gain`` times the rate of a step without drafts."""
    drafted = np.arange(survival.shape[1]) < np.array(k)[:, None]
    tokens = 1 + float(survival[drafted].sum()) / len(k)
    first = survival[:, 0][survival[:, 0] >= 0].mean()
    return (
        f"the best drafts, {counted(sum(k), 'token')} over {counted(len(k), 'request')}, would bring "
        f"{tokens:.2f} tokens each in {tokens / gain:.2f} times the time of a step of "
        f"{counted(base, 'token')}; {first:.0%} of the first draft tokens hold"
    )
