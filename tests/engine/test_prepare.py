"""Steps that are prepared while the one before is computed: nothing of either reaches the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.plan import ScheduledRequest
from engine.request import Request
from engine.runner import ModelRunner, Prepared
from ipc.messages import Sampling
from tests.engine.driving import CPU, Driver, prompt, tiny

COUNT = 12


def overlapped(driver: Driver, requests: list[Request], count: int, chunk: int) -> list[list[int]]:
    """Generate with each step prepared while the one before is held up in the middle of its forward pass."""
    runner = driver.runner
    forward = runner.decoder.forward
    entered, prepared_next = threading.Event(), threading.Event()

    def held_up(*args: Any) -> torch.Tensor:
        entered.set()
        assert prepared_next.wait(60)
        return forward(*args)

    def prepare() -> tuple[list[ScheduledRequest], Prepared] | None:
        rows = []
        for r in requests:
            new = min(chunk, r.num_known - r.num_computed)
            if r.num_known - r.num_prompt < count or r.num_computed < r.num_known - 1:
                rows.append(ScheduledRequest(r, new))
                while len(r.block_table) * driver.block_size < r.num_computed + new:
                    r.block_table.append(driver.free.pop())
        return (rows, runner.prepare(rows)) if rows else None

    runner.decoder.forward = held_up  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as worker:
        staged = prepare()
        while staged is not None:
            rows, step = staged
            step.fill()
            for row in rows:
                row.request.num_computed += row.num_new
                row.request.num_pending = int(row.request.num_computed == row.request.num_known)
            entered.clear()
            prepared_next.clear()
            running = worker.submit(runner.compute, step)
            assert entered.wait(60)
            staged = prepare()
            prepared_next.set()
            for row, ids in zip(rows, running.result().token_ids, strict=True):
                row.request.num_pending = 0
                row.request.token_ids += ids
    runner.decoder.forward = forward  # type: ignore[method-assign]
    return [r.output_ids for r in requests]


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("kv_dtype", ["model", "fp8_e4m3"])
def test_preparing_a_step_while_another_computes_changes_nothing(kv_dtype: str, attention: str) -> None:
    """Newest tokens are put in place late; penalties and shared scratch memory stay those of the step."""
    loaded, _ = tiny("llama")
    samplings = [
        Sampling(),
        Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
        Sampling(temperature=0.8, seed=4, top_k=20),
        Sampling(presence_penalty=1.5),
    ]
    prompts = [prompt(n, seed=9) for n in (3, 120, 40, 75)]

    def driver() -> Driver:
        runner = ModelRunner(
            loaded,
            device=CPU,
            dtype=torch.float32,
            attention=attention,
            measure=False,
            calibration_ids=prompt(100),
        )
        made = Driver(loaded, runner=runner)
        runner.allocate_kv(256, 16, kv_dtype)
        return made

    alone = driver()
    wants = [
        alone.generate(ids, COUNT, sampling=s, chunk=50) for ids, s in zip(prompts, samplings, strict=True)
    ]
    for chunk in (1000, 30):
        together = driver()
        requests = [together.request(ids, s) for ids, s in zip(prompts, samplings, strict=True)]
        assert overlapped(together, requests, COUNT, chunk) == wants


def test_a_step_keeps_what_it_was_launched_with() -> None:
    """A request that loses slot and blocks, or is cut short, while it is computed changes nothing in it."""
    loaded, _ = tiny("llama")
    sampling = Sampling(temperature=1.0, seed=3, repetition_penalty=1.5, frequency_penalty=1.0)
    ids = prompt(20)
    want = Driver(loaded).generate(ids, 6, sampling=sampling)
    driver = Driver(loaded)
    request = driver.request(ids, sampling)
    driver.run([request], 5)
    step = driver.runner.prepare([ScheduledRequest(request, 1)])
    step.fill()
    request.slot, request.block_table = -1, []
    del request.token_ids[-3:]
    assert driver.runner.compute(step).token_ids == [want[5:]]


def test_a_step_that_does_not_belong_is_refused() -> None:
    loaded, _ = tiny("llama")
    driver = Driver(loaded)
    request = driver.request(prompt(20))
    driver.run([request], 1)
    request.num_pending = 1
    row = ScheduledRequest(request, 2)
    step = driver.runner.prepare([row])
    with pytest.raises(RuntimeError, match="was not filled"):
        driver.runner.compute(step)
    with pytest.raises(ValueError, match="request 1 is in the step, but its token 21 never came"):
        step.fill()
    request.token_ids.append(7)
    step.fill()
    driver.runner.allocate_kv(256, 16)
    with pytest.raises(RuntimeError, match="pool was replaced"):
        driver.runner.compute(step)
