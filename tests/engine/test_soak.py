"""Ten thousand short requests with cancels, flips and preemptions: nothing is lost, kept or starved."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc

from ipc.messages import KnobValue
from tests.engine.core_harness import load, tiny_folder
from tests.engine.soaking import Soak
from tests.engine.speculation.told import Again

REQUESTS = 10_000
TRACED = 1000
WITH_THREADS = 1500
POOL_TOKENS = 256
MAX_OPEN = 128
MAX_BYTES_A_REQUEST = (5 << 20) / 5000
MAX_OBJECTS_A_REQUEST = 0.2


def soak(seed: int, *, real_time: bool = False) -> Soak:
    loaded = load(tiny_folder("llama", num_hidden_layers=1))
    return Soak(loaded, seed, pool_tokens=POOL_TOKENS, real_time=real_time)


def some(load: Soak, requests: int, *, flips: bool = True) -> None:
    """Submit some requests, up to ``requests`` in all, and perhaps cancel and flip."""
    pick = load.random
    if load.counts["submitted"] < requests and load.num_open < MAX_OPEN and pick.random() < 0.5:
        for _ in range(min(pick.choice((1, 2, 4, 8, 24)), requests - load.counts["submitted"])):
            if load.submit() is None:
                break
    if pick.random() < 0.05:
        load.cancel()
    if flips and pick.random() < 0.1:
        load.flip()


def run_until(load: Soak, requests: int, *, flips: bool = True) -> None:
    """Step until so many requests were submitted in all, and have ended."""
    idle = 0
    while load.counts["submitted"] < requests or load.num_open:
        some(load, requests, flips=flips)
        if load.random.random() < 0.1:
            load.preempt()
        load.tick()
        idle = 0 if load.core.step() else idle + 1
        assert idle < 1000, f"{load.num_open} requests are open and nothing is done"
        assert not load.faults, load.faults[:5]


def run_urgent(load: Soak, requests: int) -> None:
    """So many more requests for three places: random flips seldom let one give way to a more urgent one."""
    changes: dict[str, KnobValue] = {"policy": "priority", "priority_ageing_s": 0.5, "max_num_seqs": 3}
    for preemption in ("recompute", "swap"):
        load.core.propose(changes | {"preemption": preemption}, load.core.knobs.rev)
        load.core.step()
        run_until(load, load.counts["submitted"] + requests, flips=False)


def run_drafting(load: Soak, requests: int) -> None:
    """So many more requests with drafts for all: in texts so short, little repeats that could be drafted."""
    makers = load.core.speculator.makers
    usual, makers["ngram"] = makers["ngram"], lambda _: Again()
    changes: dict[str, KnobValue] = {"spec_adaptive": False, "spec_tokens": 2}
    for kind in ("off", "ngram"):
        load.core.propose({**changes, "speculation": kind}, load.core.knobs.rev)
        load.core.step()
    run_until(load, load.counts["submitted"] + requests, flips=False)
    makers["ngram"] = usual
    load.core.propose({"speculation": "off"}, load.core.knobs.rev)
    load.core.step()


def test_ten_thousand_requests() -> None:
    """A08, B05, B07, C01: the ledger holds after every step, each request ends once with its whole text, none
    is overtaken without bound, and nothing is left in memory.

    From half of the requests on, the objects that Python holds are counted, at rest; the bytes are, where it
    is bearable that each allocation takes thrice as long.
    """
    load = soak(1)
    before = set(threading.enumerate())
    run_urgent(load, 500)
    run_drafting(load, 1000)
    run_until(load, REQUESTS // 2)
    load.calm()
    assert load.at_rest() == []
    objects = sys.getallocatedblocks()
    run_until(load, REQUESTS - TRACED)
    load.calm()
    assert load.at_rest() == []
    more = sys.getallocatedblocks() - objects
    assert more < MAX_OBJECTS_A_REQUEST * (REQUESTS / 2 - TRACED), f"{more} objects more"
    tracemalloc.start()
    try:
        run_until(load, REQUESTS)
        load.calm()
        assert load.at_rest() == []
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < MAX_BYTES_A_REQUEST * TRACED, f"{held} bytes more"
    _much_happened(load)
    assert set(threading.enumerate()) == before


def _much_happened(load: Soak) -> None:
    """Each thing that the soak is about took place, so that it can have been seen to go well."""
    counts = load.counts
    assert counts["ended"] == counts["submitted"] == REQUESTS
    assert counts["applied, ok"] >= counts["flips"]
    assert not counts["applied, rolled_back"]
    for knob, values in load.flips.items():
        assert all(counts[f"{knob}={value}"] for value in values), f"{knob} was not given every value"
    for what in ("ended, stop", "ended, length", "ended, cancelled", "refused", "hit tokens"):
        assert counts[what] > 20, f"{what}: {counts[what]}"
    for what in ("host hit tokens", "overlap us", "result cached", "drafted tokens", "accepted tokens"):
        assert counts[what], f"{what}: none"
    for reason, mode in (("blocks", "recompute"), ("blocks", "swap"), ("priority", "recompute"),
                         ("priority", "swap"), ("rebuild", "recompute")):  # fmt: skip
        assert counts[f"preempted for {reason}, {mode}"], f"none was preempted for {reason} by {mode}"


def test_with_the_engines_own_threads() -> None:
    """B07, B10: the same while steps, forward passes and text have threads of their own; all end with it."""
    load = soak(2, real_time=True)
    before = set(threading.enumerate())
    stop = threading.Event()
    thread = threading.Thread(target=load.core.run, args=(stop,), name="step")
    thread.start()
    try:
        deadline = time.monotonic() + 200
        while load.counts["submitted"] < WITH_THREADS or load.num_open:
            some(load, WITH_THREADS)
            time.sleep(0.001)
            assert thread.is_alive()
            assert not load.faults, load.faults[:5]
            assert time.monotonic() < deadline, f"{load.num_open} requests do not end: {load.counts}"
        while (wrong := load.at_rest()) and time.monotonic() < deadline:
            time.sleep(0.05)  # the last end was heard before the threads that told it were through with it
        assert wrong == []
        for _ in range(20):
            load.submit()
    finally:
        stop.set()
        load.core.wake()
        thread.join()
    assert load.num_open == 0, "the engine stopped without ending every request"
    assert load.faults == []
    assert load.counts["ended"] == load.counts["submitted"] >= WITH_THREADS
    assert load.counts["ended, cancelled"]
    assert set(threading.enumerate()) == before
