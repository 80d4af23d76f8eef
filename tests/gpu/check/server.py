"""The product itself: an engine process, spoken to over ZeroMQ, and what its clients and its steps say."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ipc import messages as m
from ipc.client import Client
from tests.bench.engine_process import engine
from tests.bench.knob_run import Outcome, Send, Session
from tests.gpu.check.context import Context
from tests.gpu.check.settings import Load

ALL_ON: dict[str, m.KnobValue] = {
    "attention": "paged", "fused_norm": True, "fused_rope_kv": True, "fused_mlp": True,
    "fused_sampling": True, "cuda_graphs": True, "overlap": True, "chunked_prefill": True,
    "prefix_cache": True, "batched_tokenize": True, "batched_detokenize": True, "weight_dtype": "fp8",
    "kv_dtype": "fp8_e4m3",
}  # fmt: skip
GREEDY = (m.Sampling(),)
MOST_STARTS = 3
START_S = 30.0  # of an engine with its model on a card, at a guess


class Served:
    """An engine that is started when it is first asked for, and again after one that was lost."""

    def __init__(self, context: Context, *, drafts: bool = False) -> None:
        """``drafts`` gives it a draft model too."""
        self._context, self._drafts = context, drafts
        self._stack = ExitStack()
        self._session: Session | None = None
        self._starts = 0
        self.started: dict[str, m.KnobValue] = {}  # the knobs that it was started with

    def __enter__(self) -> Self:
        self._context.drop_model()  # its memory is the engine's
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def start_s(self) -> float:
        """What `session` would take: nothing while there is one."""
        return START_S if self._session is None else 0.0

    def session(self) -> Session:
        """The engine's. RuntimeError where it was lost too often."""
        if self._session is not None:
            return self._session
        if self._starts == MOST_STARTS:
            raise RuntimeError(f"the engine was lost {MOST_STARTS} times")
        self._starts += 1
        settings = self._context.settings
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        options = ["--load-format", "dummy", "--device", settings.device]
        options += ["--kv-pool-gib", str(settings.server_pool_gib)]
        options += ["--knob", f"block_size={settings.block_size}"]
        models = {"model": settings.config} | ({"draft": settings.draft_config} if self._drafts else {})
        for name, config in models.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        if self._drafts:
            options += ["--draft-model", str(folder / "draft")]
        address = self._stack.enter_context(engine(str(folder / "model"), *options))
        self._session = Session(self._stack.enter_context(Client(address, silence_s=60.0)))
        self.started = self._session.client.config().values
        return self._session

    def recover(self) -> None:
        """After something failed: end what still runs, or the engine where it does not even take that."""
        try:
            if self._session is not None:
                self._session.cancel_all()
                return
        except Exception as error:  # whatever it is, this engine is of no more use
            print(f"the engine is started again: {short(error)}", flush=True)
        self._end()

    def _end(self) -> None:
        self._session = None
        self._stack.close()


def short(error: Exception) -> str:
    """What failed, for the results."""
    return f"{type(error).__name__}: {error}"[:400]


def all_on(session: Session) -> tuple[dict[str, m.KnobValue], dict[str, str]]:
    """The values of everything that there is, and why the rest is not."""
    off = {knob: why for knob, value in ALL_ON.items() if (why := session.why_not(knob, value))}
    return {knob: value for knob, value in ALL_ON.items() if knob not in off}, off


def run_load(session: Session, load: Load, salt: str, kinds: Sequence[m.Sampling] = GREEDY) -> Outcome:
    """Requests at once, of these kinds in turn; no two of them, nor of two runs, begin alike."""
    prompts = [prompt(session, load.prompt, salt, r) for r in range(load.requests)]
    return run_prompts(session, prompts, load, salt, kinds)


def run_prompts(
    session: Session, prompts: list[list[int]], load: Load, salt: str, kinds: Sequence[m.Sampling] = GREEDY
) -> Outcome:
    """These prompts at once. ``salt`` keeps runs out of each other's prefix cache."""
    both = zip(prompts, itertools.cycle(kinds), strict=False)
    sends = [Send(prompt=each, out=load.out, sampling=sampling) for each, sampling in both]
    return session.run([sends], arm="on", pair=0, salt=salt)


def prompt(session: Session, length: int, salt: str, number: int) -> list[int]:
    vocab = session.setup.vocab_size
    first = hash_of(salt, number) % (vocab - 1)
    return [(first + 31 * number + 7 * i) % vocab for i in range(length)]


def repeating(session: Session, load: Load) -> list[list[int]]:
    """Prompts that each hold another one twice, the model's answer in between, so that drafts are found."""
    sampling = m.Sampling(max_tokens=load.out, ignore_eos=True)
    prompts = [prompt(session, load.prompt, "repeating", r) for r in range(load.requests)]
    streams = [session.client.submit(each, sampling=sampling) for each in prompts]
    return [each + stream.result()[0] + each for each, stream in zip(prompts, streams, strict=True)]


def hash_of(text: str, number: int) -> int:
    """The same for the same arguments in every process, which `hash` is not."""
    return sum((i + 1) * ord(char) for i, char in enumerate(f"{text}/{number}"))


def figures(outcome: Outcome, load: Load) -> dict[str, Any]:
    """Times in ms, of the client's clock where requests are concerned and of the engine's for steps."""
    answers = [a for a in outcome.answers if a.first_s is not None and a.last_s is not None]
    ttft = [1e3 * (a.first_s - a.intended_s) for a in answers]  # type: ignore[operator]
    tpot = [1e3 * (a.last_s - a.first_s) / (a.tokens - 1) for a in answers if a.tokens > 1]  # type: ignore[operator]
    itl = [us / 1e3 for a in answers if a.row is not None for us in a.row.itl_us]
    rows = steady(outcome.steps, load.requests)
    interval = statistics.median(row.dur_us / 1e3 for row in rows) if rows else None
    forward = statistics.median(row.forward_us / 1e3 for row in rows) if rows else None
    beyond = None if interval is None or not forward else interval / forward - 1
    return {
        "requests": len(answers), "wall_s": outcome.wall_s,
        "tok_per_s": sum(a.tokens for a in answers) / outcome.wall_s,
        "ttft_ms": _percentiles(ttft), "tpot_ms": _percentiles(tpot), "itl_ms": _percentiles(itl),
        "step_ms": interval, "forward_ms": forward, "beyond_forward": beyond, "steady_steps": len(rows),
        "drafted_tok": sum(row.drafted_tok for row in outcome.steps),
        "accepted_tok": sum(row.accepted_tok for row in outcome.steps),
        "attention": sorted({row.attention for row in outcome.steps}),
        "kernels": sorted({row.kernels for row in outcome.steps if row.decode_reqs})[-3:],
    }  # fmt: skip


def steady(steps: Sequence[m.StepRow], requests: int) -> list[m.StepRow]:
    """The steps in which, and after which, all requests decode and nothing else is computed."""
    return [
        a
        for a, b in itertools.pairwise(steps)
        if b.step == a.step + 1
        and (a.decode_reqs, b.decode_reqs) == (requests, requests)
        and not a.prefill_tok + b.prefill_tok
    ]


def _percentiles(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return {"p50": cuts[49], "p99": cuts[98], "n": len(ordered)}
