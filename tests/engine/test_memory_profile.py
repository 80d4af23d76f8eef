"""What is left of a card for the KV pool: a real step of the largest size, over a faked card."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import memory_profile
from engine.config import EngineConfig
from engine.graphs import driver
from engine.graphs.switch import BUDGET_BYTES
from engine.kernels import availability
from engine.memory_profile import LargestStep, MemoryProfile, profile, size_pool
from engine.speculation.rounds import RoundDrafter
from engine.state import state_of
from ipc.messages import MAX_LOGPROBS
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.fake_card import GIB, FakeCard, card

__all__ = ["card"]

PROMPT = [5, 6, 7, 8, 9]
A_REQUEST = 1000  # bytes that choosing its token takes beside a step


@pytest.fixture
def engine() -> Engine:
    made = Engine(load(tiny_folder("llama")), max_num_batched_tokens=96, max_num_seqs=8, spec_tokens=3)
    made.core.runner.free_kv()
    return made


def values(engine: Engine, **changes: Any) -> dict[str, Any]:
    return {**engine.core.knobs.values, **changes}


def watched(engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that are computed; each takes 3 GiB while it is."""
    batches, forward = [], engine.core.runner.forward

    def forwarding(prepared: Any, wanted: Any) -> torch.Tensor:
        batches.append(prepared.batch)
        card.peak = max(card.peak, card.reserved + 3 * GIB)
        return forward(prepared, wanted)

    monkeypatch.setattr(engine.core.runner, "forward", forwarding)
    return batches


def chooses_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs can be captured, kernels launched, and what choosing tokens by these takes is known."""
    for where in (driver, availability):
        monkeypatch.setattr(where, "probe", lambda device: None)
    monkeypatch.setattr(memory_profile, "choice_bytes", lambda rows, vocab_size: rows * A_REQUEST)


def test_the_largest_step_is_run_and_leaves_nothing(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens, rows of logits and drafts as a step can have, one row at the end of the context; then
    every row at its end, with few tokens each, and with as many as a step has room for.
    """
    batches = watched(engine, card, monkeypatch)
    chooses_on_device(monkeypatch)
    found = profile(engine.core.runner, values(engine, speculation="ngram"), 0.9)
    batch, decoding, pieces = batches
    assert len(batch.ids) == 96
    assert len(batch.rows.num_new) == 8
    assert len(batch.logit_tokens) == 8 * 4
    assert int(batch.rows.lengths.max()) == engine.core.runner.max_len
    assert int(batch.rows.tables.max()) == 0, "one block stands for all"
    assert decoding.rows.num_new.tolist() == [4] * 8
    assert pieces.rows.num_new.tolist() == [12] * 8
    for each in (decoding, pieces):
        assert each.rows.lengths.tolist() == [engine.core.runner.max_len] * 8, "blocks may be shared"
        assert len(each.logit_tokens) == 8 * 4
    chosen = 8 * A_REQUEST
    assert found == MemoryProfile(80 * GIB, 30 * GIB, 3 * GIB + chosen, BUDGET_BYTES)
    assert found.pool_bytes(0.9) == 72 * GIB - 34 * GIB - chosen
    assert all(row.sampling.logprobs == MAX_LOGPROBS for batch in batches for row in batch.sampled_rows)
    assert engine.core.runner.kv is None


@pytest.mark.parametrize("way", ["rejection", "coupled"])
def test_a_draft_model_drafts_for_the_largest_step(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A12: rounds over as many requests as a step can have, each with what a step may have brought, one of
    them at the end of the context, then all, and one that is caught up with there; the drafts are held while
    the step runs, and what they took before counts. The pool that it drafted over is gone after it."""
    folder = tiny_folder("qwen3")
    made = Engine(
        load(tiny_folder("llama")), draft_model=folder, speculation="draft", max_num_batched_tokens=96,
        max_num_seqs=8, spec_tokens=3, spec_sampling=way,
    )  # fmt: skip
    made.core.speculator.stop()
    made.core.runner.free_kv()
    batches = watched(made, card, monkeypatch)
    rounds: list[Any] = []
    forward = RoundDrafter._forward

    def drafting(self: Any, rows: Any) -> Any:
        rounds.append([(row.num_new, row.num_computed) for row in rows])
        card.peak = card.reserved + 4 * GIB
        return forward(self, rows)

    monkeypatch.setattr(RoundDrafter, "_forward", drafting)
    found = profile(made.core.runner, values(made), 0.9, made.core.drafts)
    context = made.core.runner.max_len
    assert len(rounds) == 6
    assert rounds[0][:8] == [(17, context - 3 - 17), *[(17, 0)] * 7]
    assert rounds[3][:8] == [(17, context - 3 - 17)] * 8
    for first in (0, 3):
        assert rounds[first][8:] == [(256, context - 1 - 256)]
        assert [[new for new, _ in each] for each in rounds[first + 1 : first + 3]] == [[1] * 8] * 2
    assert found.step == 4 * GIB
    assert len(batches) == 3
    for batch in batches:
        assert [draft.probs is not None for draft in batch.drafts] == [way == "rejection"] * 8
        assert all(len(draft) == 3 for draft in batch.drafts)
    assert made.core.drafts.kv_bytes == 0
    made.core.speculator.configure({**made.core.knobs.values, "speculation": "off"})


def test_a_draft_model_that_is_not_held_is_not_measured(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Engine(load(tiny_folder("llama")), draft_model=tiny_folder("qwen3"), speculation="ngram")
    made.core.runner.free_kv()
    monkeypatch.setattr(RoundDrafter, "_forward", lambda *_: pytest.fail("nobody drafts"))
    profile(made.core.runner, values(made), 0.9, made.core.drafts)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_without_speculation_no_drafts_are_counted(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    batches = watched(engine, card, monkeypatch)
    found = profile(engine.core.runner, values(engine, kv_dtype=kv_dtype, attention="sdpa"), 0.9)
    assert (len(batches[0].ids), len(batches[0].logit_tokens)) == (96, 8)
    assert found.graphs == 0, "this device captures none"


@pytest.mark.parametrize(
    ("tokens", "seqs", "drafted", "rows"), [(96, 8, 0, 8), (16, 64, 0, 16), (16, 64, 3, 4), (2, 4, 8, 1)]
)
def test_rows_never_ask_for_more_tokens_than_a_step_has(
    tokens: int, seqs: int, drafted: int, rows: int
) -> None:
    knobs: dict[str, Any] = {
        "max_num_batched_tokens": tokens, "max_num_seqs": seqs, "spec_tokens": drafted,
        "speculation": "ngram" if drafted else "off",
    }  # fmt: skip
    step = LargestStep.of(knobs)
    assert step.rows == rows
    made = step.rows_of(16, 4096)
    assert sum(row.num_new + len(row.draft) for row in made) == max(tokens, drafted + 1)
    assert made[0].num_tokens + len(made[0].draft) == 4096


def test_requests_of_a_step_without_drafts_are_counted_whatever_drafts_leave_room_for(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted changes from step to step, and how many tokens are chosen on the device."""
    watched(engine, card, monkeypatch)
    chooses_on_device(monkeypatch)
    few = values(engine, speculation="ngram", spec_tokens=3, max_num_batched_tokens=16, max_num_seqs=16)
    assert (LargestStep.of(few).rows, LargestStep.of(few).undrafted) == (4, 16)
    assert not LargestStep.of({**few, "max_num_seqs": 8}).covers(LargestStep.of(few))
    assert profile(engine.core.runner, few, 0.9).step == 3 * GIB + 16 * A_REQUEST


def test_several_prompts_fill_a_step_that_is_longer_than_a_context() -> None:
    step = LargestStep(tokens=96, rows=8, drafted=2)
    made = step.rows_of(16, 30)
    assert [row.num_new + 2 for row in made] == [30, 30, 21, 3, 3, 3, 3, 3]
    assert [row.num_tokens + 2 for row in made] == [row.num_new + 2 for row in made]


def test_rows_of_one_length_have_one_text() -> None:
    """A text for each of hundreds of rows would take as much of the host as their contexts are long."""
    made = LargestStep(tokens=96, rows=8, drafted=2)._alike([(40, 3)] * 6 + [(20, 3)] * 2, 16, ())
    assert [len(row.token_ids) for row in made] == [38] * 6 + [18] * 2
    assert len({id(row.token_ids) for row in made}) == 2


def test_a_step_that_does_not_fit_is_told_with_what_there_is(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(*_: Any) -> None:
        raise torch.OutOfMemoryError("torch says something")

    monkeypatch.setattr(engine.core.runner, "forward", scarce)
    with pytest.raises(
        MemoryError, match=r"the largest step, 96 tokens of 8 requests, .* 50\.00 GiB of the card's 80\.00"
    ):
        profile(engine.core.runner, values(engine), 0.9)
    assert engine.core.runner.kv is None


@pytest.mark.parametrize("lacks", ["graphs", "kernels"])
def test_where_the_device_cannot_choose_tokens_nothing_is_added_for_it(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    watched(engine, card, monkeypatch)
    chooses_on_device(monkeypatch)
    monkeypatch.setattr(driver, "probe", lambda device: "no" if lacks == "graphs" else None)
    monkeypatch.setattr(availability, "probe", lambda device: "no" if lacks == "kernels" else None)
    assert profile(engine.core.runner, values(engine), 0.9).step == 3 * GIB


def test_nothing_left_for_a_pool_names_every_part() -> None:
    small = MemoryProfile(total=8 * GIB, used=6 * GIB, step=GIB // 2, graphs=GIB)
    with pytest.raises(
        MemoryError, match=r"6\.80 GiB of the card's 8\.00 .*0\.85.* 6\.00 .* 0\.50 .* 1\.00 GiB"
    ):
        small.pool_bytes(0.85)


def test_the_parts_are_told_to_the_console(engine: Engine) -> None:
    core = engine.core
    assert (state_of(core).step_bytes, state_of(core).graph_budget_bytes) == (0, 0)
    core.memory_profile = MemoryProfile(80 * GIB, 30 * GIB, 3 * GIB, GIB)
    assert (state_of(core).step_bytes, state_of(core).graph_budget_bytes) == (3 * GIB, GIB)


def test_a_model_that_is_longer_than_any_pool_is_measured_with_what_a_pool_can_hold(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = watched(engine, card, monkeypatch)
    per_block = engine.core.runner.kv_bytes_per_block(16)
    card.free = card.total // 2 + 10 * per_block + 1
    profile(engine.core.runner, values(engine, max_num_seqs=1, max_num_batched_tokens=32), 0.5)
    assert int(batches[0].rows.lengths.max()) == 160


def test_the_pool_is_what_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that was asked for stands, and the card is measured all the same; a CPU is not measured."""
    measured = MemoryProfile(80 * GIB, 30 * GIB, 3 * GIB, GIB)
    asked: list[float] = []
    monkeypatch.setattr(memory_profile, "host_pool_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(
        memory_profile, "profile", lambda runner, values, share, models: asked.append(share) or measured
    )
    drafts: Any = SimpleNamespace(leave_room=lambda left: left - 2 * GIB)
    card_runner: Any = SimpleNamespace(device=torch.device("cuda", 0))
    host_runner: Any = SimpleNamespace(device=torch.device("cpu"))
    own = EngineConfig(model=Path("m"), gpu_memory_utilization=0.9)
    fixed = EngineConfig(model=Path("m"), kv_pool_bytes=GIB)
    assert size_pool(own, card_runner, drafts, {}) == (measured, 36 * GIB)
    assert size_pool(fixed, card_runner, drafts, {}) == (measured, GIB)
    assert asked == [0.9, 0.85]
    assert size_pool(own, host_runner, drafts, {}) == (None, 2 * GIB)
    assert size_pool(fixed, host_runner, drafts, {}) == (None, GIB)


def test_rows_that_share_nothing_have_the_pool_together(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = watched(engine, card, monkeypatch)
    per_block = engine.core.runner.kv_bytes_per_block(16)
    card.free = card.total // 2 + 10 * per_block + 1
    profile(engine.core.runner, values(engine, prefix_cache=False), 0.5)
    assert batches[1].rows.lengths.tolist() == [160 // 8] * 8
    assert batches[2].rows.num_new.tolist() == [96 // 8] * 8


@pytest.mark.parametrize("key", ["kv_pool_gib", ""])
def test_a_pool_that_leaves_no_room_for_a_step_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By option and by knob alike."""
    measured = MemoryProfile(80 * GIB, 30 * GIB, 3 * GIB, GIB)
    monkeypatch.setattr(memory_profile, "profile", lambda runner, values, share, drafts: measured)
    runner: Any = SimpleNamespace(device=torch.device("cuda", 0))
    drafts: Any = SimpleNamespace(leave_room=lambda left: left)

    def sized(pool_gib: int) -> Any:
        config = EngineConfig(model=Path("m"), kv_pool_bytes=None if key else pool_gib * GIB)
        return size_pool(config, runner, drafts, {key: float(pool_gib)} if key else {})

    sized(47)
    with pytest.raises(
        MemoryError, match=r"a KV pool of 48\.00 GiB .* 30\.00 GiB of the card's 80\.00 .* takes 3\.00 GiB"
    ):
        sized(48)


def test_probabilities_of_drafts_are_counted_for_whoever_draws_them(
    engine: Engine, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's own drafts are made up, for it has no weights for them yet; they are as large."""
    batches = watched(engine, card, monkeypatch)
    drawn = values(engine, speculation="self", spec_sampling="rejection", weight_dtype="bf16")
    profile(engine.core.runner, drawn, 0.9)
    vocab_size = engine.core.runner.spec.vocab_size
    shapes = {draft.probs.shape for batch in batches for draft in batch.drafts if draft.probs is not None}
    assert shapes == {(3, vocab_size)}
    plain = LargestStep.of({**drawn, "spec_sampling": "coupled"})
    assert LargestStep.of(drawn).covers(plain)
    assert not plain.covers(LargestStep.of(drawn))
    assert LargestStep.of(drawn).covers(LargestStep.of({**drawn, "speculation": "ngram"}))
    assert not LargestStep.of(drawn).covers(LargestStep.of({**drawn, "speculation": "draft"}))
