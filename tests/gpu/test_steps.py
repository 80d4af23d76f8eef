"""How the check of a card makes steps of decoding, with graphs at the driver's edge only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.graphs import switch
from tests.engine.graphs.fakes import CAPTURABLE, FakeDriver, GreedySampling, StaticAttention
from tests.gpu.check import decode
from tests.gpu.check.context import Context
from tests.gpu.check.model import Model, timed_steps
from tests.gpu.check.results import Results
from tests.gpu.check.settings import Settings
from tests.gpu.check.timing import Timer

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


def test_a_model_whose_weights_were_converted_serves_no_other_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor where converting them failed: the baselines take the tensors as they were loaded."""
    settings, cpu = Settings("cpu", True, 60.0, None, tmp_path / "x"), torch.device("cpu")
    context = Context(settings, Results(settings.out, {}, {}, keep=False), cpu, Timer(cpu, quick=True))
    made = context.the_model()

    def fails(*_: object) -> float:
        raise RuntimeError("no memory for weights")

    monkeypatch.setattr(Model, "set_weights", fails)
    with pytest.raises(RuntimeError, match="no memory for weights"):
        decode.run_fp8(context)
    assert context.model is None
    assert not made.loaded.weights
