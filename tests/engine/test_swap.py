"""Blocks in host memory: what is copied out comes back whole, in order, and never across a running copy."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kv_cache import KVCache
from engine.kv_scales import KVScales
from engine.plan import Copy, ScheduledRequest, StepPlan
from engine.request import Request
from engine.swap import CopyFailed, HostMemory, InlineLane
from engine.timing import Timer
from tests import tiny_models
from tests.engine.driving import CPU, Driver, prompt, tiny

BLOCKS = 12


def pool(kv_dtype: str = "model") -> KVCache:
    """A small pool of random content."""
    spec = tiny("llama")[0].spec
    ones = torch.ones(spec.num_layers, spec.num_kv_heads)
    kv = KVCache.allocate(
        spec,
        num_blocks=BLOCKS,
        block_size=4,
        dtype=torch.float32,
        device=CPU,
        kv_dtype=kv_dtype,
        scales=KVScales(ones, ones),
    )
    for layer in kv.paged:
        layer.view(torch.uint8).random_()
    return kv


def snapshot(kv: KVCache) -> torch.Tensor:
    """The pool's bytes, [num_blocks, bytes of a block]."""
    return torch.cat([layer.view(torch.uint8) for layer in kv.paged], dim=1)


def run(host: HostMemory, kv: KVCache, *copies: Copy) -> int:
    return host.run(copies, kv, Timer(CPU))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("staged", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("kv_dtype", ["model", "int8", "fp8_e4m3"])
def test_copies_are_made_in_their_order_and_lose_no_byte(kv_dtype: str, staged: bool, check: bool) -> None:
    """Out, in, and out again over the same blocks: each copy sees what the one before left."""
    kv = pool(kv_dtype)
    host = HostMemory(CPU, check=check)
    host._staged = staged
    host.allocate("swap", 6, kv)
    host.allocate("prefix", 3, kv)
    before = snapshot(kv)
    copied = run(
        host,
        kv,
        Copy("swap", "out", [7, 2, 9], [5, 0, 1]),
        Copy("prefix", "out", [3, 4], [2, 0]),
        Copy("swap", "in", [3, 4], [1, 5]),  # over blocks that were just saved
        Copy("swap", "out", [3], [0]),  # over a host block that is in use no more
        Copy("prefix", "in", [7, 2], [0, 2]),
        Copy("swap", "in", [11], [0]),
    )
    assert copied == 11
    want = before.clone()
    want[3], want[4] = before[9], before[7]
    want[7], want[2] = before[4], before[3]
    want[11] = before[9]
    assert torch.equal(snapshot(kv), want)


@pytest.mark.parametrize("staged", [False, True])
def test_a_large_copy_goes_in_pieces(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = pool()
    monkeypatch.setattr("engine.swap.STAGING_BYTES", 3 * kv.bytes_per_block)
    host = HostMemory(CPU, check=True)
    host._staged = staged
    host.allocate("swap", BLOCKS, kv)
    before = snapshot(kv)
    there, back = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
    assert run(host, kv, Copy("swap", "out", there, back), Copy("swap", "in", there, there)) == 2 * BLOCKS
    assert torch.equal(snapshot(kv), before.flip(0))


class _FindsWhoWaits(TorchDispatchMode):
    """Copies between the host and a device of another type, that a card's host would wait for: those to or
    from memory that is not among the ``pinned``, or that are not said to be non-blocking."""

    def __init__(self, pinned: list[Tensor]) -> None:
        super().__init__()
        self._pinned = pinned
        self.crossed = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match func:
            case torch.ops.aten.copy_.default:
                self._look(func, args[0], args[1], bool(kwargs.get("non_blocking", [*args, False][2])))
                return args[0] if args[0].device != args[1].device else func(*args, **kwargs)
            case torch.ops.aten._to_copy.default:
                out = func(*args, **kwargs)
                self._look(func, out, args[0], bool(kwargs.get("non_blocking")))
                return out
        return func(*args, **kwargs)

    def _look(self, func: Any, to: Tensor, of: Tensor, non_blocking: bool) -> None:
        if to.device == of.device:
            return
        self.crossed += 1
        host = to if to.device.type == "cpu" else of
        storages = [each.untyped_storage().data_ptr() for each in self._pinned]
        if not non_blocking or host.untyped_storage().data_ptr() not in storages:
            self.waits.append(f"{func} of {tuple(of.shape)}")


def test_the_host_waits_for_no_copy_that_goes_through_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are begun behind a step that computes: who waits for their stream has waited for that step.

    A tensor without data stands for one on a card.
    """
    card, pinned = torch.device("meta"), []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (pinned.append(self), self)[1])
    kv = KVCache.allocate(
        tiny("llama")[0].spec, num_blocks=BLOCKS, block_size=4, dtype=torch.float32, device=card
    )
    host = HostMemory(card, lane=InlineLane())
    host._staged = True
    host.allocate("swap", 6, kv)
    pinned.append(host._arenas["swap"].rows)  # by itself on a card
    with torch.no_grad(), _FindsWhoWaits(pinned) as found:
        assert run(host, kv, Copy("swap", "out", [7, 2, 9], [5, 0, 1]), Copy("swap", "in", [3], [5])) == 4
    assert found.waits == []
    # Two runs of blocks out, one in, and the numbers of each; a mode hears of none that torch.tensor sends.
    assert found.crossed == 5


def test_a_host_block_that_changed_is_not_copied_in() -> None:
    """A11: the checksum of the copy out is held against the block before the copy in."""
    kv = pool()
    host = HostMemory(CPU, check=True)
    host.allocate("swap", 3, kv)
    run(host, kv, Copy("swap", "out", [1, 2], [0, 1]))
    before = snapshot(kv)
    host._arenas["swap"].rows[1, 0, 0] ^= 1  # one bit
    with pytest.raises(CopyFailed, match=r"host block 1 has the checksum [0-9a-f]{8}, but [0-9a-f]{8} was"):
        run(host, kv, Copy("swap", "in", [5], [1]))
    with pytest.raises(CopyFailed, match=r"host block 2 has the checksum .* nothing was copied out to it"):
        run(host, kv, Copy("swap", "in", [5], [2]))
    assert torch.equal(snapshot(kv), before)
    run(host, kv, Copy("swap", "in", [5], [0]))
    assert torch.equal(snapshot(kv)[5], before[1])


def test_copies_that_cannot_be_are_refused_with_their_numbers() -> None:
    kv = pool()
    host = HostMemory(CPU)
    host.allocate("swap", 3, kv)
    for copy, why in (
        (Copy("swap", "out", [0], [3]), "block 3 is to be copied, the swap arena has 3 blocks"),
        (Copy("swap", "in", [BLOCKS], [0]), f"block {BLOCKS} is to be copied, the pool has {BLOCKS} blocks"),
        (Copy("swap", "out", [-1], [0]), "block -1 is to be copied"),
        (Copy("prefix", "out", [0], [0]), "block 0 is to be copied, the prefix arena has 0 blocks"),
        (Copy("swap", "out", [0, 1], [0]), "2 blocks are to be copied to or from 1 host blocks"),
    ):
        with pytest.raises(CopyFailed, match=why):
            run(host, kv, copy)


def test_arenas_stay_with_a_pool_of_the_same_shape_and_go_with_another() -> None:
    loaded, _ = tiny("llama")
    driver = Driver(loaded, block_size=16)
    runner = driver.runner
    runner.allocate_host("swap", 5)
    assert runner.kv is not None
    assert runner.host_nbytes("swap") == 5 * runner.kv.bytes_per_block
    assert runner.host_nbytes("prefix") == 0
    runner.allocate_kv(40, 16)
    assert runner.host_nbytes("swap") == 5 * runner.kv.bytes_per_block
    runner.allocate_kv(40, 32)
    assert runner.host_nbytes("swap") == 0
    runner.allocate_host("swap", 2)
    runner.allocate_host("swap", 0)
    assert runner.host_nbytes("swap") == 0
    with pytest.raises(MemoryError, match=r"no host memory for 1000000000000 KV blocks \(.* GiB\)"):
        runner.allocate_host("prefix", 10**12)
    runner.free_kv()
    with pytest.raises(RuntimeError, match="no KV pool"):
        runner.allocate_host("swap", 2)


def test_pinned_memory_is_given_back_with_its_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what was pinned, and a console would be told of gigabytes that nobody else can have."""
    given_back: list[int] = []
    monkeypatch.setattr(torch.accelerator.memory, "empty_host_cache", lambda: given_back.append(1))
    small = pool()
    large = KVCache.allocate(
        tiny("llama")[0].spec, num_blocks=2, block_size=64, dtype=torch.float32, device=CPU
    )
    host = HostMemory(CPU)
    host.allocate("swap", 3, small)
    host.allocate("swap", 0, small)
    assert not given_back  # nothing is pinned for a CPU
    host._device = torch.device("cuda")
    host.allocate("swap", 3, small)
    assert not given_back  # nothing is gone
    host.allocate("swap", 2, small)
    assert len(given_back) == 1
    host.keep_fitting(small)
    assert len(given_back) == 1
    host.keep_fitting(large)
    assert len(given_back) == 2


class SlowLane:
    """A thread that takes 50 ms before each copy."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        self._errors: list[Exception] = []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            time.sleep(0.05)
            try:
                with torch.inference_mode():
                    task()
            except Exception as error:
                self._errors.append(error)
            self._tasks.task_done()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    host = submit

    def mark(self) -> None:
        pass

    def fence(self) -> None:
        self._tasks.join()
        if self._errors:
            raise self._errors.pop()


class LateLane:
    """Copies nothing before somebody waits for it: the slowest lane there can be."""

    def __init__(self, fenced: bool) -> None:
        self._tasks: list[Callable[[], None]] = []
        self._fenced = fenced

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)

    host = submit

    def mark(self) -> None:
        pass

    def fence(self) -> None:
        if self._fenced:
            self.finish()

    def finish(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task()


def swapped_and_resumed(driver: Driver, ids: list[int], other: list[int], count: int) -> Iterator[list[int]]:
    """Generate ``count`` ids, swapped out after half of them, while a second request gets the same blocks.

    Yields once when the blocks were given on and computed over, then the ids.
    """
    host_blocks = [4, 0, 3, 1, 2]
    request, thief = driver.request(ids), driver.request(other)
    driver.run([request], count // 2)
    held = request.block_table
    kept = host_blocks[: len(held)]
    request.block_table = []
    thief.block_table = list(held)
    step(driver, thief, len(other), Copy("swap", "out", held, kept))
    yield []
    driver.run([thief], 3)
    request.block_table = [driver.free.pop() for _ in held]
    step(driver, request, 1, Copy("swap", "in", request.block_table, kept))
    driver.run([request], count)
    yield request.output_ids


def step(driver: Driver, request: Request, new: int, copy: Copy) -> None:
    out = driver.runner.execute(StepPlan(scheduled=[ScheduledRequest(request, new)]), [copy])
    assert out.copied_blocks == len(copy.blocks)
    request.num_computed += new
    request.token_ids += out.token_ids[0]


@pytest.mark.parametrize("lane", ["inline", "slow thread", "late", "late, without the fence"])
def test_blocks_are_given_on_only_behind_the_fence(lane: str) -> None:
    """A11: freed and computed over in the very step that copies them out; ids equal the undisturbed run.

    Without the fence they do not, or this test would show nothing.
    """
    loaded, reference = tiny("llama")
    ids, other, count = prompt(60), prompt(64, seed=4), 12
    want = tiny_models.greedy(reference, ids, count)
    driver = Driver(loaded)
    late = LateLane(fenced=lane == "late")
    if lane != "inline":
        host_lane = SlowLane() if lane == "slow thread" else late
        driver.runner._host = HostMemory(CPU, check=True, lane=host_lane)
    driver.runner.allocate_host("swap", 5)
    stages = swapped_and_resumed(driver, ids, other, count)
    next(stages)
    if lane == "late, without the fence":
        late.finish()  # the copy runs after all, once the forward pass has written over its blocks
        late._fenced = True
        assert next(stages) != want
    else:
        assert next(stages) == want


def test_copies_that_were_begun_before_one_failed_are_waited_for_too() -> None:
    """A11: the pool starts over then, and they must not write into blocks that belong to somebody else."""
    kv = pool()
    lane = LateLane(fenced=True)
    host = HostMemory(CPU, lane=lane)
    host.allocate("swap", 2, kv)
    before = snapshot(kv)
    with pytest.raises(CopyFailed, match="the swap arena has 2 blocks"):
        run(
            host,
            kv,
            Copy("swap", "out", [1], [0]),
            Copy("swap", "in", [5], [0]),
            Copy("swap", "in", [6], [2]),
        )
    assert torch.equal(snapshot(kv)[5], before[1])
    for layer in kv.paged:
        layer.zero_()
    lane.fence()
    assert not snapshot(kv).any()


def test_the_time_of_copies_is_told_apart_from_the_forward_pass() -> None:
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    driver.runner._host = HostMemory(CPU, lane=SlowLane())
    driver.runner.allocate_host("swap", 1)
    request = driver.request(prompt(5))
    request.block_table = [0]
    row = ScheduledRequest(request, 5)
    out = driver.runner.execute(StepPlan(scheduled=[row]), [Copy("swap", "out", [1], [0])])
    assert out.copy_s >= 0.05  # of the lane's own making
    assert out.forward_s > 0 < out.sample_s
    assert driver.runner.execute(StepPlan(), [Copy("swap", "in", [1], [0])]).copied_blocks == 1


def test_a_copy_behind_the_forward_pass_takes_no_time_from_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the way to the host may last longer than what is computed meanwhile."""
    loaded, _ = tiny("llama")
    driver = Driver(loaded)

    def run_long(copies: list[Copy], kv: KVCache, timer: Timer) -> int:
        monkeypatch.setattr(timer, "elapsed_s", lambda: 10.0)
        return len(copies)

    monkeypatch.setattr(driver.runner._host, "run", run_long)
    request = driver.request(prompt(5))
    request.block_table = [0]
    step = StepPlan(scheduled=[ScheduledRequest(request, 5)])
    out = driver.runner.execute(step, [Copy("swap", "out", [1], [0])])
    assert (out.copy_s, out.copied_blocks) == (10.0, 1)
    assert 0 < out.sample_s < 10.0
