"""What each optimization is worth: from everything on, one change at a time and back, in one running engine.

A change is measured between two runs without it, in the order on, changed, changed, on, and the last of them
is the next one's first. The steady steps of each run are cut into parts of as many, and the time that a token
took in each is divided by that of the part at the same place of the run beside it: so a drift of the card's
clock, and texts that get longer, weigh on both. The ratio is the mean over those pairs, with the interval of
`tests.bench.paired`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ipc import messages as m
from tests.bench.knob_run import Outcome, Session
from tests.bench.paired import ratio_interval
from tests.gpu.check.context import Context
from tests.gpu.check.server import Served, all_on, figures, repeating, run_prompts, short, steady
from tests.gpu.check.settings import Load

Values = dict[str, m.KnobValue]
PARTS = 3  # of a run
LEFT_FOR_OTHERS_S = 45.0  # the baselines that come after


@dataclass(frozen=True)
class Change:
    """``least_s``: what it takes on a card there and back, at a guess until changes were measured.

    Where it could not be had with everything on, or would take another optimization along, ``base`` is what
    both sides have besides.
    """

    name: str
    values: Values
    least_s: float = 6.0
    base: Values = field(default_factory=dict)


def _off(knob: str, least_s: float = 6.0, base: Values | None = None) -> Change:
    return Change(f"{knob} off", {knob: False}, least_s, base or {})


# A graph is captured only with these, and what is asked is what they are worth by themselves.
_WITHOUT_GRAPHS: Values = {"cuda_graphs": False}
# What other attentions read: keys and values in 16 bits, by blocks of 256 tokens.
_PLAIN_POOL: Values = {"cuda_graphs": False, "kv_dtype": "model", "block_size": 256}

# The copy that drafts has fewer bits than the weights.
_SELF: Values = {"speculation": "self", "spec_self_dtype": "int4", "spec_adaptive": False}

CHANGES = (
    _off("cuda_graphs"),
    _off("overlap"),
    Change("kv_dtype model", {"kv_dtype": "model"}, 10.0),
    Change("weight_dtype model", {"weight_dtype": "model"}, 20.0),
    Change("speculation ngram", {"speculation": "ngram", "spec_adaptive": False}, 8.0),
    Change("kv_dtype int8", {"kv_dtype": "int8"}, 10.0),
    Change("weight_dtype int8", {"weight_dtype": "int8"}, 20.0),
    Change("weight_dtype int4", {"weight_dtype": "int4", "int4_method": "rtn"}, 25.0),
    _off("fused_norm"),
    _off("fused_mlp"),
    _off("fused_sampling"),
    Change("speculation self", _SELF, 15.0),
    Change("speculation draft", {"speculation": "draft", "spec_adaptive": False}, 15.0),
    Change("attention sdpa", {"attention": "sdpa"}, base=_WITHOUT_GRAPHS),
    _off("fused_rope_kv", base=_WITHOUT_GRAPHS),
    Change("attention flash_attn", {"attention": "flash_attn"}, 8.0, _PLAIN_POOL),
    Change("attention varlen", {"attention": "varlen"}, 8.0, _PLAIN_POOL),
    _off("chunked_prefill"),
    _off("prefix_cache"),
    _off("batched_detokenize"),
    _off("batched_tokenize"),
)
"""In the order of what they are worth; those with the same base stand together."""


def run(context: Context) -> dict[str, Any]:
    """Each change that can be made here. RuntimeError if none was measured."""
    found = context.begin(changes={}, not_run={}, failed={}, everything={})
    with Served(context, drafts=True) as served:
        chain = _Chain(context, served, found)
        for change in CHANGES:
            chain.take(change)
            context.keep()
    if not found["changes"]:
        raise RuntimeError(f"no change was measured: {found['failed'] or found['not_run']}")
    return found


class _Chain:
    """Changes one after the other, each there and back."""

    def __init__(self, context: Context, served: Served, found: dict[str, Any]) -> None:
        self._context, self._served, self._found = context, served, found
        self._load: Load = context.settings.flip_load
        self._base: Values | None = None  # that the engine runs with, None where that is not sure
        self._on: Values = {}
        self._before: Outcome | None = None  # the newest run with it
        self._prompts: list[list[int]] = []
        self._slower = 1.0  # than was guessed, the worst change so far

    def take(self, change: Change) -> None:
        """Measure a change, or note why not. What fails ends none but itself."""
        try:
            reason = self._too_late(change) or self._why_not(self._served.session(), change)
            if reason:
                self._found["not_run"][change.name] = reason
                return
            if change.base != self._base or self._before is None:
                self._rebase(change.base)
            began = time.perf_counter()
            self._found["changes"][change.name] = self._measure(change)
            took = time.perf_counter() - began
            self._slower = max(self._slower, took / change.least_s)
        except Exception as error:  # the other changes are still worth knowing about
            self._found["failed"][change.name] = short(error)
            self._base = self._before = None
            self._served.recover()

    def _too_late(self, change: Change) -> str:
        left_s, takes_s = self._context.left_s, change.least_s * self._slower + self._served.start_s
        if self._context.settings.tiny or left_s >= takes_s + LEFT_FOR_OTHERS_S:
            return ""
        return (
            f"{left_s:.0f} s were left to the deadline, it takes about {takes_s:.0f} s, and "
            f"{LEFT_FOR_OTHERS_S:g} s are kept for the baselines"
        )

    def _why_not(self, session: Session, change: Change) -> str:
        """Why a change cannot be made here, or makes none; "" if it can."""
        off = all_on(session)[1]
        for knob, value in change.values.items():
            if reason := session.why_not(knob, value):
                return reason
            if knob in off and value == session.knobs[knob].default:
                return off[knob]
        return ""

    def _rebase(self, base: Values) -> None:
        """Everything on but for this, and a run with it."""
        session = self._served.session()
        self._base = None
        on, off = all_on(session)
        self._on = self._served.started | on | {k: v for k, v in base.items() if not session.why_not(k, v)}
        session.flip(self._on)
        self._prompts = self._prompts or repeating(session, self._load)
        self._warm()
        self._before, self._base = self._run("before"), base
        if not base:
            self._found["everything"] = {"knobs": on, "off": off, **figures(self._before, self._load)}

    def _measure(self, change: Change) -> dict[str, Any]:
        before, session = self._before, self._served.session()
        assert before is not None
        self._before = None
        session.flip(change.values)
        self._warm()
        changed = [self._run(f"{change.name} {i}") for i in range(2)]
        session.flip(self._on)
        self._warm()
        after = self._run(f"{change.name} after")
        row = figures(changed[-1], self._load)
        row |= ratio(self._load, (before, changed[0]), (after, changed[1]))
        self._before = self._run(f"{change.name} before the next")
        return row

    def _warm(self) -> None:
        """What is compiled or captured after a flip; a dry run does without."""
        if not self._context.settings.tiny:
            self._run("warm")

    def _run(self, salt: str) -> Outcome:
        return run_prompts(self._served.session(), self._prompts, self._load, salt)


def ratio(load: Load, *pairs: tuple[Outcome, Outcome]) -> dict[str, Any]:
    """How much longer a token takes changed than on, over the parts of pairs of runs (on, changed)."""
    on, changed = ([t for pair in pairs for t in token_ms(pair[i].steps, load.requests)] for i in range(2))
    times, low, high = ratio_interval(on, changed)
    return {
        "token_ms": statistics.fmean(changed), "token_ms_on": statistics.fmean(on), "times": times,
        "low": low, "high": high, "pairs": len(on),
    }  # fmt: skip


def token_ms(steps: Sequence[m.StepRow], requests: int) -> list[float]:
    """Milliseconds that a token took each request, in each of `PARTS` parts of the steady steps.

    Drafts bring several tokens a step, so it is not the time of a step. ValueError for too few steps.
    """
    rows = steady(steps, requests)
    size = len(rows) // PARTS
    if not size:
        raise ValueError(f"{len(rows)} steps had all {requests} requests decoding, fewer than {PARTS}")
    parts = [rows[i * size : (i + 1) * size] for i in range(PARTS)]
    return [
        sum(row.dur_us for row in part) / 1e3 * requests / sum(row.output_tok for row in part)
        for part in parts
    ]
