"""The computing thread: results and errors in order, one step at a time, nothing kept, a clean end."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from engine.forward_worker import ForwardWorker, compute
from engine.runner import StepOutput


def output() -> StepOutput:
    return StepOutput.of(0)


def forward_threads() -> set[threading.Thread]:
    """Those of other tests may be among them, and end at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "forward"}


def test_steps_are_computed_elsewhere_and_given_back_in_order() -> None:
    worker = ForwardWorker(time.monotonic_ns)
    seen: list[str] = []
    for _ in range(3):
        wanted = output()

        def job(out: StepOutput = wanted) -> StepOutput:
            seen.append(threading.current_thread().name)
            return out

        begin = time.monotonic_ns()
        worker.start(job)
        outcome = worker.outcome()
        assert outcome.out is wanted
        assert begin <= outcome.ended_ns <= time.monotonic_ns()
    assert seen == ["forward"] * 3
    worker.stop()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_error_is_an_outcome_and_the_next_step_is_computed(elsewhere: bool) -> None:
    worker = ForwardWorker(time.monotonic_ns)

    def fail() -> StepOutput:
        raise MemoryError("no memory")

    def outcome_of(job: object) -> object:
        if not elsewhere:
            return compute(job, time.monotonic_ns)  # type: ignore[arg-type]
        worker.start(job)  # type: ignore[arg-type]
        return worker.outcome()

    failed = outcome_of(fail)
    assert failed.out is None  # type: ignore[attr-defined]
    assert str(failed.error) == "no memory"  # type: ignore[attr-defined]
    assert outcome_of(output).error is None  # type: ignore[attr-defined]
    worker.stop()


def test_the_caller_goes_on_while_a_step_is_computed() -> None:
    worker, gate = ForwardWorker(time.monotonic_ns), threading.Event()

    def wait() -> StepOutput:
        gate.wait()
        return output()

    worker.start(wait)
    with pytest.raises(RuntimeError, match="take its outcome first"):
        worker.start(output)
    opened = time.monotonic_ns()
    gate.set()
    assert worker.outcome().ended_ns >= opened
    worker.stop()


def test_the_thread_ends_when_stopped_and_comes_back() -> None:
    before = forward_threads()
    worker = ForwardWorker(time.monotonic_ns)
    worker.stop()  # never began
    assert not forward_threads() - before
    for _ in range(2):
        worker.start(output)
        worker.outcome()
        assert len(forward_threads() - before) == 1
        worker.stop()
        assert not forward_threads() - before


def test_starting_again_and_again_leaves_nothing_behind() -> None:
    """B07: overlap can be switched as often as anybody likes."""
    worker = ForwardWorker(time.monotonic_ns)
    before = weakref.getweakrefcount(worker)
    for _ in range(5):
        worker.start(output)
        worker.outcome()
        worker.stop()
    assert weakref.getweakrefcount(worker) == before


def test_nothing_of_a_step_and_no_thread_outlives_a_forgotten_worker() -> None:
    before = forward_threads()
    worker = ForwardWorker(time.monotonic_ns)

    class Model:
        def __call__(self) -> StepOutput:
            return output()

    model = Model()
    held = weakref.ref(model)
    worker.start(model)
    worker.outcome()
    del model
    [thread] = forward_threads() - before
    while held() is not None:  # the thread is on its way to wait for the next one
        gc.collect()
        time.sleep(0.001)
    del worker
    gc.collect()
    thread.join(30)
    assert not forward_threads() - before
