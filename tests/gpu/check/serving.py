"""Many requests at once with everything on: what their clients saw, and what the steps say."""

from __future__ import annotations

from typing import Any

from ipc import messages as m
from tests.gpu.check.context import Context
from tests.gpu.check.server import GREEDY, Served, all_on, figures, run_load, short
from tests.gpu.check.settings import Load

MIXED = "all on, mixed requests"
LOADS: dict[str, dict[str, m.KnobValue]] = {
    "16 bits": {"weight_dtype": "model", "kv_dtype": "model"},
    "all on": {},
    MIXED: {},
}
KINDS = (
    m.Sampling(temperature=0.8, seed=1),
    m.Sampling(logprobs=5),
    m.Sampling(repetition_penalty=1.1),
    m.Sampling(temperature=0.7, seed=2, presence_penalty=0.5, frequency_penalty=0.2, logprobs=0),
)
"""Of the mixed load, in turn."""
LEAST_S = 40.0  # of a load on a card, with the change of the weights


def run(context: Context) -> dict[str, Any]:
    """By load. One that fails leaves the others be. RuntimeError if all do."""
    found = context.begin(loads={}, not_run={}, failed={})
    with Served(context) as served:
        for name, but in LOADS.items():
            if found["loads"] and not context.settings.tiny and context.left_s < LEAST_S:
                left = f"{context.left_s:.0f} s were left to the deadline"
                found["not_run"][name] = f"{left}, it takes {LEAST_S:g} s"
                continue
            try:
                found["loads"][name] = _one(context, served, name, but)
            except Exception as error:  # the other load is still worth knowing about
                found["failed"][name] = short(error)
                served.recover()
            context.keep()
    if not found["loads"]:
        raise RuntimeError(f"no load could be run: {found['failed']}")
    return found


def _one(context: Context, served: Served, name: str, but: dict[str, m.KnobValue]) -> dict[str, Any]:
    load, session = context.settings.load, served.session()
    on, off = all_on(session)
    session.flip(on | but)
    kinds = KINDS if name == MIXED else GREEDY
    run_load(session, Load(load.requests, load.prompt // 4, 8), f"warm {name}", kinds)
    before = session.client.snapshot().state.graphs
    outcome = run_load(session, load, name, kinds)
    after = session.client.snapshot().state.graphs
    graphs = None if before is None or after is None else _became(before, after, len(outcome.steps))
    return {"knobs": on | but, "off": off, "graphs": graphs, **figures(outcome, load)}


def _became(before: m.GraphUse, after: m.GraphUse, steps: int) -> dict[str, Any]:
    """What became of so many steps: how many were fed, and why others were not replayed or not whole."""
    return {
        "fed_share": (after.ahead_n - before.ahead_n) / steps,
        "missed_n": _more(before.missed_n, after.missed_n),
        "logits_n": _more(before.logits_n, after.logits_n),
    }


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {why: n for why, count in after.items() if (n := count - before.get(why, 0))}
