"""Knobs that allow a larger step than was measured: it is run, over a faked card, before they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.graphs import switch
from engine.memory_profile import LargestStep, MemoryProfile, measure_again, profile
from engine.speculation.model_drafter import ModelDrafter
from engine.speculation.rounds import RoundDrafter
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.fake_card import GIB, FakeCard, card
from tests.engine.graphs.fakes import CAPTURABLE, FakeDriver, StaticAttention
from tests.engine.test_memory_profile import PROMPT, engine, values, watched

__all__ = ["card", "engine"]


def on_a_card(engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An engine whose largest step was measured at start, and the batches that are computed from then on."""
    core = engine.core
    core.memory_profile = profile(core.runner, core.knobs.values, 0.9)
    layout = core.layout
    core.runner.allocate_kv(layout.num_blocks, layout.block_size, layout.kv_dtype)
    return watched(engine, card, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_batched_tokens": 128},
        {"max_num_seqs": 16},
        {"speculation": "ngram"},
        {"attention": "naive"},
        {"kv_dtype": "int8"},
    ],
)
def test_a_change_that_allows_a_larger_step_has_it_run(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    batches = on_a_card(engine, card, monkeypatch)
    core, before = engine.core, engine.core.knobs.values
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    expected = Engine(load(tiny_folder("llama")), **change).generate([PROMPT], sampling)
    rid = engine.submit(PROMPT, sampling)
    core.step()
    batches.clear()
    engine.set(**change)
    engine.run()
    wanted = LargestStep.of(core.knobs.values, core.runner.attention_name)
    assert [len(each.ids) for each in batches[:1]] == [wanted.tokens]
    assert [len(each.rows.num_new) for each in batches[:3]] == [wanted.rows] * 3
    assert core.memory_profile is not None
    assert core.memory_profile.step == core.drafts.kept_bytes == 3 * GIB
    assert engine.ids(rid) == expected[0], "who was running computes again"
    for again in ({knob: before[knob] for knob in change}, change):
        batches.clear()
        engine.set(**again)
        engine.run()
        assert not batches, "what was measured once is not again"


@pytest.mark.parametrize("before", ["off", "ngram"])
def test_a_draft_model_that_comes_is_measured(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A12: what it takes, and the probabilities of its drafts, are no part of what was measured without it.

    Who was running gets the text of an engine of its own.
    """
    made = Engine(
        load(tiny_folder("llama")), draft_model=tiny_folder("qwen3"), speculation=before, spec_tokens=3,
        max_num_batched_tokens=96, max_num_seqs=8, spec_sampling="rejection",
    )  # fmt: skip
    made.core.runner.free_kv()
    batches = on_a_card(made, card, monkeypatch)
    rounds: list[int] = []
    forward = RoundDrafter._forward

    def drafting(self: Any, rows: Any) -> Any:
        rounds.append(len(rows))
        card.peak = max(card.peak, card.reserved + 4 * GIB)
        return forward(self, rows)

    monkeypatch.setattr(RoundDrafter, "_forward", drafting)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    expected = Engine(load(tiny_folder("llama"))).generate([PROMPT], sampling)
    rid = made.submit(PROMPT, sampling)
    made.core.step()
    for change, measured in (
        ({"speculation": "draft"}, True),
        ({"speculation": "ngram"}, False),
        ({"speculation": "off"}, False),
        ({"speculation": "draft", "spec_sampling": "coupled"}, False),
    ):
        batches.clear()
        rounds.clear()
        known = made.core.memory_profile
        made.set(**change)
        made.run()
        assert made.heard.applies[-1].result == "ok"
        assert (made.core.memory_profile is known) is not measured
        if measured:
            assert rounds[0] == 8 + 1, "all requests, and one that is caught up with"
            largest = [batch for batch in batches if len(batch.drafts) == 8]
            assert len(largest) == 3
            assert all(draft.probs is not None for batch in largest for draft in batch.drafts)
            assert made.core.memory_profile is not None
            assert made.core.memory_profile.step == made.core.drafts.kept_bytes == 4 * GIB
    assert made.ids(rid) == expected[0]


def test_a_draft_model_that_is_measured_again_has_followed_nobody(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds wrote over what it knew of who was running, whose blocks may come to lie where they were."""
    made = Engine(
        load(tiny_folder("llama")), draft_model=tiny_folder("llama"), speculation="draft", spec_tokens=3,
        max_num_batched_tokens=96, max_num_seqs=8, spec_adaptive=False,
    )  # fmt: skip
    core = made.core
    core.speculator.stop()
    core.runner.free_kv()
    on_a_card(made, card, monkeypatch)
    core.speculator.configure(core.knobs.values)
    drafter = core.drafts.drafter
    assert isinstance(drafter, ModelDrafter)
    followed: list[int] = []

    def measuring(*args: Any) -> MemoryProfile:
        found = measure_again(*args)
        followed.append(drafter.num_followed)
        return found

    monkeypatch.setattr("engine.reconfigure.measure_again", measuring)
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    rid = made.submit(PROMPT, sampling)
    while not drafter.num_followed:
        core.step()
    made.set(max_num_seqs=16)
    made.run()
    assert followed == [0]
    assert made.ids(rid) == Engine(load(tiny_folder("llama"))).generate([PROMPT], sampling)[0]


def test_graphs_and_their_counts_outlive_measuring(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring replays nothing; larger shapes are compiled before anybody waits for them."""
    made = FakeDriver()
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    engine = Engine(load(tiny_folder("llama")), max_num_batched_tokens=96, max_num_seqs=8)
    runner = engine.core.runner
    runner.free_kv()
    on_a_card(engine, card, monkeypatch)
    runner._attention, runner.decoder.ops, runner.sampler.fused = StaticAttention(), CAPTURABLE, None
    runner.graphs.switch(True)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    before = engine.generate([PROMPT], sampling)
    use, known = runner.graphs.use(), engine.core.memory_profile
    assert use is not None
    assert use.graphs_n == 1
    assert known is not None
    found = measure_again(runner, values(engine, max_num_seqs=9), known)
    assert len(found.measured) == 2
    assert runner.graphs.use() == use
    captures = made.captures
    assert engine.generate([PROMPT], sampling) == before
    assert made.captures == captures, "it is replayed as before"


@pytest.mark.parametrize(("seqs", "warmed"), [(16, [16]), (4, [])])
def test_more_requests_have_their_shapes_compiled(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch, seqs: int, warmed: list[int]
) -> None:
    on_a_card(engine, card, monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(engine.core.runner, "warm_up", lambda max_rows, told: asked.append(max_rows))
    engine.set(max_num_seqs=seqs)
    engine.run()
    assert engine.heard.applies[-1].result == "ok"
    assert asked == warmed


def test_a_change_whose_step_does_not_fit_is_undone(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_card(engine, card, monkeypatch)
    core, forward = engine.core, engine.core.runner.forward
    known = core.memory_profile

    def scarce(prepared: Any, wanted: Any) -> torch.Tensor:
        if len(prepared.batch.ids) > 96:
            raise torch.OutOfMemoryError("torch says something")
        return forward(prepared, wanted)

    monkeypatch.setattr(core.runner, "forward", scarce)
    engine.set(max_num_batched_tokens=512)
    engine.run()
    [apply] = engine.heard.applies
    assert apply.result == "rolled_back"
    assert "the largest step, 512 tokens of 8 requests, does not fit beside the KV pool: " in apply.why
    assert "50.00 GiB of the card's 80.00 GiB are free" in apply.why
    assert core.memory_profile is known
    assert core.knobs["max_num_batched_tokens"] == 96
    assert engine.generate([PROMPT], Sampling(max_tokens=4, ignore_eos=True))


def test_no_pool_takes_what_steps_need(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_card(engine, card, monkeypatch)
    core, asked = engine.core, list[int]()
    monkeypatch.setattr("engine.reconfigure.check_room", lambda device, now, then, kept: asked.append(kept))
    core.drafts.kept_bytes = 5 * GIB
    engine.set(block_size=4)
    engine.run()
    assert asked == [5 * GIB]
