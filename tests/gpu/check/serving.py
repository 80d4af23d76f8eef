"""Many requests at once with everything on: what their clients saw, and what the steps say."""

from __future__ import annotations

from typing import Any

from ipc import messages as m
from tests.bench.knob_run import Session
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
    before = _launched_ahead(session)
    outcome = run_load(session, load, name, kinds)
    after = _launched_ahead(session)
    fed = None if before is None or after is None else (after - before) / len(outcome.steps)
    return {"knobs": on | but, "off": off, "fed_share": fed, **figures(outcome, load)}


def _launched_ahead(session: Session) -> int | None:
    """Steps whose tokens were fed on the device until now, None without graphs."""
    use = session.client.snapshot().state.graphs
    return None if use is None else use.ahead_n
