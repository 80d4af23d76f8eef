"""How changes of knobs and loads are measured on an engine that fails, against a fake one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ipc import messages as m
from ipc.client import EngineGone
from tests.bench.knob_run import KnobRefused, Outcome
from tests.gpu.check import knobs, server, serving, summary
from tests.gpu.check.context import Context
from tests.gpu.check.knobs import Change, ratio, token_ms
from tests.gpu.check.results import Results
from tests.gpu.check.settings import Load, Settings
from tests.gpu.check.timing import Timer

ON_MS = 4.0
STEPS = 13
FLIP_S = 1.0


def outcome(step_ms: float, requests: int, tokens: int = 1) -> Outcome:
    """A run whose steps bring each request so many tokens; the first is a prompt's."""
    steps: list[Any] = [
        SimpleNamespace(
            step=i, decode_reqs=requests if i else 0, prefill_tok=0 if i else 9, dur_us=1e3 * step_ms,
            forward_us=900 * step_ms, output_tok=tokens * requests, drafted_tok=0, accepted_tok=0,
            attention="paged", kernels="k",
        )
        for i in range(STEPS)
    ]  # fmt: skip
    return Outcome(arm="on", pair=0, wall_s=1.0, answers=[], steps=steps, block_size=16, memory={})


def test_the_time_of_a_token_is_that_of_a_step_by_what_it_brings() -> None:
    """Three parts of the eleven steps that are followed by one alike; the time of a prompt does not count."""
    assert token_ms(outcome(6.0, 4).steps, 4) == pytest.approx([6.0] * 3)
    assert token_ms(outcome(6.0, 4, tokens=3).steps, 4) == pytest.approx([2.0] * 3)
    with pytest.raises(ValueError, match="2 steps had all 4 requests decoding, fewer than 3"):
        token_ms(outcome(6.0, 4).steps[:4], 4)


def test_a_ratio_has_an_interval_and_a_drift_weighs_on_both() -> None:
    """The card was a tenth slower in the second pair of runs; with noise the interval holds the ratio."""
    load = Load(4, 8, 8)
    drifted = ratio(load, (outcome(5.0, 4), outcome(10.0, 4)), (outcome(5.5, 4), outcome(11.0, 4)))
    assert [drifted[key] for key in ("times", "low", "high")] == pytest.approx([2.0] * 3)
    assert drifted["pairs"] == 6
    noisy = ratio(load, (outcome(5.0, 4), outcome(9.0, 4)), (outcome(5.0, 4), outcome(11.0, 4)))
    assert 1.5 < noisy["low"] < noisy["times"] < noisy["high"] < 2.5


class Engine:
    """An engine at the edges of `server.Served`: what it was flipped to, how often it was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts, self.now_s = 0, 0.0
        self.values: dict[str, Any] = {}
        self.fails: dict[Any, Exception] = {}  # by the value of `attention` that it is flipped to
        self.lost = False
        self.flips: list[dict[str, Any]] = []
        self.setup = SimpleNamespace(vocab_size=100)
        self.graphs: m.GraphUse | None = None
        self.runs: dict[str, m.GraphUse] = {}  # what graphs have come to after a load
        self.knobs = {knob: SimpleNamespace(default=False) for knob in server.ALL_ON}

        @contextlib.contextmanager
        def start(model: str, *options: str) -> Iterator[str]:
            assert json.loads((Path(model) / "config.json").read_text())["vocab_size"]
            self.starts, self.lost = self.starts + 1, False
            self.values = {"attention": "auto", "block_size": 64}
            yield "address"

        monkeypatch.setattr(server, "engine", start)
        monkeypatch.setattr(server, "Client", lambda address, silence_s: contextlib.nullcontext(self))
        monkeypatch.setattr(server, "Session", lambda client: self)
        monkeypatch.setattr(knobs, "repeating", lambda session, load: [[1, 2]])
        for module, name in ((knobs, "run_prompts"), (serving, "run_load")):
            monkeypatch.setattr(module, name, self.run)
        monkeypatch.setattr(knobs.time, "perf_counter", lambda: self.now_s)

    @property
    def client(self) -> Engine:
        return self

    def config(self) -> Any:
        return SimpleNamespace(values=dict(self.values))

    def snapshot(self) -> Any:
        return SimpleNamespace(state=SimpleNamespace(graphs=self.graphs))

    def why_not(self, knob: str, value: Any) -> str:
        return "it needs another card" if value == "varlen" else ""

    def flip(self, values: dict[str, Any]) -> None:
        self.now_s += FLIP_S
        self.flips.append(values)
        error = self.fails.get(values.get("attention"))
        if error is not None:
            self.lost = isinstance(error, EngineGone)
            raise error
        self.values |= values

    def cancel_all(self) -> None:
        if self.lost:
            raise EngineGone("it is not there any more")

    def run(self, session: Engine, load: Any, name: Any, *_: Any) -> Outcome:
        self.graphs = self.runs.get(str(name), self.graphs)
        slow = {"sdpa": 2.0, "naive": 3.0}.get(self.values["attention"], 1.0)
        return outcome(ON_MS * slow, Settings("cuda", False, 420.0, None, Path("x")).flip_load.requests)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


@pytest.fixture
def context(tmp_path: Path, engine: Engine) -> Context:
    settings = Settings("cuda", False, 420.0, None, tmp_path / "gpu.json", began_s=0.0)
    identity = {"device": "a card", "tiny": False, "config": settings.config}
    results = Results(settings.out, identity, {"commit": "abc", "changed_files": 0}, keep=False)
    made = Context(settings, results, torch.device("cpu"), Timer(torch.device("cpu"), quick=True))
    made.stage = "knobs"
    return made


def attention(name: str, least_s: float = 6.0, **base: Any) -> Change:
    return Change(f"attention {name}", {"attention": name}, least_s, base)


def test_a_change_that_fails_ends_none_but_itself(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, lost with its engine, or not to be had here: each is named, and the next starts from
    everything on. The base that a change needs is given back after it. What was found is in the file."""
    engine.fails = {"flash_attn": KnobRefused("no room"), "gone": EngineGone("it ended")}
    names = ("sdpa", "flash_attn", "varlen", "gone", "naive")
    changes = (
        *map(attention, names),
        attention("sdpa", block_size=256),
        Change("again", {"attention": "sdpa"}),
    )
    monkeypatch.setattr(knobs, "CHANGES", changes)
    kept: list[dict[str, Any]] = []
    write = context.results.write

    def writing() -> None:
        write()
        kept.append(json.loads(context.settings.out.read_text("utf-8"))["stages"]["knobs"])

    monkeypatch.setattr(context.results, "write", writing)
    found = knobs.run(context)
    assert found["failed"] == {
        "attention flash_attn": "KnobRefused: no room", "attention gone": "EngineGone: it ended"
    }  # fmt: skip
    assert found["not_run"] == {"attention varlen": "it needs another card"}
    assert {name: row["times"] for name, row in found["changes"].items()} == pytest.approx(
        {"attention sdpa": 2.0, "attention naive": 3.0, "again": 2.0}
    )
    assert engine.starts == 2
    assert engine.values["block_size"] == 64
    assert any(flip.get("block_size") == 256 for flip in engine.flips)
    assert [len(each["result"]["changes"]) for each in kept] == [1, 1, 1, 1, 2, 2, 3]
    assert {each["status"] for each in kept} == {"unfinished"}
    assert context.results.of("knobs") is None  # until the stage has ended
    assert "it had not ended" in context.results.why_not("knobs")


def test_an_engine_that_is_lost_again_and_again_is_given_up(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fails = {"gone": EngineGone("it ended")}
    changes = [
        attention("sdpa"),
        *(Change(f"{i}", {"attention": "gone"}) for i in range(3)),
        attention("naive"),
    ]
    monkeypatch.setattr(knobs, "CHANGES", changes)
    found = knobs.run(context)
    assert list(found["changes"]) == ["attention sdpa"]
    assert engine.starts == server.MOST_STARTS
    assert (
        found["failed"]["attention naive"] == f"RuntimeError: the engine was lost {server.MOST_STARTS} times"
    )
    engine.fails = {"paged": KnobRefused("nothing is taken")}
    with pytest.raises(RuntimeError, match=r"no change was measured.*nothing is taken"):
        knobs.run(context)


def test_what_would_not_end_before_the_deadline_is_left_out_by_what_changes_took(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that was guessed at half a second takes two, so the next are taken for four times as long as
    was guessed of them; one that is short enough still comes."""
    monkeypatch.setattr(
        knobs, "CHANGES", (attention("sdpa", 0.5), attention("naive", 20.0), attention("x", 0.1))
    )
    engine.now_s = 420.0 - knobs.LEFT_FOR_OTHERS_S - server.START_S - 5.0
    monkeypatch.setattr(server, "START_S", 10.0)
    found = knobs.run(context)
    assert list(found["changes"]) == ["attention sdpa", "attention x"]
    left, why = found["not_run"]["attention naive"].split(" s were left to the deadline, ")
    assert float(left) == pytest.approx(420.0 - engine.now_s, abs=3 * FLIP_S)
    assert why == "it takes about 80 s, and 45 s are kept for the baselines"


def test_the_table_names_every_change(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.fails = {"flash_attn": KnobRefused("no room")}
    monkeypatch.setattr(knobs, "CHANGES", [attention(name) for name in ("sdpa", "flash_attn", "varlen")])
    context.results.put("knobs", "ok", 1.0, result=knobs.run(context))
    context.results.data["summary"] = summary.rows(context.results)
    table = summary.table(context.results)
    row = next(line for line in table.splitlines() if line.startswith("attention sdpa"))
    assert row.split()[2:] == ["8.000", "2.000", "2.000", "to", "2.000"]
    assert "attention flash_attn: FAILED: KnobRefused: no room" in table
    assert "attention varlen: it needs another card" in table


def test_a_load_that_fails_leaves_the_other_be(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = {"first": {"attention": "gone"}, "second": {}}
    monkeypatch.setattr(serving, "LOADS", loads)
    engine.fails = {"gone": EngineGone("it ended")}
    found = serving.run(context)
    assert found["failed"] == {"first": "EngineGone: it ended"}
    assert list(found["loads"]) == ["second"]
    assert engine.starts == 2
    monkeypatch.setattr(serving, "LOADS", {"first": {"attention": "gone"}})
    with pytest.raises(RuntimeError, match=r"no load could be run.*it ended"):
        serving.run(context)


def test_a_load_says_how_many_steps_were_fed_and_why_others_were_not(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the load alone, not of what came before it; nothing where there are no graphs."""
    monkeypatch.setattr(serving, "LOADS", {"first": {}, "second": {}})
    engine.runs = {
        "warm second": m.GraphUse(ahead_n=5, missed_n={"prefill": 4}, logits_n={"penalties": 1}),
        "second": m.GraphUse(
            ahead_n=5 + STEPS - 1, missed_n={"prefill": 6, "failed": 1}, logits_n={"penalties": 1}
        ),
    }
    found = serving.run(context)["loads"]
    assert found["first"]["graphs"] is None
    assert found["second"]["graphs"] == {
        "fed_share": (STEPS - 1) / STEPS, "missed_n": {"prefill": 2, "failed": 1}, "logits_n": {}
    }  # fmt: skip
