"""How the check of a card makes steps of decoding, with graphs at the driver's edge only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.graphs import switch
from tests.engine.graphs.fakes import CAPTURABLE, FakeDriver, GreedySampling, StaticAttention
from tests.gpu.check.model import Model, timed_steps
from tests.gpu.check.settings import Settings

STEPS, WARM, CONTEXT = 3, 1, 20


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver(lazy=True)
    monkeypatch.setattr(switch, "probe", lambda device: None)
    monkeypatch.setattr(switch, "make_driver", lambda device: made)
    return made


@pytest.fixture
def model(driver: FakeDriver) -> Iterator[Model]:
    made = Model(Settings("cpu", True, 60.0, None, Path("x")), torch.device("cpu"))
    made.allocate(500, "model")
    yield made
    made.close()


def test_a_step_is_launched_before_the_one_ahead_of_it_is_read(driver: FakeDriver, model: Model) -> None:
    """As the engine does it, so that what the host takes counts only where the device waits for it. The
    tokens are those of steps by themselves."""
    alone = model.rows(2, CONTEXT, 40)
    timed = timed_steps(model, alone, STEPS, WARM)
    assert timed.overlapped_s is None  # the host chooses, so that nothing follows at once
    runner = model.runner
    runner._attention, runner.decoder.ops, runner.sampler.fused = (
        StaticAttention(),
        CAPTURABLE,
        GreedySampling(),
    )
    runner.graphs.switch(True)
    rows = model.rows(2, CONTEXT, 40)
    timed = timed_steps(model, rows, STEPS, WARM)
    assert timed.overlapped_s is not None
    assert driver.most_awaited == 2
    assert driver.awaited == driver.pending == 0
    steps = 2 * (STEPS + WARM) + 1
    assert [len(row.token_ids) for row in rows] == [CONTEXT + 1 + steps] * 2
    for _ in range(STEPS + WARM + 1):
        model.advance(alone)
    assert [row.token_ids for row in rows] == [row.token_ids for row in alone]
    assert timed.out.kv_bytes > 0
