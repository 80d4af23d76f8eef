"""The pool of threads: every chunk once, from several callers at once, whether its workers sleep or not."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter

import pytest

from engine.native import forward_pass, kernels, unavailable
from engine.native.build import build

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    assert kernels() is not None, unavailable()
    return ctypes.CDLL(str(build()))


def shared(library: ctypes.CDLL, chunks: int, threads: int) -> Counter[int]:
    """How often each chunk was computed."""
    done: list[int] = []
    work = WORK(lambda _, chunk: done.append(chunk))
    library.share_chunks(ctypes.c_int64(chunks), threads, work, None)
    return Counter(done)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_chunk_is_computed_once(library: ctypes.CDLL, threads: int) -> None:
    for _ in range(20):
        with forward_pass():
            for chunks in (0, 1, 2, 7, 100):
                assert shared(library, chunks, threads) == Counter(range(chunks))
    assert shared(library, 9, threads) == Counter(range(9))


def test_callers_do_not_disturb_each_other(library: ctypes.CDLL) -> None:
    wrong = []

    def call() -> None:
        wrong.extend(n for n in range(200) if shared(library, n % 9, 3) != Counter(range(n % 9)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_workers_sleep_unless_a_pass_is_under_way(library: ctypes.CDLL) -> None:
    """An idle engine takes no time of a CPU, and neither does one that waits within a pass for long."""
    for _ in range(3):
        with forward_pass():
            shared(library, 50, 4)
    before = time.process_time()
    time.sleep(0.3)
    with forward_pass():
        time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_a_process_that_was_forked_has_workers_of_its_own(library: ctypes.CDLL) -> None:
    """Those of its parent are gone with the fork, and so may be whoever held the lock."""
    with forward_pass():
        shared(library, 50, 3)
        child = os.fork()
        if child == 0:
            os._exit(0 if all(shared(library, 50, 3) == Counter(range(50)) for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared(library, 50, 3) == Counter(range(50))
