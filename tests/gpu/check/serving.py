"""The product itself: an engine process, spoken to over ZeroMQ, under requests that come at once."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipc import messages as m
from ipc.client import Client, EngineError
from tests.bench.engine_process import engine
from tests.bench.knob_run import KnobRefused, Outcome, Send, Session
from tests.gpu.check.context import Context
from tests.gpu.check.settings import Load

ALL_ON: dict[str, m.KnobValue] = {
    "attention": "paged", "fused_norm": True, "fused_rope_kv": True, "fused_mlp": True,
    "fused_sampling": True, "cuda_graphs": True, "overlap": True, "chunked_prefill": True,
    "prefix_cache": True, "batched_tokenize": True, "batched_detokenize": True, "weight_dtype": "fp8",
    "kv_dtype": "fp8_e4m3",
}  # fmt: skip
OFF: dict[str, m.KnobValue] = {
    "cuda_graphs": False, "attention": "sdpa", "overlap": False, "fused_norm": False, "fused_rope_kv": False,
    "fused_mlp": False, "fused_sampling": False, "kv_dtype": "model", "batched_detokenize": False,
    "batched_tokenize": False, "chunked_prefill": False, "prefix_cache": False, "weight_dtype": "model",
}  # fmt: skip
"""What each is without, the one that takes long to change last."""
LOADS: dict[str, dict[str, m.KnobValue]] = {
    "16 bits": {"weight_dtype": "model", "kv_dtype": "model"},
    "all on": {},
}
FLIP_S = 8.0  # what a knob takes at least, both ways
LEFT_FOR_OTHERS_S = 45.0  # the baselines that come after


@contextmanager
def _session(context: Context) -> Iterator[Session]:
    context.drop_model()  # its memory is the engine's
    settings = context.settings
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        (Path(name) / "config.json").write_text(json.dumps(settings.config))
        options = ["--load-format", "dummy", "--device", settings.device]
        options += [
            "--kv-pool-gib",
            str(settings.server_pool_gib),
            "--knob",
            f"block_size={settings.block_size}",
        ]
        with engine(name, *options) as address, Client(address, silence_s=60.0) as client:
            yield Session(client)


def _all_on(
    session: Session, but: dict[str, m.KnobValue] | None = None
) -> tuple[dict[str, m.KnobValue], dict[str, str]]:
    """Switch on what there is, ``but`` for these; what that was, and why the rest is not."""
    off = {knob: why for knob, value in ALL_ON.items() if (why := session.why_not(knob, value))}
    on = {knob: value for knob, value in ALL_ON.items() if knob not in off} | (but or {})
    session.flip(on)
    return on, off


def run_server(context: Context) -> dict[str, Any]:
    """Many requests at once with everything on: what their clients saw, and what the steps say."""
    found = context.begin(loads={})
    load = context.settings.load
    with _session(context) as session:
        for name, but in LOADS.items():
            if found["loads"] and not context.settings.tiny and context.left_s < 40:
                found["not_run"] = {name: "no time was left"}
                break
            values, off = _all_on(session, but)
            _run(session, Load(load.requests, load.prompt // 4, 8), f"warm {name}")
            outcome = _run(session, load, name)
            found["loads"][name] = {"knobs": values, "off": off, **figures(outcome, load)}
    return found


def run_knobs(context: Context) -> dict[str, Any]:
    """From everything on, each knob off by itself: the same requests, and the time of a step."""
    load = context.settings.flip_load
    found = context.begin(off={}, not_run={})
    with _session(context) as session:
        on, unavailable = _all_on(session)
        found["not_run"] |= unavailable
        _run(session, load, "warm")
        found["all_on"] = figures(_run(session, load, "all on"), load)
        longest = FLIP_S
        for knob in (knob for knob in OFF if knob in on):
            if not context.settings.tiny and context.left_s < 2 * longest + LEFT_FOR_OTHERS_S:
                found["not_run"][knob] = f"{context.left_s:.0f} s were left, for this and the baselines"
                continue
            began = context.left_s
            try:
                session.flip({knob: OFF[knob]})
                _run(session, load, f"warm {knob}")
                row = figures(_run(session, load, knob), load)
                row["times_all_on"] = _ratio(row["step_ms"], found["all_on"]["step_ms"])
                found["off"][knob] = row
            except (KnobRefused, EngineError, RuntimeError) as error:
                found["not_run"][knob] = f"{type(error).__name__}: {error}"[:400]
            session.flip(on)  # where this fails the stage ends: later figures would have another baseline
            longest = max(longest, began - context.left_s)
    return found


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _run(session: Session, load: Load, salt: str) -> Outcome:
    """Requests at once; no two of them, nor of two runs, begin alike."""
    vocab = session.setup.vocab_size

    def prompt(r: int) -> list[int]:
        first = hash_of(salt, r) % (vocab - 1)
        return [(first + 31 * r + 7 * i) % vocab for i in range(load.prompt)]

    wave = [Send(prompt=prompt(r), out=load.out) for r in range(load.requests)]
    return session.run([wave], arm="on", pair=0, salt=salt)


def hash_of(text: str, number: int) -> int:
    """The same for the same arguments in every process, which `hash` is not."""
    return sum((i + 1) * ord(char) for i, char in enumerate(f"{text}/{number}"))


def figures(outcome: Outcome, load: Load) -> dict[str, Any]:
    """Times in ms, of the client's clock where requests are concerned and of the engine's for steps."""
    answers = [a for a in outcome.answers if a.first_s is not None and a.last_s is not None]
    ttft = [1e3 * (a.first_s - a.intended_s) for a in answers]  # type: ignore[operator]
    tpot = [1e3 * (a.last_s - a.first_s) / (a.tokens - 1) for a in answers if a.tokens > 1]  # type: ignore[operator]
    itl = [us / 1e3 for a in answers if a.row is not None for us in a.row.itl_us]
    steady = _steady(outcome.steps, load.requests)
    interval = statistics.median(steady[0]) if steady[0] else None
    forward = statistics.median(steady[1]) if steady[1] else None
    beyond = None if interval is None or not forward else interval / forward - 1
    return {
        "requests": len(answers), "wall_s": outcome.wall_s,
        "tok_per_s": sum(a.tokens for a in answers) / outcome.wall_s,
        "ttft_ms": _percentiles(ttft), "tpot_ms": _percentiles(tpot), "itl_ms": _percentiles(itl),
        "step_ms": interval, "forward_ms": forward, "beyond_forward": beyond, "steady_steps": len(steady[0]),
        "attention": sorted({row.attention for row in outcome.steps}),
        "kernels": sorted({row.kernels for row in outcome.steps if row.decode_reqs})[-3:],
    }  # fmt: skip


def _steady(steps: Sequence[m.StepRow], requests: int) -> tuple[list[float], list[float]]:
    """Milliseconds that steps took, and their forward passes, where all requests decode and nothing else."""
    pairs = [
        (a, b)
        for a, b in itertools.pairwise(steps)
        if b.step == a.step + 1
        and (a.decode_reqs, b.decode_reqs) == (requests, requests)
        and not a.prefill_tok + b.prefill_tok
    ]
    return [a.dur_us / 1e3 for a, _ in pairs], [a.forward_us / 1e3 for a, _ in pairs]


def _percentiles(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return {"p50": cuts[49], "p99": cuts[98], "n": len(ordered)}
