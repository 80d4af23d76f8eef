"""What else kept the machine busy while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil
import pytest

from app.model.machine import OtherWork, busy_s, used_s


class Clock:
    """Processor time that a test writes."""

    def __init__(self) -> None:
        self.machine = 100.0
        self.own = {1: 50.0, 2: 5.0}

    def used(self, pids: Iterable[int]) -> dict[int, float]:
        return {pid: self.own[pid] for pid in pids if pid in self.own}


def test_the_work_of_others_is_all_but_ours() -> None:
    clock = Clock()
    work = OtherWork(lambda: clock.machine, clock.used)
    work.sample(10.0, [1, 2])
    clock.machine += 4.0
    clock.own[1] += 2.5
    work.sample(10.5, [1, 2])  # too soon
    assert work.stats(0.0, 100.0) == {}
    work.sample(12.0, [1, 2])
    clock.machine += 0.5
    clock.own[1] += 1.0  # the clocks of the two are not one: never less than nothing
    work.sample(13.0, [1, 2])
    stats = work.stats(0.0, 100.0)
    assert stats["other_cores_mean"] == pytest.approx((1.5 / 2 + 0.0) / 2)
    assert stats["other_cores_max"] == pytest.approx(0.75)
    assert stats["machine_cores"] == psutil.cpu_count()
    assert work.stats(12.0, 100.0)["other_cores_max"] == 0.0, "only of the time that was asked for"
    assert work.stats(20.0, 30.0) == {}


def test_a_process_that_came_or_went_is_not_counted_as_ours_at_once() -> None:
    clock = Clock()
    work = OtherWork(lambda: clock.machine, clock.used)
    work.sample(0.0, [1])
    clock.machine += 1.0
    work.sample(1.0, [1, 2, 999])  # what process 2 spent before is not of this second
    assert work.stats(0.0, 2.0)["other_cores_mean"] == pytest.approx(1.0)
    work.forget()
    work.sample(5.0, [1])
    assert len([1 for at, _ in work._cores if at > 1.0]) == 0, "nothing is told of a time nobody watched"


def test_the_machine_and_its_processes_are_read() -> None:
    before, own = busy_s(), used_s([os.getpid(), 2**30])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert set(own) == {os.getpid()}
    assert used_s([os.getpid()])[os.getpid()] - own[os.getpid()] >= 0.02
    assert busy_s() >= before
