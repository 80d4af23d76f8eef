"""An engine core under a long random load, judged while it runs.

What is known of a request is forgotten with its end, so that what grows is the engine's. Faults are gathered
and not raised where they are found: some are found on threads of the engine.
"""

from __future__ import annotations

import gc
import random
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.knob import KnobContext
from engine.knob_store import KnobStore, PatchRefused
from engine.knobs import BY_ID
from engine.loop import BlockView, EngineCore, Event, RequestRefused
from engine.models.loader import LoadedModel
from engine.ops.choice import FUSED, SAMPLING
from engine.prefix_cache import Match
from engine.request import Request
from ipc import codec
from ipc.messages import (
    ApplyEvent,
    Done,
    KnobValue,
    Preempted,
    RequestRow,
    RequestRows,
    Sampling,
    StepRow,
    StepRows,
    Tokens,
)
from tests.engine.core_harness import cannot_run

FIRST_RID = 4 << 50  # no time, token or size is as great: a container that holds one is keyed by request
LAST_RID = FIRST_RID + (1 << 32)  # masks of bits are greater
STEP_NS = 10_000_000
LEVELS = 5  # priorities 0 to 4
FLIPS: dict[str, tuple[KnobValue, ...]] = {
    "batching": ("continuous", "continuous", "static"),
    "batch_wait_ms": (0.0, 30.0),
    "max_num_seqs": (3, 16, 32),
    "max_num_batched_tokens": (24, 128, 512),
    "chunked_prefill": (True, False),
    "prefill_chunk_tokens": (8, 64),
    "policy": ("fcfs", "priority"),
    "priority_ageing_s": (0.05, 0.5),
    "max_num_queued": (30, 4096, 4096),
    "preemption": ("recompute", "swap", "swap"),
    "swap_space_gib": (0.001, 0.002),
    "overlap": (False, True),
    "prefix_cache": (True, True, False),
    "block_size": (1, 4, 16),
    "kv_allocation": ("paged", "paged", "contiguous"),
    "kv_dtype": ("model", "int8", "fp8_e4m3"),
    "kv_host_gib": (0.0, 0.001),
    "sliding_window": (0, 12),
    "attention": ("naive", "sdpa", "auto"),
    "speculation": ("off", "ngram", "ngram"),
    "spec_tokens": (2, 16),
    "spec_adaptive": (True, False),
    "batched_tokenize": (False, True),
    "batched_detokenize": (False, True),
    "result_cache": (False, True),
    "forward_timing": (False, True),
    **dict.fromkeys((*FUSED, SAMPLING, "cuda_graphs"), (False, True)),
}
MAX_AGEING_S = 0.5
FIRST_VALUES: dict[str, KnobValue] = {
    "swap_space_gib": 0.001,  # 1 GiB of tiny blocks is four million to check
    "priority_ageing_s": MAX_AGEING_S,  # the default's window would be four times as long
}
# Who came so many steps later is behind in the order for good, whatever the priorities; the rest is for
# swaps.
WINDOW = round((LEVELS - 1) * MAX_AGEING_S * 1e9 / STEP_NS) + 100
MAX_PASSED = 20  # steps in a row in which a request is passed over for its prefix; four are seen
MAX_QUIET = 50  # steps without a token or an end while requests are open; four are seen
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<"  # begins of tokens, or the whole of them


@dataclass(slots=True)
class Case:
    """A request that has not ended."""

    sampling: Sampling
    streamed: bool
    arrived_step: int
    ahead: int
    started: bool = False
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Soak:
    """Submits, cancels and flips at random, and holds what comes out to what was promised."""

    def __init__(self, loaded: LoadedModel, seed: int, *, pool_tokens: int, real_time: bool = False) -> None:
        self.random = random.Random(seed)
        self.loaded = loaded
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.longest_wait = 0.0  # steps a request took, by the bound that it has
        self.longest_quiet = 0  # steps in which no open request got a token or ended
        self._news_step = 0  # of the last token or end
        self._lock = threading.Lock()
        self._open: dict[int, Case] = {}
        self._unstarted: OrderedDict[int, int] = OrderedDict()  # rid -> step it came in
        self._arrived = array("L", [0])  # how many had come before each step
        self._in_order = not real_time  # steps are known, so places in the queue can be judged
        self._now_ns = 0
        self._fresh = count(1)
        per_token = loaded.spec.kv_bytes_per_token(loaded.weights["embed"].dtype)
        self._pools = (0.0, 0.75 * pool_tokens * per_token / (1 << 30))
        config = EngineConfig(
            model=Path(loaded.info.path), kv_pool_bytes=pool_tokens * per_token, check=True, stall_after_s=1e6
        )
        clock: dict[str, Any] = {} if real_time else {"clock_ns": self.clock_ns}
        cannot = cannot_run(loaded)
        knobs = KnobStore(KnobContext(reasons=cannot), FIRST_VALUES)
        self.core = EngineCore(loaded, config, knobs, self.sink, **clock)
        self.core._rids = count(FIRST_RID)
        self._watch_passing()
        self.flips = {knob: values for knob, values in FLIPS.items() if knob not in cannot}
        self.flips["kv_pool_gib"] = self._pools
        self._prefixes = [self._ids(n) for n in (8, 16, 24)]
        self._popular = [self._ids(n) for n in (3, 9)]  # asked for again and again, word for word

    def clock_ns(self) -> int:
        """A clock of its own for the engine: a microsecond for each look, ten milliseconds for each step."""
        self._now_ns += 1000
        return self._now_ns

    @property
    def num_open(self) -> int:
        return len(self._open)

    # --- load ------------------------------------------------------------------------------------

    def _ids(self, length: int) -> list[int]:
        return [self.random.randrange(4, self.loaded.spec.vocab_size) for _ in range(length)]

    def tick(self) -> None:
        """The time of one step goes by; call it between steps.

        Steps that compute and get nowhere are a fault, as where requests make room for each other in turn:
        the engine is not idle then, and how long a request took is only judged when it has ended.
        """
        ageing_s = self.core.knobs["priority_ageing_s"]
        assert isinstance(ageing_s, float)
        assert ageing_s <= MAX_AGEING_S, "the window holds for less"
        self._now_ns += STEP_NS
        self._arrived.append(self._arrived[-1])
        step = len(self._arrived) - 1
        if not self._open:
            self._news_step = step
        self.longest_quiet = max(self.longest_quiet, step - self._news_step)
        if step - self._news_step > MAX_QUIET:
            self.faults.append(f"no token and no end in {step - self._news_step} steps, {self.num_open} wait")

    def submit(self, **changes: Any) -> int | None:
        """A random request of 1 to 6 tokens; None if it was refused because too many wait."""
        pick = self.random
        options: dict[str, Any] = {
            "max_tokens": pick.randint(1, 6),
            "stop": pick.sample(LETTERS, 8) if pick.random() < 0.4 else [],
            "ignore_eos": pick.random() < 0.5,
            "stop_token_ids": [pick.randrange(4, 320)] if pick.random() < 0.1 else [],
        }
        if pick.random() < 0.5:
            options |= {"temperature": 0.8, "seed": pick.randrange(1000) if pick.random() < 0.7 else None}
        sampling = Sampling(**(options | changes))
        if pick.random() < 0.1:
            prompt, sampling = pick.choice(self._popular), Sampling(max_tokens=4)
        else:
            prompt = pick.choice(self._prefixes) if pick.random() < 0.5 else []
            prompt = prompt + self._ids(pick.randint(0 if prompt else 1, 12))
            if pick.random() < 0.3:  # something that drafts are found for
                prompt = prompt + self._ids(pick.randint(1, 3)) * 4
        rid = self.core.new_rid()
        request = Request(
            rid,
            prompt,
            sampling,
            priority=pick.randrange(LEVELS),
            stream=pick.random() < 0.8,
            cache_salt=pick.choice(("", "", "a")),
        )
        step = len(self._arrived) - 1
        with self._lock:
            self._open[rid] = Case(sampling, request.stream, step, len(self._open))
            self._unstarted[rid] = step
        try:
            self.core.submit(request)
        except RequestRefused as refused:
            with self._lock:
                del self._open[rid], self._unstarted[rid]
            if refused.code != "busy":
                raise
            self.counts["refused"] += 1
            return None
        self._arrived[-1] += 1
        self.counts["submitted"] += 1
        return rid

    def cancel(self) -> None:
        """Cancel some open requests, and one that there never was."""
        with self._lock:
            rids = self.random.sample(list(self._open), min(len(self._open), self.random.randint(1, 3)))
        self.core.cancel([*rids, FIRST_RID - next(self._fresh)])

    def preempt(self) -> None:
        """Send one running request back to the queue, as lack of blocks does; call it between steps."""
        core = self.core
        if core.scheduler.running:
            victim = self.random.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, self.clock_ns())])

    def flip(self) -> None:
        """Give one knob another of its values, every other time one that was not given yet."""
        pairs = [(knob, value) for knob, values in self.flips.items() for value in values]
        new = [(knob, value) for knob, value in pairs if not self.counts[f"{knob}={value}"]]
        if new and self.random.random() < 0.5:
            self.set(*self.random.choice(new))
            return
        knob = self.random.choice(list(self.flips))
        self.set(knob, self.random.choice(self.flips[knob]))

    def calm(self) -> None:
        """Give each knob its first value and keep nothing for reuse, so that two looks can be compared."""
        values = {knob: BY_ID[knob].default for knob in self.flips} | FIRST_VALUES | {"prefix_cache": False}
        changes = {knob: value for knob, value in values.items() if self.core.knobs[knob] != value}
        if changes:
            self.core.propose(changes, self.core.knobs.rev)
            self.core.step()

    def set(self, knob: str, value: KnobValue) -> None:
        try:
            self.core.propose({knob: value}, self.core.knobs.rev)
            self.counts["flips"] += 1
            self.counts[f"{knob}={value}"] += 1
        except PatchRefused as refused:  # it has this value, or a change is still being made
            self.counts[f"flips refused: {refused.code}"] += 1

    # --- judgement -------------------------------------------------------------------------------

    def sink(self, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                if why := refused_by_clients(event):
                    self.faults.append(why)
                if isinstance(event, Tokens | Done):
                    self._news_step = len(self._arrived) - 1
                match event:
                    case Tokens():
                        self._tokens(event)
                    case Done():
                        self._done(event)
                    case RequestRow():
                        self._row(event)
                    case Preempted():
                        self.counts[f"preempted for {event.reason}, {event.mode}"] += 1
                    case ApplyEvent():
                        self.counts[f"applied, {event.result}"] += 1
                        if event.result != "ok":
                            self.counts[f"rolled back: {event.why[:40]}"] += 1
                    case StepRow():
                        self.counts["steps"] += 1
                        self.counts["preemptions"] += event.preempted
                        self.counts["hit tokens"] += event.hit_tok
                        self.counts["host hit tokens"] += event.host_hit_tok
                        self.counts["overlap us"] += event.overlap_us
                        self.counts["drafted tokens"] += event.drafted_tok
                        self.counts["accepted tokens"] += event.accepted_tok
                    case _:
                        self.counts["other events"] += 1

    def _tokens(self, event: Tokens) -> None:
        case = self._open.get(event.rid)
        if case is None:
            self.faults.append(f"request {event.rid} has tokens and is not open")
        elif not case.streamed:
            self.faults.append(f"request {event.rid} was not to be streamed")
        elif event.index != len(case.ids) or len(event.ids) != len(event.t_ns):
            self.faults.append(f"request {event.rid}: index {event.index} after {len(case.ids)} ids")
        else:
            case.ids += event.ids
            case.text.append(event.text)

    def _row(self, event: RequestRow) -> None:
        if event.sched_ns is None or event.rid not in self._unstarted:
            return
        self._passed.pop(event.rid, None)
        arrived = self._unstarted.pop(event.rid)
        oldest = next(iter(self._unstarted.values()), arrived)
        if self._in_order and arrived - oldest > WINDOW and not self._is_passed(next(iter(self._unstarted))):
            self.faults.append(f"a request of step {oldest} was overtaken by one of step {arrived}")

    def _watch_passing(self) -> None:
        """Note who is passed over because its prefix is being computed, and since when without a pause.

        Somebody behind may then take the free place. How much later that one came says nothing: both may have
        waited long, for a place that nobody got.
        """
        self._passed: dict[int, tuple[int, int]] = {}  # rid -> first and last step of the latest such time
        is_coming = self.core.scheduler.is_coming

        def watched(request: Request, match: Match) -> bool:
            coming, step = is_coming(request, match), len(self._arrived) - 1
            if coming and request.rid in self._unstarted:
                first, last = self._passed.get(request.rid, (step, step))
                first = first if step - last <= 1 else step
                self._passed[request.rid] = first, step
                if step - first > MAX_PASSED:
                    self.faults.append(f"request {request.rid} was passed over in steps {first} to {step}")
            return coming

        self.core.scheduler.is_coming = watched  # type: ignore[method-assign]

    def _is_passed(self, rid: int) -> bool:
        """Whether a request was passed over for its prefix in this step or the one before."""
        return self._passed.get(rid, (0, -2))[1] >= len(self._arrived) - 2

    def _done(self, event: Done) -> None:
        case = self._open.pop(event.rid, None)
        self._unstarted.pop(event.rid, None)
        self._passed.pop(event.rid, None)
        if case is None:
            self.faults.append(f"request {event.rid} ended a second time")
            return
        self.counts["ended"] += 1
        self.counts[f"ended, {event.finish}"] += 1
        if event.row.result_cached:
            self.counts["result cached"] += 1
        if event.finish == "error":
            self.faults.append(f"request {event.rid} failed: {event.message}")
        ids = case.ids if case.streamed else event.ids
        if ids is None or (case.streamed and event.ids is not None):
            self.faults.append(f"request {event.rid}: ids in the wrong place")
            return
        if len(ids) != event.row.output_tok or len(ids) > case.sampling.max_tokens:
            self.faults.append(f"request {event.rid}: {len(ids)} ids, its row says {event.row.output_tok}")
        if event.finish == "length" and len(ids) != case.sampling.max_tokens:
            self.faults.append(f"request {event.rid} ended by length with {len(ids)} ids")
        if why := self._wrong_text("".join(case.text) + event.text, ids, event):
            self.faults.append(f"request {event.rid}: {why}")
        self._judge_wait(case)

    def _wrong_text(self, text: str, ids: list[int], done: Done) -> str:
        decode = self.loaded.tokenizer.decode
        if isinstance(done.stop_reason, str):
            whole = decode(ids)
            rest = whole[len(text) :]
            good = whole.startswith(text) and rest.startswith(done.stop_reason)
        else:
            whole = decode(ids[:-1] if done.stop_reason is not None else ids)
            good = text == whole
        return "" if good else f"text {text!r} of {whole!r}, ended by {done.finish} {done.stop_reason!r}"

    def _judge_wait(self, case: Case) -> None:
        """A request's steps are bounded by the work of those that may go before it.

        Those are who was there when it came, and who came within the window. Each takes about six steps, and
        three or more of them at once.
        """
        step = len(self._arrived) - 1
        end = min(case.arrived_step + WINDOW, step)
        before = case.ahead + self._arrived[end] - self._arrived[case.arrived_step]
        wait = (step - case.arrived_step) / (100 + 2 * before)
        self.longest_wait = max(self.longest_wait, wait)
        if self._in_order and wait > 1:
            self.faults.append(f"a request took {step - case.arrived_step} steps behind {before} others")

    # --- at rest ---------------------------------------------------------------------------------

    def at_rest(self) -> list[str]:
        """What is not as it should be while nothing is open."""
        core, wrong = self.core, []
        core.scheduler.check()
        pool = core.scheduler.pool
        if core.scheduler.running or core.scheduler.waiting or core.answers.live:
            wrong.append("the engine holds requests that have ended")
        if pool.num_used or pool.used_tokens or pool.num_free + pool.num_cached != pool.num_blocks:
            wrong.append(f"{pool.num_used} blocks are used by nobody")
        gc.collect()
        # Those of other tests may be held by what these left in the process.
        held = [each for each in gc.get_objects() if type(each) is Request and each.rid >= FIRST_RID]
        if held:
            wrong.append(f"{len(held)} requests are still in memory: {held[:3]}")
        wrong += [f"{where} still knows {rid}" for where, rid in keyed_by_request(core)]
        return wrong


def refused_by_clients(event: Event) -> str:
    """Why a client could not read an event, which it would then never learn of; "" if it could."""
    try:
        match event:
            case Tokens() | Done():
                codec.decode_reply([codec.encode(event)])
            case StepRow():
                codec.unpack_telemetry(codec.pack_telemetry(1, StepRows(rows=[event])))
            case RequestRow():
                codec.unpack_telemetry(codec.pack_telemetry(1, RequestRows(rows=[event])))
            case BlockView():
                pass  # it is no message; what is made of it is the block encoder's affair
            case _:
                codec.unpack_telemetry(codec.pack_telemetry(1, event))
    except codec.BadMessage as bad:
        return f"{bad.message}: {event}"
    return ""


def keyed_by_request(root: object) -> Iterator[tuple[str, int]]:
    """Containers reachable from an engine object that hold a request's id, each with one such id."""
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque([("core", root)])
    while todo:
        where, thing = todo.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | tuple | deque | frozenset):
            inside: Iterable[object] = [*thing, *thing.values()] if isinstance(thing, dict) else list(thing)
            for item in inside:
                if type(item) is int and FIRST_RID <= item <= LAST_RID:
                    yield where, item
                    break
            todo += [(where, item) for item in inside if type(item) is not int]
        elif type(thing).__module__.startswith("engine."):
            names = [*getattr(thing, "__dict__", {})]
            for kind in type(thing).__mro__:
                slots = getattr(kind, "__slots__", ())
                names += [slots] if isinstance(slots, str) else list(slots)
            todo += [(f"{where}.{name}", getattr(thing, name)) for name in names if hasattr(thing, name)]
