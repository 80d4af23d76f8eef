"""Steps in flight: what overlaps, and that whatever ends, fails or changes meanwhile leaves nothing wrong."""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.knob_store import PatchRefused
from engine.models.loader import LoadedModel
from engine.runner import CopyFailed, StepOutput
from ipc import codec
from ipc.messages import KnobValue, Sampling
from tests.engine.core_harness import Engine, load, tiny_folder
from tests.engine.oracle import NEW_TOKENS, draft_model, tiny, told

GREEDY = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(tiny_folder("llama"))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 300) for _ in range(length)]


class Faults:
    """Makes chosen computations of an engine go wrong, on whatever thread they run."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad_row: int | None = None  # of the logits of the next forward pass
        self.error: Exception | None = None  # of the next step
        runner = engine.core.runner
        forward, compute = runner.decoder.forward, runner.compute

        def poisoned(*args: Any) -> torch.Tensor:
            logits = forward(*args)
            if self.bad_row is not None and len(logits):
                logits[self.bad_row % len(logits)] = math.nan
                self.bad_row = None
            return logits

        def failing(*args: Any) -> StepOutput:
            error, self.error = self.error, None
            if error is not None:
                raise error
            return compute(*args)

        monkeypatch.setattr(runner.decoder, "forward", poisoned)
        monkeypatch.setattr(runner, "compute", failing)


# --- what overlaps ---------------------------------------------------------------------------------


def test_host_work_is_hidden_and_durations_add_up(model: LoadedModel) -> None:
    """What was hidden is told, no moment is counted twice, and a step's stages fit into it and the hidden."""
    engine = Engine(model, overlap=True)
    begin = time.monotonic_ns()
    engine.generate([prompt(n, 20) for n in range(4)], Sampling(max_tokens=40, ignore_eos=True))
    wall_us = (time.monotonic_ns() - begin) / 1000
    steps = engine.heard.steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.dur_us for step in steps) <= wall_us
    assert sum(step.overlap_us > 0 for step in steps) > len(steps) // 2
    for step in steps:
        assert step.overlap_us <= step.plan_us + step.prepare_us + step.publish_us + 3
        stages = step.plan_us + step.prepare_us + step.copy_us + step.forward_us + step.sample_us
        assert stages <= step.dur_us + step.overlap_us + 5


def test_without_overlap_the_stages_lie_within_their_step(model: LoadedModel) -> None:
    engine = Engine(model)
    engine.generate([prompt(n, 20) for n in range(4)], GREEDY)
    for step in engine.heard.steps:
        assert step.overlap_us == 0
        stages = step.plan_us + step.prepare_us + step.copy_us + step.forward_us + step.sample_us
        assert stages <= step.dur_us + 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_has_what_all_steps_took(model: LoadedModel, overlap: bool) -> None:
    """Its stages are the sums of the steps'; the tokens computed twice have their share of the passes."""
    engine = Engine(model, overlap=overlap, prefix_cache=False)
    rid = engine.submit(prompt(1, 50), Sampling(max_tokens=20, ignore_eos=True))
    for _ in range(8):
        engine.core.step()
    core = engine.core
    core.answers.note_preempted([core.scheduler.preempt(core.scheduler.running[0], core.clock_ns())])
    engine.run()
    row, steps = engine.heard.done[rid].row, engine.heard.steps
    for stage in ("plan_us", "prepare_us", "forward_us", "sample_us", "recompute_us"):
        total = sum(getattr(step, stage) for step in steps)
        if stage != "recompute_us" and overlap:  # the preemption cut it off from the step in flight
            assert 0 < getattr(row, stage) <= total + len(steps)
        else:
            assert getattr(row, stage) == pytest.approx(total, abs=len(steps) + 1)
    assert row.recompute_us > 0
    assert row.recompute_tok == sum(step.recompute_tok for step in steps) == row.lost_tok
    assert row.forward_us > row.recompute_us
    assert row.preempt_reason == "blocks"


def test_a_step_is_staged_while_one_computes(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computation waits until the next step was prepared, which without overlap would wait for ever."""
    engine = Engine(model, overlap=True)
    engine.submit(prompt(1, 20), Sampling(max_tokens=6, ignore_eos=True))
    assert engine.core.step()
    runner, staged = engine.core.runner, threading.Event()
    compute, prepare = runner.compute, runner.prepare

    def waiting(*args: Any) -> StepOutput:
        assert staged.wait(60), "nothing was prepared meanwhile"
        staged.clear()
        return compute(*args)

    def preparing(*args: Any) -> Any:
        prepared = prepare(*args)
        staged.set()
        return prepared

    monkeypatch.setattr(runner, "prepare", preparing)
    assert engine.core.step()  # the second step is in flight: it was prepared before `compute` is replaced
    monkeypatch.setattr(runner, "compute", waiting)
    staged.clear()
    for _ in range(3):
        assert engine.core.step()
    monkeypatch.undo()
    engine.run()
    assert engine.heard.done[1].finish == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_computed_for_a_request_that_has_ended(model: LoadedModel, overlap: bool) -> None:
    """Ends by length, by a stop id and by cancel: as many tokens are computed as are needed, not one more."""
    plain = Engine(model)
    [ids] = plain.generate([prompt(3, 20)], Sampling(max_tokens=20, ignore_eos=True))
    engine = Engine(model, overlap=overlap, prefix_cache=False)
    rids = [
        engine.submit(prompt(1, 10), Sampling(max_tokens=4, ignore_eos=True)),
        engine.submit(prompt(2, 10), Sampling(max_tokens=9, ignore_eos=True)),
        engine.submit(prompt(3, 20), Sampling(max_tokens=20, ignore_eos=True, stop_token_ids=[ids[2]])),
        engine.submit(prompt(4, 10), Sampling(max_tokens=400, ignore_eos=True)),
    ]
    while len(engine.heard.tokens[rids[3]]) < 14:
        engine.core.step()
    engine.core.cancel([rids[3]])
    engine.run()
    assert engine.ids(rids[2]) == ids[:3]
    rows = {rid: engine.heard.done[rid].row for rid in rids}
    assert [rows[rid].output_tok for rid in rids[:3]] == [4, 9, 3]
    for row in rows.values():
        assert row.computed_tok == row.prompt_tok + row.output_tok - 1
    assert sum(step.prefill_tok for step in engine.heard.steps) == 50
    assert sum(step.decode_tok for step in engine.heard.steps) == sum(r.output_tok - 1 for r in rows.values())
    assert all(step.prefill_reqs + step.decode_reqs for step in engine.heard.steps)


def test_a_slot_is_released_when_no_step_uses_it(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted by the plan that is staged, cancelled or ended: the runner hears of it between two steps."""
    engine = Engine(model, overlap=True, pool_tokens=96, block_size=4)
    computing, released = threading.Lock(), []
    runner = engine.core.runner
    compute, release = runner.compute, runner.release

    def locked(*args: Any) -> StepOutput:
        with computing:
            return compute(*args)

    def watched(slot: int) -> None:
        assert computing.acquire(blocking=False), "a slot was released while a step computed"
        computing.release()
        released.append(slot)
        release(slot)

    monkeypatch.setattr(runner, "compute", locked)
    monkeypatch.setattr(runner, "release", watched)
    rids = [engine.submit(prompt(n, 20), Sampling(max_tokens=40, ignore_eos=True)) for n in range(4)]
    for _ in range(12):
        engine.core.step()
    engine.core.cancel(rids[:1])
    engine.run()
    preempted = sum(done.row.preempt_n for done in engine.heard.done.values())
    assert preempted > 0
    assert len(released) == 4 + preempted


# --- what goes wrong in flight -----------------------------------------------------------------------


def test_a_row_that_is_not_finite_takes_no_sharer_with_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25: a request is admitted on blocks of a step still in flight, whose logits then are not finite. It
    must not go on with what was scrubbed there: it computes them itself and gets its own tokens."""
    shared = prompt(5, 64)
    expected = Engine(model).generate([[*shared, 7]], GREEDY)
    engine = Engine(model, overlap=True)
    faults = Faults(engine, monkeypatch)
    first = engine.submit([*shared, 9], GREEDY)
    faults.bad_row = 0
    engine.core.step()  # launched: its full blocks are under their keys already
    second = engine.submit([*shared, 7], GREEDY)
    engine.core.step()
    [event] = engine.heard.preemptions
    assert (event.rid, event.reason, event.mode) == (second, "rebuild", "recompute")
    assert event.lost_tok == 64
    engine.run()
    assert "non-finite" in engine.heard.done[first].message
    assert [engine.ids(second)] == expected
    assert engine.generate([[*shared, 7]], GREEDY) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_its_requests_and_no_others(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    expected = Engine(model).generate([prompt(n, 30) for n in range(3)], GREEDY)
    engine = Engine(model, overlap=overlap, max_num_seqs=2)
    faults = Faults(engine, monkeypatch)
    rids = [engine.submit(prompt(n, 30), GREEDY) for n in range(3)]
    for _ in range(4):
        engine.core.step()
    faults.error = MemoryError("no memory for a step")
    engine.run()
    ends = [engine.heard.done[rid] for rid in rids]
    assert [(done.finish, done.code) for done in ends] == [("error", "oom")] * 2 + [("length", None)]
    assert ends[0].message == "no memory for a step"
    assert engine.ids(rids[2]) == expected[2]
    assert engine.generate([prompt(n, 30) for n in range(3)], GREEDY) == expected
    assert engine.core.scheduler.pool.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_that_fail_are_made_good_by_recompute(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A11: what should have been copied is not relied on; nobody ends, everybody computes again."""
    expected = Engine(model).generate([prompt(n, 30) for n in range(3)], GREEDY)
    engine = Engine(model, overlap=overlap, preemption="swap", swap_space_gib=0.001, kv_host_gib=0.001)
    faults = Faults(engine, monkeypatch)
    rids = [engine.submit(prompt(n, 30), GREEDY) for n in range(3)]
    for _ in range(4):
        engine.core.step()
    faults.error = CopyFailed("the lane broke")
    engine.run()
    assert [engine.ids(rid) for rid in rids] == expected
    assert {(event.reason, event.mode) for event in engine.heard.preemptions} == {("rebuild", "recompute")}
    assert {event.rid for event in engine.heard.preemptions} == set(rids)
    assert engine.core.scheduler.swap_blocks_used == 0


def test_a_fault_of_the_engine_with_a_step_in_flight_ends_everything(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, overlap=True)
    rids = [engine.submit(prompt(n, 10), GREEDY) for n in range(2)]
    engine.core.step()
    assert engine.core.pipeline.in_flight

    def broken(now_ns: int) -> None:
        raise ArithmeticError("the plan is wrong")

    monkeypatch.setattr(engine.core.scheduler, "plan", broken)
    with pytest.raises(ArithmeticError):
        engine.core.step()
    assert not engine.core.pipeline.in_flight
    assert {engine.heard.done[rid].finish for rid in rids} == {"error"}
    assert engine.core.phase == "failed"


def test_a_lost_device_is_raised_from_the_computing_thread(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, overlap=True)
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    Faults(engine, monkeypatch).error = lost
    rid = engine.submit(prompt(1, 10), GREEDY)
    with pytest.raises(torch.AcceleratorError):
        engine.run()
    assert (engine.heard.done[rid].finish, engine.core.phase) == ("error", "failed")


# --- what changes in flight ----------------------------------------------------------------------------


def test_a_change_waits_for_the_step_in_flight(model: LoadedModel) -> None:
    engine = Engine(model, overlap=True, attention="sdpa")
    expected = Engine(model).generate([prompt(1, 30)], GREEDY)
    rid = engine.submit(prompt(1, 30), GREEDY)
    for _ in range(4):
        engine.core.step()
    assert engine.core.pipeline.in_flight
    before = engine.core.step_count
    engine.set(block_size=4, attention="naive")
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.at_step, apply.preempted) == ("ok", before + 1, 1)
    for step in engine.heard.steps:
        assert step.cfg_rev == (step.step > before)
        assert step.attention == ("naive" if step.step > before else "sdpa")
    assert [engine.ids(rid)] == expected


def test_overlap_itself_comes_and_goes_with_its_thread(model: LoadedModel) -> None:
    before = set(threading.enumerate())  # those of engines that nobody holds any more end at any moment

    def threads() -> int:
        return sum(thread.name == "forward" for thread in set(threading.enumerate()) - before)

    engine = Engine(model)
    rid = engine.submit(prompt(1, 30), Sampling(max_tokens=30, ignore_eos=True))
    for overlap in (True, False, True, False):
        engine.set(overlap=overlap)
        for _ in range(3):
            engine.core.step()
        assert engine.core.pipeline.in_flight == overlap
        assert threads() == overlap
    engine.run()
    assert engine.heard.done[rid].finish == "length"


def test_stopping_with_a_step_in_flight_delivers_its_tokens(model: LoadedModel) -> None:
    before = set(threading.enumerate())
    engine = Engine(model, overlap=True)
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
    ends = [engine.heard.done[rid] for rid in rids]
    assert {done.finish for done in ends} == {"cancelled"}
    for rid, done in zip(rids, ends, strict=True):
        assert done.row.output_tok == len(engine.ids(rid)) == done.row.computed_tok - 9
    left = set(threading.enumerate()) - before
    assert not any(each.name in ("forward", "delivery") for each in left if each.is_alive())


def test_an_end_before_the_preemption_takes_no_time_off(model: LoadedModel) -> None:
    """C03: with overlap a plan can displace a request whose last token, computed before, has not landed."""
    engine = Engine(model)
    rid = engine.submit([5, 6, 7], Sampling(max_tokens=8, ignore_eos=True))
    engine.core.step()
    request, now_ns = engine.core.answers.live[rid], time.monotonic_ns()
    engine.core.answers.note_preempted([engine.core.scheduler.preempt(request, now_ns)])
    engine.core.answers.finish(request, "length", now_ns - 69_000)
    engine.run()
    done = engine.heard.done[rid]
    assert (done.row.preempt_n, done.row.preempted_us) == (1, 0)
    assert codec.decode_reply([codec.encode(done)]) == done


@pytest.mark.parametrize("overlap", [False, True])
def test_swap_space_goes_when_nobody_is_in_it(model: LoadedModel, overlap: bool) -> None:
    """Switched off while requests are swapped, it stays until they have come back, and they lose nothing."""
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    prompts = [prompt(n, 40) for n in range(4)]
    expected = Engine(model).generate(prompts, sampling)
    engine = Engine(model, overlap=overlap, pool_tokens=12 * 16, preemption="swap", swap_space_gib=0.001)
    core = engine.core
    space = core.state().swap_bytes
    assert 0.9e6 < space <= 0.001 * (1 << 30)
    rids = [engine.submit(p, sampling) for p in prompts]
    while not core.scheduler.num_swapped:
        core.step()
    engine.set(preemption="recompute")
    while not engine.heard.applies:
        core.step()
    if core.scheduler.num_swapped:
        assert core.state().swap_bytes == space
    engine.run()
    assert [engine.ids(rid) for rid in rids] == expected
    assert sum(done.row.swap_in_tok for done in engine.heard.done.values()) > 0
    assert core.state().swap_bytes == 0
    engine.set(preemption="swap")
    engine.run()
    assert core.state().swap_bytes == space


def test_host_memory_that_is_not_there_is_refused_with_both_numbers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model)
    monkeypatch.setattr("engine.layout.available_bytes", lambda: 1 << 28)
    rid = engine.submit(prompt(1, 30), GREEDY)
    engine.core.step()
    for patch in ({"kv_host_gib": 0.5}, {"preemption": "swap", "swap_space_gib": 0.5}):
        engine.set(**patch)
        engine.core.step()
        apply = engine.heard.applies[-1]
        assert apply.result == "rolled_back"
        assert apply.why == "host memory for KV blocks would take 0.50 GiB, 0.25 GiB can be had"
        state = engine.core.state()
        assert (state.host_kv_bytes, state.swap_bytes) == (0, 0)
    engine.run()
    assert engine.heard.done[rid].row.preempt_n == 0


def test_host_memory_that_fails_to_come_leaves_the_old_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, kv_host_gib=0.001)
    held = engine.core.state().host_kv_bytes
    allocate = engine.core.runner.allocate_host

    def scarce(arena: str, num_blocks: int) -> None:
        if num_blocks > 300:
            raise MemoryError("no host memory")
        allocate(arena, num_blocks)

    monkeypatch.setattr(engine.core.runner, "allocate_host", scarce)
    engine.set(kv_host_gib=0.002, max_num_seqs=3)
    engine.run()
    [apply] = engine.heard.applies
    assert (apply.result, apply.why) == ("rolled_back", "no host memory")
    assert engine.core.knobs["max_num_seqs"] == 64 == engine.core.scheduler.knobs.max_num_seqs
    assert engine.core.state().host_kv_bytes == held > 0
    assert engine.core.layout.prefix_blocks == 174


def test_the_state_tells_of_memory_results_and_work(model: LoadedModel) -> None:
    engine = Engine(model, kv_host_gib=0.001, result_cache=True)
    for _ in range(2):
        engine.generate([prompt(1, 20)], GREEDY)
    engine.set(kv_dtype="int8")
    engine.run()
    state = engine.core.state()
    assert (state.kv_dtype, state.ended, state.result_hits) == ("int8", 2, 1)
    assert (state.prefill_tok, state.decode_tok) == (20, 11)
    assert state.kv_bytes == state.num_blocks * state.block_size * 96
    assert 0 < state.host_kv_bytes <= 0.001 * (1 << 30)
    assert (state.result_n, state.result_bytes > 0) == (1, True)


# --- a batch that waits --------------------------------------------------------------------------------


def test_a_batch_that_waits_is_no_stall(model: LoadedModel) -> None:
    now = [1_000_000_000]
    engine = Engine(
        model, clock_ns=lambda: now[0], stall_after_s=1.0, batching="static", batch_wait_ms=5000.0
    )
    first = engine.submit(prompt(1, 10), GREEDY)
    for _ in range(4):
        engine.core.step()
        now[0] += 1_200_000_000
        assert engine.core.phase == "ready"
    second = engine.submit(prompt(2, 10), GREEDY)
    engine.core.step()
    assert not engine.core.scheduler.running
    now[0] += 300_000_000
    engine.run()
    rows = [engine.heard.done[rid].row for rid in (first, second)]
    assert [row.sched_ns for row in rows] == [now[0]] * 2
    assert {state.phase for state in engine.heard.states} <= {"ready"}


def test_a_loop_that_waits_for_a_batch_sleeps(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, batching="static", batch_wait_ms=300.0)
    plans, plan = [], engine.core.scheduler.plan

    def counted(now_ns: int) -> Any:
        made = plan(now_ns)
        plans.append(len(made.scheduled))
        return made

    monkeypatch.setattr(engine.core.scheduler, "plan", counted)
    stop = threading.Event()
    thread = threading.Thread(target=engine.core.run, args=(stop,))
    thread.start()
    rid = engine.submit(prompt(1, 10), Sampling(max_tokens=1, ignore_eos=True))
    while rid not in engine.heard.done:
        time.sleep(0.005)
    stop.set()
    engine.core.wake()
    thread.join(30)
    row = engine.heard.done[rid].row
    assert row.sched_ns is not None
    assert row.sched_ns - row.arrive_ns >= 300_000_000
    assert plans.index(1) <= 3, "it looked again and again while there was nothing to do"


# --- everything at random ------------------------------------------------------------------------------

STOPPING = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, stop=["a", "e", "t"])
PLAIN = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
RANDOM_FLIPS: list[dict[str, KnobValue]] = [
    {"overlap": True}, {"overlap": False}, {"overlap": True, "preemption": "swap"},
    {"preemption": "swap"}, {"preemption": "recompute"}, {"swap_space_gib": 0.0015},
    {"kv_host_gib": 0.001}, {"kv_host_gib": 0.0}, {"prefix_cache": False}, {"prefix_cache": True},
    {"block_size": 4}, {"block_size": 16}, {"kv_allocation": "contiguous"}, {"kv_allocation": "paged"},
    {"batching": "static", "batch_wait_ms": 1.0}, {"batching": "continuous"}, {"policy": "priority"},
    {"policy": "fcfs"}, {"prefill_chunk_tokens": 5}, {"prefill_chunk_tokens": 512}, {"max_num_seqs": 2},
    {"max_num_seqs": 64}, {"attention": "naive"}, {"attention": "sdpa"}, {"batched_detokenize": True},
    {"batched_detokenize": False}, {"result_cache": True}, {"result_cache": False},
    {"speculation": "ngram", "spec_adaptive": False}, {"speculation": "off"}, {"spec_adaptive": True},
    {"speculation": "draft", "spec_adaptive": False}, {"speculation": "self"}, {"spec_self_dtype": "int4"},
    {"spec_tokens": 1}, {"spec_tokens": 9}, {"forward_timing": True}, {"max_num_batched_tokens": 11},
    {"max_num_batched_tokens": 2048},
]  # fmt: skip


@functools.cache
def stopped_answers() -> list[tuple[list[int], str]]:
    """What the oracle's prompts come to when they end at stop strings."""
    expected = tiny("llama")
    engine = Engine(expected.loaded)
    rids = [engine.submit(p, STOPPING) for p in expected.prompts]
    engine.run()
    return [(engine.ids(rid), engine.text(rid)) for rid in rids]


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("seed", range(8))
def test_anything_may_happen_at_any_time(seed: int, faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A08, A11: requests, cancels, flips, forced preemptions and, in half of the runs, rows that are not
    finite, steps and copies that fail. Each request ends once, with the oracle's ids as far as it came; the
    ledger holds after every step and nothing is left."""
    expected, rng, speculates = tiny("llama"), random.Random(seed), seed // 2 % 2 == 1
    engine = Engine(
        expected.loaded,
        pool_tokens=320,
        overlap=seed % 2 == 0,
        swap_space_gib=0.001,
        drafter=told(expected),
        draft_model=draft_model("llama"),
        speculation="ngram" if speculates else "off",
        spec_adaptive=False,
    )
    core, faults = engine.core, Faults(engine, monkeypatch)
    sent: dict[int, tuple[int, Sampling]] = {}
    cancelled: set[int] = set()

    def submit(which: int, sampling: Sampling) -> None:
        rid = engine.submit(
            expected.prompts[which], sampling, stream=rng.random() < 0.7, priority=rng.randrange(3)
        )
        sent[rid] = which, sampling

    def cancel() -> None:
        if core.answers.live:
            rid = rng.choice(list(core.answers.live))
            cancelled.add(rid)
            core.cancel([rid])

    def flip() -> None:
        if core.knobs.pending is None:
            engine.set(**rng.choice(RANDOM_FLIPS))

    def preempt() -> None:
        if core.scheduler.running:
            victim = rng.choice(core.scheduler.running)
            core.answers.note_preempted([core.scheduler.preempt(victim, core.clock_ns())])

    def break_something() -> None:
        kind = rng.randrange(6)
        if kind == 0:
            faults.error = RuntimeError("a step that fails")
        elif kind == 1:
            faults.error = CopyFailed("copies that fail")
        else:
            faults.bad_row = rng.randrange(8)

    acts: list[tuple[float, Callable[[], None]]] = [
        (0.3, lambda: submit(rng.randrange(5), rng.choice([PLAIN, PLAIN, STOPPING]))), (0.06, cancel),
        (0.25, flip), (0.1, preempt),
        (0.08 if faulty else 0.0, break_something),
    ]  # fmt: skip
    for _ in range(180):
        for chance, act in acts:
            if rng.random() < chance:
                act()
        core.step()
    faults.error = faults.bad_row = None
    engine.run()
    # What chance may have left out all the time: steps that overlap, drafts that hold, ends of both kinds.
    always: dict[str, KnobValue] = {"overlap": True, "result_cache": False, "max_num_batched_tokens": 2048}
    for kind in ("off", "ngram") if speculates else ("off",):
        engine.set(**always, speculation=kind, spec_adaptive=False)
        engine.run()
        for which in range(5):
            submit(which, PLAIN if which % 2 else STOPPING)
        engine.run()

    assert set(engine.heard.done) == set(sent)
    finishes = {done.finish for done in engine.heard.done.values()}
    for rid, (which, sampling) in sent.items():
        done = engine.heard.done[rid]
        want = stopped_answers()[which] if sampling is STOPPING else (expected.ids[which], None)
        ids = engine.ids(rid)
        if done.finish in ("length", "stop"):
            assert ids == want[0]
            assert want[1] is None or engine.text(rid) == want[1]
        else:
            assert done.finish == "error" or rid in cancelled
            assert ids == want[0][: len(ids)]
        assert done.row.output_tok == len(ids)
    assert {"length", "stop"} <= finishes
    assert ("error" in finishes) == faulty
    assert {apply.result for apply in engine.heard.applies} == {"ok"}
    assert any(step.overlap_us for step in engine.heard.steps)
    assert not speculates or any(step.accepted_tok for step in engine.heard.steps)
    assert engine.heard.preemptions
    core.scheduler.check()
    assert core.scheduler.pool.num_used == core.scheduler.swap_blocks_used == 0
    assert not core.pipeline.in_flight
    assert not core.answers.live


def test_a_patch_that_cannot_be_is_refused_at_the_door(model: LoadedModel) -> None:
    engine = Engine(model)
    with pytest.raises(PatchRefused) as refused:
        engine.set(batch_wait_ms=-1.0, preemption="sometimes", swap_space_gib=0.0, kv_dtype="int3")
    assert set(refused.value.keys) == {"batch_wait_ms", "preemption", "swap_space_gib", "kv_dtype"}
