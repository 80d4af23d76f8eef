"""The engine core with a real tiny model: ends, refusals, live changes, stalls, and nothing left behind."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
import tracemalloc
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import reconfigure
from engine.block_pool import LedgerError
from engine.bringup import explain
from engine.config import ConfigError, EngineConfig
from engine.door import RequestRefused
from engine.knob_store import PatchRefused
from engine.lifetime import ExitCode
from engine.models.loader import LoadedModel
from engine.reconfigure import NoWayBack
from engine.request import Request
from ipc.messages import Sampling
from tests.engine.core_harness import Engine, load, tiny_folder

GREEDY = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 300) for _ in range(length)]


# --- ends ----------------------------------------------------------------------------------------


def test_the_limit_of_tokens_ends_with_length(model: LoadedModel) -> None:
    """A40: max_tokens is obeyed to the token and told as length, streamed or not."""
    engine = Engine(model)
    for stream in (True, False):
        rid = engine.submit(prompt(1, 9), Sampling(max_tokens=5, ignore_eos=True), stream=stream)
        engine.run()
        done = engine.heard.done[rid]
        assert (done.finish, len(engine.ids(rid)), done.row.output_tok) == ("length", 5, 5)


def test_streamed_text_equals_the_whole_text(model: LoadedModel) -> None:
    engine = Engine(model)
    streamed, whole = (engine.submit(prompt(2, 20), GREEDY, stream=stream) for stream in (True, False))
    engine.run()
    assert engine.ids(streamed) == engine.ids(whole)
    assert engine.text(streamed) == engine.heard.done[whole].text == model.tokenizer.decode(engine.ids(whole))
    assert engine.heard.tokens[whole] == []


def test_a_stop_string_ends_and_is_cut(model: LoadedModel) -> None:
    engine = Engine(model)
    [rid] = [engine.submit(prompt(2, 20), Sampling(max_tokens=40, ignore_eos=True))]
    engine.run()
    text = engine.text(rid)
    stop = text[9:11]
    again = engine.submit(prompt(2, 20), Sampling(max_tokens=40, ignore_eos=True, stop=[stop]))
    engine.run()
    done = engine.heard.done[again]
    assert (done.finish, done.stop_reason) == ("stop", stop)
    assert engine.text(again) == text[: text.index(stop)]


def test_stops_count_only_after_min_tokens(model: LoadedModel) -> None:
    engine = Engine(model)
    [ids] = engine.generate([prompt(3, 20)], Sampling(max_tokens=20, ignore_eos=True))
    early = ids[2]
    assert ids.index(early) == 2
    stopped = engine.submit(prompt(3, 20), Sampling(max_tokens=20, stop_token_ids=[early], ignore_eos=True))
    later = engine.submit(
        prompt(3, 20), Sampling(max_tokens=20, min_tokens=8, stop_token_ids=[early], ignore_eos=True)
    )
    engine.run()
    assert engine.ids(stopped) == ids[:3]
    assert engine.heard.done[stopped].stop_reason == early
    assert len(engine.ids(later)) >= 8
    assert early not in engine.ids(later)[:8]


def test_eos_ends_unless_ignored(model: LoadedModel) -> None:
    engine = Engine(model)
    [ids] = engine.generate([prompt(3, 20)], GREEDY)
    eos = next(iter(model.eos_token_ids))
    forced = Sampling(max_tokens=12, stop_token_ids=[ids[4]])
    rid = engine.submit(prompt(3, 20), forced)
    engine.run()
    assert engine.ids(rid)[-1] == ids[4]
    assert engine.heard.done[rid].row.finish == "stop"
    assert eos in engine.core.loaded.eos_token_ids


def test_the_context_ends_an_answer_with_length(model: LoadedModel) -> None:
    engine = Engine(model, max_model_len=32)
    rid = engine.submit(prompt(1, 20), Sampling(max_tokens=100, ignore_eos=True))
    engine.run()
    assert (engine.heard.done[rid].finish, len(engine.ids(rid))) == ("length", 12)


def test_cancelling_one_of_two_with_equal_tags(model: LoadedModel) -> None:
    """A35: a tag is only a label; cancelling one request leaves the other its own tokens."""
    engine = Engine(model)
    [alone] = engine.generate([prompt(5, 20)], GREEDY)
    first = engine.submit(prompt(5, 20), GREEDY, tag="id")
    second = engine.submit(prompt(6, 20), GREEDY, tag="id")
    engine.core.step()
    engine.core.step()
    engine.core.cancel([second, second, 999])
    engine.run()
    assert engine.ids(first) == alone
    done = engine.heard.done[second]
    assert (done.finish, done.code) == ("cancelled", "cancelled")
    assert 0 < len(engine.ids(second)) < 12


def test_each_request_ends_once_and_in_its_own_time(model: LoadedModel) -> None:
    """A36: ten streams of different lengths, one cancelled: each ends once, short ones before long ones."""
    engine = Engine(model)
    rids = [engine.submit(prompt(n, 10), Sampling(max_tokens=2 + n, ignore_eos=True)) for n in range(10)]
    engine.core.step()
    engine.core.cancel(rids[8:9])
    engine.run()
    assert sorted(engine.heard.done) == rids
    ends = [engine.heard.done[rid].row.end_ns for rid in rids if rid != rids[8]]
    assert ends == sorted(ends)


def test_non_finite_logits_fail_their_request_alone(model: LoadedModel, monkeypatch: Any) -> None:
    """A25: NaN in one row of three ends that request with an error; others and later ones are untouched."""
    engine = Engine(model)
    prompts = [prompt(n, 20) for n in range(3)]
    expected = engine.generate(prompts, GREEDY)
    engine = Engine(model)
    forward = engine.core.runner.decoder.forward
    for value in (math.nan, math.inf, -math.inf):
        calls = 0

        def poisoned(*args: Any, bad: float = value) -> torch.Tensor:
            nonlocal calls
            logits = forward(*args)
            calls += 1
            if calls == 4:
                logits[1] = bad
            return logits

        monkeypatch.setattr(engine.core.runner.decoder, "forward", poisoned)
        rids = [engine.submit(p, GREEDY) for p in prompts]
        engine.run()
        ends = [engine.heard.done[rid] for rid in rids]
        assert sorted(done.finish for done in ends) == ["error", "length", "length"]
        for rid, done, want in zip(rids, ends, expected, strict=True):
            if done.finish == "error":
                assert "non-finite" in done.message
            else:
                assert engine.ids(rid) == want
    monkeypatch.undo()
    assert engine.generate(prompts, GREEDY) == expected


def test_a_token_that_is_not_finite_costs_nobody_else_who_gets_its_blocks(
    model: LoadedModel, monkeypatch: Any
) -> None:
    """A25: its request is about to be preempted, long before it is asked for logits."""
    knobs: dict[str, Any] = {"prefill_chunk_tokens": 8, "max_num_seqs": 1, "prefix_cache": False}
    engine = Engine(model, pool_tokens=64, policy="priority", **knobs)
    embed = engine.core.runner.decoder.embed.clone()
    embed[3] = math.nan
    monkeypatch.setattr(engine.core.runner.decoder, "embed", embed)
    bad = engine.submit([3, *[5] * 39], GREEDY, priority=5)
    engine.core.step()
    good = engine.submit([7, 8, 9, 10, 11], GREEDY, priority=0)
    engine.run()
    assert (engine.heard.done[bad].finish, engine.heard.done[good].finish) == ("error", "length")
    assert "non-finite" in engine.heard.done[bad].message
    monkeypatch.undo()
    assert engine.generate([[7, 8, 9, 10, 11]], GREEDY) == [engine.ids(good)]


def test_a_failing_step_fails_its_requests_and_no_more(model: LoadedModel, monkeypatch: Any) -> None:
    engine = Engine(model)
    [expected] = engine.generate([prompt(1, 10)], GREEDY)

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.core.runner, "compute", fail)
    rid = engine.submit(prompt(1, 10), GREEDY)
    engine.run()
    monkeypatch.undo()
    assert (engine.heard.done[rid].code, engine.heard.done[rid].message) == ("internal", "device lost")
    assert engine.generate([prompt(1, 10)], GREEDY) == [expected]


def test_a_lost_device_fails_the_engine_and_not_one_step_after_the_other(
    model: LoadedModel, monkeypatch: Any
) -> None:
    """After such an error every use of the device fails: an engine that calls itself ready would lie."""
    engine = Engine(model)

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.core.runner, "compute", lost)
    rid = engine.submit(prompt(1, 10), GREEDY)
    with pytest.raises(torch.AcceleratorError) as caught:
        engine.run()
    assert (engine.heard.done[rid].finish, engine.core.phase) == ("error", "failed")
    assert "illegal memory access" in engine.heard.states[-1].reason
    assert explain(caught.value, running=True)[0] == ExitCode.DEVICE


def test_a_step_that_fails_without_a_text_is_named(model: LoadedModel, monkeypatch: Any) -> None:
    engine = Engine(model)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.core.runner, "compute", fail)
    rid = engine.submit(prompt(1, 10), GREEDY)
    engine.run()
    assert (engine.heard.done[rid].code, engine.heard.done[rid].message) == ("oom", "MemoryError")


def test_a_broken_ledger_ends_everything_and_is_told(model: LoadedModel) -> None:
    engine = Engine(model)
    rid = engine.submit(prompt(1, 10), GREEDY)
    engine.core.step()
    engine.core.scheduler.pool.allocate(1, 9)
    with pytest.raises(LedgerError):
        engine.run()
    assert engine.core.phase == "failed"
    assert engine.heard.done[rid].finish == "error"
    with pytest.raises(RequestRefused, match="failed"):
        engine.submit(prompt(1, 10))


# --- the same answer whatever else runs ------------------------------------------------------------


def test_penalties_keep_the_border_of_prompt_and_output(model: LoadedModel) -> None:
    """A10: after a preemption penalties, counts and logprobs still tell prompt from output."""
    sampling = Sampling(
        max_tokens=30,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=2,
        ignore_eos=True,
    )
    runs = []
    for preempted in (False, True):
        engine = Engine(model)
        rid = engine.submit(prompt(7, 20), sampling)
        while not engine.heard.done:
            engine.core.step()
            running = engine.core.scheduler.running
            if preempted and running and running[0].num_output == 20 and not running[0].preempt_count:
                engine.core.scheduler.preempt(running[0], time.monotonic_ns())
        row = engine.heard.done[rid].row
        assert (row.prompt_tok, row.output_tok, row.preempt_n) == (20, 30, int(preempted))
        logprobs = [t.logprobs[0] for t in engine.heard.tokens[rid] if t.logprobs]
        runs.append((engine.ids(rid), [lp.token for lp in logprobs], [lp.logprob for lp in logprobs]))
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2] == pytest.approx(runs[1][2], abs=1e-4)
    plain = Engine(model).generate([prompt(7, 20)], Sampling(max_tokens=30, ignore_eos=True))
    assert plain[0] != runs[0][0], "the penalties do nothing here"


def test_a_seed_alone_fixes_the_answer(model: LoadedModel) -> None:
    """A13: equal in any batch, at any place in it, and over a preemption."""
    seeded = Sampling(max_tokens=20, temperature=0.8, seed=42, ignore_eos=True)
    mates = [
        [],
        [Sampling(max_tokens=20, temperature=0.8, ignore_eos=True)],
        [Sampling(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True)] * 7,
    ]
    answers = []
    for others in mates:
        for first in (True, False):
            engine = Engine(model)
            batch = [seeded, *others] if first else [*others, seeded]
            rids = [engine.submit(prompt(8, 12), sampling) for sampling in batch]
            engine.run()
            answers.append(engine.ids(rids[0 if first else -1]))
    engine = Engine(model)
    rid = engine.submit(prompt(8, 12), seeded)
    for _ in range(6):
        engine.core.step()
    engine.core.scheduler.preempt(engine.core.scheduler.running[0], time.monotonic_ns())
    engine.run()
    answers.append(engine.ids(rid))
    assert all(answer == answers[0] for answer in answers)
    other = Sampling(max_tokens=20, temperature=0.8, seed=43, ignore_eos=True)
    assert Engine(model).generate([prompt(8, 12)], other) != [answers[0]]


def test_tiny_temperatures_are_greedy(model: LoadedModel) -> None:
    """A26: a temperature so small that 1/T overflows picks the best token."""
    engine = Engine(model)
    samplings = [
        Sampling(max_tokens=12, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 1e-6, 1e-30, 1e-45)
    ]
    answers = [engine.generate([prompt(9, 12)], sampling)[0] for sampling in samplings]
    assert all(answer == answers[0] for answer in answers)


def test_preempted_streams_have_neither_gap_nor_repeat(model: LoadedModel) -> None:
    """A08: twelve blocks for four requests of 40 + 60 tokens: ids and text equal those of a large pool."""
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    prompts = [prompt(n, 40) for n in range(4)]
    large, small = Engine(model), Engine(model, pool_tokens=12 * 16)
    expected = large.generate(prompts, sampling)
    assert small.generate(prompts, sampling) == expected
    assert sum(done.row.preempt_n for done in small.heard.done.values()) >= 2
    for rid in small.heard.done:
        assert small.text(rid) == large.text(rid)


# --- the door ------------------------------------------------------------------------------------


def test_prompts_at_the_limit(model: LoadedModel) -> None:
    """A23: one token of room is enough; beyond it the refusal names both numbers and the engine goes on."""
    engine = Engine(model, max_model_len=128)
    sampling = Sampling(max_tokens=1)
    fits = engine.submit(prompt(1, 127), sampling)
    for length in (128, 129, 10_000):
        with pytest.raises(RequestRefused, match=rf"{length} tokens.*128") as refused:
            engine.submit(prompt(1, length), sampling)
        assert refused.value.code == "too_long"
    engine.run()
    assert engine.heard.done[fits].finish == "length"


@pytest.mark.parametrize(("ids", "sampling", "code"), [
    ([], Sampling(), "invalid"), ([5, 320], Sampling(), "invalid"), ([-1], Sampling(), "invalid"),
    ([5], Sampling(stop_token_ids=[999]), "invalid"), ([5], Sampling(temperature=-1.0), "invalid"),
    ([5], Sampling(temperature=math.nan), "invalid"), ([5], Sampling(temperature=math.inf), "invalid"),
    ([5], Sampling(min_tokens=9, max_tokens=8), "invalid"),
    ([5] * 100, Sampling(max_tokens=200), "too_large"),
])  # fmt: skip
def test_what_can_never_run_is_refused(
    model: LoadedModel, ids: list[int], sampling: Sampling, code: str
) -> None:
    """A26, I08: numbers out of range, unknown ids, empty prompts and what can never fit fail alone."""
    engine = Engine(model, pool_tokens=256)
    with pytest.raises(RequestRefused) as refused:
        engine.submit(ids, sampling)
    assert refused.value.code == code
    assert not engine.core.step()


def test_a_full_queue_asks_to_come_back(model: LoadedModel) -> None:
    engine = Engine(model, max_num_queued=3)
    for n in range(3):
        engine.submit(prompt(n, 5))
    with pytest.raises(RequestRefused) as refused:
        engine.submit(prompt(9, 5))
    assert (refused.value.code, refused.value.retry_after_ms) == ("busy", 1000)
    engine.run()
    engine.submit(prompt(9, 5))


# --- live changes --------------------------------------------------------------------------------


def test_a_patch_is_taken_whole_or_not_at_all(model: LoadedModel) -> None:
    engine = Engine(model)
    before = engine.core.knobs.values
    with pytest.raises(PatchRefused) as refused:
        engine.set(max_num_seqs=4, block_size=0, attention="flash_attn", nonsense=1, chunked_prefill=1)
    assert set(refused.value.keys) == {"block_size", "attention", "nonsense", "chunked_prefill"}
    assert engine.core.knobs.values == before
    with pytest.raises(PatchRefused) as stale:
        engine.core.propose({"max_num_seqs": 4}, 7)
    assert stale.value.code == "conflict"
    engine.set(max_num_seqs=4)
    with pytest.raises(PatchRefused) as second:
        engine.set(max_num_seqs=5)
    assert second.value.code == "busy"
    engine.core.step()
    assert (engine.core.knobs["max_num_seqs"], engine.core.knobs.rev) == (4, 1)


def test_a_dry_run_changes_nothing(model: LoadedModel) -> None:
    engine = Engine(model)
    proposal = engine.core.propose({"block_size": 32, "policy": "fcfs"}, 0, dry_run=True)
    assert (proposal.mode, dict(proposal.changed)) == ("rebuild_kv", {"block_size": 32})
    engine.core.step()
    assert engine.core.knobs.rev == 0
    assert not engine.heard.applies


def test_a_change_that_would_strand_a_request_is_rolled_back(model: LoadedModel) -> None:
    engine = Engine(model, pool_tokens=200, block_size=8)
    rid = engine.submit(prompt(1, 60), Sampling(max_tokens=80, ignore_eos=True))
    engine.core.step()
    engine.set(block_size=128)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, engine.core.knobs.rev) == ("rolled_back", 0)
    assert f"request {rid} would not fit" in apply.why
    assert engine.heard.done[rid].finish == "length"


def test_a_pool_beyond_memory_is_refused_before_anything_is_touched(model: LoadedModel) -> None:
    engine = Engine(model)
    rid = engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()
    engine.set(kv_pool_gib=1024.0, block_size=1024)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.preempted) == ("rolled_back", 0)
    assert apply.why.startswith("the pool would take 1024.00 GiB")
    assert engine.heard.done[rid].row.preempt_n == 0


def test_a_pool_of_more_blocks_than_can_be_shown_is_refused(model: LoadedModel, monkeypatch: Any) -> None:
    """A block map beyond the protocol's bound could be read by no client: neither it nor any snapshot."""
    monkeypatch.setattr("engine.layout.MAX_BLOCKS", 100)
    engine = Engine(model)
    engine.set(block_size=1)
    engine.run()
    [apply] = engine.heard.applies
    assert apply.result == "rolled_back"
    assert "1024 blocks of 1 token, at most 100" in apply.why
    assert engine.core.scheduler.pool.block_size == 16
    with pytest.raises(ValueError, match="larger block_size"):
        Engine(model, block_size=1)


def test_the_pool_grows_and_shrinks_live(model: LoadedModel) -> None:
    engine = Engine(model)
    before = engine.core.scheduler.pool.num_blocks
    engine.set(kv_pool_gib=0.002)
    engine.run()
    assert engine.core.scheduler.pool.num_blocks > before
    assert engine.core.runner.kv is not None
    assert engine.core.runner.kv.num_blocks == engine.core.scheduler.pool.num_blocks
    engine.set(kv_pool_gib=0.0)
    engine.run()
    assert engine.core.scheduler.pool.num_blocks == before


def test_memory_that_is_not_there_rolls_back(model: LoadedModel, monkeypatch: Any) -> None:
    """The old pool comes back, running requests resume by recompute, and the reason is told."""
    engine = Engine(model)
    expected = engine.generate([prompt(1, 30)], GREEDY)
    allocate = engine.core.runner.allocate_kv

    def scarce(num_blocks: int, block_size: int, kv_dtype: str) -> None:
        if block_size == 4:
            raise MemoryError("no memory for the pool")
        allocate(num_blocks, block_size, kv_dtype)

    monkeypatch.setattr(engine.core.runner, "allocate_kv", scarce)
    rid = engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()
    engine.set(block_size=4, max_num_seqs=3)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.why) == ("rolled_back", "no memory for the pool")
    assert engine.core.knobs["max_num_seqs"] == 64 == engine.core.scheduler.knobs.max_num_seqs
    assert engine.core.scheduler.pool.block_size == 16
    assert [engine.ids(rid)] == expected
    assert engine.heard.states[-1].phase == "ready"


def test_an_error_without_a_text_is_still_a_roll_back(model: LoadedModel, monkeypatch: Any) -> None:
    """Python's own MemoryError says nothing, and must not read as success."""
    engine = Engine(model)
    allocate, calls = engine.core.runner.allocate_kv, 0

    def scarce(num_blocks: int, block_size: int, kv_dtype: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError
        allocate(num_blocks, block_size, kv_dtype)

    monkeypatch.setattr(engine.core.runner, "allocate_kv", scarce)
    engine.set(block_size=4)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.why, engine.core.knobs.rev) == ("rolled_back", "MemoryError", 0)


def test_a_roll_back_lays_the_pool_out_as_it_was(monkeypatch: Any) -> None:
    """Runs of neighbouring blocks are kept whole, pages outside every window are not; the pool must know."""
    engine = Engine(load(tiny_folder("mistral", sliding_window=8)), block_size=4, kv_allocation="contiguous")
    allocate = engine.core.runner.allocate_host

    def scarce(arena: Any, num_blocks: int) -> None:
        if num_blocks:
            raise MemoryError("no host memory")
        allocate(arena, num_blocks)

    monkeypatch.setattr(engine.core.runner, "allocate_host", scarce)
    engine.set(kv_allocation="paged", kv_host_gib=0.001)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.why) == ("rolled_back", "no host memory")
    first, again = (engine.generate([prompt(1, 40)], GREEDY) for _ in range(2))  # the ledger is checked
    assert first == again


def test_a_change_with_no_way_back_fails_the_engine(model: LoadedModel, monkeypatch: Any) -> None:
    """An engine that lost its pool must not call itself ready; its requests end and the reason is told."""
    engine = Engine(model)
    rid = engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()

    def none_left(num_blocks: int, block_size: int, kv_dtype: str) -> None:
        raise MemoryError(f"no memory for {num_blocks} blocks")

    monkeypatch.setattr(engine.core.runner, "allocate_kv", none_left)
    engine.set(block_size=4)
    with pytest.raises(NoWayBack, match="no memory for"):
        engine.run()
    assert engine.heard.done[rid].finish == "error"
    assert engine.heard.states[-1].phase == "failed"
    assert "neither be applied nor undone" in engine.heard.states[-1].reason


def test_rows_carry_the_revision_they_ran_under(model: LoadedModel) -> None:
    engine = Engine(model)
    rid = engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()
    engine.set(attention="naive")
    engine.run()
    [apply] = engine.heard.applies
    cut = next(step.step for step in engine.heard.steps if step.cfg_rev == 1)
    assert (apply.from_rev, apply.to_rev, apply.at_step) == (0, 1, cut)
    assert {step.attention for step in engine.heard.steps if step.step >= cut} == {"naive"}
    row = engine.heard.done[rid].row
    assert (row.rev_first, row.rev_last) == (0, 1)


# --- measures ------------------------------------------------------------------------------------


def test_every_request_with_a_token_has_a_first_token_time(model: LoadedModel) -> None:
    """C01: as many first-token times as requests with a token, and their instants are in order."""
    engine = Engine(model, max_num_seqs=8, max_model_len=64)
    rids = [engine.submit(prompt(n, 5), Sampling(max_tokens=2, ignore_eos=True)) for n in range(100)]
    refused = 0
    for _ in range(20):
        with pytest.raises(RequestRefused):
            engine.submit(prompt(1, 70))
        refused += 1
    engine.core.step()
    waiting = [r.rid for r in engine.core.scheduler.waiting][:30]
    engine.core.cancel(waiting)
    engine.run()
    rows = [engine.heard.done[rid].row for rid in rids]
    assert sum(row.first_ns is not None for row in rows) == 70 == sum(row.output_tok > 0 for row in rows)
    for row in rows:
        if row.first_ns is not None:
            assert row.sched_ns is not None
            assert row.end_ns is not None
            assert row.arrive_ns <= row.sched_ns <= row.first_ns <= row.end_ns
    assert refused == 20


def test_preemption_leaves_the_first_stamps_alone(model: LoadedModel) -> None:
    """C03: TTFT is what it was at token one; the gap shows between tokens and as preempted time."""
    engine = Engine(model)
    rid = engine.submit(prompt(1, 10), Sampling(max_tokens=20, ignore_eos=True))
    for _ in range(10):
        engine.core.step()
    first = next(row.first_ns for row in engine.heard.rows[rid] if row.first_ns)
    engine.core.scheduler.preempt(engine.core.scheduler.running[0], time.monotonic_ns())
    time.sleep(0.05)
    engine.run()
    row = engine.heard.done[rid].row
    assert row.first_ns == first
    assert row.preempted_us >= 50_000
    assert max(row.itl_us) >= 50_000
    assert len(row.itl_us) == 19


def test_the_wall_clock_is_not_used_for_durations(model: LoadedModel, monkeypatch: Any) -> None:
    """C13: the wall clock jumps back an hour in mid run; no duration notices."""
    engine = Engine(model)
    rid = engine.submit(prompt(1, 10), GREEDY)
    engine.core.step()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    engine.run()
    row = engine.heard.done[rid].row
    assert row.end_ns is not None
    assert 0 < row.end_ns - row.arrive_ns < 600e9
    starts = [step.t_ns for step in engine.heard.steps]
    assert starts == sorted(starts)


def test_applying_is_not_counted_as_planning(model: LoadedModel, monkeypatch: Any) -> None:
    engine = Engine(model)
    engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()
    allocate = engine.core.runner.allocate_kv

    def slow(num_blocks: int, block_size: int, kv_dtype: str) -> None:
        time.sleep(0.2)
        allocate(num_blocks, block_size, kv_dtype)

    monkeypatch.setattr(engine.core.runner, "allocate_kv", slow)
    engine.set(block_size=8)
    engine.run()
    assert engine.heard.applies[0].took_us >= 200_000
    assert all(step.plan_us < 200_000 for step in engine.heard.steps)


def test_step_rows_add_up(model: LoadedModel) -> None:
    """C14: blocks add up to the pool in each row, the last has none in use; tokens add up to the work."""
    engine = Engine(model)
    engine.generate([prompt(n, 30) for n in range(6)], GREEDY)
    pool = engine.core.scheduler.pool
    for step in engine.heard.steps:
        assert step.used_blk + step.cached_blk + step.free_blk == pool.num_blocks
        assert step.used_tok <= step.used_blk * pool.block_size
        assert step.prefill_reqs + step.decode_reqs >= 1
    assert sum(s.prefill_tok for s in engine.heard.steps) == 180
    assert sum(s.decode_tok for s in engine.heard.steps) == 6 * 11
    assert engine.heard.steps[-1].used_blk == 0
    assert engine.heard.views[-1].state.size == pool.num_blocks


def test_running_requests_are_told_of_while_they_run(model: LoadedModel) -> None:
    """Whoever watches sees the tokens of a running request grow, twice a second and not each step."""
    now = [1_000_000_000]
    engine = Engine(model, clock_ns=lambda: now[0])
    rid = engine.submit(prompt(1, 20), Sampling(max_tokens=12, ignore_eos=True))
    while rid not in engine.heard.done:
        engine.core.step()
        now[0] += 100_000_000
    decoding = [row.output_tok for row in engine.heard.rows[rid] if row.state == "decode"]
    assert decoding == sorted(decoding)
    grown = [tokens for tokens in decoding if tokens > 1]
    assert len(grown) >= 2
    assert all(b - a >= 4 for a, b in pairwise(grown))


# --- progress, idleness, bounds --------------------------------------------------------------------


def test_a_stall_is_told_and_its_end_too(model: LoadedModel) -> None:
    """B02: work waits and nothing is done: after a while the phase is stalled with the reason, then ready."""
    now = [1_000_000_000]
    engine = Engine(model, clock_ns=lambda: now[0], stall_after_s=3.0)
    pool = engine.core.scheduler.pool
    lost = pool.allocate(pool.num_blocks, 99)
    rid = engine.submit(prompt(1, 20), GREEDY)
    assert engine.core.step()  # it took the request in
    now[0] += 2_900_000_000
    assert not engine.core.step()
    assert engine.core.phase == "ready"
    now[0] += 200_000_000
    assert not engine.core.step()
    state = engine.heard.states[-1]
    assert (state.phase, state.waiting, state.running) == ("stalled", 1, 0)
    assert f"request {rid} needs 2 blocks; 0 of {pool.num_blocks} are available" in state.reason
    pool.release(lost)
    engine.run()
    assert engine.heard.states[-1].phase == "ready"
    assert engine.heard.done[rid].finish == "length"


def test_neither_a_change_nor_a_rest_ages_the_step_after_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09: a change that takes ten seconds, or a second asleep, is no part of how long the next step runs."""
    now, ages = [1_000_000_000], []
    engine = Engine(model, clock_ns=lambda: now[0])
    core = engine.core
    carry_out, launch = reconfigure.carry_out, core.pipeline.launch

    def slow_change(*args: Any) -> None:
        now[0] += 10_000_000_000
        carry_out(*args)

    def slow_step(*args: Any) -> None:
        now[0] += 300_000_000
        ages.append((core.phase, now[0] - core.last_step_ns))
        launch(*args)

    monkeypatch.setattr(reconfigure, "carry_out", slow_change)
    monkeypatch.setattr(core.pipeline, "launch", slow_step)
    engine.set(block_size=32)
    engine.submit(prompt(1, 20), GREEDY)
    core.step()
    assert [phase for phase, _ in groupby(state.phase for state in engine.heard.states)] == [
        "applying",
        "ready",
    ]
    now[0] += 900_000_000
    core.step()
    assert ages[:1] == [("ready", 300_000_000)]
    assert all(age == 300_000_000 for _, age in ages)


def test_idle_at_start_between_and_at_the_end(model: LoadedModel) -> None:
    """B10: no request yet, none for a while, a stop while idle and a second start are all normal."""
    for _ in range(2):
        engine = Engine(model)
        stop = threading.Event()
        thread = threading.Thread(target=engine.core.run, args=(stop,))
        thread.start()
        for _ in range(2):
            time.sleep(0.05)
            rid = engine.submit(prompt(1, 10), GREEDY)
            while rid not in engine.heard.done:
                time.sleep(0.005)
        stop.set()
        engine.core.wake()
        thread.join(30)
        assert not thread.is_alive()
        assert [done.finish for done in engine.heard.done.values()] == ["length", "length"]


def test_stopping_ends_what_is_live(model: LoadedModel) -> None:
    engine = Engine(model)
    stop = threading.Event()
    rids = [engine.submit(prompt(n, 10), Sampling(max_tokens=400, ignore_eos=True)) for n in range(3)]
    thread = threading.Thread(target=engine.core.run, args=(stop,))
    thread.start()
    while len(engine.heard.tokens) < 3:
        time.sleep(0.005)
    stop.set()
    engine.core.wake()
    thread.join(30)
    assert not thread.is_alive()
    assert {engine.heard.done[rid].finish for rid in rids} == {"cancelled"}


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_at_once_from_several_threads(model: LoadedModel, overlap: bool) -> None:
    """Submits, cancels and flips while the loop runs: each request ends once and with its own tokens, the
    ledger, checked in every step, stays whole, and nothing is left. Every third request has stop strings,
    which are found on the delivery thread while the engine goes on."""
    prompts = [prompt(n % 5, 10 + 7 * (n % 5)) for n in range(5)]
    plain = Sampling(max_tokens=10, ignore_eos=True)
    samplings = [plain, plain, Sampling(max_tokens=10, ignore_eos=True, stop=["a", "e", "t"])]
    expected = [Engine(model).generate(prompts, sampling) for sampling in samplings]
    engine = Engine(model, pool_tokens=320, overlap=overlap, swap_space_gib=0.001)
    core, stop = engine.core, threading.Event()
    submitted: dict[int, tuple[int, int]] = {}
    cancelled: set[int] = set()
    loop = threading.Thread(target=core.run, args=(stop,))
    loop.start()

    def submit(first: int) -> None:
        rng = random.Random(first)
        for n in range(60):
            which = (first + n) % 5
            rid = core.new_rid()
            submitted[rid] = n % 3, which
            core.submit(Request(rid, prompts[which], samplings[n % 3], priority=n % 3, stream=n % 2 == 0))
            if rng.random() < 0.2:
                cancelled.add(rid)
                core.cancel([rid])
            if rng.random() < 0.3:
                time.sleep(0.01)

    def flip() -> None:
        rng = random.Random(7)
        flips: list[dict[str, Any]] = [
            {"block_size": 4}, {"block_size": 16, "prefix_cache": False}, {"kv_allocation": "contiguous"},
            {"prefix_cache": True, "policy": "priority"}, {"kv_allocation": "paged", "attention": "naive"},
            {"attention": "sdpa"}, {"overlap": not overlap}, {"overlap": overlap}, {"preemption": "swap"},
            {"preemption": "recompute"}, {"kv_host_gib": 0.001}, {"batched_detokenize": True},
            {"batching": "static", "prefill_chunk_tokens": 5}, {"batching": "continuous", "policy": "fcfs"},
        ]  # fmt: skip
        for _ in range(25):
            with contextlib.suppress(PatchRefused):
                core.propose(rng.choice(flips), core.knobs.rev)
            time.sleep(0.02)

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(3)] + [threading.Thread(target=flip)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    deadline = time.monotonic() + 60
    while len(engine.heard.done) < len(submitted) and loop.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    core.wake()
    loop.join(30)
    assert core.phase == "stopping", core.state().reason
    assert set(engine.heard.done) == set(submitted)
    for rid, done in engine.heard.done.items():
        sampling, which = submitted[rid]
        want = expected[sampling][which]
        if done.finish == "cancelled":
            assert rid in cancelled
            assert engine.ids(rid) == want[: len(engine.ids(rid))]
        else:
            assert (done.finish in ("length", "stop"), engine.ids(rid)) == (True, want)
    assert {"length", "stop"} <= {done.finish for done in engine.heard.done.values()}
    assert len([a for a in engine.heard.applies if a.result == "ok"]) >= 3
    assert core.scheduler.pool.num_used == 0
    assert not core.answers.live


@pytest.mark.parametrize("overlap", [False, True])
def test_many_short_requests_leave_nothing_behind(overlap: bool) -> None:
    """B07: memory stays flat over thousands of requests, and all that is kept by request is empty at idle."""
    engine = Engine(load(tiny_folder("llama", num_hidden_layers=1)), pool_tokens=512, overlap=overlap)
    core = engine.core

    def burst(count: int) -> None:
        for n in range(count):
            engine.submit([4 + n % 290, 7, 9], Sampling(max_tokens=1, ignore_eos=True), stream=n % 2 == 0)
            if n % 50 == 49:
                engine.run()
                engine.heard.__init__()  # the listener keeps nothing either
                core.answers.delivery._sink = core.answers._sink = engine.heard.sink

    burst(500)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    burst(1500)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 500_000
    assert not core.answers.live
    assert not core.answers.events
    assert not core.scheduler.waiting
    assert not core.scheduler.running
    assert not core.scheduler._in_flight
    assert not core._inbox


@pytest.mark.parametrize("values", [
    {"kv_pool_bytes": 0}, {"gpu_memory_utilization": 1.5}, {"max_model_len": 1}, {"threads": 0},
    {"stall_after_s": 0.0},
])  # fmt: skip
def test_start_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        EngineConfig(model=Path("x"), **values)
