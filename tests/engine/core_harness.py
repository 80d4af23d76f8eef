"""An engine core driven step by step, with what its sink heard sorted by request."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.availability import available
from engine.config import EngineConfig
from engine.knob import KnobContext
from engine.knob_store import KnobStore
from engine.loop import BlockView, EngineCore, Event
from engine.models.loader import LoadedModel, load_model
from engine.request import Request
from engine.speculation.base import Drafter
from ipc import codec
from ipc.messages import (
    ApplyEvent,
    Done,
    EngineState,
    KnobValue,
    Preempted,
    RequestRow,
    RequestRows,
    Sampling,
    StepRow,
    StepRows,
    TokenLogprob,
    Tokens,
)
from tests import tiny_models

# Operations on tiny models take microseconds; a second thread only waits for the first, and on a busy
# machine each such wait costs a time slice.
torch.set_num_threads(1)

CPU = torch.device("cpu")

_FOLDERS = tempfile.TemporaryDirectory(prefix="decodeck-tiny-")


@functools.cache
def tiny_folder(architecture: str, seed: int = 0, **changes: Any) -> Path:
    """A small random model's folder, written once a run."""
    name = f"{architecture}-{seed}-{'-'.join(f'{k}{v}' for k, v in changes.items())}"
    return tiny_models.build(Path(_FOLDERS.name) / name, architecture, seed=seed, **changes)


@functools.cache
def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype, device=torch.device("cpu"), progress=lambda *_: None)


def cannot_run(loaded: LoadedModel) -> dict[str, str]:
    """Knobs that cannot be used with this model on the CPU of this machine, and why."""
    return available(loaded.spec, CPU, loaded.weights["embed"].dtype)[1]


@dataclass
class Heard:
    """What the sink was told."""

    tokens: dict[int, list[Tokens]] = field(default_factory=lambda: defaultdict(list))
    done: dict[int, Done] = field(default_factory=dict)
    rows: dict[int, list[RequestRow]] = field(default_factory=lambda: defaultdict(list))
    steps: list[StepRow] = field(default_factory=list)
    applies: list[ApplyEvent] = field(default_factory=list)
    states: list[EngineState] = field(default_factory=list)
    views: list[BlockView] = field(default_factory=list)
    preemptions: list[Preempted] = field(default_factory=list)

    def sink(self, events: list[Event]) -> None:
        for event in events:
            _check_wire(event)
            match event:
                case Tokens():
                    assert event.rid not in self.done, "tokens after the end"
                    self.tokens[event.rid].append(event)
                case Done():
                    assert event.rid not in self.done, "a second end"
                    self.done[event.rid] = event
                case RequestRow():
                    self.rows[event.rid].append(event)
                case StepRow():
                    self.steps.append(event)
                case Preempted():
                    self.preemptions.append(event)
                case ApplyEvent():
                    self.applies.append(event)
                case EngineState():
                    self.states.append(event)
                case _:
                    self.views.append(event)


def _check_wire(event: Event) -> None:
    """That a client can read it: every figure is within its bounds, and nothing is lost on the way."""
    if isinstance(event, Tokens | Done):
        assert codec.decode_reply([codec.encode(event)]) == event
    elif not isinstance(event, BlockView):
        message: Any = event
        if isinstance(event, StepRow):
            message = StepRows(rows=[event])
        elif isinstance(event, RequestRow):
            message = RequestRows(rows=[event])
        assert codec.unpack_telemetry(codec.pack_telemetry(1, message))[2] == message


class Engine:
    """A core over a small pool, with the ledger checked after every step."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        pool_tokens: int = 1024,
        clock_ns: Callable[[], int] | None = None,
        max_model_len: int | None = None,
        stall_after_s: float = 3.0,
        drafter: Drafter | None = None,
        draft_model: Path | None = None,
        **knobs: KnobValue,
    ) -> None:
        """``drafter`` takes the place of the one that ``speculation=ngram`` makes."""
        self.heard = Heard()
        self.loaded = loaded
        config = EngineConfig(
            model=Path(loaded.info.path),
            draft_model=draft_model,
            kv_pool_bytes=pool_tokens * loaded.spec.kv_bytes_per_token(loaded.weights["embed"].dtype),
            max_model_len=max_model_len,
            check=True,
            stall_after_s=stall_after_s,
            knobs=knobs,
        )
        context = KnobContext(
            attention=available(loaded.spec, CPU, loaded.weights["embed"].dtype)[0],
            draft_model="" if draft_model is None else str(draft_model),
            reasons=cannot_run(loaded),
        )
        clock: dict[str, Any] = {} if clock_ns is None else {"clock_ns": clock_ns}
        self.core = EngineCore(loaded, config, KnobStore(context, knobs), self.heard.sink, **clock)
        if drafter is not None:
            speculator, values = self.core.speculator, self.core.knobs.values
            speculator.makers["ngram"] = lambda _: drafter
            speculator.configure({**values, "speculation": "off"})
            speculator.configure(values)

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, **options: Any) -> int:
        rid = self.core.new_rid()
        self.core.submit(Request(rid, prompt, sampling or Sampling(max_tokens=8), **options))
        return rid

    def set(self, **patch: KnobValue) -> None:
        self.core.propose(patch, self.core.knobs.rev)

    def run(self, limit: int = 20_000) -> None:
        """Step until nothing is live and no change is on its way."""
        for _ in range(limit):
            if self.core.step():
                continue
            if not self.core.answers.live and self.core.knobs.pending is None:
                return
            time.sleep(1e-4)
        raise AssertionError(f"not finished after {limit} steps")

    def ids(self, rid: int) -> list[int]:
        """Output ids, from the stream or from the end."""
        done = self.heard.done[rid]
        if done.ids is not None:
            return done.ids
        streamed = self.heard.tokens[rid]
        ids: list[int] = []
        for tokens in streamed:
            assert tokens.index == len(ids), "a gap or a repeat in the stream"
            ids += tokens.ids
        return ids

    def logprobs(self, rid: int) -> list[TokenLogprob]:
        """Log-probabilities that a request has got, from the stream or from the end."""
        events = [*self.heard.tokens[rid], self.heard.done[rid]]
        return [each for event in events for each in event.logprobs or []]

    def text(self, rid: int) -> str:
        return "".join(t.text for t in self.heard.tokens[rid]) + self.heard.done[rid].text

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, **options: Any
    ) -> list[list[int]]:
        """All at once; the output ids of each."""
        rids = [self.submit(prompt, sampling, **options) for prompt in prompts]
        self.run()
        return [self.ids(rid) for rid in rids]
